"""A real model's step, taken apart: every event of its trace with what the training thread did after it, while the wire takes no time.

Each transfer is awaited where it is launched, and the clock stands still meanwhile. What is left out, the simulator puts back: how
long transfers take, and where the engine waits for them. A recorded step is a step: it trains its model.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...core.access import runtime_of
from ...core.comm import Handle
from ...core.runtime import Runtime
from ...core.unit import Flat
from .machine import Machine, Transfer, together
from .program import Wires, program
from .rehearsal import Moment
from .simulate import Timeline, timeline

STEPS = 5


class _Clock(deque[tuple[str, str, str]]):
    """A trace that knows when its events came, by a clock that can stand still."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.times: list[float] = []
        self.stood = 0.0

    def now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - self.stood

    def append(self, event: tuple[str, str, str]) -> None:
        self.times.append(self.now())
        super().append(event)

    def step(self) -> tuple[list[tuple[str, str, str]], list[float]]:
        """(the events since the last call, when they came and when this call did)."""
        found = list(self), [*self.times, self.now()]
        self.clear()
        self.times.clear()
        return found

    def stands(self, launch: Callable[..., Handle]) -> Callable[..., Handle]:
        """`launch` and the wait for it, in no time."""

        def launched(*given: Any, **named: Any) -> Handle:
            began = self.now()
            handle = launch(*given, **named)
            handle.wait()
            self.stood += self.now() - began
            return handle

        return launched


def record(model: nn.Module, step: Callable[[], Any], steps: int = STEPS, warmup: int = 2) -> list[Moment]:
    """The moments of one step in the steady state, from several, after `warmup` others (a collective).

    step: one whole step of the sharded `model`: its passes, the optimizer's step and `zero_grad`.
    """
    runtime = runtime_of(model)
    for _ in range(warmup):
        step()
    clock, before = _Clock(runtime.arena.device), runtime.trace
    with _observed(runtime, clock):
        recorded = []
        for _ in range(steps + 1):  # the first one begins with what the step before left under way
            step()
            recorded.append(clock.step())
    runtime.trace = before
    return medians(recorded[1:])


def medians(recorded: Sequence[tuple[list[tuple[str, str, str]], list[float]]]) -> list[Moment]:
    """One step from several like it: of each interval the median. What comes before the first event, such as reading the batch,
    goes to the end of the step."""
    usual = recorded[-1][0]
    alike = [times for events, times in recorded if events == usual]
    spent = [[b - a for a, b in itertools.pairwise(times)] for times in alike]
    return [Moment(*event, statistics.median(one)) for event, one in zip(usual, zip(*spent, strict=True), strict=True)]


@contextlib.contextmanager
def _observed(runtime: Runtime, clock: _Clock) -> Iterator[None]:
    """The trace on the clock, with "drain" where the engine waits for the reductions under way; transfers in no time."""
    comm, reducer, drains = runtime.comm, runtime.reducer, runtime.reducer.drain

    def drain() -> None:
        clock.append(("drain", "", runtime.phase))
        drains()

    runtime.trace = clock
    comm.all_gather, comm.reduce_scatter = clock.stands(comm.all_gather), clock.stands(comm.reduce_scatter)  # type: ignore[method-assign]
    reducer.drain = drain  # type: ignore[method-assign]
    try:
        yield
    finally:
        del comm.all_gather, comm.reduce_scatter, reducer.drain


def wires_of(runtime: Runtime, machine: Machine) -> Wires:
    """What the units of a model send, from their layouts. Sums are in the recording; so are the ranks' small messages."""
    gathers, reduces = {}, {}
    tensor = runtime.comm.mesh.tensor.size
    for unit in runtime.units:
        gathered = [
            _transfer(machine, "all_gather", flat, flat.param_dtype.itemsize, tensor)
            for flat in unit.flats
            if flat.group.size > 1
        ]
        if gathered:
            gathers[unit.name] = together(gathered)
        trained = [flat for flat in unit.flats if flat.trains and flat.group.size * flat.replicas.size > 1]
        if trained:
            reduces[unit.name] = together([_reduction(machine, runtime, flat, tensor) for flat in trained])
    return Wires(gathers, reduces)


def _transfer(machine: Machine, op: str, flat: Flat, element: int, stride: int) -> Transfer:
    size = flat.group.size
    sent = flat.layout.padded_numel * element * (size - 1) / size
    return machine.transfer(op, size, stride, sent, len(flat.layout.pieces))


def _reduction(machine: Machine, runtime: Runtime, flat: Flat, stride: int) -> Transfer:
    dtype = runtime.reducer.reduce_dtype or flat.param_dtype
    found = [_transfer(machine, "reduce_scatter", flat, dtype.itemsize, stride)] if flat.group.size > 1 else []
    if (copies := flat.replicas.size) > 1:
        sent = 2 * flat.layout.shard_numel * dtype.itemsize * (copies - 1) / copies
        found.append(
            machine.transfer("all_reduce", copies, stride * flat.group.size, sent, 2 * len(flat.layout.pieces))
        )
    return together(found)


def replay(model: nn.Module, moments: Sequence[Moment], machine: Machine) -> Timeline:
    """A recorded step with a wire like the machine's."""
    return timeline(program(moments, wires_of(runtime_of(model), machine)), machine.shared_rate)
