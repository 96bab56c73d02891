"""Starts the ranks of one measurement on this machine and returns what rank 0 reports."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULT = "RESULT "


class Failed(Exception):
    """A run that gave no result; the message is the end of what its ranks printed."""


def report(result: dict[str, Any]) -> None:
    """Called on rank 0: hands `result` to the process that started the ranks."""
    print(RESULT + json.dumps(result), flush=True)


def run_ranks(
    script: Path,
    *arguments: str,
    ranks: int = 2,
    prefix: Sequence[str] = (),
    env: dict[str, str] | None = None,
    limit: float = 900,
) -> dict[str, Any]:
    """Runs `script` once per rank, one thread each, over gloo on the loopback device."""
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
    command = [*prefix, sys.executable, str(script), *arguments]
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


def _result(texts: Sequence[str]) -> dict[str, Any]:
    for line in texts[0].splitlines():
        if line.startswith(RESULT):
            return dict(json.loads(line.removeprefix(RESULT)))
    raise Failed("\n".join(f"rank {rank}: {text[-800:]}" for rank, text in enumerate(texts)))
