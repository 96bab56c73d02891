"""From the moments of a step to what the simulator runs: which transfer each event launches, and where the engine waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...core.reducer import IN_FLIGHT
from .machine import Transfer
from .rehearsal import Moment
from .simulate import Instruction, Launch, Mark, Wait, Work

GATHER, REDUCE, TENSOR = "gather", "reduce", "tensor"
REPEATS = 3  # steps until what one leaves under way is what it found


@dataclass(frozen=True)
class Wires:
    """What the events of a step send, by unit; a unit that is not there sends nothing.

    sums: seconds of adding up a reduction that has arrived; tensor: what tensor parallel ranks send during a moment (kind, unit, phase), which waits for it; message: seconds of the ranks'
    agreement before the optimizer's step.
    """

    gathers: Mapping[str, Transfer] = field(default_factory=dict)
    reduces: Mapping[str, Transfer] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict)
    tensor: Mapping[tuple[str, str, str], Transfer] = field(default_factory=dict)
    message: float = 0.0


class _Program:
    """The instructions of several steps, made moment by moment."""

    def __init__(self, wires: Wires) -> None:
        self.wires = wires
        self.made: list[Instruction] = []
        self.keys = 0
        self.gathers: dict[str, int] = {}  # under way, by unit
        self.reduces: deque[tuple[int, str]] = deque()

    def add(self, moment: Moment) -> None:
        kind, unit, phase, seconds = moment
        if kind == "gather" and unit in self.wires.gathers:
            self.gathers[unit] = self._launch(GATHER, self.wires.gathers[unit], unit, phase)
        elif kind == "use" and unit in self.gathers:
            self.made.append(Wait(self.gathers.pop(unit)))
        elif kind == "reduce" and unit in self.wires.reduces:
            self.reduces.append((self._launch(REDUCE, self.wires.reduces[unit], unit, phase), unit))
        elif kind == "drain":
            self._advance(0)
        elif kind == "update":
            seconds += self.wires.message
        self._work(seconds, unit, phase)
        if kind == "reduce":
            self._advance(IN_FLIGHT)
        if (kind, unit, phase) in self.wires.tensor:
            self.made.append(Wait(self._launch(TENSOR, self.wires.tensor[(kind, unit, phase)], unit, phase)))
        if kind == "step":
            self.made.append(Mark())

    def _work(self, seconds: float, unit: str, phase: str) -> None:
        if seconds > 0:
            self.made.append(Work(seconds, unit, phase))

    def _launch(self, lane: str, transfer: Transfer, unit: str, phase: str) -> int:
        self.keys += 1
        self._work(transfer.launch, unit, phase)
        self.made.append(Launch(self.keys, lane, transfer.latency, transfer.seconds, unit, phase))
        return self.keys

    def _advance(self, limit: int) -> None:
        while len(self.reduces) > limit:
            key, unit = self.reduces.popleft()
            self.made.append(Wait(key))
            self._work(self.wires.sums.get(unit, 0.0), unit, "reduce")


def program(step: Iterable[Moment], wires: Wires, repeats: int = REPEATS) -> list[Instruction]:
    """The instructions of `repeats` such steps one after another."""
    moments, made = list(step), _Program(wires)
    for _ in range(repeats):
        for moment in moments:
            made.add(moment)
    return made.made
