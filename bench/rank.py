"""One rank of one run of run.py: trains a few steps by one method and reports time, memory and losses."""

from __future__ import annotations

import importlib
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from methods import METHODS, Workload
from model import batches


def memory(field: str) -> int:
    """Bytes the kernel counts for this process: VmRSS (resident now) or VmHWM (its high-water mark)."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


def reset_high_water_mark() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(name: str, work: Workload) -> dict[str, Any]:
    """Step times run from barrier to barrier without a gap, so that work left over to the next step is counted."""
    importlib.import_module(METHODS[name].module)  # its code must not count as memory of its training state
    source = batches(dist.get_rank(), work.bsz, work.ctx)
    base = memory("VmRSS")
    trainer = METHODS[name].build(work.model(), work)
    losses, marks, cpu_marks = [], [], []
    for i in range(work.warmup + work.steps):
        losses.append(trainer.step(list(itertools.islice(source, work.accum))))
        dist.barrier()
        marks.append(time.perf_counter())
        cpu_marks.append(time.process_time())
        if i == work.warmup - 1:
            reset_high_water_mark()
    times = [b - a for a, b in itertools.pairwise(marks[work.warmup - 1 :])]
    cpu = (cpu_marks[-1] - cpu_marks[work.warmup - 1]) / work.steps
    most = torch.tensor([memory("VmHWM") - base, memory("VmRSS") - base, cpu], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    mean = torch.stack(losses).double()
    dist.all_reduce(mean)
    peak_bytes, rest_bytes, cpu = most.tolist()
    return {
        "step_s": statistics.median(times),
        "cpu_s": cpu,
        "times_s": times,
        "peak_bytes_per_param": peak_bytes / work.numel,
        "rest_bytes_per_param": rest_bytes / work.numel,
        "losses": (mean / dist.get_world_size()).tolist(),
    }
