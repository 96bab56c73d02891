"""The only place that makes large tensors. It reuses a few buffers for gathered memory and keeps a ledger by kind.

ZeRO-R's constant-size buffers and defragmentation: slots are raw bytes, handed out by size and taken back, so that after the
first step the same few buffers serve every unit. What it holds never exceeds the most that was in use at one time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

STATES = ("parameters", "gradients", "master", "first_moment", "second_moment", "other_state")
KINDS = (*STATES, "unsharded", "buckets", "activations")


class Slot:
    """A borrowed buffer: `tensor` is [numel] of the asked dtype, `cut` remembers views of it."""

    __slots__ = ("address", "base", "buffer", "cuts", "kind", "label", "nbytes", "size", "tensor")

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = self.tensor = buffer
        self.size = buffer.numel()  # bytes
        self.address = buffer.untyped_storage()._cdata  # identifies the storage to saved-tensor hooks
        self.cuts: dict[Any, Any] = {}
        self.base = 0

    def lend(self, numel: int, dtype: torch.dtype, kind: str, label: str) -> Slot:
        nbytes = numel * dtype.itemsize
        if not self.base or self.tensor.dtype != dtype or self.tensor.numel() != numel:
            self.cuts.clear()
            with torch.inference_mode(False):  # or training could not use it later
                self.tensor = self.buffer[:nbytes].view(dtype)
            # Read, not assumed: how many references there are while nobody else looks at the buffer.
            self.base = self.references()
        self.nbytes, self.kind, self.label = nbytes, kind, label
        return self

    def cut(self, key: Any, make: Callable[[Tensor], Any]) -> Any:
        """`make(tensor)`, views of it, kept for the next borrower that cuts it the same way."""
        made = self.cuts.get(key)
        if made is None:
            before = self.references()
            made = self.cuts[key] = make(self.tensor)
            self.base += self.references() - before
        return made

    def references(self) -> int:
        return torch._C._storage_Use_Count(self.address)

    @property
    def in_use(self) -> bool:
        """Somebody still sees the buffer: an autograd graph, a tensor of the user, the engine for a moment."""
        return self.references() > self.base


class Arena:
    """Slots and the ledger of one sharded model on one device."""

    def __init__(self, device: torch.device, pinned: bool = False, align: int = 1) -> None:
        self.device, self.pin, self.align = device, pinned, align  # align: bytes, of the addresses of slots
        self.idle: dict[int, list[Slot]] = {}  # by size
        self.limbo: list[Slot] = []
        self.reserved = self.lent = self.lent_peak = 0
        self.now = dict.fromkeys(KINDS, 0)
        self.peak = dict.fromkeys(KINDS, 0)
        self.total = self.total_peak = 0

    # ---- slots: short-lived

    def take(self, numel: int, dtype: torch.dtype, kind: str, label: str = "") -> Slot:
        """Borrow a buffer of `numel` elements; its contents are arbitrary."""
        if self.limbo:
            self.settle()
        needed = numel * dtype.itemsize
        self.lent += needed
        if self.lent > self.lent_peak:
            self.lent_peak = self.lent
        same = self.idle.get(needed)
        slot = same.pop() if same else self._fitting(needed)
        if slot is None:
            self._trim(needed)
            with torch.inference_mode(False):  # or training could not use it later
                slot = Slot(self._buffer(needed))
            self.reserved += needed
        self.add(kind, needed)
        return slot.lend(numel, dtype, kind, label)

    def _buffer(self, nbytes: int) -> Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device, pin_memory=self.pin)
        if buffer.data_ptr() % self.align:  # pinned memory begins on a page; other memory may not
            buffer = torch.empty(nbytes + self.align, dtype=torch.uint8, device=self.device, pin_memory=self.pin)
            start = -buffer.data_ptr() % self.align
            buffer = buffer[start : start + nbytes]
        return buffer

    def _fitting(self, needed: int) -> Slot | None:
        """The smallest idle buffer that is large enough and not much larger."""
        size = min((size for size, slots in self.idle.items() if slots and needed <= size <= 2 * needed), default=None)
        return None if size is None else self.idle[size].pop()

    def give(self, slot: Slot, done: bool = False) -> None:
        """Hand a slot back. While somebody still sees it, it waits in limbo: freeing too early is impossible.

        done: its last use is over, whoever still refers to it; for slots that `clear` drops before any pass.
        """
        if slot.in_use and not done:
            self.limbo.append(slot)
        else:
            self.lent -= slot.nbytes
            self.add(slot.kind, -slot.nbytes)
            self.idle.setdefault(slot.size, []).append(slot)

    def settle(self) -> None:
        """Look again at the slots in limbo."""
        if self.limbo:
            waiting, self.limbo = self.limbo, []
            for slot in waiting:
                self.give(slot)

    def pinned(self) -> list[tuple[str, int]]:
        """(unit, bytes) of slots that were handed back while somebody still sees them."""
        self.settle()
        return [(slot.label, slot.nbytes) for slot in self.limbo]

    def drop_idle(self) -> None:
        """Let go of every buffer that nobody uses now."""
        self._trim(self.lent_peak)

    def _trim(self, needed: int) -> None:
        for size in sorted(self.idle, reverse=True):
            slots = self.idle[size]
            while slots and self.reserved + needed > self.lent_peak:
                slots.pop()
                self.reserved -= size
            if not slots:
                del self.idle[size]

    def clear(self) -> None:
        """Let go of idle buffers, and begin to count peaks anew."""
        self.settle()
        self.drop_idle()
        self.reset_peaks()

    # ---- long-lived memory

    def allocate(self, numel: int, dtype: torch.dtype, kind: str) -> Tensor:
        with torch.inference_mode(False):
            tensor = torch.empty(numel, dtype=dtype, device=self.device)
        self.add(kind, tensor.nbytes)
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
        self.lent_peak = self.lent
