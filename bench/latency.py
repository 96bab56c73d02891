"""What a slow wire adds to forward and backward: stage 3 beside stage 2, with prefetch and with kept units.

`python bench/latency.py` delays every collective by the latency and bandwidth of a chosen wire (delays.py); with `--link RATE` the loopback
device itself is rate-limited instead, where that is allowed.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import launch
import report
import torch
import torch.distributed as dist
from delays import delay
from link import Unavailable, rate_limited
from methods import Trainer, Workload
from model import batches

EVERYTHING = 2**40
VARIANTS: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, no prefetch": {"stage": 3, "prefetch": 0},
    "stage 3, prefetch 2": {"stage": 3, "prefetch": 2},
    "stage 3, all units kept from forward to backward": {"stage": 3, "unsharded_bytes": EVERYTHING},
}


def measure(work: Workload, wire: tuple[float, float] | None, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of forward and backward, the median of rounds in which all variants take their turn (a collective)."""
    import zerodp

    trainers = {}
    for name, options in VARIANTS.items():
        model = work.model()
        trainer = Trainer(*zerodp.shard(model, torch.optim.AdamW(model.parameters(), fused=True), **options), work)
        if wire is not None:
            delay(trainer.model, *wire)
        trainers[name] = trainer
    source = batches(dist.get_rank(), work.bsz, work.ctx)
    found: dict[str, dict[str, list[float]]] = {name: {"forward": [], "backward": []} for name in VARIANTS}
    for turn in range(work.warmup + rounds):
        for name, trainer in trainers.items():
            for x, y in itertools.islice(source, 1):
                dist.barrier()
                began = time.perf_counter()
                loss = trainer.forward(x, y)
                between = time.perf_counter()
                trainer.backward(loss)
                ended = time.perf_counter()
                trainer.update()
            if turn >= work.warmup:
                found[name]["forward"].append(between - began)
                found[name]["backward"].append(ended - between)
    return {name: {phase: statistics.median(values) for phase, values in row.items()} for name, row in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser_of("latency.py", __doc__, "'latency'", dim=384, layers=6, ctx=128)
    parser.add_argument("--latency", type=float, default=3e-3, help="seconds of every collective (default: 3 ms)")
    parser.add_argument(
        "--bandwidth", type=float, default=0.5e9, help="bytes per second that a rank sends (default: 0.5 GB/s)"
    )
    parser.add_argument(
        "--link", metavar="RATE", help="rate-limit the loopback device instead, as in 2gbit (needs root)"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args(argv)
    work = Workload(dim=args.dim, layers=args.layers, ctx=args.ctx, warmup=2)
    wire = None if args.link else (args.latency, args.bandwidth)
    try:
        with rate_limited(args.link) if args.link else contextlib.nullcontext([]) as prefix:
            found = launch.on_ranks(measure, work, wire, args.rounds, ranks=args.ranks, prefix=prefix)
    except Unavailable as reason:
        print(f"skipped: no rate-limited network: {reason}")
        return 0
    columns = ["", "forward, ms", "backward, ms"]
    rows = [[name, *(f"{row[phase] * 1e3:.0f}" for phase in ("forward", "backward"))] for name, row in found.items()]
    told = args.link or f"{args.latency * 1e3:g} ms and {args.bandwidth / 1e9:g} GB/s for every collective"
    title = f"{work.numel / 1e6:.1f}M parameters, fp32, {args.ranks} gloo ranks of one thread; {told}"
    report.table(title, columns, rows)
    report.save("latency", {"workload": vars(work), "wire": wire, "link": args.link, "found": found}, args.out)
    report.fill(args.page, "latency", f"{title}.\n\n{report.markdown(columns, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
