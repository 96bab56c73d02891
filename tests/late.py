"""Host memory whose copies are late: nothing is copied before somebody waits for it, as with a device that is busy.

What is read too early, or used again too early, is wrong then on every run.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerodp.core.arena import Slot
from zerodp.regions import ALIGN
from zerodp.tiers import Transfer
from zerodp.tiers.host import HostTier


class Queue:
    """The side stream."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], Any]] = deque()
        self.done = 0
        self.lock = threading.RLock()  # the disk tier's threads wait for copies, too

    def record_event(self) -> Event:
        with self.lock:
            return Event(self, self.done + len(self.waiting))

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    def __init__(self, queue: Queue, place: int) -> None:
        self.queue, self.place = queue, place

    def query(self) -> bool:
        return self.queue.done >= self.place

    def synchronize(self) -> None:
        with self.queue.lock:
            while not self.query():
                self.queue.waiting.popleft()()
                self.queue.done += 1


class LateCopy:
    def __init__(self, event: Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def launched(self) -> Transfer:
        return self

    def behind(self) -> Any:
        self.wait()  # a collective reads its memory when it is launched, here
        return contextlib.nullcontext()


class LateTier(HostTier):
    def __init__(self, device: torch.device, align: int = ALIGN) -> None:
        super().__init__(device, align)
        self.stream = Queue()

    def put(self, tensor: Tensor, kind: str, label: str = "") -> Slot:
        slot = super().put(tensor, kind, label)
        self.stream.synchronize()  # as whoever puts first values does with a device
        return slot

    def _copy(self, to: Tensor, source: Tensor) -> Transfer:
        self.stream.waiting.append(lambda: to.copy_(source))
        return LateCopy(self.stream.record_event())
