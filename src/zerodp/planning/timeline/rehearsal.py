"""The order of a step's events without a model: the engine's own pager, orders and cache, walked over units that hold nothing.

The result is the trace that `zerodp.stats(model).trace` would show in the steady state, with a moment more for each thing that takes
time: "backward" where a unit's backward begins and "rest" where its second half does, "head" and "tail" where the root's last part comes
in forward and its first in backward, "drain" where reductions under way are waited for, "update" where the optimizer begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from ...core.pager import Pager
from ...core.reducer import IN_FLIGHT
from ...core.schedule import Order, Pass, backward_order, forward_order
from ...core.wrap import ROOT

RECORDED = ("gather", "use", "free", "reduce", "step")  # kinds that the engine's trace has too
STEPS = 3  # until the orders have settled


class Moment(NamedTuple):
    """An event of one rank, as in the trace, and how long the training thread works until the next one."""

    kind: str
    unit: str
    phase: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Part:
    """A unit as far as the order goes: pages: gathered for use; renewed: gathered whole after a step."""

    name: str
    gathered_bytes: int = 0
    pages: bool = False
    renewed: bool = False
    trains: bool = True


class _Unit:
    """What the pager asks of a unit."""

    flats = far = ()
    kept = visible = False
    opened = holders = arrivals = expected = 0
    adapts = surrounds = False

    def __init__(self, part: Part, index: int, stage: Rehearsal) -> None:
        self.part, self.index, self.stage = part, index, stage
        self.name, self.pages, self.trains, self.gathered_bytes = (
            part.name,
            part.pages,
            part.trains,
            part.gathered_bytes,
        )
        self.present = not part.pages

    def launch(self) -> None:
        self.stage.event("gather", self)
        self.present = True

    def show(self) -> None:
        if not self.visible:
            self.visible = True
            self.stage.event("use", self)

    def hide(self) -> None:
        self.visible = False

    def free(self) -> None:
        if self.pages and self.present:
            self.present = False
            self.stage.event("free", self)
        self.visible = False


class _Reducer:
    """Reductions that are launched and end when they are waited for."""

    def __init__(self, stage: Rehearsal) -> None:
        self.stage = stage
        self.under_way: deque[_Unit] = deque()

    def launch(self, unit: _Unit) -> None:
        self.under_way.append(unit)
        while len(self.under_way) > IN_FLIGHT:
            self.under_way.popleft()

    def drain(self) -> None:
        self.stage.event("drain", None)
        self.under_way.clear()


class Rehearsal:
    """The runtime of units that hold nothing."""

    recomputes = False  # what a checkpoint computes again is timed as a part of backward

    def __init__(self, parts: Sequence[Part], prefetch: int, budget_bytes: int) -> None:
        self.units = [_Unit(part, index, self) for index, part in enumerate(parts)]
        self.root = next((unit for unit in self.units if unit.name == ROOT), None)
        if self.root is not None:
            self.root.surrounds = True
        self.pager = Pager(self.units, budget_bytes, prefetch, self)  # type: ignore[arg-type]
        self.passes: list[Pass] = []
        self.orders: dict[str, Order] = {}
        self.moments: list[Moment] = []
        self.comm = SimpleNamespace(broken=None)
        self.control = SimpleNamespace(meet=lambda _: 0)
        self.reducer = _Reducer(self)
        self.arena = SimpleNamespace(drop_idle=lambda: None)

    def event(self, kind: str, unit: Any) -> None:
        phase = self.passes[-1].phase if self.passes else "idle"
        self.moments.append(Moment(kind, unit.name if unit is not None else "", phase))

    def step(self, backwards: int) -> list[Moment]:
        """One optimizer step of so many forward and backward passes."""
        self.moments = []
        for _ in range(backwards):
            self._forward()
            self._backward()
        self.reducer.drain()
        self.event("update", None)
        for unit in self.pager.cache.clear():
            self.pager.let_go(unit)
        for one in self.units:
            if one.part.renewed and one.trains:
                self.event("gather", one)
        self.event("step", None)
        return self.moments

    # ---- the passes, as module hooks and autograd would drive them

    def _forward(self) -> None:
        pages = (unit.index for unit in self.units if unit.pages)
        order = self.orders.setdefault("forward", Order(forward_order(pages), 0))
        current = Pass("forward", ("forward", "", True), order)
        self.passes.append(current)
        outer = [self.root] if self.root is not None else []
        for unit in (*outer, *(u for u in self.units if u is not self.root)):
            self._demand(unit)
            unit.holders += 1
            if unit is not self.root:
                self._unhold(unit)
        for unit in outer:
            self.event("head", unit)
            self._unhold(unit)
        self._finish(current)

    def _backward(self) -> None:
        uses = [unit.index for unit in self.units]
        trains, pages = {u.index for u in self.units if u.trains}, {u.index for u in self.units if u.pages}
        if "backward" not in self.orders:
            first = backward_order(uses, uses, pages, trains, self.root.index if self.root is not None else -1)
            self.orders["backward"] = Order(first, self.pager.prefetch)
        self.reducer.drain()
        current = Pass("backward", ("backward",), self.orders["backward"], awaited=set(trains))
        self.passes.append(current)
        for unit in self.units:
            unit.visible = unit.visible or not unit.pages
            unit.expected = int(unit.trains)
        outer = [self.root] if self.root is not None else []
        for unit in (*outer, *(u for u in reversed(self.units) if u is not self.root)):
            self._demand(unit)
            self.event("backward", unit)
            if unit in self.reducer.under_way:  # its first gradient needs the bucket
                self.reducer.drain()
            if unit is not self.root:
                self._gradients(unit, current)
        for unit in outer:
            self.event("tail", unit)
            self._gradients(unit, current)
        self._finish(current)

    def _gradients(self, unit: _Unit, current: Pass) -> None:
        if unit.trains:
            current.arrived = True
            if unit.pages:
                self.pager.halfway(current)
                self.event("rest", unit)
            self.pager.complete(unit, current)  # type: ignore[arg-type]

    def _demand(self, unit: _Unit) -> None:
        if not unit.visible:
            if unit.pages:
                self.pager.page_in(unit, self.passes[-1])  # type: ignore[arg-type]
            unit.show()

    def _unhold(self, unit: _Unit) -> None:
        unit.holders -= 1
        if unit.pages:
            self.pager.release(unit)  # type: ignore[arg-type]

    def _finish(self, current: Pass) -> None:
        self.pager.finish(current)
        self.passes.remove(current)
        if current.missed:
            current.order.revise(current.order.record, current.arrived)


def rehearse(parts: Sequence[Part], prefetch: int = 1, unsharded_bytes: int = 0, backwards: int = 1) -> list[Moment]:
    """The moments of a step in the steady state; the root stands first among `parts` and is needed first and last."""
    stage = Rehearsal(parts, prefetch, unsharded_bytes)
    for _ in range(STEPS):
        found = stage.step(backwards)
    return found
