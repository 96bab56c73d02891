"""The ranks' small messages: what each one did and wants, compared before anything depends on it.

Every rank sends the same sequence of equally long messages; a difference in kind or fingerprint is a `RankMismatchError`
on all of them. Ends of passes are sent without waiting and looked at before the next message.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import errors
from .comm import Comm, Handle
from .schedule import Pass, number_of
from .watch import WATCH

if TYPE_CHECKING:
    from .runtime import Runtime
    from .unit import Flat

BITS = 62


class Kind(enum.IntEnum):
    FORWARD = 1
    BACKWARD = 2
    EXTRA = 3
    ORDER = 4
    STEP = 5
    CLIP = 6
    GRADIENTS = 7
    FULL = 8
    STATE = 9
    LENT = 10
    SAVE = 11
    LOAD = 12
    SLEEP = 20
    WAKE = 21


SAYS = {
    Kind.FORWARD: "ended a forward pass of {}",
    Kind.BACKWARD: "ended a backward pass after {}",
    Kind.EXTRA: "needs unit {} once more",
    Kind.ORDER: "began its first backward pass of this kind",
    Kind.STEP: "called optimizer.step()",
    Kind.CLIP: "called clip_grad_norm_()",
    Kind.GRADIENTS: "reads full gradients",
    Kind.FULL: "gathers full parameters",
    Kind.STATE: "gathers or loads a state dict",
    Kind.LENT: "begins a pass after local_shards()",
    Kind.SAVE: "saves a checkpoint",
    Kind.LOAD: "loads a checkpoint",
    Kind.SLEEP: "goes to sleep",
    Kind.WAKE: "wakes up",
}


class Control:
    """Messages of one model. Columns: kind, argument, fingerprint, launches, then the flags below, then two masks."""

    FINGERPRINT, LAUNCHES, MISSED, ARRIVED, WAITING, OVERFLOW = range(2, 8)
    UNITS, GRADIENTS = "units", "gradients"

    def __init__(self, runtime: Runtime, comm: Comm, compares: bool) -> None:
        self.runtime, self.comm, self.compares = runtime, comm, compares
        self.pending: list[tuple[Handle, tuple[Any, ...]]] = []
        forwards = [("forward", name, grad) for name in runtime.module_names.values() for grad in (True, False)]
        self.numbers = {number_of(key): _entry(key) for key in forwards}
        self.flats = list(runtime.flats())
        self.settings = 0, ""  # of this rank's last step or clip
        num_units, num_parameters = len(runtime.units), sum(len(flat.parameters) for flat in self.flats)
        self.columns = {self.UNITS: (8, num_units), self.GRADIENTS: (8 + _words(num_units), num_parameters)}
        self.width = 8 + _words(num_units) + _words(num_parameters)

    # ---- sending

    def post(self, kind: Kind, done: Pass) -> None:
        """Tell the others that a pass ended; looked at before the next message."""
        if self.comm.broken is not None:
            return
        number = number_of(done.key)
        self.numbers[number] = _entry(done.key)
        message = self._message(kind, number)
        message[self.MISSED], message[self.ARRIVED] = done.missed, done.arrived
        self.pending.append((self.comm.exchange(message, "the other ranks' end of the pass"), done.key))

    def require(self, kind: Kind, argument: int = 0, overflow: bool = False) -> Tensor:
        """All ranks must be at this point. The result is their messages, [world size, width]."""
        if kind is not Kind.WAKE:
            self.runtime.lending.require_awake()
        self.look()
        message = self._message(kind, argument)
        message[self.OVERFLOW] = overflow
        handle = self.comm.exchange(message, f"the other ranks to be where this one is, which {self._says(message)}")
        rows = handle.wait()
        self._compare(rows)
        return rows  # type: ignore[no-any-return]

    def meet(self, unit: int) -> int:
        """All ranks need this unit now, though their list does not have it. The result is how much the furthest of them has launched."""
        return int(self.require(Kind.EXTRA, unit)[:, self.LAUNCHES].max())

    def look(self) -> None:
        """Check what the ranks said at the ends of passes, and agree on a new order where one was missed."""
        pending, self.pending = self.pending, []
        for handle, key in pending:
            rows = handle.wait()
            self._compare(rows)
            if bool(rows[:, self.MISSED].any()):
                self.runtime.revise(key, bool(rows[:, self.ARRIVED].any()))
            if key[0] == "backward" and key[3]:  # or the next backward's gradients would be added before this one's sum
                self.runtime.reduce_waiting(rows)

    def _message(self, kind: Kind, argument: int) -> Tensor:
        fingerprint = self.runtime.pager.fingerprint
        waiting = sum(
            1 << unit.index for unit in self.runtime.units if any(flat.bucket is not None for flat in unit.flats)
        )
        row = [int(kind), argument, fingerprint.value, fingerprint.launches, 0, 0, int(waiting > 0), 0]
        row += _split(waiting, self.columns[self.UNITS][1])
        gradients = position = 0
        if kind in (Kind.STEP, Kind.GRADIENTS):  # only these read this mask
            for flat in self.flats:
                for index in flat.has_grad:
                    gradients |= 1 << (position + index)
                position += len(flat.parameters)
        row += _split(gradients, self.columns[self.GRADIENTS][1])
        return torch.tensor(row, dtype=torch.int64, device="cpu")

    def share(self, error: Exception | None) -> None:
        """A mistake found on one rank is raised on all of them, before anything is changed."""
        share_verdict(self.comm.exchange_objects(told(error), "the verdict of all ranks"), error)

    def alike(self, settings: str) -> int:
        """The argument of a message by which the ranks notice that their settings differ."""
        self.settings = number_of(settings), settings
        return self.settings[0]

    # ---- reading

    def mask(self, rows: Tensor, which: str) -> int:
        """Bits set by any rank."""
        start, count = self.columns[which]
        words = rows[:, start : start + _words(count)].tolist()
        value = 0
        for row in words:
            for i, word in enumerate(row):
                value |= word << (BITS * i)
        return value

    def with_gradient(self, rows: Tensor) -> dict[Flat, set[int]]:
        """Per flat, the parameters that have a gradient on any rank."""
        mask, found = self.mask(rows, self.GRADIENTS), {}
        for flat in self.flats:
            found[flat] = {index for index in range(len(flat.parameters)) if mask >> index & 1}
            mask >>= len(flat.parameters)
        return found

    def _compare(self, rows: Tensor) -> None:
        alike = self.FINGERPRINT if bool((rows[:, 0] == Kind.EXTRA).all()) else self.MISSED  # so many columns must be
        if not self.compares or bool((rows[:, :alike] == rows[0, :alike]).all()):
            return
        said = [self._says(row) for row in rows]
        if len(set(said)) == 1 and not bool((rows[:, 1] == rows[0, 1]).all()):
            said = [f"{text} with {self._settings(row)}" for text, row in zip(said, rows, strict=True)]
        elif len(set(said)) == 1:
            said = [f"{text} after {int(row[3])} collectives" for text, row in zip(said, rows, strict=True)]
            if len(set(said)) == 1:
                said = [f"{text} (fingerprint {int(row[2]):x})" for text, row in zip(said, rows, strict=True)]
        lines = "; ".join(f"rank {rank} {text}" for rank, text in enumerate(said))
        raise self.comm.mismatch(
            f"the ranks did different things: {lines}. Last on this rank: {self.runtime.last_event()}. Every rank must run the same number of "
            "forward and backward passes and steps in the same order; inside zerodp.full_params() forward passes need not match, and units of "
            "stage 2 may be used more often on one rank than on another"
        )

    def _settings(self, row: Tensor) -> str:
        number, text = self.settings
        return text[:300] if int(row[1]) == number else "other settings"

    def _says(self, row: Tensor) -> str:
        kind, argument = Kind(int(row[0])), int(row[1])
        what = self.numbers.get(argument, "other forward passes")
        if kind == Kind.EXTRA:
            what = repr(self.runtime.units[argument].name)
        return SAYS[kind].format(what)


def _entry(key: tuple[Any, ...]) -> str:
    """What a pass entered and how, in words."""
    if key[0] == "forward":
        return (repr(key[1]) if key[1] else "the model") + ("" if key[2] else " without gradients")
    entered = ", ".join(dict.fromkeys(_entry(entered) for entered in key[1])) or "the model"
    return entered + ("" if key[3] else " under no_sync()")


def _words(count: int) -> int:
    return -(-count // BITS)


def _split(value: int, count: int) -> list[int]:
    return [(value >> (BITS * i)) & ((1 << BITS) - 1) for i in range(_words(count))]


def told(error: Exception | None) -> list[str] | None:
    """What a rank says of its own verdict."""
    return None if error is None else [type(error).__name__, str(error)]


def share_verdict(said: list[Any], own: Exception | None) -> None:
    """Raise the first rank's error on every rank; `said` is [type name, text] or None per rank."""
    first = next(((rank, verdict) for rank, verdict in enumerate(said) if verdict is not None), None)
    if first is None:
        return
    rank, (kind, text) = first
    everywhere = all(verdict == said[0] for verdict in said)
    raise getattr(errors, kind, errors.ZeroError)(text if everywhere else f"rank {rank}: {text}") from own


def spread(error: errors.ZeroError, comms: Sequence[Comm]) -> None:
    """An error that one rank meets inside a pass becomes the same error on all; all ranks of `comms` are in the first one.

    What the ranks check together is told by `Control.share`; this is for what one rank meets while the others go on.
    """
    told = [comm for comm in comms if comm.tell(error)]
    if told and told[0] is comms[0]:
        WATCH.await_heard(comms[0].number, comms[0].mesh.world.size - 1)
