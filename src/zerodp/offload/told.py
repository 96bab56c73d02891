"""A tier whose failure on one rank becomes the same error on all, also where the others do not ask; and which several threads may use.

Knows that there are other ranks, and nothing of them: how they are told is given to it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ..core.arena import KEEPERS
from ..errors import StorageError
from ..tiers import Opened, Transfer


class Shared(threading.local):
    """How often this thread is inside `together`."""

    depth = 0


class Told:
    """`tier`, with `tell` for what fails; not inside `together`, where the ranks share their verdicts at the end.

    One thread at a time is in the tier: an update may run beside training.
    """

    def __init__(self, tier: Any, tell: Callable[[StorageError], None]) -> None:
        self.tier, self.tell, self.shared, self.lock = tier, tell, Shared(), threading.RLock()
        self.dropped: deque[Any] = deque()
        KEEPERS.discard(tier.host)
        KEEPERS.add(self)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All ranks are here, and the caller sees to it that all of them hear of an error."""
        self.shared.depth += 1
        try:
            yield
        finally:
            self.shared.depth -= 1

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            if not self.shared.depth:
                self.tell(error)
            raise

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with self.telling(), self.lock:
            while self.dropped:
                self.tier.free(self.dropped.popleft())
            yield

    def settle(self) -> None:
        with self.lock:
            self.tier.host.settle()

    def put(self, tensor: Tensor, kind: str, label: str = "") -> Any:
        with self.entered():
            return self.tier.put(tensor, kind, label)

    def reserve(self, numel: int, dtype: Any, kind: str, label: str = "") -> Any:
        with self.entered():
            return self.tier.reserve(numel, dtype, kind, label)

    def write_back(self, ticket: Any, tensor: Tensor) -> None:
        with self.entered():
            self.tier.write_back(ticket, tensor)

    def fetch(self, ticket: Any, out: Tensor) -> Transfer:
        with self.entered():
            return ToldTransfer(self, self.tier.fetch(ticket, out))

    def open(self, ticket: Any) -> Opened:
        with self.entered():
            return ToldOpened(self, self.tier.open(ticket))

    def ahead(self, ticket: Any) -> None:
        with self.entered():
            self.tier.ahead(ticket)

    def free(self, ticket: Any) -> None:
        with self.entered():
            self.tier.free(ticket)

    def drop(self, ticket: Any) -> None:
        """`free` it at the next use: for the collector of garbage, which runs at any moment and in any thread."""
        self.dropped.append(ticket)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tier, name)  # the rest is for one rank and thread alone


class ToldTransfer:
    def __init__(self, told: Told, transfer: Transfer) -> None:
        self.told, self.transfer = told, transfer

    def wait(self) -> None:
        with self.told.entered():
            self.transfer.wait()

    def launched(self) -> Transfer:
        with self.told.entered():
            return self.transfer.launched()

    def behind(self) -> contextlib.AbstractContextManager[Any]:
        return self.transfer.behind()


class ToldOpened:
    def __init__(self, told: Told, opened: Opened) -> None:
        self.told, self.opened = told, opened

    def wait(self) -> Tensor:
        with self.told.entered():
            return self.opened.wait()

    def close(self, changed: bool) -> None:
        with self.told.entered():
            self.opened.close(changed)
