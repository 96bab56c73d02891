"""Runs a measurement on ranks: torchrun's where it has started this process, else local ones that are started for it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..parser import Parser, UsageError, one_of, whole
from ..training.launch import environment
from ..training.worker import choose_device, process_group

POLL = 0.05  # seconds between looks at the ranks
SETTLE = 1.0  # seconds in which a failure shows on other ranks


def add_options(parser: Parser, ranks: int = 2) -> None:
    """--ranks, --threads and --device, as `zerodp train` has them."""
    parser.add_argument(
        "--ranks",
        type=whole(1),
        metavar="N",
        help=f"local processes, unless torchrun started this one (default {ranks})",
    )
    parser.add_argument("--threads", type=whole(1), default=1, metavar="N", help="torch threads per rank (default 1)")
    parser.add_argument(
        "--device",
        type=one_of(["auto", "cpu", "cuda"]),
        default="auto",
        metavar="NAME",
        help="auto: GPUs where each rank has one",
    )
    parser.set_defaults(default_ranks=ranks)


def on_ranks(task: str, arguments: argparse.Namespace, settings: dict[str, Any]) -> Any:
    """The value that function `task` ("links.measure" in this package, ".compare.on_rank" beside it) gives on rank 0 for (device, settings), or None on other ranks.

    Raises:
        UsageError: --ranks under torchrun, or a rank that failed.
    """
    if "RANK" in os.environ:
        if arguments.ranks is not None:
            raise UsageError("--ranks: torchrun has started the ranks; leave it out")
        return call(task, arguments.device, arguments.threads, settings)
    ranks = arguments.ranks or arguments.default_ranks
    if arguments.device == "cuda" and torch.cuda.device_count() < ranks:
        raise UsageError(f"--device cuda: {ranks} ranks on this machine, which has {torch.cuda.device_count()} GPUs")
    given = json.dumps([arguments.device, arguments.threads, settings])
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        _start(ranks, arguments.threads, [task, given, str(result)], Path(folder))
        return json.loads(result.read_text())


def call(
    task: str,
    device_name: str,
    threads: int,
    settings: dict[str, Any],
    failed: Callable[[Exception], None] = lambda error: None,
) -> Any:
    """Run the task as the rank that the environment says; a collective. `failed` learns of an error before the other ranks can."""
    module, function = task.rsplit(".", 1)
    torch.set_num_threads(threads)
    device = choose_device(device_name)
    with process_group(device):
        try:
            found = getattr(importlib.import_module(f".{module}", __package__), function)(device, settings)
        except Exception as error:
            failed(error)
            raise
        return found if dist.get_rank() == 0 else None


def serve(task: str, given: str, result: str) -> None:
    """A local rank: rank 0 leaves what it found in the file `result`, and a rank that fails says why in a file beside it."""
    rank, path = os.environ["RANK"], Path(result)

    def failed(error: Exception) -> None:
        path.with_name(f"rank{rank}.error").write_text(f"{type(error).__name__}: {error}")

    found = call(task, *json.loads(given), failed)
    if rank == "0":
        path.write_text(json.dumps(found))


def _start(ranks: int, threads: int, arguments: list[str], folder: Path) -> None:
    """Local ranks, to their end.

    Raises:
        UsageError: one failed; the message is the first one's error.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", __package__, *arguments]
    with _workers(command, ranks, threads, store.port, folder) as workers:
        while (statuses := [worker.poll() for worker in workers]).count(0) < ranks:
            if any(status not in (0, None) for status in statuses):
                time.sleep(SETTLE)
                raise UsageError(_account(folder, [worker.poll() for worker in workers]))
            time.sleep(POLL)


def _account(folder: Path, statuses: list[int | None]) -> str:
    """What became of the rank that failed first: it said so itself, or its log does."""
    failed = [rank for rank, status in enumerate(statuses) if status not in (0, None)]
    told = [path for rank in range(len(statuses)) if (path := folder / f"rank{rank}.error").exists()]
    path = min(told or [folder / f"rank{rank}.log" for rank in failed], key=lambda path: path.stat().st_mtime_ns)
    lines = path.read_text(errors="replace").strip().splitlines()
    return f"{path.stem} failed: {lines[-1] if lines else 'it ended without a word'}".replace("rank", "rank ", 1)


@contextlib.contextmanager
def _workers(
    command: list[str], ranks: int, threads: int, port: int, folder: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            with (folder / f"rank{rank}.log").open("wb") as log:
                env = environment(rank, ranks, threads, port)
                workers.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
