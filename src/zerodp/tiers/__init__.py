"""Places where tensors rest between uses, under one protocol: device, host and disk.

A tier knows bytes. It does not know what they mean, when they are needed again, or who else has some of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Transfer(Protocol):
    """Bytes on their way."""

    def wait(self) -> None:
        """Until they are there: for the current stream where there is one, else for the caller."""


class Arrived:
    """A transfer that has ended."""

    def wait(self) -> None:
        pass


ARRIVED = Arrived()


class Ledger(NamedTuple):
    """Bytes at one place ("device", "host" or "disk") by kind, now and at their peak."""

    place: str
    now: dict[str, int]
    peak: dict[str, int]


class Tier(Protocol):
    """Keeps 1-D contiguous tensors of the device under tickets. What a ticket is, only its tier knows.

    latent: whether a fetch is worth starting ahead of need.
    """

    latent: bool

    def put(self, tensor: Tensor, kind: str, label: str = "") -> Any:
        """Keep a copy of `tensor`; the result is its ticket.

        Raises:
            StorageError: there is no space; nothing is kept then.
        """

    def write_back(self, ticket: Any, tensor: Tensor) -> None:
        """Put new values in the place of those under `ticket`; same dtype and number of elements."""

    def fetch(self, ticket: Any, out: Tensor) -> Transfer:
        """Start copying what is kept into `out`; same dtype and number of elements. `out` must live until the wait."""

    def free(self, ticket: Any) -> None:
        """Forget what is kept. A fetch of it must have been waited for."""

    def close(self) -> None:
        """Give back everything that the tier has of the system."""

    def ledgers(self) -> list[Ledger]:
        """What rests where."""

    def reset_peaks(self) -> None:
        """Count peaks anew."""
