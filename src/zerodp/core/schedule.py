"""One total order of gathers and reductions per pass, as data.

All ranks launch the same operations in the same order. An `Order` is that list for one kind of pass (which module was
entered, with or without gradients); a `Pass` walks it. The rule: a demand for a unit, or the completion of its gradients,
launches everything in the list up to it; the end of the pass launches the rest.

This file knows units by number only.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

GATHER, REDUCE = "gather", "reduce"
Op = tuple[str, int]
MAX_REVISIONS = 4  # routing that changes for ever must not cost an agreement for ever


@dataclass
class Order:
    """The list for one kind of pass, the same on all ranks, and what this rank did in the last such pass."""

    natural: list[Op]  # in the order of use
    prefetch: int
    ops: list[Op] = field(init=False)  # as launched: each gather ahead of its use
    record: list[Op] = field(default_factory=list)
    arrivals: dict[int, int] = field(default_factory=dict)  # gradients that came per unit, last time
    silent: set[int] = field(default_factory=set)  # units that were used last time, and got none
    revisions: int = 0

    def __post_init__(self) -> None:
        self.ops = arrange(self.natural, self.prefetch)

    @property
    def reduces(self) -> bool:
        return any(kind == REDUCE for kind, _ in self.ops)

    def revise(self, record: Sequence[Op], arrived: bool) -> None:
        """Take the order that was really used (rank 0's); what it lacks keeps its place, as other ranks may need it."""
        self.revisions += 1
        old = self.natural if arrived else [op for op in self.natural if op[0] != REDUCE]
        self.natural = merge(record, old)
        self.ops = arrange(self.natural, self.prefetch)


@dataclass(eq=False)
class Pass:
    """One forward or backward under way."""

    phase: str  # "forward" or "backward"
    key: tuple[Any, ...]
    order: Order
    pointer: int = 0
    missed: bool = False
    record: list[Op] = field(default_factory=list)
    uses: list[int] = field(default_factory=list)  # units in the order of use, whether they are pages or not
    ahead: dict[int, int] = field(default_factory=dict)  # launched, not yet demanded: unit -> position
    begun: list[int] = field(default_factory=list)  # units in backward, as far as this rank can tell
    forward: Counter[int] = field(default_factory=Counter)  # of a backward: how often forward used each unit
    several: bool = False  # of a backward: more than one forward came before it
    arrived: bool = False
    synchronizes: bool = True
    awaited: set[int] = field(default_factory=set)  # units that will get gradients on this rank, by all it knows
    complete: set[int] = field(default_factory=set)  # units whose gradients are all here
    alive: Callable[[], Any] | None = None  # of a backward: None once autograd is done with it, or has failed

    @property
    def failed(self) -> bool:
        """An exception has ended this backward, so that autograd will not say that it ends."""
        return self.alive is not None and self.alive() is None

    def reducible(self, prefetch: int) -> int | None:
        """The last place in the list up to which every awaited unit is complete; None if the next one is not.

        A reduction never overtakes gradients that are still to come: theirs would be added up in another order. Nor does it bring more pages
        than are gathered ahead: a list that has them before it is wrong.
        """
        last, ahead = None, len(self.ahead)
        for position in range(self.pointer, len(self.order.ops)):
            kind, index = self.order.ops[position]
            if kind == REDUCE:
                if index in self.complete:
                    last = position
                elif index in self.awaited:
                    break
            elif self.forward[index]:
                ahead += 1
                if ahead > prefetch:
                    self.missed |= any(op[0] == REDUCE and op[1] in self.complete for op in self.order.ops[position:])
                    break
        return last

    def find(self, kind: str, unit: int) -> int | None:
        """Where the list has this ahead of the pointer."""
        ops, op = self.order.ops, (kind, unit)
        for position in range(self.pointer, len(ops)):
            if ops[position] == op:
                return position
        return None


def forward_order(units: Iterable[int]) -> list[Op]:
    return [(GATHER, unit) for unit in units]


def backward_order(uses: Sequence[int], units: Sequence[int], pages: set[int], trains: set[int], root: int) -> list[Op]:
    """The first backward, from the order of use in forward; `units` that were not used keep their registered place."""
    order = list(uses)
    for place, unit in enumerate(units):
        if unit not in order:
            order.insert(min(place, len(order)), unit)
    if root in order:
        order = [root, *(unit for unit in order if unit != root), root]
    # A unit used twice is needed for its last use first, and has all its gradients after its first use.
    first = {unit: place for place, unit in reversed(list(enumerate(order)))}
    last = {unit: place for place, unit in enumerate(order)}
    ops: list[Op] = []
    for place, unit in reversed(list(enumerate(order))):
        if unit in pages and last[unit] == place:
            ops.append((GATHER, unit))
        if unit in trains and first[unit] == place:
            ops.append((REDUCE, unit))
    return ops


def arrange(ops: Sequence[Op], prefetch: int) -> list[Op]:
    """Move each gather ahead of its use by `prefetch` gathers, so that a reduction never stands in its way."""
    gathers = [op for op in ops if op[0] == GATHER]
    result: list[Op] = []
    launched = used = 0
    for op in ops:
        if op[0] == GATHER:
            used += 1
            while launched < min(used + prefetch, len(gathers)):
                result.append(gathers[launched])
                launched += 1
        else:
            result.append(op)
    return result


def merge(new: Sequence[Op], old: Sequence[Op]) -> list[Op]:
    """`new`, with each operation that only `old` has put behind the one it followed there. Reductions happen once."""
    result = [op for i, op in enumerate(new) if op[0] == GATHER or op not in new[i + 1 :]]
    previous: Op | None = None
    for op in old:
        if op not in result:
            at = result.index(previous) + 1 if previous in result else 0
            result.insert(at, op)
        previous = op
    return result


def number_of(value: Any) -> int:
    """A number for any plain value that is the same in every process."""
    return zlib.crc32(repr(value).encode())


class Fingerprint:
    """A running number over everything launched; equal on all ranks or something went apart."""

    def __init__(self) -> None:
        self.value = 0
        self.launches = 0

    def add(self, kind: str, unit: int) -> None:
        self.launches += 1
        self.value = (self.value * 1_000_003 + unit * 2 + (kind == REDUCE) + 1) % (2**61 - 1)
