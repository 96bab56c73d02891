"""Starts the ranks of one measurement on this machine and returns what rank 0 found: `on_ranks`. Run as a script it is one rank."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULT = "RESULT "


class Failed(Exception):
    """A run that gave no result; the message is the end of what its ranks printed."""


def on_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int = 2,
    backend: str = "gloo",
    prefix: Sequence[str] = (),
    env: dict[str, str] | None = None,
    limit: float = 900,
) -> Any:
    """What `function(*arguments)`, of a file in this folder, returns on rank 0, as JSON has it.

    Every rank is a process with one thread of compute, and all are one group over gloo on the loopback device; with the backend
    "fake" each is rank 0 of two whose collectives do nothing.

    Raises:
        Failed: a rank did not end well.
    """
    shared = {
        **os.environ,
        **(env or {}),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    module = Path(function.__code__.co_filename).stem
    command = [*prefix, sys.executable, __file__, module, function.__name__, backend, pickle.dumps(arguments).hex()]
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes: list[subprocess.Popen[Any]] = []
        try:
            for rank, log in enumerate(logs):
                own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
            _wait(processes, limit)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return _result([_text(log) for log in logs])


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _wait(processes: Sequence[subprocess.Popen[Any]], limit: float) -> None:
    """Until all ranks have ended, one has failed, or the time is up."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            return
        time.sleep(0.25)


def _text(log: Any) -> str:
    log.seek(0)
    return str(log.read())


def _result(texts: Sequence[str]) -> Any:
    for line in texts[0].splitlines():
        if line.startswith(RESULT):
            return json.loads(line.removeprefix(RESULT))
    raise Failed("\n".join(f"rank {rank}: {text[-800:]}" for rank, text in enumerate(texts)))


def _rank(module: str, function: str, backend: str, arguments: str) -> None:
    import torch
    import torch._dynamo  # or an optimizer's first step would load it: 60 MB that are no training state
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group(backend, rank=0, world_size=2, store=FakeStore())
    else:
        dist.init_process_group(backend)
    result = getattr(importlib.import_module(module), function)(*pickle.loads(bytes.fromhex(arguments)))
    if dist.get_rank() == 0:
        print(RESULT + json.dumps(result), flush=True)
    dist.destroy_process_group()


def train(out: Path, *options: str) -> None:
    """`zerodp train` with these options, without a sample; what it writes is in the folder `out`."""
    command = [sys.executable, "-m", "zerodp.cli", "train", "--out", str(out), "--sample", "0", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    _rank(*sys.argv[1:])
