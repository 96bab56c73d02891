"""Python time of the engine per unit and pass, for transformer blocks of 12 parameters: `python bench/overhead.py`.

The model is so small that its arithmetic is negligible. Reported is what a block's forward, backward and optimizer step
take beyond the unsharded block's, the passes' own fixed cost included: gather, reshard, saved-tensor hooks, the gradients'
way into the bucket, the launch of the reduction. All times are those that the training thread itself ran, so waiting for
the other rank is not in them.

- no wire: two ranks' bookkeeping in one process, whose collectives do nothing. All that is left is the engine.
- 2 ranks: over gloo; "in gloo" is the part spent inside its calls (sends that write to sockets at once, most of all).
"""

from __future__ import annotations

import cProfile
import functools
import itertools
import pstats
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import launch
import report
import torch
import torch.distributed as dist
from methods import METHODS, Trainer, Workload
from model import batches

TARGET_US = 150.0
PHASES = ("forward", "backward", "update")
SETTINGS = {"1 rank": ("gloo", 1), "no wire": ("fake", 1), "2 ranks": ("gloo", 2)}  # backend, processes


class Stopwatch:
    """Thread time, and how much of it was spent inside the process group's own calls."""

    def __init__(self) -> None:
        self.inside = 0.0
        for owner, names in ((dist.ProcessGroup, ("send", "recv")), (dist.Work, ("wait",))):
            for name in names:
                setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any) -> Any:
            start = time.thread_time()
            result = call(*args)
            self.inside += time.thread_time() - start
            return result

        return timed

    def read(self) -> tuple[float, float]:
        return time.thread_time(), self.inside


def measure(name: str, work: Workload, watch: Stopwatch) -> dict[str, list[float]]:
    """Seconds of each phase in its least disturbed step: in all, and inside the process group's calls."""
    trainer = METHODS[name].build(work.model(), work)
    steps = []
    for x, y in itertools.islice(batches(dist.get_rank(), work.bsz, work.ctx), work.warmup + work.steps):
        marks = [watch.read()]
        loss = trainer.forward(x, y)
        marks.append(watch.read())
        trainer.backward(loss)
        marks.append(watch.read())
        trainer.update()
        marks.append(watch.read())
        steps.append([(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(marks)])
    counted = list(zip(*steps[work.warmup :], strict=True))
    return {phase: [*min(samples)] for phase, samples in zip(PHASES, counted, strict=True)}


def profile(name: str, work: Workload) -> list[list[str]]:
    """Rows of function, calls, own and total microseconds per block (forward and backward), the costliest first."""
    trainer = METHODS[name].build(work.model(), work)
    source = batches(dist.get_rank(), work.bsz, work.ctx)
    for batch in itertools.islice(source, work.warmup):
        trainer.step([batch])
    profiler = cProfile.Profile(time.thread_time)
    for batch in itertools.islice(source, work.steps):
        profiler.runcall(_passes, trainer, *batch)
        trainer.update()
    stats: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    per_block = 1 / (work.steps * work.layers)
    rows = []
    for (file, line, function), (_, calls, own, total, _) in stats.items():
        where = f"{'/'.join(Path(file).parts[-2:])}:{line} {function}" if line else function
        values = calls * per_block, own * per_block * 1e6, total * per_block * 1e6
        rows.append((values[1], [where[:70], *(f"{value:.1f}" for value in values)]))
    return [row for _, row in sorted(rows, reverse=True)[:30]]


def _passes(trainer: Trainer, x: torch.Tensor, y: torch.Tensor) -> None:
    trainer.backward(trainer.forward(x, y))


def measure_all(names: Sequence[str], work: Workload) -> dict[str, Any]:
    watch = Stopwatch()
    return {name: measure(name, work, watch) for name in names}


def in_setting(setting: str, function: Callable[..., Any], *arguments: Any) -> Any:
    backend, processes = SETTINGS[setting]
    return launch.on_ranks(function, *arguments, ranks=processes, backend=backend)


def per_block(sharded: dict[str, Any], plain: dict[str, Any], layers: int) -> dict[str, dict[str, float]]:
    """Microseconds per block that `sharded` takes beyond `plain`, and how much of it is the process group's."""
    beyond = {}
    for phase in PHASES:
        inside = sharded[phase][1]
        engine = sharded[phase][0] - plain[phase][0] - inside
        beyond[phase] = {"engine_us": engine / layers * 1e6, "gloo_us": inside / layers * 1e6}
    return beyond


def show_profile(method: str, setting: str, work: Workload) -> None:
    rows = in_setting(setting, profile, method, work)
    title = f"{method}, {setting}: forward and backward, per block and step, under the profiler"
    report.table(title, ["function", "calls", "own us", "total us"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser_of("overhead.py", __doc__, layers=24)
    parser.add_argument("--methods", default="zerodp3,zerodp2,zerodp1,zerodp0,fsdp2", help="methods of bench/run.py")
    parser.add_argument("--settings", default=",".join(SETTINGS), help=f"of {', '.join(SETTINGS)} (default: all)")
    parser.add_argument("--steps", type=int, default=200, help="steps that count (default: 200)")
    parser.add_argument("--profile", metavar="METHOD", help="a table of functions for this method, and nothing else")
    args = parser.parse_args(argv)
    settings, methods = args.settings.split(","), args.methods.split(",")
    work = Workload(dim=16, layers=args.layers, ctx=8, steps=args.steps, warmup=10)
    if args.profile:
        for setting in settings:
            show_profile(args.profile, setting, work)
        return 0
    measured = {setting: in_setting(setting, measure_all, ["local", *methods], work) for setting in settings}
    found = {
        f"{name}, {setting}": per_block(results[name], results["local"], work.layers)
        for setting, results in measured.items()
        for name in methods
    }
    columns = ["us per block", *(text for phase in PHASES for text in (phase, "in gloo"))]
    rows = [
        [what, *(f"{us:.0f}" for phase in PHASES for us in beyond[phase].values())] for what, beyond in found.items()
    ]
    report.table(f"Beyond the unsharded block; the target is {TARGET_US:.0f} us per pass", columns, rows)
    report.save("overhead", {"target_us": TARGET_US, "layers": work.layers, "per_block": found}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
