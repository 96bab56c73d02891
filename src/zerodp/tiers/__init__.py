"""Places where tensors rest between uses, under one protocol: device, host and disk.

A tier knows bytes. It does not know what they mean, when they are needed again, or who else has some of them.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Transfer(Protocol):
    """Bytes on their way."""

    def wait(self) -> None:
        """Until they are there: for the current stream where there is one, else for the caller.

        Raises:
            StorageError: they cannot be read.
        """

    def launched(self) -> Transfer:
        """The caller waits for the part of the way that streams do not go; the result is the rest of it.

        Raises:
            StorageError: they cannot be read.
        """

    def behind(self) -> contextlib.AbstractContextManager[Any]:
        """What is launched inside comes after a launched transfer; what comes after this does not."""


class Arrived:
    """A transfer that has ended."""

    def wait(self) -> None:
        pass

    def launched(self) -> Transfer:
        return self

    def behind(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


ARRIVED = Arrived()


class Opened(Protocol):
    """Kept values on their way into memory, where they can be read and changed in place until `close`."""

    def wait(self) -> Tensor:
        """The values themselves, 1-D, in the dtype of what was put. They stay where they are until `close`.

        Raises:
            StorageError: they cannot be read; there is nothing to close then.
        """

    def close(self, changed: bool) -> None:
        """Give them back. `changed`: they were written to, and what was written is kept from now on.

        Raises:
            StorageError: an earlier write failed; its values are kept in memory.
        """


class Resting:
    """An `Opened` whose values rest where they are used."""

    def __init__(self, values: Tensor, ready: Any = None) -> None:
        self.values, self.ready = values, ready  # ready: an event to wait for first

    def wait(self) -> Tensor:
        if self.ready is not None:
            self.ready.synchronize()
        return self.values

    def close(self, changed: bool) -> None:
        pass


class Ledger(NamedTuple):
    """Bytes at one place ("device", "host" or "disk") by kind, now and at their peak, and what went there and back.

    fetched_bytes, written_bytes: moved from and to this place since the last reset, in whole blocks where it has blocks.
    note: how the place is used, for people.
    """

    place: str
    now: dict[str, int]
    peak: dict[str, int]
    fetched_bytes: int = 0
    written_bytes: int = 0
    note: str = ""


class Tier(Protocol):
    """Keeps 1-D contiguous tensors of the device under tickets. What a ticket is, only its tier knows.

    What was written last is what comes next, whether it came by `put`, `write_back` or an `Opened`.

    latent: whether a fetch is worth starting ahead of need.
    """

    latent: bool

    def put(self, tensor: Tensor, kind: str, label: str = "") -> Any:
        """Keep a copy of `tensor`; the result is its ticket.

        Raises:
            StorageError: there is no space; nothing is kept then.
        """

    def reserve(self, numel: int, dtype: Any, kind: str, label: str = "") -> Any:
        """Room for `numel` elements; the result is its ticket. The values are arbitrary until the first write.

        Raises:
            StorageError: there is no space; nothing is kept then.
        """

    def write_back(self, ticket: Any, tensor: Tensor) -> None:
        """Put new values in the place of those under `ticket`; same dtype and number of elements."""

    def fetch(self, ticket: Any, out: Tensor) -> Transfer:
        """Start copying what is kept into `out`; same dtype and number of elements. `out` must live until the wait."""

    def open(self, ticket: Any) -> Opened:
        """Start bringing what is kept to where it can be changed: host memory, or the device's own for its tier.

        One opening of a ticket at a time; it must be waited for.
        """

    def ahead(self, ticket: Any) -> None:
        """A hint: this ticket will be fetched or opened soon."""

    def free(self, ticket: Any) -> None:
        """Forget what is kept. A fetch of it must have been waited for, and an opening closed."""

    def close(self) -> None:
        """Give back everything that the tier has of the system."""

    def ledgers(self) -> list[Ledger]:
        """What rests where."""

    def reset_peaks(self) -> None:
        """Count peaks and moved bytes anew."""
