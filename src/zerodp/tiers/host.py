"""Host memory as a tier: pinned, and copied to and from on a stream of its own, where there is an accelerator.

All copies run on that one stream, in order, so a buffer's next copy comes after its last. Who else touches host buffers (an
optimizer, the disk tier's threads, the allocator) gets them only when the copies that were under way have ended.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from ..core.arena import KEEPERS, Arena, Slot
from ..regions import ALIGN
from . import ARRIVED, Ledger, Resting, Transfer

KEPT_BYTES = 256 * 2**20  # memory of the device that copies under way may keep; a caller far ahead of it waits


class Copy:
    """A copy on the side stream."""

    def __init__(self, stream: Any, device: torch.device) -> None:
        self.stream, self.event, self.device = stream, stream.record_event(), device

    def wait(self) -> None:
        torch.accelerator.current_stream(self.device).wait_event(self.event)

    def launched(self) -> Transfer:
        return self

    def behind(self) -> Any:
        return self.stream  # a collective, too, begins when the stream that it is launched from has come so far


class HostTier:
    """Copies of tensors of `device` in host memory; tickets are slots of an arena of its own.

    align: bytes; of the addresses of the memory.
    """

    latent = True

    def __init__(self, device: torch.device, align: int = ALIGN) -> None:
        self.device = device
        self.stream: Any = None if device.type == "cpu" else torch.Stream(device)
        self.arena = Arena(torch.device("cpu"), pinned=self.stream is not None, align=align)
        # (event, what may go after it): slots that were given back, and tensors that are still being read
        self.leaving: deque[tuple[Any, Slot | None, Tensor | None]] = deque()
        self.kept_bytes = 0  # of these tensors
        self.touched: dict[Slot, Any] = {}  # an event after the last copy from or to a slot
        self.fetched_bytes = self.written_bytes = 0
        KEEPERS.add(self)
        if self.stream is not None:
            # Dropped with its model while copies are under way: their memory must not become somebody else's before they end.
            weakref.finalize(self, self.stream.synchronize).atexit = False

    def put(self, tensor: Tensor, kind: str, label: str = "") -> Slot:
        slot = self.reserve(tensor.numel(), tensor.dtype, kind, label)
        self.write_back(slot, tensor)
        return slot

    def reserve(self, numel: int, dtype: torch.dtype, kind: str, label: str = "") -> Slot:
        """A buffer that no copy touches any more."""
        self.settle()
        return self.arena.take(numel, dtype, kind, label)

    def write_back(self, ticket: Slot, tensor: Tensor) -> None:
        self.write(ticket.tensor, tensor)
        self._touch(ticket)

    def fetch(self, ticket: Slot, out: Tensor) -> Transfer:
        transfer = self.read(ticket.tensor, out)
        self._touch(ticket)
        return transfer

    def open(self, ticket: Slot) -> Resting:
        """The resting memory itself, when its own copies have ended; those of other tickets go on."""
        return Resting(ticket.tensor, self.touched.get(ticket))

    def ahead(self, ticket: Slot) -> None:
        """It can be copied at any time."""

    def free(self, ticket: Slot) -> None:
        self.touched.pop(ticket, None)
        if self.stream is None:
            self.arena.give(ticket)
        else:
            self.leaving.append((self.stream.record_event(), ticket, None))
            self.settle()

    def close(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()
        self.settle()
        self.arena.settle()
        self.arena.drop_idle()

    def ledgers(self) -> list[Ledger]:
        self.settle()
        self.arena.settle()
        return [Ledger("host", self.arena.now, self.arena.peak, self.fetched_bytes, self.written_bytes)]

    def reset_peaks(self) -> None:
        self.arena.reset_peaks()
        self.fetched_bytes = self.written_bytes = 0

    # ---- for tiers beyond this one, which have host memory only for a while

    def write(self, memory: Tensor, tensor: Tensor) -> None:
        """Start copying a tensor of the device into host memory; `tensor` may be dropped at once."""
        self._copy(memory, tensor)
        self.written_bytes += tensor.nbytes
        if self.stream is not None:
            # An alias, since an arena counts who sees a storage: a slot that is given back now waits until it is copied.
            self.leaving.append((self.stream.record_event(), None, tensor.detach()))
            self.kept_bytes += tensor.nbytes
            while self.kept_bytes > max(KEPT_BYTES, 2 * tensor.nbytes):
                self.reclaim()

    def read(self, memory: Tensor, out: Tensor) -> Transfer:
        """Start copying host memory to the device."""
        self.settle()
        self.fetched_bytes += out.nbytes
        return self._copy(out, memory)

    def mark(self) -> Any:
        """An event after all copies launched so far, whose `synchronize` waits for them; None where copies do not wait."""
        return None if self.stream is None else self.stream.record_event()

    def settle(self) -> None:
        """Let go of what copies kept that have ended."""
        while self.leaving and self.leaving[0][0].query():
            self._let_go()

    def reclaim(self) -> bool:
        """Wait for the oldest copy that keeps something. False: none does."""
        if self.leaving:
            self.leaving[0][0].synchronize()
            self._let_go()
            return True
        return False

    def _let_go(self) -> None:
        _, slot, tensor = self.leaving.popleft()
        if slot is not None:
            self.arena.give(slot)
        if tensor is not None:
            self.kept_bytes -= tensor.nbytes

    def _touch(self, ticket: Slot) -> None:
        if self.stream is not None:
            self.touched[ticket] = self.stream.record_event()

    def _copy(self, to: Tensor, source: Tensor) -> Transfer:
        if self.stream is None:
            to.copy_(source)
            return ARRIVED
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            to.copy_(source, non_blocking=True)
        return Copy(self.stream, self.device)
