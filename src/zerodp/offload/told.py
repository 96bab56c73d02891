"""A tier whose failure on one rank becomes the same error on all, also where the others do not ask.

Knows that there are other ranks, and nothing of them: how they are told is given to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ..errors import StorageError
from ..tiers import Opened, Transfer


class Told:
    """`tier`, with `tell` for what fails; not inside `together`, where the ranks share their verdicts at the end."""

    def __init__(self, tier: Any, tell: Callable[[StorageError], None]) -> None:
        self.tier, self.tell, self.shared = tier, tell, 0

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All ranks are here, and the caller sees to it that all of them hear of an error."""
        self.shared += 1
        try:
            yield
        finally:
            self.shared -= 1

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            if not self.shared:
                self.tell(error)
            raise

    def put(self, tensor: Tensor, kind: str, label: str = "") -> Any:
        with self.telling():
            return self.tier.put(tensor, kind, label)

    def reserve(self, numel: int, dtype: Any, kind: str, label: str = "") -> Any:
        with self.telling():
            return self.tier.reserve(numel, dtype, kind, label)

    def write_back(self, ticket: Any, tensor: Tensor) -> None:
        with self.telling():
            self.tier.write_back(ticket, tensor)

    def fetch(self, ticket: Any, out: Tensor) -> Transfer:
        with self.telling():
            return ToldTransfer(self, self.tier.fetch(ticket, out))

    def open(self, ticket: Any) -> Opened:
        with self.telling():
            return ToldOpened(self, self.tier.open(ticket))

    def ahead(self, ticket: Any) -> None:
        with self.telling():
            self.tier.ahead(ticket)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tier, name)  # the rest is for one rank alone, or cannot fail


class ToldTransfer:
    def __init__(self, told: Told, transfer: Transfer) -> None:
        self.told, self.transfer = told, transfer

    def wait(self) -> None:
        with self.told.telling():
            self.transfer.wait()

    def launched(self) -> Transfer:
        with self.told.telling():
            return self.transfer.launched()

    def behind(self) -> contextlib.AbstractContextManager[Any]:
        return self.transfer.behind()


class ToldOpened:
    def __init__(self, told: Told, opened: Opened) -> None:
        self.told, self.opened = told, opened

    def wait(self) -> Tensor:
        with self.told.telling():
            return self.opened.wait()

    def close(self, changed: bool) -> None:
        with self.told.telling():
            self.opened.close(changed)
