"""How speed grows with ranks: measured here on 1, 2, 4 ... gloo ranks, and simulated to 1024 devices.

Weak scaling gives every rank the same batch, strong scaling divides one batch among them. A machine with fewer cores than ranks
cannot scale; the table says what the same number of ranks reach without any communication, which is what its cores allow.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Sequence

import launch
import report
import torch.distributed as dist
from methods import METHODS, Workload
from model import batches

STAGES = (1, 2, 3)


def measure(methods: Sequence[str], work: Workload) -> dict[str, float]:
    """Median seconds per step, methods in turn (a collective)."""
    source = batches(dist.get_rank(), work.bsz, work.ctx)
    trainers = {name: METHODS[name].build(work.model(), work) for name in methods}
    found: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(work.warmup + work.steps):
        for name, trainer in trainers.items():
            batch = next(source)
            dist.barrier()
            began = time.perf_counter()
            trainer.step([batch])
            dist.barrier()
            if turn >= work.warmup:
                found[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in found.items()}


def measured(work: Workload, ranks: Sequence[int], methods: Sequence[str], strong: bool) -> dict[int, dict[str, float]]:
    """Samples per second by ranks and method."""
    found = {}
    for count in ranks:
        batch = max(work.bsz // count, 1) if strong else work.bsz
        seconds = launch.on_ranks(measure, methods, dataclasses.replace(work, bsz=batch), ranks=count)
        found[count] = {name: batch * count / value for name, value in seconds.items()}
    return found


def simulated() -> list[list[str]]:
    """Weak scaling of 8B on assumed DGX-2 nodes: the part of one device's speed that each keeps."""
    from zerodp.planning.timeline.scenarios import weak_scaling

    by_stage = {stage: dict(weak_scaling(stage)) for stage in STAGES}
    return [[f"{count:,}", *(f"{by_stage[stage][count]:.1%}" for stage in STAGES)] for count in by_stage[STAGES[0]]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser_of("scaling.py", __doc__, "'scaling'", dim=384, layers=6, ctx=128)
    parser.add_argument("--ranks", default="1,2,4", help="to measure, as in 1,2,4,8 (default: 1,2,4)")
    parser.add_argument("--methods", default="local,zerodp1,zerodp2,zerodp3", help="methods of bench/run.py")
    parser.add_argument("--strong", action="store_true", help="divide one batch among the ranks")
    parser.add_argument("--batch", type=int, default=4, help="samples per rank, or in all with --strong (default: 4)")
    parser.add_argument("--steps", type=int, default=7, help="steps that count (default: 7)")
    args = parser.parse_args(argv)
    ranks, methods = [int(count) for count in args.ranks.split(",")], args.methods.split(",")
    work = Workload(dim=args.dim, layers=args.layers, ctx=args.ctx, bsz=args.batch, steps=args.steps, warmup=2)
    found = measured(work, ranks, methods, args.strong)
    first = found[ranks[0]]
    columns = ["ranks", *(f"{METHODS[name].label}, samples/s" for name in methods), "cores"]
    rows = [
        [
            str(count),
            *(f"{row[name]:.1f} ({row[name] / first[name] / (count / ranks[0]):.0%})" for name in methods),
            str(os.cpu_count()),
        ]
        for count, row in found.items()
    ]
    kind = "strong" if args.strong else "weak"
    title = f"Measured {kind} scaling, {work.numel / 1e6:.1f}M parameters, fp32, {args.batch} samples {'in all' if args.strong else 'per rank'}"
    report.table(f"{title}; in brackets the part of perfect scaling", columns, rows)
    labels = ["devices", *(f"stage {stage}" for stage in STAGES)]
    far = simulated()
    report.table("Simulated weak scaling, 8B on assumed DGX-2 nodes", labels, far)
    content = {"workload": vars(work), "scaling": kind, "samples_per_second": found, "simulated": far}
    report.save(f"scaling-{kind}", content, args.out)
    text = [
        f"{title}, one thread per rank, {os.cpu_count()} cores; in brackets the part of perfect scaling.",
        report.markdown(columns[:-1], [row[:-1] for row in rows]),
        "Simulated, 8B parameters, 8 samples on each device of assumed DGX-2 nodes: the part of one device's speed that each keeps.",
        report.markdown(labels, far),
    ]
    report.fill(args.page, "scaling", "\n\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
