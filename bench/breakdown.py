"""Where a training step's time goes: `python bench/breakdown.py` (not "profile", which would hide Python's own module).

Every moment of the training thread on rank 0 is put into one class: the operators by torch.profiler, the waits for the
wire by a label around them, and the rest, which is Python and autograd's own bookkeeping. The table is printed and
written between the markers of docs/profile.md.
"""

from __future__ import annotations

import functools
import itertools
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import launch
import report
import torch
import torch.distributed as dist
from methods import METHODS, Workload
from model import batches
from torch.profiler import ProfilerActivity, record_function

DOC = Path(__file__).parents[1] / "docs" / "profile.md"
STEP, WAIT, LAUNCH, MOVE = "bench.step", "bench.wait", "bench.launch", "bench.move"
# What an operator counts as if it, or something it runs in, has a name that begins so; the first line that fits decides.
ENCLOSING = {
    "wait for the wire": (WAIT,),
    "launch on the wire": (LAUNCH, "c10d::", "record_param_comms"),
    "optimizer": ("Optimizer.step",),
    "copies and sums of parameters and gradients": (MOVE, "FSDP::"),
}
COMPUTE, PYTHON = "compute", "Python and autograd"
VIEWS = re.compile(
    r"aten::(detach|as_strided|view|split|slice|narrow|set_|alias|empty|resize|select|expand|permute|t$|unbind)"
)


def label_communication() -> None:
    """Names the launches and waits of process groups in the profile, and what zerodp does between the two."""
    from zerodp.core.reducer import Reducer
    from zerodp.core.unit import Flat

    for owner, names, label in (
        (dist.Work, ("wait",), WAIT),
        (dist.ProcessGroup, ("send", "recv"), LAUNCH),
        (Reducer, ("accept", "launch", "drain"), MOVE),
        (Flat, ("launch",), MOVE),
    ):
        for name in names:
            setattr(owner, name, _labelled(getattr(owner, name), label))


def _labelled(call: Callable[..., Any], label: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def labelled(*args: Any, **kwargs: Any) -> Any:
        with record_function(label):
            return call(*args, **kwargs)

    return labelled


def classify(profiler: torch.profiler.profile, steps: int) -> dict[str, float]:
    """Milliseconds per step of the training thread, by class."""
    events = profiler.events()
    assert events is not None
    thread = next(event.thread for event in events if event.name == STEP)
    spent = dict.fromkeys((COMPUTE, *ENCLOSING, PYTHON), 0.0)
    for event in events:
        if event.thread == thread:
            spent[_class_of(event)] += event.self_cpu_time_total / 1000 / steps
    return spent


def _class_of(event: Any) -> str:
    operator = event.name.startswith("aten::") and not VIEWS.match(event.name)
    enclosing, names = event, []
    while enclosing is not None:
        names.append(enclosing.name)
        enclosing = enclosing.cpu_parent
    for kind, starts in ENCLOSING.items():
        if any(name.startswith(starts) for name in names):
            return kind if operator or names[0].startswith((WAIT, *ENCLOSING["launch on the wire"])) else PYTHON
    return COMPUTE if operator else PYTHON


def measure(name: str, work: Workload) -> dict[str, Any]:
    """One method's step without the profiler (wall time, fresh memory) and with it (classes)."""
    label_communication()
    trainer = METHODS[name].build(work.model(), work)
    source = batches(dist.get_rank(), work.bsz, work.ctx)
    for batch in itertools.islice(source, work.warmup):
        trainer.step([batch])
    dist.barrier()
    faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
    for batch in itertools.islice(source, work.steps):
        trainer.step([batch])
        dist.barrier()
    wall = (time.perf_counter() - start) / work.steps
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        for batch in itertools.islice(source, work.steps):
            with record_function(STEP):
                trainer.step([batch])
                dist.barrier()
    operators = Counter({e.key: e.self_cpu_time_total / 1000 / work.steps for e in profiler.key_averages()})
    return {
        "wall_ms": wall * 1000,
        "fresh_mb": faults * resource.getpagesize() / work.steps / 2**20,
        "classes_ms": classify(profiler, work.steps),
        "operators_ms": dict(operators.most_common(25)),
        "engine": engine_counts(trainer.model, trainer, next(source)) if name.startswith("zerodp") else None,
    }


def engine_counts(model: torch.nn.Module, trainer: Any, batch: Any) -> dict[str, Any]:
    """What the engine itself counted in one more step."""
    import zerodp

    zerodp.stats(model).reset()
    trainer.step([batch])
    stats = zerodp.stats(model)
    events = Counter(f"{event.kind} in {event.phase}" for event in stats.trace)
    return {"wire_bytes": stats.wire_bytes, "launches": stats.launches, "events": dict(events)}


def markdown(found: dict[str, dict[str, Any]], work: Workload) -> str:
    """The table, and what the engine counted, as the generated part of the page."""

    def row(what: str, values: Iterable[float]) -> list[str]:
        return [what, *(f"{value:.0f}" for value in values)]

    rows = [
        *(row(kind, (r["classes_ms"][kind] for r in found.values())) for kind in (COMPUTE, *ENCLOSING, PYTHON)),
        row("all of it, under the profiler", (sum(r["classes_ms"].values()) for r in found.values())),
        row("the same without the profiler", (r["wall_ms"] for r in found.values())),
        row("fresh memory touched, MB", (r["fresh_mb"] for r in found.values())),
    ]
    size = f"{work.numel / 1e6:.1f}M parameters in {work.dtype}"
    lines = [
        f"Milliseconds per step of rank 0's training thread; {size}, 2 ranks of one thread over loopback.",
        "",
        report.markdown(["", *(METHODS[name].label for name in found)], rows),
    ]
    for name, result in found.items():
        if engine := result["engine"]:
            events = ", ".join(f"{count} {event}" for event, count in sorted(engine["events"].items()))
            wire = f"{engine['wire_bytes'] / 2**20:.0f} MB in {engine['launches']} collectives"
            lines += ["", f"{METHODS[name].label} sends {wire} per step and rank: {events}."]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    page = "'breakdown' (default: docs/profile.md's)"
    parser = report.parser_of("breakdown.py", __doc__, page, saves=False, dim=768, layers=12)
    parser.add_argument("--methods", default="zerodp3,zerodp2,fsdp2,local", help="methods of bench/run.py")
    parser.add_argument("--steps", type=int, default=6, help="steps that count (default: 6)")
    parser.add_argument("--operators", action="store_true", help="the costliest operators of each method as well")
    args = parser.parse_args(argv)
    work = Workload(dim=args.dim, layers=args.layers, steps=args.steps)
    # each in processes of its own, so that memory starts afresh
    found = {name: launch.on_ranks(measure, name, work) for name in args.methods.split(",")}
    text = markdown(found, work)
    print(text)
    if args.operators:
        for name, result in found.items():
            rows = [[operator, f"{ms:.1f}"] for operator, ms in result["operators_ms"].items()]
            report.table(f"{METHODS[name].label}, all threads", ["operator", "own ms per step"], rows)
    report.fill(args.page or DOC, "breakdown", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
