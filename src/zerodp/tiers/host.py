"""Host memory as a tier: pinned, and copied to and from on a stream of its own, where there is an accelerator.

All copies run on that one stream, in order, so a buffer's next copy comes after its last. Who else touches host buffers (the
disk tier's threads, the allocator) gets them only when the copies that were under way have ended.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from ..core.arena import Arena, Slot
from . import ARRIVED, Ledger, Transfer


class Copy:
    """A copy on the side stream."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self.event, self.device = event, device

    def wait(self) -> None:
        torch.accelerator.current_stream(self.device).wait_event(self.event)


class HostTier:
    """Copies of tensors of `device` in host memory; tickets are slots of an arena of its own."""

    latent = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = None if device.type == "cpu" else torch.Stream(device)
        self.arena = Arena(torch.device("cpu"), pinned=self.stream is not None)
        # (event, what may go after it): slots that were given back, and tensors that are still being read
        self.leaving: deque[tuple[Any, Slot | None, Tensor | None]] = deque()

    def put(self, tensor: Tensor, kind: str, label: str = "") -> Slot:
        slot = self.space(tensor.numel(), tensor.dtype, kind, label)
        self.write_back(slot, tensor)
        return slot

    def space(self, numel: int, dtype: torch.dtype, kind: str, label: str = "") -> Slot:
        """A buffer that no copy touches any more; its contents are arbitrary."""
        self._settle()
        return self.arena.take(numel, dtype, kind, label)

    def write_back(self, ticket: Slot, tensor: Tensor) -> None:
        self._copy(ticket.tensor, tensor)
        if self.stream is not None:
            self.leaving.append((self.stream.record_event(), None, tensor))

    def fetch(self, ticket: Slot, out: Tensor) -> Transfer:
        self._settle()
        return self._copy(out, ticket.tensor)

    def free(self, ticket: Slot) -> None:
        if self.stream is None:
            self.arena.give(ticket)
        else:
            self.leaving.append((self.stream.record_event(), ticket, None))
            self._settle()

    def close(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()
        self._settle()
        self.arena.drop_idle()

    def ledgers(self) -> list[Ledger]:
        self._settle()
        return [Ledger("host", self.arena.now, self.arena.peak)]

    def reset_peaks(self) -> None:
        self.arena.reset_peaks()

    def synchronize(self) -> None:
        """Until the copies launched so far have ended; for threads that read host memory themselves."""
        if self.stream is not None:
            self.stream.synchronize()

    def _copy(self, to: Tensor, source: Tensor) -> Transfer:
        if self.stream is None:
            to.copy_(source)
            return ARRIVED
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            to.copy_(source, non_blocking=True)
        return Copy(self.stream.record_event(), self.device)

    def _settle(self) -> None:
        while self.leaving and self.leaving[0][0].query():
            slot = self.leaving.popleft()[1]
            if slot is not None:
                self.arena.give(slot)
