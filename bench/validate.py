"""Simulated against measured steps: `python bench/validate.py --ranks 2` (and 4), for stages 1 to 3 and several wires.

The step is recorded on a clock that stands still while the wire works (what the training thread does after each event), the wire is measured
on its own or set by delays.py, and the simulator puts the two together. Beside it stands the step as it is, measured with the wire in it. Recordings and
measurements alternate, since a machine gets slower and faster.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import launch
import report
import torch
import torch.distributed as dist
from delays import delay
from methods import METHODS, Workload
from model import batches

LIMIT = 0.15  # the most that a simulated step may be off, as a part of the measured one
# latency in seconds and bandwidth in bytes per second that a rank sends; None: the loopback device as it is
WIRES: dict[str, tuple[float, float] | None] = {
    "loopback": None,
    "5 ms, 1 GB/s": (5e-3, 1e9),
    "2 ms, 0.25 GB/s": (2e-3, 0.25e9),
}


def stepper(name: str, work: Workload) -> tuple[torch.nn.Module, Callable[[], None]]:
    """A sharded model, and what makes one step of it."""
    trainer = METHODS[name].build(work.model(), work)
    source = batches(dist.get_rank(), work.bsz, work.ctx)

    def step() -> None:
        trainer.step(list(itertools.islice(source, work.accum)))

    return trainer.model, step


def times(step: Callable[[], None], count: int) -> list[float]:
    found = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        found.append(time.perf_counter() - began)
    return found


def compare(name: str, work: Workload, wires: Sequence[str], rounds: int, seconds: float) -> dict[str, Any]:
    """Per wire, the median of simulated and of measured steps (a collective)."""
    from zerodp.planning.timeline.calibrate import calibrate
    from zerodp.planning.timeline.recording import record, replay

    twin, twin_step = stepper(name, work)
    times(twin_step, work.warmup)
    subjects = {}
    for wire in wires:
        model, step = stepper(name, work)
        if (costs := WIRES[wire]) is not None:
            delay(model, *costs)
        times(step, work.warmup)
        subjects[wire] = step
    keys = ("simulated", "measured", "exposed", "compute")
    found: dict[str, dict[str, list[float]]] = {wire: {key: [] for key in keys} for wire in wires}
    for _ in range(rounds):
        machine = calibrate(torch.device("cpu"), seconds=seconds)
        moments = record(twin, twin_step, steps=2, warmup=0)
        for wire, step in subjects.items():
            simulated = replay(twin, moments, slowed(machine, WIRES[wire]))
            found[wire]["simulated"].append(simulated.seconds)
            found[wire]["exposed"].append(simulated.exposed)
            found[wire]["compute"].append(sum(moment.seconds for moment in moments))
            found[wire]["measured"] += times(step, work.steps)
    return {wire: {key: statistics.median(values) for key, values in row.items()} for wire, row in found.items()}


def slowed(machine: Any, costs: tuple[float, float] | None) -> Any:
    """The machine with the delayed wire. Its bytes are also really sent, which keeps the processor as long as ever, but not for as
    large a part of the transfer."""
    if costs is None:
        return machine
    latency, bandwidth = costs
    links = [
        dataclasses.replace(one, latency=max(latency, one.latency), bandwidth=min(bandwidth, one.bandwidth))
        for one in machine.inside
    ]
    share = statistics.mean(slow.bandwidth / one.bandwidth for slow, one in zip(links, machine.inside, strict=True))
    return dataclasses.replace(machine, inside=tuple(links), shared_rate=1 - (1 - machine.shared_rate) * share)


def rows_of(found: dict[str, dict[str, Any]], ranks: int) -> list[list[str]]:
    rows = []
    for name, wires in found.items():
        for wire, row in wires.items():
            off = row["simulated"] / row["measured"] - 1
            cells = [f"{ranks} ranks, {METHODS[name].label}, {wire}"]
            cells += [f"{row[key] * 1e3:.0f}" for key in ("simulated", "measured", "compute", "exposed")]
            rows.append([*cells, f"{off:+.0%}"])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser_of("validate.py", __doc__, "'validation N ranks'", dim=384, layers=6, ctx=128)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--methods", default="zerodp1,zerodp2,zerodp3", help="methods of bench/run.py")
    parser.add_argument("--wires", default="; ".join(WIRES), help=f"of {'; '.join(WIRES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="recordings and measurements in turn (default: 7)")
    parser.add_argument(
        "--seconds", type=float, default=0.02, help="for each measurement of the machine (default: 0.02)"
    )
    args = parser.parse_args(argv)
    wires = [wire.strip() for wire in args.wires.split(";")]
    work = Workload(dim=args.dim, layers=args.layers, ctx=args.ctx, steps=3, warmup=2)
    settings = (work, wires, args.rounds, args.seconds)
    found = {name: launch.on_ranks(compare, name, *settings, ranks=args.ranks) for name in args.methods.split(",")}
    columns = ["", "simulated, ms", "measured, ms", "without a wire, ms", "simulated waits, ms", "off by"]
    rows = rows_of(found, args.ranks)
    title = f"Steps of {work.numel / 1e6:.1f}M parameters, fp32, {args.ranks} gloo ranks of one thread"
    report.table(title, columns, rows)
    worst = max(abs(row["simulated"] / row["measured"] - 1) for one in found.values() for row in one.values())
    print(f"the largest difference is {worst:.0%}; the aim is at most {LIMIT:.0%}")
    content = {"workload": vars(work), "ranks": args.ranks, "wires": WIRES, "found": found, "worst": worst}
    report.save(f"simulated-{args.ranks}-ranks", content, args.out)
    text = f"{title}; {args.rounds} rounds.\n\n{report.markdown(columns, rows)}\n\nThe largest difference is {worst:.0%}."
    report.fill(args.page, f"validation {args.ranks} ranks", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
