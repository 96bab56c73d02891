"""Where the states of one piece rest between uses: the master, the reduced gradient, and what the optimizer keeps.

Whoever reads or writes states goes through a home, so that neither the engine nor the optimizer knows which tier it is. On the
device and in host memory states are live at all times; on disk they are live inside `walk` only, and traps outside of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..tiers import Tier
from .away import AwayTensor, away, hole, is_away, trapped
from .source import Source

if TYPE_CHECKING:
    from ..core.arena import Arena
    from ..core.unit import Flat
    from .delay import Delay
    from .places import Link

MASTER, GRADIENT, STATES = "master", "gradient", "states"
LEDGER = {MASTER: "master", GRADIENT: "gradients"}  # kinds of the memory ledger
FIRST = ("exp_avg", "momentum_buffer", "sum", "square_avg_first")
SECOND = ("exp_avg_sq", "square_avg", "max_exp_avg_sq")


def moment_kind(key: str) -> str:
    """What the ledger calls an elementwise optimizer state."""
    return "first_moment" if key in FIRST else "second_moment" if key in SECOND else "other_state"


def is_elementwise(value: Any, segment: Tensor) -> bool:
    """Whether an entry of a segment's optimizer state has a value for each of its elements."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.shape == segment.shape


class Home:
    """On the device."""

    place = "device"
    live = True  # whether the states can be used at all times

    def __init__(self, flat: Flat, piece: int, source: Source) -> None:
        self.flat, self.piece, self.source = flat, piece, source
        self.segments: list[Any] = []  # the optimizer's, which look at the master
        self.state: dict[Any, dict[str, Any]] = {}  # the optimizer's, by segment
        source.home = self

    @property
    def numel(self) -> int:
        return self.flat.layout.piece_numels[self.piece]

    @property
    def name(self) -> str:
        return self.flat.unit.name

    @property
    def arena(self) -> Arena:
        """Of the memory in which the optimizer steps."""
        return self.flat.unit.runtime.arena

    @property
    def sums_in_place(self) -> bool:
        """Whether gradients rest in memory of the device, where reductions can write."""
        return True

    # ---- the master

    def take(self, values: Tensor) -> Tensor:
        """Keep the first values of this rank's part [numel], on the device in the dtype of the master; the result stands for the master."""
        flat = self.flat
        if flat.full is not None and flat.param_dtype == flat.shard_dtype:
            master = flat.full.parts[self.piece][flat.group.rank]
        else:
            kind = "parameters" if flat.shard_dtype == flat.param_dtype else "master"
            master = self.arena.allocate(self.numel, flat.shard_dtype, kind).copy_(values)
        self.source.take(values)
        return master

    def widen(self) -> None:
        """Keep the master in the flat's new dtype."""
        old, flat = self.flat.master[self.piece], self.flat
        if flat.full is None:
            self.arena.release(old.nbytes, "parameters")
        self._show_master(self.arena.allocate(self.numel, flat.shard_dtype, "master").copy_(old))

    def read(self, out: Tensor) -> None:
        """The master's values into `out` [numel] on the device, cast to its dtype."""
        master = self.flat.master[self.piece]
        if out.data_ptr() != master.data_ptr():
            out.copy_(master)

    def attach(self, segment: Any, state: dict[Any, dict[str, Any]]) -> None:
        """A segment of the optimizer looks at the master from here on; `state` is the optimizer's."""
        self.segments.append(segment)
        self.state = state

    def view(self, segment: Any) -> Tensor:
        """What a segment (of the layout) shows of the master."""
        return self.flat.master[self.piece][segment.offset : segment.offset + segment.numel]

    @property
    def version(self) -> int:
        """Changes when somebody writes into the master."""
        return self.flat.master[self.piece]._version

    def _show_master(self, master: Tensor) -> None:
        self.flat.master[self.piece] = master
        for one in self.segments:
            torch.Tensor.data.__set__(one, self.view(one.segment))  # type: ignore[attr-defined]

    # ---- the reduced gradient

    def new_gradient(self) -> Tensor:
        """Room for one; the result stands for it."""
        return self.arena.allocate(self.numel, self.flat.grad_dtype, "gradients")

    def drop_gradient(self) -> None:
        assert self.flat.grad is not None
        self.arena.release(self.flat.grad[self.piece].nbytes, "gradients")

    @contextlib.contextmanager
    def summing(self, fresh: bool) -> Iterator[Tensor]:
        """The gradient in memory of the device, to be written (if `fresh`) or added to."""
        assert self.flat.grad is not None
        yield self.flat.grad[self.piece]

    def scale_gradient(self, factor: float, segments: Iterable[Any] | None = None) -> None:
        """Multiply all of it, or the parts of these segments."""
        assert self.flat.grad is not None
        _multiply(self.flat.grad[self.piece], factor, _spans(segments))

    def uses(self, gradient: Tensor) -> None:
        """The optimizer takes this part of it."""

    def ahead(self) -> None:
        """`read` comes soon."""

    # ---- what `walk` does

    def begin(self, kinds: tuple[str, ...]) -> None:
        """Start to make these kinds of states live."""

    def show(self) -> None:
        """They are live when this returns."""

    def end(self, changed: tuple[str, ...]) -> None:
        """No longer needed live; `changed` kinds have new values."""


class Elsewhere(Home):
    """In another tier. What is not `live` there is brought to host memory while it is used, and so are gradients while they are summed."""

    def __init__(self, flat: Flat, piece: int, source: Source, place: str, tier: Tier, host: Arena, link: Link) -> None:
        super().__init__(flat, piece, source)
        self.place, self.tier, self.host, self.link = place, tier, host, link
        self.live = place == "host"
        self.tickets: dict[str, Any] = {}  # by name: master, gradient, and the optimizer's own keys
        self.opened: dict[str, Any] = {}
        self.shown: dict[str, Tensor] = {}
        self.users, self.changed, self.writes = 0, set[str](), 0
        self.reader: Delay | None = None  # an update beside training that reads the gradient
        # What the gradient on disk is still to be multiplied by, one after the other: (factor, where).
        self.factors: list[tuple[float, list[slice] | None]] = []

    @property
    def arena(self) -> Arena:
        return self.host

    @property
    def sums_in_place(self) -> bool:
        return self.live and self.flat.unit.runtime.arena.device == self.host.device

    # ---- the master

    def take(self, values: Tensor) -> Tensor:
        self._keep_master(values)
        self.source.take(values)
        return self.shown[MASTER] if self.live else self._hidden(MASTER)

    def widen(self) -> None:
        self.begin((MASTER,))
        self.show()
        wide = self.flat.master[self.piece].to(self.flat.shard_dtype)
        self.end(())
        self._close(MASTER, False)
        self.tier.free(self.tickets[MASTER])
        self._keep_master(wide)
        self._show_master(self.shown[MASTER] if self.live else self._hidden(MASTER))

    def _keep_master(self, values: Tensor) -> None:
        self.tickets[MASTER] = self.tier.put(values, LEDGER[MASTER], self.name)
        if values.device.type != "cpu":
            torch.accelerator.synchronize(values.device)  # what they lie in is used again at once
        if self.live:
            self._open(MASTER)

    def read(self, out: Tensor) -> None:
        if MASTER in self.shown:
            out.copy_(self.shown[MASTER])
        elif out.dtype == self.flat.shard_dtype:
            self.tier.fetch(self.tickets[MASTER], out).wait()
        else:
            arena = self.flat.unit.runtime.arena
            slot = arena.take(self.numel, self.flat.shard_dtype, "unsharded", self.name)
            self.tier.fetch(self.tickets[MASTER], slot.tensor).wait()
            out.copy_(slot.tensor)
            arena.give(slot)
        self.link.back += out.numel() * self.flat.shard_dtype.itemsize

    def ahead(self) -> None:
        self.tier.ahead(self.tickets[MASTER])

    def view(self, segment: Any) -> Tensor:
        if MASTER in self.shown:
            return super().view(segment)
        return hole(segment.numel, self.flat.shard_dtype)

    def attach(self, segment: Any, state: dict[Any, dict[str, Any]]) -> None:
        super().attach(segment, state)
        segment.plain_class = type(segment)
        segment.what = f"this rank's part of the master of parameter {segment.full_name!r}"
        self._trap(segment)

    @property
    def version(self) -> int:
        return super().version if self.live else self.writes

    def _show_master(self, master: Tensor) -> None:
        for one in self.segments:
            one.__class__ = one.plain_class
        super()._show_master(master)
        for one in self.segments:
            self._trap(one)

    def _trap(self, segment: Any) -> None:
        if MASTER not in self.shown:
            segment.__class__ = trapped(segment.plain_class)

    def _hidden(self, name: str) -> AwayTensor:
        dtype = self.flat.shard_dtype if name == MASTER else self.flat.grad_dtype
        return away(f"this rank's {name} of unit {self.name!r}", self.numel, dtype)

    # ---- the reduced gradient

    def new_gradient(self) -> Tensor:
        self.tickets[GRADIENT] = self.tier.reserve(self.numel, self.flat.grad_dtype, LEDGER[GRADIENT], self.name)
        if self.live:
            self._open(GRADIENT)
            return self.shown[GRADIENT]
        return self._hidden(GRADIENT)

    def drop_gradient(self) -> None:
        self.factors.clear()
        self._close(GRADIENT, False)
        ticket = self.tickets.pop(GRADIENT)
        if self.reader is None:
            self.tier.free(ticket)
        else:
            self.reader.leaving.append((self.tier, ticket))
            self.reader = None

    @contextlib.contextmanager
    def summing(self, fresh: bool) -> Iterator[Tensor]:
        assert self.flat.grad is not None
        if not self.keeps_gradient:
            yield self.flat.grad[self.piece]
            return
        self._claim_gradient()
        if self.sums_in_place:
            yield self.shown[GRADIENT]
        else:
            arena = self.flat.unit.runtime.arena
            slot = arena.take(self.numel, self.flat.grad_dtype, "buckets", self.name)
            if not fresh:
                self.tier.fetch(self.tickets[GRADIENT], slot.tensor).wait()
                self._scaled(slot.tensor)
                self.factors.clear()
            yield slot.tensor
            self.tier.write_back(self.tickets[GRADIENT], slot.tensor)
            arena.give(slot)
        self.link.out += self.numel * self.flat.grad_dtype.itemsize

    def scale_gradient(self, factor: float, segments: Iterable[Any] | None = None) -> None:
        self._claim_gradient()
        if self.live or not self.keeps_gradient:
            super().scale_gradient(factor, segments)
        else:
            self.factors.append((factor, _spans(segments)))  # on its next way through memory: a pass over the disk less

    def uses(self, gradient: Tensor) -> None:
        if not self.keeps_gradient:
            self.link.out += gradient.nbytes

    @property
    def keeps_gradient(self) -> bool:
        """Whether it rests here; whole gradients stay on the device, and this rank's part of them with them."""
        return GRADIENT in self.tickets

    def _claim_gradient(self) -> None:
        """Somebody may write into it: nobody else reads it any more."""
        if self.reader is not None:
            self.reader.end()

    def _scaled(self, gradient: Tensor) -> None:
        for factor, spans in self.factors:
            _multiply(gradient, factor, spans)

    # ---- what `walk` does

    def begin(self, kinds: tuple[str, ...]) -> None:
        self.users += 1
        if GRADIENT in kinds:
            self._claim_gradient()
        if self.live:
            for ticket in self.tickets.values():
                self.tier.open(ticket).wait()  # gradients may still be on their way
        for name in self.tickets:
            if (name if name in LEDGER else STATES) in kinds and name not in self.opened:
                self.opened[name] = self.tier.open(self.tickets[name])

    def show(self) -> None:
        for name in self.opened.keys() - self.shown.keys():
            self._show(name)

    def end(self, changed: tuple[str, ...]) -> None:
        self.changed.update(changed)
        self.writes += MASTER in changed
        self.users -= 1
        if self.users or self.live:
            return
        if STATES in self.changed:
            self._collect_states()
        for name in list(self.opened):
            kind = name if name in LEDGER else STATES
            if name == GRADIENT and GRADIENT in self.changed:
                self.factors.clear()
            self._close(name, kind in self.changed)
            self._hide(name)
        self.changed.clear()

    def _open(self, name: str) -> None:
        self.opened[name] = self.tier.open(self.tickets[name])
        self._show(name)

    def _close(self, name: str, changed: bool) -> None:
        opened = self.opened.pop(name, None)
        if opened is not None:
            self.shown.pop(name, None)
            opened.close(changed)

    def _show(self, name: str) -> None:
        tensor = self.shown[name] = self.opened[name].wait()
        if name == MASTER:
            if self.flat.master:
                self._show_master(tensor)
        elif name == GRADIENT:
            self._scaled(tensor)
            if self.flat.grad is not None:
                self.flat.grad[self.piece] = tensor
        else:
            for one in self.segments:
                if is_away(self.state.get(one, {}).get(name)):
                    place = one.segment
                    self.state[one][name] = tensor[place.offset : place.offset + place.numel]

    def _hide(self, name: str) -> None:
        if name == MASTER:
            self._show_master(self._hidden(MASTER))
        elif name == GRADIENT:
            assert self.flat.grad is not None
            self.flat.grad[self.piece] = self._hidden(GRADIENT)
        else:
            for one in self.segments:
                if is_elementwise(self.state.get(one, {}).get(name), one):
                    what = f"optimizer state {name!r} of parameter {one.full_name!r}"
                    self.state[one][name] = away(what, one.segment.numel, self.state[one][name].dtype)

    def _collect_states(self) -> None:
        """Take what the optimizer has made or replaced into memory that a ticket stands for; forget what it no longer has."""
        live: dict[str, list[Any]] = {}
        kept = set[str]()
        for one in self.segments:
            for key, value in self.state.get(one, {}).items():
                if is_elementwise(value, one):
                    kept.add(key)
                    if not is_away(value):
                        live.setdefault(key, []).append(one)
        for key in self.tickets.keys() - LEDGER.keys() - kept:
            self._close(key, False)
            self.tier.free(self.tickets.pop(key))
        for key, segments in live.items():
            self._room_for(key, self.state[segments[0]][key].dtype)
            for one in segments:
                mine = self.shown[key][one.segment.offset : one.segment.offset + one.segment.numel]
                value = self.state[one][key]
                if mine.data_ptr() != value.data_ptr():
                    mine.copy_(value)

    def _room_for(self, key: str, dtype: torch.dtype) -> None:
        if key in self.shown and self.shown[key].dtype != dtype:  # as after loading
            self._close(key, False)
            self.tier.free(self.tickets.pop(key))
        if key not in self.shown:
            self.tickets[key] = self.tier.reserve(self.numel, dtype, moment_kind(key), self.name)
            self.opened[key] = self.tier.open(self.tickets[key])
            self.shown[key] = self.opened[key].wait().zero_()


def _spans(segments: Iterable[Any] | None) -> list[slice] | None:
    if segments is None:
        return None
    return [slice(one.segment.offset, one.segment.offset + one.segment.numel) for one in segments]


def _multiply(gradient: Tensor, factor: float, spans: list[slice] | None) -> None:
    for part in [gradient] if spans is None else [gradient[span] for span in spans]:
        part.mul_(factor)


def walk(homes: Iterable[Home], kinds: tuple[str, ...], changed: tuple[str, ...] = ()) -> Iterator[Home]:
    """Each home in turn with its states of these kinds live; `changed` kinds are kept as they are when the next one is asked for."""
    for window in windows(homes, kinds, changed, 1):
        yield from window


def windows(
    homes: Iterable[Home], kinds: tuple[str, ...], changed: tuple[str, ...], numel: float
) -> Iterator[list[Home]]:
    """`walk` by several homes at a time, of at least `numel` elements together.

    While one window is used, the next one is read and the one before is written.
    """
    coming: list[list[Home]] = []
    rest = _grouped(homes, numel)
    try:
        for window in rest:
            for home in window:
                home.begin(kinds)
            coming.append(window)
            if len(coming) > 1:
                yield from _used(coming, changed)
        while coming:
            yield from _used(coming, changed)
    finally:
        for window in coming:  # the caller has stopped early
            for home in window:
                home.end(())


def _grouped(homes: Iterable[Home], numel: float) -> Iterator[list[Home]]:
    group: list[Home] = []
    total = 0
    for home in homes:
        group.append(home)
        total += home.numel
        if total >= numel:
            yield group
            group, total = [], 0
    if group:
        yield group


def _used(coming: list[list[Home]], changed: tuple[str, ...]) -> Iterator[list[Home]]:
    window, kept = coming.pop(0), tuple[str, ...]()
    try:
        for home in window:
            home.show()
        kept = changed
        yield window
    finally:
        for home in window:
            home.end(kept)
