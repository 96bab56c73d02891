"""A machine's figures from short measurements on all ranks at once: what `zerodp bench links` does.

Collectives are this library's own, on groups like those of a model, so that what is measured is what a step pays.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core import mesh as meshes
from ...core.arena import Arena
from ...core.comm import Comm, Handle
from ...core.mesh import Group
from .machine import Link, Machine

PURPOSE = "bench "
WARMUP = 2
LEAST_HIDDEN = -0.5  # where the two are in each other's way, so that both together take longer than one after the other


class Calibration:
    """Measurements on one group of ranks; every method is called by all of them together."""

    def __init__(self, group: Any, device: torch.device, dtype: torch.dtype, seconds: float) -> None:
        made, problem = meshes.resolve(group, device, purpose=PURPOSE)
        if problem is not None:
            raise problem
        self.comm = Comm(made, exact=made.backend != "nccl", check=False)
        self.comm.mesh = meshes.connect(made, PURPOSE)
        self.device, self.dtype, self.seconds = device, dtype, seconds
        self.arena = Arena(device)
        self.largest_bytes = 2**24 if device.type == "cpu" else 2**28

    @property
    def group(self) -> Group:
        return self.comm.mesh.shard

    def timed(self, call: Callable[[], Any]) -> float:
        """Seconds of one call among several in a row, the mean of the ranks; as many as `seconds` allow."""
        for _ in range(WARMUP):
            call()
        count = self.agreed([self._clock(call, 1)], max)
        repeats = max(3, min(200, int(self.seconds / max(count, 1e-6))))
        rounds = [self._clock(call, max(repeats // 3, 1)) for _ in range(3)]
        return self.agreed([statistics.median(rounds)], statistics.fmean)

    def _clock(self, call: Callable[[], Any], repeats: int) -> float:
        self.meet()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        self.settle()
        return (time.perf_counter() - began) / repeats

    def settle(self) -> None:
        """A clock on the host must wait for an accelerator."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def meet(self) -> None:
        self.settle()
        self.agreed([0.0], max)

    def agreed(self, values: list[float], how: Callable[[list[float]], float]) -> float:
        """One figure from every rank's, the same on all."""
        message = torch.tensor(values, dtype=torch.float64, device="cpu")
        return how(self.comm.exchange(message, "the other ranks' measurement").wait()[:, 0].tolist())

    # ---- the wire

    def collective(self, op: str, nbytes: int) -> tuple[Callable[[], Handle], int]:
        """(a launch of `op` with a whole buffer of about so many bytes, bytes that one rank sends)."""
        group, comm = self.group, self.comm
        numel = max(nbytes // self.dtype.itemsize // group.size, 64)
        whole = self.arena.allocate(numel * group.size, self.dtype, "buckets").zero_()
        if op == "all_gather":
            return lambda: comm.all_gather(whole, group, "bench"), numel * (group.size - 1) * self.dtype.itemsize
        space = self.arena.allocate(numel * comm.receive_parts(group), self.dtype, "buckets")
        receive = list(space.split(numel))
        sent = numel * (group.size - 1) * self.dtype.itemsize
        return lambda: comm.reduce_scatter(whole, list(receive), group, "bench"), sent

    def link(self, op: str) -> Link:
        """The line through the times of a few sizes, and that of their launches."""
        sizes, times, launches = [], [], []
        nbytes = 2**14
        while nbytes <= self.largest_bytes:
            launch, sent = self.collective(op, nbytes)
            spent = [0.0, 0]

            def call(launch: Callable[[], Handle] = launch, spent: list[Any] = spent) -> None:
                began = time.perf_counter()
                handle = launch()
                spent[0] += time.perf_counter() - began
                spent[1] += 1
                handle.wait()

            sizes.append(sent)
            times.append(self.timed(call))
            launches.append(self.agreed([spent[0] / spent[1]], statistics.fmean))
            nbytes *= 16 if nbytes < 2**22 else 4
        latency, bandwidth = line(sizes, times)
        launch_seconds, launch_bandwidth = line(sizes, launches)
        return Link(
            op, self.group.size, latency, bandwidth, min(launch_seconds, latency), max(launch_bandwidth, bandwidth)
        )

    def message(self) -> float:
        return self.timed(lambda: self.agreed([0.0], max))

    # ---- the processor

    def compute(self) -> tuple[tuple[float, float], ...]:
        """Rates of matrix products of rising size."""
        found, width = [], 64
        while True:
            seconds = self.timed(self.product(width))
            found.append((2.0 * width**3, 2.0 * width**3 / seconds))
            width *= 2
            if seconds * 8 > self.seconds or width > 8192:
                return tuple(found)

    def product(self, width: int) -> Callable[[], Tensor]:
        left, right, out = (
            self.arena.allocate(width * width, self.dtype, "buckets").fill_(0.5).view(width, width) for _ in range(3)
        )
        return lambda: torch.mm(left, right, out=out)

    def memory(self) -> float:
        source, target = (
            self.arena.allocate(self.largest_bytes // 4, torch.float32, "buckets").zero_() for _ in range(2)
        )
        return 2 * source.nbytes / self.timed(lambda: target.copy_(source))

    def shared_rate(self) -> float:
        """How fast compute and a transfer go on side by side: 1 where neither feels the other, 0.5 on one processor."""
        launch, _ = self.collective("all_gather", 2**22)
        one = self.product(256)
        launch_only: list[float] = []

        def alone() -> None:
            began = time.perf_counter()
            handle = launch()
            launch_only.append(time.perf_counter() - began)
            handle.wait()

        wire, single = self.timed(alone), self.timed(one)
        first = self.agreed([statistics.median(launch_only)], statistics.fmean)
        count = max(1, round(self.agreed([(wire - first) / single], max)))

        def both() -> None:
            handle = launch()
            for _ in range(count):
                one()
            handle.wait()

        together, work = self.timed(both), count * single
        shorter = min(work, wire - first)
        if shorter <= 0:
            return 1.0
        hidden = min(max((work + wire - together) / shorter, LEAST_HIDDEN), 1.0)
        return 1 / (2 - hidden)


def line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """(latency, bandwidth) of times = latency + size / bandwidth, the squares of relative errors being least; both above 0."""
    weights = [1 / max(t, 1e-9) ** 2 for t in times]
    total = sum(weights)
    x = sum(w * s for w, s in zip(weights, sizes, strict=True)) / total
    y = sum(w * t for w, t in zip(weights, times, strict=True)) / total
    square = sum(w * (s - x) ** 2 for w, s in zip(weights, sizes, strict=True))
    both = sum(w * (s - x) * (t - y) for w, s, t in zip(weights, sizes, times, strict=True))
    slope = both / square if square else 0.0
    if slope <= 0:
        return min(times), math.inf
    latency = y - slope * x
    return (latency, 1 / slope) if latency > 0 else (0.0, sum(sizes) / sum(times))


def calibrate(device: torch.device, dtype: torch.dtype = torch.float32, seconds: float = 0.1) -> Machine:
    """This machine, measured on all ranks of the process group (a collective); `seconds` for each single measurement.

    Where the ranks stand on several nodes (LOCAL_WORLD_SIZE is less than WORLD_SIZE), links are measured inside a node and across.
    """
    size = dist.get_world_size()
    local = min(int(os.environ.get("LOCAL_WORLD_SIZE", size)), size)
    world = Calibration(None, device, dtype, seconds)
    several = 1 < local < size and size % local == 0
    near = Calibration(_own_node(local), device, dtype, seconds) if several else world
    inside = tuple(near.link(op) for op in ("all_gather", "reduce_scatter")) if near.group.size > 1 else ()
    across = tuple(world.link(op) for op in ("all_gather", "reduce_scatter")) if local < size else ()
    pairwise = world.comm.pairwise
    if across:
        away = local * (size - local) / (size - 1) if pairwise else 1.0
        across = tuple(
            Link(one.op, one.ranks, one.latency, one.bandwidth * away, one.launch_seconds, one.launch_bandwidth)
            for one in across
        )
    kind = torch.accelerator.current_accelerator() if device.type != "cpu" else None
    return Machine(
        f"{size} ranks on {kind or 'cpu'}",
        world.compute(),
        world.memory(),
        inside or across or (Link("any", 1, 0.0, 1e12),),
        across,
        local,
        pairwise,
        world.shared_rate() if size > 1 else 1.0,
        world.message() if size > 1 else 0.0,
        "measured",
    )


def _own_node(local: int) -> Any:
    """The group of this node's ranks; all ranks make all nodes' groups."""
    mine = None
    for first in range(0, dist.get_world_size(), local):
        ranks = list(range(first, first + local))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine
