"""Saving and loading beside plain files: `python bench/checkpoints.py`.

Two gloo ranks train one step, so that all state exists, and then save and load it several times over. Between these each
rank writes (and reads back) as many plain bytes as it has state, at the same time as the other rank, with one fsync at the
end: what the disk gives at that moment. A library's figure is the time of the plain files over its own, measured in turns.
Reads are made after the kernel was asked to drop what it had cached of the files. All times are those of the slower rank.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import sys
import tempfile
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

KINDS = ("save", "save, plain", "load", "load, plain", "stall")
BLOCK = 8 * 2**20


class Files:
    """Plain files: the same bytes, straight from and into memory."""

    def __init__(self, num_bytes: int, folder: Path) -> None:
        self.data = torch.randint(256, (num_bytes,), dtype=torch.uint8)
        self.path = folder / f"plain{dist.get_rank()}"

    def save(self) -> None:
        self.path.unlink(missing_ok=True)
        with self.path.open("wb", buffering=0) as file:
            view = memoryview(self.data.numpy())
            while view:
                view = view[file.write(view[:BLOCK]) :]
            os.fsync(file.fileno())

    def load(self) -> None:
        """Into fresh memory, as libraries do that check before they change anything."""
        view = memoryview(torch.empty_like(self.data).numpy())
        with self.path.open("rb", buffering=0) as file:
            while view:
                view = view[file.readinto(view[:BLOCK]) :]


def _zerodp(trainer: Trainer, path: Path) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]:
    import zerodp

    def save() -> None:
        zerodp.save(path, trainer.model, trainer.optimizer)

    def load() -> None:
        zerodp.load(path, trainer.model, trainer.optimizer)

    def stall() -> Any:
        return zerodp.save(path, trainer.model, trainer.optimizer, asynchronous=True)

    return save, load, stall


def _fsdp2(trainer: Trainer, path: Path) -> tuple[Callable[[], Any], Callable[[], Any], None]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def states() -> dict[str, Any]:
        model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save() -> None:
        dcp.save(states(), checkpoint_id=path)

    def load() -> None:
        held = states()
        dcp.load(held, checkpoint_id=path)
        set_state_dict(
            trainer.model, trainer.optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"]
        )

    return save, load, None


def _deepspeed(trainer: Trainer, path: Path) -> tuple[Callable[[], Any], Callable[[], Any], None]:
    engine: Any = trainer.model
    return (
        lambda: engine.save_checkpoint(str(path), tag="it"),
        lambda: engine.load_checkpoint(str(path), tag="it"),
        None,
    )


WAYS: dict[str, Callable[..., Any]] = {
    "zerodp3": _zerodp,
    "zerodp1": _zerodp,
    "fsdp2": _fsdp2,
    "deepspeed3": _deepspeed,
}


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    begin = time.perf_counter()
    result = action()
    taken = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken), result


def stalled(save: Callable[[], Any], trainer: Trainer) -> float:
    """Seconds that an asynchronous save keeps the slower rank from training: in the call, and in the step that follows."""
    import zerodp

    _, saving = timed(save)
    trainer.step([next(batches(dist.get_rank(), trainer.work.bsz, trainer.work.ctx))])
    seconds = torch.tensor([zerodp.stats(trainer.model).checkpoint.stall_seconds], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    saving.wait()
    return float(seconds)


def forget(folder: Path) -> None:
    """Ask the kernel to drop what it has cached of the files in a folder."""
    if dist.get_rank() == 0:
        for path in (p for p in folder.rglob("*") if p.is_file()):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(name: str, work: Workload, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of each kind, in turns (a collective)."""
    trainer = METHODS[name].build(work.model(), work)
    trainer.step([next(batches(dist.get_rank(), work.bsz, work.ctx))])
    files = Files(12 * work.numel // dist.get_world_size(), folder)  # fp32 weights and two moments
    path = folder / "checkpoint"
    save, load, stall = WAYS[name](trainer, path)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(rounds + 1):  # the first is for warming up
        found: dict[str, float] = {}
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        found["save"], _ = timed(save)
        found["save, plain"], _ = timed(files.save)
        forget(folder)
        found["load"], _ = timed(load)
        found["load, plain"], _ = timed(files.load)
        if stall is not None:
            found["stall"] = stalled(stall, trainer)
        for kind, seconds in found.items() if turn else ():
            times[kind].append(seconds)
    return times


def ratio(times: dict[str, list[float]], over: str, under: str) -> float | None:
    """The median of the rounds' own ratios."""
    pairs = list(zip(times[over], times[under], strict=False))
    return statistics.median(a / b for a, b in pairs) if pairs else None


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser_of("checkpoints.py", __doc__, "'checkpoints'", dim=768, layers=12)
    parser.add_argument("--methods", default=",".join(WAYS), help=f"of {', '.join(WAYS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: 5)")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    args = parser.parse_args(argv)
    work = Workload(dim=args.dim, layers=args.layers, ctx=64)
    found: dict[str, Any] = {}
    for name in args.methods.split(","):
        if importlib.util.find_spec(METHODS[name].module) is None:
            print(f"skipped: {name} needs the package {METHODS[name].module}, which is not installed")
            continue
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            found[name] = launch.on_ranks(measure, name, work, args.rounds, Path(folder))
    columns = ["method", "save s", "share of plain", "load s", "share of plain", "stall of an asynchronous save"]
    rows = []
    for name, times in found.items():
        shares = [ratio(times, f"{kind}, plain", kind) for kind in ("save", "load")]
        stalled = ratio(times, "stall", "save")
        rows.append(
            [
                METHODS[name].label,
                f"{statistics.median(times['save']):.2f}",
                f"{shares[0]:.2f}",
                f"{statistics.median(times['load']):.2f}",
                f"{shares[1]:.2f}",
                "-" if stalled is None else f"{stalled:.0%} of a save",
            ]
        )
    title = f"{work.numel / 1e6:.1f}M parameters, {12 * work.numel / 1e9:.2f} GB of state, 2 ranks"
    report.table(title, columns, rows)
    report.save("checkpoints", {"numel": work.numel, "times": found}, args.out)
    report.fill(args.page, "checkpoints", f"{title}.\n\n{report.markdown(columns, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
