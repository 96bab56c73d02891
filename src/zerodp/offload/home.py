"""Where the states of one piece rest between uses: the master, the reduced gradient, and what the optimizer keeps.

Whoever reads or writes states goes through a home, so that neither the engine nor the optimizer knows which tier it is. On the
device (here) and in host memory (see `elsewhere`) states are live at all times; on disk they are live inside `walk` only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..core.bits import same_memory
from ..tiers import ARRIVED, Transfer
from .source import Source

if TYPE_CHECKING:
    from ..core.arena import Arena, Slot
    from ..core.unit import Flat

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
        self.slot: Slot | None = None  # of the gradient
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

    @property
    def gradient_is_here(self) -> bool:
        """Whether the device can read the reduced gradient as it rests."""
        return True

    # ---- the master

    def take(self, values: Tensor) -> Tensor:
        """Keep the first values of this rank's part [numel], on the device in the dtype of the master; the result stands for the master."""
        flat = self.flat
        if flat.full is not None and flat.param_dtype == flat.shard_dtype:
            master = flat.full.parts[self.piece][flat.group.rank]
        else:
            serves = flat.shard_dtype == flat.param_dtype and self.source.is_master
            kind = "parameters" if serves else "master"
            master = self.arena.allocate(self.numel, flat.shard_dtype, kind).copy_(values)
        self.source.take(values)
        return master

    def widen(self) -> None:
        """Keep the master in the flat's new dtype."""
        old, flat = self.flat.master[self.piece], self.flat
        if flat.full is None:
            self.arena.release(old.nbytes, "parameters")
        self._show_master(self.arena.allocate(self.numel, flat.shard_dtype, "master").copy_(old))

    def read(self, out: Tensor) -> Transfer:
        """The master's values into `out` [numel] on the device, cast to its dtype; see `Source.fetch`."""
        master = self.flat.master[self.piece]
        if not same_memory(out, master):
            out.copy_(master)
        return ARRIVED

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
        self.slot = self.arena.take(self.numel, self.flat.grad_dtype, "gradients", self.name)
        return self.slot.tensor

    def drop_gradient(self) -> None:
        assert self.slot is not None
        self.arena.give(self.slot)  # which waits while a tensor of the user's still sees it
        self.slot = None

    def summing(self, fresh: bool) -> contextlib.AbstractContextManager[Tensor]:
        """Inside, the gradient in memory of the device, to be written (if `fresh`) or added to."""
        assert self.flat.grad is not None
        return contextlib.nullcontext(self.flat.grad[self.piece])

    def arrive(self) -> None:
        """Wait for gradients on their way, for somebody who looks at them without `walk`."""

    def scale_gradient(self, factor: float, segments: Iterable[Any] | None = None) -> None:
        """Multiply all of it, or the parts of these segments."""
        assert self.flat.grad is not None
        multiply(self.flat.grad[self.piece], factor, spans_of(segments))

    def uses(self, gradient: Tensor) -> None:
        """The optimizer takes this part of it."""

    def ahead(self) -> None:
        """`read` comes soon."""

    def close(self) -> None:
        """Nothing rests here any more."""
        self.segments, self.state = [], {}
        self.source.close()

    # ---- what `walk` does

    def begin(self, kinds: tuple[str, ...]) -> None:
        """Start to make these kinds of states live."""

    def show(self) -> None:
        """They are live when this returns."""

    def end(self, changed: tuple[str, ...]) -> None:
        """No longer needed live; `changed` kinds have new values."""


def spans_of(segments: Iterable[Any] | None) -> list[slice] | None:
    if segments is None:
        return None
    return [slice(one.segment.offset, one.segment.offset + one.segment.numel) for one in segments]


def multiply(gradient: Tensor, factor: float, spans: list[slice] | None) -> None:
    for part in [gradient] if spans is None else [gradient[span] for span in spans]:
        part.mul_(factor)


def walk(homes: Iterable[Home], kinds: tuple[str, ...], changed: tuple[str, ...] = ()) -> Iterator[Home]:
    """Each home in turn with its states of these kinds live; `changed` kinds are kept as they are when the next one is asked for."""
    for window in windows(homes, kinds, changed, 1):
        yield from window


class Walked(Protocol):
    """What `windows` goes through."""

    @property
    def numel(self) -> int: ...
    def begin(self, kinds: tuple[str, ...]) -> None: ...
    def show(self) -> None: ...
    def end(self, changed: tuple[str, ...]) -> None: ...


W = TypeVar("W", bound=Walked)


def windows(homes: Iterable[W], kinds: tuple[str, ...], changed: tuple[str, ...], numel: float) -> Iterator[list[W]]:
    """`walk` by several homes at a time, of at least `numel` elements together.

    While one window is used, the next one is read and the one before is written.
    """
    coming: list[list[W]] = []
    rest = _grouped(homes, numel)
    try:
        for window in rest:
            coming.append([])
            for home in window:
                coming[-1].append(home)  # at once: one that fails to begin is ended with the others
                home.begin(kinds)
            if len(coming) > 1:
                yield from _used(coming, changed)
        while coming:
            yield from _used(coming, changed)
    finally:
        for window in coming:  # the caller has stopped early, or one could not begin
            for home in window:
                home.end(())


def _grouped(homes: Iterable[W], numel: float) -> Iterator[list[W]]:
    group: list[W] = []
    total = 0
    for home in homes:
        group.append(home)
        total += home.numel
        if total >= numel:
            yield group
            group, total = [], 0
    if group:
        yield group


def _used(coming: list[list[W]], changed: tuple[str, ...]) -> Iterator[list[W]]:
    window, kept = coming.pop(0), tuple[str, ...]()
    try:
        for home in window:
            home.show()
        kept = changed
        yield window
    finally:
        for home in window:
            home.end(kept)
