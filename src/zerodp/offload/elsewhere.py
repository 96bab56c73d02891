"""A home off the device: what is in host memory is used where it rests, what is on disk is brought to memory while it is used.

Knows tickets of one tier; which tier that is, and how its bytes move, the tier knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.parameter import trapped
from ..tiers import ARRIVED, Tier, Transfer
from .home import GRADIENT, LEDGER, MASTER, STATES, Home, is_elementwise, moment_kind, multiply, spans_of
from .placeholders import DiskPlaceholder, disk_placeholder, hole, is_placeholder
from .source import Source

if TYPE_CHECKING:
    from ..core.arena import Arena
    from ..core.unit import Flat
    from .delay import Delay
    from .places import Link


class Elsewhere(Home):
    """In another tier. What is not `live` there is brought to host memory while it is used, and so are gradients while they are summed."""

    def __init__(self, flat: Flat, piece: int, source: Source, place: str, tier: Tier, host: Arena, link: Link) -> None:
        super().__init__(flat, piece, source)
        self.place, self.tier, self.host, self.link = place, tier, host, link
        self.live = place == "host"
        self.tickets: dict[str, Any] = {}  # by name: master, gradient, and the optimizer's own keys
        self.opened: dict[str, Any] = {}
        self.shown: dict[str, Tensor] = {}
        self.users, self.changed = 0, set[str]()
        self.writes = self.seen_version = 0  # of a master that is not live
        self.reader: Delay | None = None  # an update beside training that reads the gradient
        # What the gradient on disk is still to be multiplied by, one after the other: (factor, where).
        self.factors: list[tuple[float, list[slice] | None]] = []

    @property
    def arena(self) -> Arena:
        return self.host

    @property
    def sums_in_place(self) -> bool:
        return self.live and self.flat.unit.runtime.arena.device == self.host.device

    @property
    def gradient_is_here(self) -> bool:
        return not self.keeps_gradient or self.sums_in_place

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

    def read(self, out: Tensor) -> Transfer:
        self.link.back += out.numel() * self.flat.shard_dtype.itemsize
        same = out.dtype == self.flat.shard_dtype
        if same and (self.live or MASTER not in self.shown):
            return self.tier.fetch(self.tickets[MASTER], out).launched()
        if MASTER in self.shown:
            out.copy_(self.shown[MASTER])
        else:
            arena = self.flat.unit.runtime.arena
            slot = arena.take(self.numel, self.flat.shard_dtype, "unsharded", self.name)
            self.tier.fetch(self.tickets[MASTER], slot.tensor).wait()
            out.copy_(slot.tensor)
            arena.give(slot)
        return ARRIVED

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
            segment.__class__ = trapped(segment.plain_class, DiskPlaceholder)

    def _hidden(self, name: str) -> Tensor:
        dtype = self.flat.shard_dtype if name == MASTER else self.flat.grad_dtype
        return disk_placeholder(f"this rank's {name} of unit {self.name!r}", self.numel, dtype)

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

    def arrive(self) -> None:
        for ticket in list(self.tickets.values()) if self.live else ():
            self.tier.open(ticket).wait()

    def scale_gradient(self, factor: float, segments: Iterable[Any] | None = None) -> None:
        self._claim_gradient()
        self.arrive()
        if self.live or not self.keeps_gradient:
            super().scale_gradient(factor, segments)
        else:
            self.factors.append(
                (factor, spans_of(segments))
            )  # on its next way through memory: a pass over the disk less

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
            multiply(gradient, factor, spans)

    def close(self) -> None:
        super().close()
        for name in list(self.tickets):
            self._close(name, False)
            self.tier.free(self.tickets.pop(name))

    # ---- while it sleeps farther away

    def resting(self) -> dict[str, Any]:
        """Tickets by name; what is live has none for states, which are the optimizer's own memory."""
        return self.tickets

    def leave(self, name: str) -> None:
        """What is live is kept elsewhere from now on."""
        self._close(name, False, hide=True)
        self.tier.free(self.tickets[name])

    def come_back(self, name: str, ticket: Any) -> None:
        self.tickets[name] = ticket
        self._open(name)

    # ---- what `walk` does

    def begin(self, kinds: tuple[str, ...]) -> None:
        if GRADIENT in kinds:
            self._claim_gradient()
            self.arrive()
        if not self.live:
            self.flat.unit.runtime.look()  # an update beside training opens it, too
        self.users += 1
        for name in list(self.tickets):  # training may get another gradient meanwhile
            if (name if name in LEDGER else STATES) in kinds and name not in self.opened:
                self.opened[name] = self.tier.open(self.tickets[name])

    def show(self) -> None:
        for name in self.opened.keys() - self.shown.keys():
            self._show(name)

    def end(self, changed: tuple[str, ...]) -> None:
        self.changed.update(changed)
        if MASTER in self.shown and not self.live:
            self.writes += self.shown[MASTER]._version - self.seen_version
            self.seen_version = self.shown[MASTER]._version
        self.users -= 1
        if self.users or self.live:
            return
        if STATES in self.changed:
            self._collect_states()
        for name in list(self.opened):
            kind = name if name in LEDGER else STATES
            if name == GRADIENT and GRADIENT in self.changed:
                self.factors.clear()
            self._close(name, kind in self.changed, hide=True)
        self.changed.clear()

    def _open(self, name: str) -> None:
        self.opened[name] = self.tier.open(self.tickets[name])
        self._show(name)

    def _close(self, name: str, changed: bool, hide: bool = False) -> None:
        opened = self.opened.pop(name, None)
        self.shown.pop(name, None)
        if hide:  # first, so that nothing sees the memory any more when the tier gets it back
            self._hide(name)
        if opened is not None:
            opened.close(changed)

    def _show(self, name: str) -> None:
        tensor = self.shown[name] = self.opened[name].wait()
        if name == MASTER:
            self.seen_version = tensor._version
            if self.flat.master:
                self._show_master(tensor)
        elif name == GRADIENT:
            self._scaled(tensor)
            if self.flat.grad is not None:
                self.flat.grad[self.piece] = tensor
        else:
            for one in self.segments:
                if is_placeholder(self.state.get(one, {}).get(name)):
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
                    self.state[one][name] = disk_placeholder(what, one.segment.numel, self.state[one][name].dtype)

    def _collect_states(self) -> None:
        """Take what the optimizer has made or replaced into memory that a ticket stands for; forget what it no longer has."""
        live: dict[str, list[Any]] = {}
        kept = set[str]()
        for one in self.segments:
            for key, value in self.state.get(one, {}).items():
                if is_elementwise(value, one):
                    kept.add(key)
                    if not is_placeholder(value):
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
