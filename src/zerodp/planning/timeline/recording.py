"""A real model's step, taken apart: every event of its trace with what the training thread did after it, while the wire does nothing.

What is left out, the simulator puts back: how long transfers take, and where the engine waits for them. The values of a model
are worthless after a recording; take a twin of the one that is to be trained.
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
from torch import Tensor, nn

from ...core.access import runtime_of
from ...core.comm import GATHER, REDUCE, Comm, Handle
from ...core.mesh import Group
from ...core.runtime import Runtime
from ...core.unit import Flat
from .machine import Machine, Transfer, together
from .program import Wires, program
from .rehearsal import Moment
from .simulate import Timeline, timeline

STEPS = 5


class _Clock(deque[tuple[str, str, str]]):
    """A trace that knows when its events came."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def append(self, event: tuple[str, str, str]) -> None:
        self.times.append(time.perf_counter())
        super().append(event)


def record(model: nn.Module, step: Callable[[], Any], steps: int = STEPS, warmup: int = 2) -> list[Moment]:
    """The moments of one step in the steady state, from several, after `warmup` ones with the wire (a collective).

    step: one whole step of the sharded `model`: its passes, the optimizer's step and `zero_grad`.
    """
    runtime = runtime_of(model)
    for _ in range(warmup):
        step()
    clock, before = _Clock(), runtime.trace
    recorded = []
    with _without_wire(runtime.comm), _more_events(runtime, clock):
        for _ in range(steps + 1):
            runtime.trace = clock
            step()
            _settle(runtime.arena.device)
            recorded.append((list(clock), [*clock.times, time.perf_counter()]))
            clock.clear()
            clock.times.clear()
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
def _without_wire(comm: Comm) -> Iterator[None]:
    """Collectives that send nothing: what was in their buffers stays there."""

    def all_gather(out: Tensor, group: Group, unit: str, *_: Any, **__: Any) -> Handle:
        return Handle(comm, (), group, GATHER, unit)

    def reduce_scatter(
        bucket: Tensor, receive: list[Tensor], group: Group, unit: str, parts: Any = None, op: str = ""
    ) -> Handle:
        own = (bucket.view(group.size, -1).unbind() if parts is None else parts)[group.rank]
        if group.size == 1 or not comm.exact:
            found = [own] if group.size == 1 else receive
        else:
            found = [own if rank == group.rank else receive[0] for rank in range(group.size)]
        return Handle(comm, (), group, REDUCE, unit, found)

    comm.all_gather, comm.reduce_scatter = all_gather, reduce_scatter  # type: ignore[method-assign]
    try:
        yield
    finally:
        del comm.all_gather, comm.reduce_scatter


@contextlib.contextmanager
def _more_events(runtime: Runtime, clock: _Clock) -> Iterator[None]:
    """Beside the engine's own: "drain" where it waits for the reductions under way."""
    reducer, drains = runtime.reducer, runtime.reducer.drain

    def drain() -> None:
        clock.append(("drain", "", runtime.phase))
        drains()

    reducer.drain = drain  # type: ignore[method-assign]
    try:
        yield
    finally:
        del reducer.drain


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


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
