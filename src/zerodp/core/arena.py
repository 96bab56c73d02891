"""The only place that makes large tensors. It reuses a few buffers for what comes and goes, and keeps a ledger by kind.

ZeRO-R's constant-size buffers and defragmentation: slots are parts of contiguous blocks of memory, handed out by size and
taken back. What lives long (checkpointed activations, gradients) and what lives short (pages, buckets) has blocks of its own, so
that nothing short-lived leaves holes between the long-lived. Once the largest step has been seen nothing is allocated any more.
Gradients grow while activations go. So they lie where the activations do: in the region of the checkpoints, or, as long as
torch keeps all activations, in memory of the device that goes back to torch with them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..host_memory import block
from ..regions import ALIGN, Lasting, Passing, Region, Space

STATES = ("parameters", "gradients", "master", "first_moment", "second_moment", "other_state")
KINDS = (*STATES, "unsharded", "buckets", "activations")
LONG = ("activations", "gradients")  # kinds whose slots outlive many others
TOP = ("gradients",)  # of the kinds that share a region, the one that fills it from above
FEW_RANKS = 64
# What sees slots for as long as it copies them elsewhere. Asked to `settle`, it lets go of those that have been copied.
KEEPERS: weakref.WeakSet[Any] = weakref.WeakSet()


class Parts(dict[int, Tensor]):
    """Each rank's equal part of a piece [size * n]. Of many ranks only this one's view is kept: thousands would cost more than
    the collective, and most are never asked for."""

    def __init__(self, piece: Tensor, size: int, rank: int) -> None:
        self.piece, self.numel = piece, piece.numel() // size
        if size <= FEW_RANKS:
            self.update(enumerate(piece.view(size, -1).unbind()))
        else:
            self[rank] = self[rank]

    def __missing__(self, rank: int) -> Tensor:
        return self.piece[rank * self.numel : (rank + 1) * self.numel]


class Slot:
    """A borrowed buffer: `tensor` is [numel] of the asked dtype, `cut` remembers views of it."""

    __slots__ = ("address", "base", "buffer", "cuts", "kind", "label", "nbytes", "own", "page", "region", "space", "tensor")  # fmt: skip

    def __init__(self, region: Region, space: Space) -> None:
        self.region, self.space = region, space
        self.buffer = self.tensor = space.memory()
        self.address = self.buffer.untyped_storage()._cdata  # identifies the storage to saved-tensor hooks
        self.cuts: dict[Any, Any] = {}
        self.own = self.references()  # to the storage, by the buffer alone
        self.base = 0  # by all that the slot keeps
        self.page: Any = None  # whose page it is, or was when it was handed back

    def lend(self, numel: int, dtype: torch.dtype, kind: str, label: str) -> Slot:
        nbytes = numel * dtype.itemsize
        if not self.base or self.tensor.dtype != dtype or self.tensor.numel() != numel:
            self.cuts.clear()
            with torch.inference_mode(False):  # or training could not use it later
                self.tensor = self.buffer[:nbytes].view(dtype)
            # Not read: a thread of the backend's may hold a view for a moment longer, which would count for ever.
            self.base = self.own + 1
        self.nbytes, self.kind, self.label, self.page = nbytes, kind, label, None
        return self

    def cut(self, key: Any, make: Callable[[Tensor], Any]) -> Any:
        """`make(tensor)`, views of it, kept for the next borrower that cuts it the same way."""
        made = self.cuts.get(key)
        if made is None:
            before = self.references()
            made = self.cuts[key] = make(self.tensor)
            views = sum(1 for view in _tensors_in(made) if view is not self.tensor)
            self.base += max(views, self.references() - before)  # a fake tensor's views may hold more than themselves
        return made

    def references(self) -> int:
        return torch._C._storage_Use_Count(self.address)

    @property
    def in_use(self) -> bool:
        """Somebody still sees the buffer: an autograd graph, a tensor of the user, the engine for a moment."""
        return self.references() > self.base


class Arena:
    """Slots and the ledger of one sharded model on one device."""

    def __init__(
        self, device: torch.device, pinned: bool = False, align: int = ALIGN, beside_activations: bool = False
    ) -> None:
        """align: bytes, of the addresses of slots; beside_activations: a model computes on this device."""
        self.device, self.pin, self.align = device, pinned, align
        short, long = Region(self._block, align), Region(self._block, align)
        self.regions = {kind: long if kind in LONG else short for kind in KINDS}
        self.both = (short, long)
        self.passing = Passing(self.empty, align)
        if beside_activations:
            self.regions["gradients"] = self.passing
        self.limbo: list[Slot] = []
        self.lasting = Lasting()  # what `allocate` made
        self.now = dict.fromkeys(KINDS, 0)
        self.peak = dict.fromkeys(KINDS, 0)
        self.total = self.total_peak = 0

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Fresh memory that no ledger knows of."""
        with torch.inference_mode(False):  # or training could not use it later
            return torch.empty(numel, dtype=dtype, device=self.device)

    def _block(self, nbytes: int, dtype: torch.dtype) -> Tensor:
        """Fresh memory for slots. It begins where torch's own kernels want it, which may be less than was asked for."""
        if self.device.type != "cpu":
            return self.empty(nbytes, dtype)
        if self.align <= ALIGN or self.pin:
            return block(nbytes, self.pin)
        room = block(nbytes + self.align, False)
        start = -room.data_ptr() % self.align
        return room[start : start + nbytes]

    # ---- slots: what comes and goes

    def take(self, numel: int, dtype: torch.dtype, kind: str, label: str = "", near: str | None = None) -> Slot:
        """Borrow a buffer of `numel` elements; its contents are arbitrary. It lies where the kind `near`, or its own, does."""
        if self.limbo:
            self.settle()
        needed = numel * dtype.itemsize
        where = near or kind
        region = self.regions[where]
        if where == "activations":
            self.regions["gradients"] = region
        space = region.take(needed, where in TOP if where in LONG else None)
        if space.slot is None:
            space.slot = Slot(region, space)
        self.add(kind, needed)
        return space.slot.lend(numel, dtype, kind, label)  # type: ignore[no-any-return]

    def give(self, slot: Slot, done: bool = False) -> None:
        """Hand a slot back. While somebody still sees it, it waits in limbo: freeing too early is impossible.

        done: its last use is over, whoever still refers to it; for slots that `clear` drops before any pass.
        """
        if slot.in_use and not done:
            self.limbo.append(slot)
        else:
            self.add(slot.kind, -slot.nbytes)
            slot.region.give(slot.space)

    def settle(self) -> None:
        """Look again at the slots in limbo."""
        if self.limbo:
            for keeper in KEEPERS:
                keeper.settle()
            waiting, self.limbo = self.limbo, []
            for slot in waiting:
                self.give(slot)

    def pinned(self) -> list[tuple[str, int]]:
        """(unit, bytes) of slots that were handed back while somebody still sees them."""
        self.settle()
        return [(slot.label, slot.nbytes) for slot in self.limbo]

    @property
    def _all(self) -> tuple[Region, ...]:
        return (*self.both, self.passing)

    @property
    def reserved(self) -> int:
        """Bytes that the slots' memory takes, in use or idle."""
        return sum(region.reserved for region in self._all)

    @property
    def lent(self) -> int:
        """Bytes of slots in use."""
        return sum(region.lent for region in self._all)

    @property
    def allocations(self) -> int:
        """How often memory for slots was asked of the system."""
        return sum(region.allocations for region in self._all)

    def drop_idle(self) -> None:
        """Let go of memory that nobody uses now."""
        for region in self.both:
            region.clear()

    def clear(self) -> None:
        """Let go of idle memory, and begin to count peaks anew."""
        self.settle()
        self.drop_idle()
        self.reset_peaks()

    # ---- what stays

    def allocate(self, numel: int, dtype: torch.dtype, kind: str) -> Tensor:
        tensor = self.empty(numel, dtype)
        self.add(kind, tensor.nbytes)
        self.lasting.add(tensor, kind)
        return tensor

    def release(self, nbytes: int, kind: str) -> None:
        """Of a tensor from `allocate`, whose last reference the caller drops."""
        self.add(kind, -nbytes)

    # ---- ledger

    def add(self, kind: str, nbytes: int) -> None:
        self.now[kind] += nbytes
        self.total += nbytes
        if nbytes > 0:
            if self.now[kind] > self.peak[kind]:
                self.peak[kind] = self.now[kind]
            if self.total > self.total_peak:
                self.total_peak = self.total

    def reset_peaks(self) -> None:
        self.peak = dict(self.now)
        self.total_peak = self.total


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    else:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)
