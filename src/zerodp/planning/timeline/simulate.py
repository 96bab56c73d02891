"""The event simulator: one training thread and the lanes of its wire, as time goes by.

All ranks do the same at the same time, so one of them stands for all. The thread works, launches transfers and waits for
them; each lane carries one transfer after the other; what is under way at once shares the wire, and slows the thread by the
machine's `shared_rate`. It knows instructions, not models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

THREAD, WAIT = "compute", "wait"
TINY = 1e-15  # seconds; what is left of a piece of work by rounding


@dataclass(frozen=True)
class Work:
    """The training thread is busy for `seconds`."""

    seconds: float
    unit: str = ""
    phase: str = ""


@dataclass(frozen=True)
class Launch:
    """A transfer joins the queue of its lane: `latency`, then `seconds` of bytes when it has the wire for itself."""

    key: int
    lane: str
    latency: float
    seconds: float
    unit: str = ""
    phase: str = ""


@dataclass(frozen=True)
class Wait:
    """The thread goes on when the transfer `key` has ended."""

    key: int


@dataclass(frozen=True)
class Mark:
    """A step ends here."""


Instruction = Work | Launch | Wait | Mark


@dataclass(frozen=True)
class Span:
    """Something that took from `start` to `end`, in seconds; lane: "compute", "wait", or a lane of the wire."""

    lane: str
    start: float
    end: float
    unit: str
    phase: str


@dataclass(eq=False)
class _Transfer:
    launch: Launch
    latency: float
    seconds: float
    start: float = 0.0


@dataclass
class _State:
    now: float = 0.0
    lanes: dict[str, deque[_Transfer]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    spans: list[Span] = field(default_factory=list)

    def heads(self) -> list[_Transfer]:
        return [lane[0] for lane in self.lanes.values() if lane]


def run(instructions: Iterable[Instruction], shared_rate: float = 1.0) -> tuple[list[Span], list[float]]:
    """(what happened, and the moments of the marks); the thread begins at 0."""
    state, marks = _State(), []
    for one in instructions:
        if isinstance(one, Work):
            start = state.now
            _work(state, one.seconds, shared_rate)
            if state.now > start:
                state.spans.append(Span(THREAD, start, state.now, one.unit, one.phase))
        elif isinstance(one, Launch):
            lane = state.lanes.setdefault(one.lane, deque())
            lane.append(_Transfer(one, one.latency, one.seconds, state.now))
        elif isinstance(one, Wait):
            start = state.now
            while one.key not in state.ended:
                assert state.heads(), "a wait for what was never launched"
                _pass(state, None, shared_rate)
            if state.now > start:
                state.spans.append(Span(WAIT, start, state.now, "", ""))
        else:
            marks.append(state.now)
    while state.heads():
        _pass(state, None, shared_rate)
    return state.spans, marks


def _work(state: _State, seconds: float, shared_rate: float) -> None:
    while seconds > TINY:
        seconds = _pass(state, seconds, shared_rate)


def _pass(state: _State, work: float | None, shared_rate: float) -> float:
    """Let time pass until something ends; the result is what is left of the thread's work."""
    heads = state.heads()
    moving = [head for head in heads if head.latency <= TINY]
    beside = shared_rate if moving and work is not None else 1.0
    speed = beside / max(len(moving), 1)
    ends = [head.seconds / speed if head.latency <= TINY else head.latency for head in heads]
    if work is not None:
        ends.append(work / beside)
    span = max(min(ends), 0.0)
    state.now += span
    for head in heads:
        if head.latency > TINY:
            head.latency -= span
        else:
            head.seconds -= span * speed
        if head.latency <= TINY and head.seconds <= TINY:
            _end(state, head)
    return 0.0 if work is None else work - span * beside


def _end(state: _State, head: _Transfer) -> None:
    lane = state.lanes[head.launch.lane]
    lane.popleft()
    if lane:
        lane[0].start = max(lane[0].start, state.now)
    state.ended.add(head.launch.key)
    state.spans.append(Span(head.launch.lane, head.start, state.now, head.launch.unit, head.launch.phase))


# ---- what a step's spans say


@dataclass(frozen=True)
class Timeline:
    """One step in the steady state. Seconds of the step; of compute; in which the wire was busy; in which the thread waited for
    it (exposed); and what happened when, from 0."""

    seconds: float
    compute: float
    wire: float
    exposed: float
    spans: tuple[Span, ...]

    @property
    def overlap(self) -> float:
        """The part of the wire's time that compute hid; 1 where nothing was sent."""
        return 1.0 if not self.wire else max(1.0 - self.exposed / self.wire, 0.0)

    def as_json(self) -> dict[str, Any]:
        names = ("seconds", "compute", "wire", "exposed", "overlap")
        return {name: getattr(self, name) for name in names}


def timeline(instructions: Iterable[Instruction], shared_rate: float = 1.0) -> Timeline:
    """The last of the marked steps: what one leaves under way, the next one waits for, so there should be several."""
    spans, marks = run(instructions, shared_rate)
    begin, end = (marks[-2] if len(marks) > 1 else 0.0), marks[-1]
    inside = [
        Span(s.lane, max(s.start, begin) - begin, min(s.end, end) - begin, s.unit, s.phase)
        for s in spans
        if s.end > begin and s.start < end
    ]
    inside.sort(key=lambda s: (s.start, s.end))
    busy = _union([(s.start, s.end) for s in inside if s.lane not in (THREAD, WAIT)])
    compute, exposed = (sum(s.end - s.start for s in inside if s.lane == lane) for lane in (THREAD, WAIT))
    return Timeline(end - begin, compute, busy, exposed, tuple(inside))


def _union(intervals: list[tuple[float, float]]) -> float:
    total = last = 0.0
    for start, end in sorted(intervals):
        if end > last:
            total += end - max(start, last)
            last = end
    return total
