"""States as checkpoints take them: in memory as they are, on disk read when they are asked for, one home at a time.

So a save needs no more memory than a step, and a load keeps what it has read on disk until everything is known to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .elsewhere import Elsewhere
from .home import MASTER, STATES, Home, walk


def together(home: Elsewhere) -> AbstractContextManager[None]:
    """What fails inside is shared by the caller, with all ranks."""
    tier: Any = home.tier
    return tier.together()  # type: ignore[no-any-return]


class Reader:
    """Keeps the home it last read from live: neighbours are asked for one after the other.

    Of saves, which share what fails on one rank themselves.
    """

    def __init__(self) -> None:
        self.open: tuple[Elsewhere, str] | None = None

    def ready(self, home: Elsewhere, kind: str) -> None:
        if self.open != (home, kind):
            self.close()
            with together(home):
                home.begin((kind,))
                self.open = (home, kind)
                home.show()

    def close(self) -> None:
        if self.open is not None:
            home, self.open = self.open[0], None
            with together(home):
                home.end(())


class Unread:
    """Elements [low, high) of a tensor that is live only while its home is."""

    def __init__(
        self, reader: Reader, home: Elsewhere, kind: str, tensor: Callable[[], Tensor], low: int, high: int
    ) -> None:
        self.reader, self.home, self.kind, self.tensor, self.low, self.high = reader, home, kind, tensor, low, high

    def numel(self) -> int:
        return self.high - self.low

    def __getitem__(self, part: slice) -> Unread:
        start, stop, _ = part.indices(self.numel())
        return Unread(self.reader, self.home, self.kind, self.tensor, self.low + start, self.low + stop)

    def read(self) -> Tensor:
        """Good until the next `read` of the same reader."""
        self.reader.ready(self.home, self.kind)
        return self.tensor()[self.low : self.high]


class Parked:
    """A value that has been read, kept in the tier that it will go to."""

    def __init__(self, home: Elsewhere, values: Tensor) -> None:
        self.tier: Any = home.tier
        self.numel, self.dtype = values.numel(), values.dtype
        with together(home):  # loads share what fails before they change anything
            self.ticket = self.tier.put(values, "buckets", home.name)

    def read(self) -> Tensor:
        out = torch.empty(self.numel, dtype=self.dtype, device="cpu")
        self.tier.fetch(self.ticket, out).wait()
        return out

    def __del__(self) -> None:
        if hasattr(self, "ticket"):
            self.tier.drop(self.ticket)


def read(value: Any) -> Any:
    """The value itself, if it is to be read."""
    return value.read() if isinstance(value, (Unread, Parked)) else value


def parked(home: Home, value: Any) -> Any:
    """A tensor put aside until it is needed, where its home has no room for it in memory."""
    if home.live or not isinstance(value, Tensor) or value.dim() != 1:
        return value
    assert isinstance(home, Elsewhere)
    return Parked(home, value)


def master_part(reader: Reader, segment: Any, home: Home) -> Any:
    """A segment (of the layout) of the master."""
    low, high = segment.offset, segment.offset + segment.numel
    if home.live:
        return home.flat.master[home.piece][low:high]
    assert isinstance(home, Elsewhere)
    return Unread(reader, home, MASTER, lambda: home.flat.master[home.piece], low, high)


def state_part(reader: Reader, one: Any, key: str, home: Home) -> Any:
    """An elementwise entry of a segment's optimizer state."""
    if home.live:
        return home.state[one][key]
    assert isinstance(home, Elsewhere)
    return Unread(reader, home, STATES, lambda: home.state[one][key], 0, one.segment.numel)


def replace_masters(values: Iterable[tuple[Home, Any, Any]]) -> None:
    """New values for segments of masters: (home, segment of the layout, values)."""
    rows: dict[Home, list[tuple[Any, Any]]] = {}
    for home, segment, value in values:
        rows.setdefault(home, []).append((segment, value))
    for home in walk(rows, (MASTER,), (MASTER,)):
        for segment, value in rows[home]:
            home.flat.master[home.piece][segment.offset : segment.offset + segment.numel].copy_(read(value))


def replace_states(
    state: MutableMapping[Any, dict[str, Any]], new: Mapping[Any, dict[str, Any]], segments: Iterable[Any]
) -> None:
    """All of an optimizer's state, by segment, by another one; `segments` are all that it has."""
    homes: dict[Home, list[Any]] = {}
    for one in segments:
        homes.setdefault(one.flat.homes[one.segment.piece], []).append(one)
    state.clear()
    for home in walk(homes, (STATES,), (STATES,)):
        for one in homes[home]:
            if one in new:
                state[one] = {key: read(value) for key, value in new[one].items()}
