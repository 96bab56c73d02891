"""Step time and memory side by side: `make bench`, or `make bench LINK=2gbit` for a slow network.

Every run is a fresh pair of processes. Rounds are interleaved (A B C ..., A B C ...), so that a machine that gets slower
or faster meets all methods alike; a run counts as the median of its steps, a method as the median of its runs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.util
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import report
from launch import Failed, on_ranks
from link import Unavailable, rate_limited, seconds
from methods import METHODS, Workload
from rank import measure

RANKS = 2
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}  # every block of 64 KiB and more
# (what, compared with) -> the most that the ratio of step times may be, on loopback and on the slow link
TARGETS: dict[tuple[str, str], tuple[float | None, float | None]] = {
    ("zerodp3", "fsdp2"): (0.72, 0.47),
    ("zerodp3", "fsdp2-keep"): (None, None),
    ("zerodp3", "deepspeed3"): (1.0, 0.45),
    ("zerodp2", "fsdp2"): (0.65, 0.54),
    ("zerodp2", "fsdp2-keep"): (None, None),
    ("zerodp2", "deepspeed2"): (None, None),
    ("zerodp2", "ddp"): (None, 0.92),
    ("zerodp1", "ddp"): (1.0, None),
    ("zerodp1", "zro"): (None, None),
    ("zerodp0", "ddp"): (None, None),
    ("zerodp3", "local"): (1.40, 1.20),
    ("zerodp3", "local-part"): (None, None),
}
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 0.1}


def available(names: Sequence[str]) -> list[str]:
    """Those of the methods that are installed here; says which are not."""
    found = []
    for name in names:
        if importlib.util.find_spec(METHODS[name].module):
            found.append(name)
        else:
            print(f"skipped: {name} needs the package {METHODS[name].module}, which is not installed")
    return found


def rounds(
    names: Sequence[str], count: int, work: Workload, prefix: Sequence[str], env: dict[str, str], limit: float
) -> dict[str, list[dict[str, Any]]]:
    """All methods in turn, `count` times over; a method that failed once is left out of later rounds."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    failed: set[str] = set()
    for i in range(count):
        for name in names:
            if name in failed:
                continue
            try:
                run = on_ranks(measure, name, work, ranks=RANKS, prefix=prefix, env=env, limit=limit)
            except Failed as error:
                failed.add(name)
                print(f"round {i + 1}/{count}  {name} failed:\n{error}", flush=True)
                continue
            runs[name].append(run)
            memory = f"{run['peak_bytes_per_param']:.1f} bytes/parameter"
            print(f"round {i + 1}/{count}  {name:14} {run['step_s']:.3f} s/step  {memory}", flush=True)
    return {name: done for name, done in runs.items() if len(done) == count}


def summarise(
    runs: dict[str, list[dict[str, Any]]], mapped: dict[str, list[dict[str, Any]]], dtype: str
) -> dict[str, dict[str, Any]]:
    """One row per method; `losses_agree` is False for a method that trained something else, None for the limits."""
    exact = [name for name in runs if METHODS[name].exact]
    reference = runs["ddp" if "ddp" in exact else exact[0]][0]["losses"] if exact else []
    rows = {}
    for name, done in runs.items():
        gap = max((abs(a - b) for run in done for a, b in zip(run["losses"], reference, strict=True)), default=0.0)
        rows[name] = {
            "step_s": statistics.median(run["step_s"] for run in done),
            "fastest_s": min(min(run["times_s"]) for run in done),
            "cpu_s": statistics.median(run["cpu_s"] for run in done),
            "peak_bytes_per_param": statistics.median(run["peak_bytes_per_param"] for run in done),
            "peak_bytes_per_param_mapped": mapped[name][0]["peak_bytes_per_param"] if name in mapped else None,
            "losses_agree": gap <= LOSS_TOLERANCE[dtype] if METHODS[name].exact else None,
            "largest_loss_gap": gap if METHODS[name].exact else None,
        }
    return rows


def ratios(rows: dict[str, dict[str, Any]], slow: bool) -> list[dict[str, Any]]:
    """The comparisons the project holds itself to, for the methods that ran and trained the right thing."""
    valid = {name for name, row in rows.items() if row["losses_agree"] is not False}
    found = [
        {"what": f"{a} / {b}", "value": rows[a]["step_s"] / rows[b]["step_s"], "target": limits[slow]}
        for (a, b), limits in TARGETS.items()
        if {a, b} <= valid
    ]
    for key, allocator in (
        ("peak_bytes_per_param", "default allocator"),
        ("peak_bytes_per_param_mapped", "mapped blocks"),
    ):
        if {"zerodp3", "fsdp2"} <= valid and rows["zerodp3"][key] and rows["fsdp2"][key]:
            what, value = f"zerodp3 / fsdp2, peak memory, {allocator}", rows["zerodp3"][key] / rows["fsdp2"][key]
            found.append({"what": what, "value": value, "target": 1.0})
    return found


def wire_seconds(work: Workload, link: str | None) -> dict[str, float | None]:
    """The time that the limited wire alone takes for a step, by how often the parameters' bytes cross it: no overlap helps.

    Twice in stages 0 to 2 and DDP, three times in stage 3, each time a share of (N-1)/N, sent by all N ranks through one device.
    """
    if link is None:
        return {}
    crossing = work.numel * (2 if work.low else 4) * (RANKS - 1)
    return {f"{passes} passes": seconds(passes * crossing, link) for passes in (2, 3)}


def tables(
    rows: dict[str, dict[str, Any]], found: Sequence[dict[str, Any]]
) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, columns, rows) of what is shown."""

    def cell(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    columns = ["method", "s/step", "fastest", "CPU s", "peak bytes/param", "mapped", "losses"]
    agree = {True: "agree", False: "WRONG", None: "-"}
    body = [
        [
            METHODS[name].label,
            *(cell(row[key], 3) for key in ("step_s", "fastest_s", "cpu_s")),
            *(cell(row[key], 1) for key in ("peak_bytes_per_param", "peak_bytes_per_param_mapped")),
            agree[row["losses_agree"]],
        ]
        for name, row in sorted(rows.items(), key=lambda item: item[1]["step_s"])
    ]
    verdict = [[r["what"], f"{r['value']:.3f}", cell(r["target"], 2), _verdict(r["value"], r["target"])] for r in found]
    return [("Methods", columns, body), ("Ratios of medians", ["ratio", "measured", "at most", ""], verdict)]


def _verdict(value: float, target: float | None) -> str:
    return "" if target is None else "met" if value <= target else "missed"


@contextlib.contextmanager
def network(rate: str | None) -> Iterator[list[str]]:
    if rate is None:
        yield []
        return
    with rate_limited(rate) as prefix:
        yield prefix


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = report.parser_of("run.py", __doc__, "'loopback', or the one of the link")
    parser.add_argument("--methods", default=",".join(METHODS), help=f"of {', '.join(METHODS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument("--link", metavar="RATE", help="rate-limit the network, as in 2gbit (needs root)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one short round: does it run?")
    parser.add_argument("--no-memory", action="store_true", help="without the extra round in mapped blocks")
    parser.add_argument("--limit", type=float, default=900, help="most seconds for one run (default: 900)")
    for field in dataclasses.fields(Workload):
        choices = tuple(LOSS_TOLERANCE) if field.name == "dtype" else None
        parser.add_argument(f"--{field.name}", type=type(field.default), choices=choices)
    args = parser.parse_args(argv)
    args.methods = args.methods.split(",")
    if unknown := sorted(set(args.methods) - set(METHODS)):
        parser.error(f"unknown methods {', '.join(unknown)}; there are {', '.join(METHODS)}")
    return args


def workload(args: argparse.Namespace) -> Workload:
    """The size that the targets are stated for (85M parameters, 25M on a slow link), changed as asked."""
    defaults: dict[str, Any] = {"dim": 512, "layers": 8, "bsz": 2} if args.link else {}
    if args.quick:
        defaults = {"dim": 64, "layers": 2, "ctx": 32, "steps": 2, "warmup": 1}
        args.rounds = 1
    given = {f.name: value for f in dataclasses.fields(Workload) if (value := getattr(args, f.name)) is not None}
    return Workload(**{**defaults, **given})


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespace is removed
    work, names = workload(args), available(args.methods)
    size = f"{work.numel / 1e6:.1f}M"
    try:
        with network(args.link) as prefix:
            runs = rounds(names, args.rounds, work, prefix, {}, args.limit)
            short = dataclasses.replace(work, steps=2, warmup=2)
            memory = not (args.link or args.no_memory)
            mapped = rounds(list(runs), 1, short, prefix, MAPPED, args.limit) if memory else {}
    except Unavailable as reason:
        print(f"skipped: no rate-limited network: {reason}")
        return 0
    rows = summarise(runs, mapped, work.dtype)
    found = ratios(rows, slow=args.link is not None)
    title = f"{size} parameters, {work.dtype}, {RANKS} gloo ranks of one thread, {args.link or 'loopback'}"
    parts = tables(rows, found)
    print(f"\n{title}")
    for part in parts:
        report.table(*part)
    wire = wire_seconds(work, args.link)
    for passes, least in wire.items():
        if least is not None:
            print(f"The wire alone takes {least:.3f} s for {passes} of the parameters")
    text = f"{title}; {args.rounds} rounds, {datetime.date.today()}, {report.facts()['cpu']}."
    text = "\n\n".join([text, *(report.markdown(columns, body) for _, columns, body in parts)])
    report.fill(args.page, args.link or "loopback", text)
    content = {
        "workload": dataclasses.asdict(work),
        "parameters": work.numel,
        "ranks": RANKS,
        "link": args.link,
        "wire_s": wire,
        "summary": rows,
        "ratios": found,
        "runs": runs,
        "runs_mapped": mapped,
    }
    report.save(f"step-{args.link or 'loopback'}-{size}-{work.dtype}", content, args.out)
    broken = set(names) - set(runs) | {name for name, row in rows.items() if row["losses_agree"] is False}
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
