"""Local ranks: starts one worker process per rank, passes signals on, and ends them all when one dies."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO

import torch.distributed as dist

from .stopping import EXIT_STATUSES, SIGNALS

POLL = 0.1  # seconds between looks at the workers
SETTLE = 1.0  # after the first failure, seconds in which others may fail of it or with it
LIFELINE = "ZERODP_LIFELINE"  # tells a worker that its standard input ends when the launcher does


def launch(command: list[str], ranks: int, threads: int, folder: Path) -> int:
    """Run `command` as `ranks` ranks, each with the environment that torchrun would give it. The result is the exit status.

    What a rank writes to standard error goes to `folder`, so that the first rank's panel stays whole; a failed rank's last
    line is shown.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    workers: list[subprocess.Popen[bytes]] = []
    with _forwarded(workers):
        for rank, log in enumerate(logs):
            with log.open("wb") as file:
                workers.append(_start(command, environment(rank, ranks, threads, store.port), file, shows=rank == 0))
    try:
        statuses = _watch(workers)
    finally:
        _kill(workers)
    failed = _first_failure(statuses, logs)
    if failed is not None:
        _restore_terminal()
        print(f"zerodp train: {_account(failed, statuses[failed], logs[failed])}", file=sys.stderr)
        return 1
    for log in logs:
        if not log.stat().st_size:
            log.unlink()
    return max(status for status in statuses if status is not None)


def environment(rank: int, ranks: int, threads: int, port: int) -> dict[str, str]:
    """What torchrun sets, with the launcher as the host of the store; and the loopback interface, which needs no network."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    return {
        **({"GLOO_SOCKET_IFNAME": loopback} if loopback else {}),
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LIFELINE: "1",
    }


def _start(command: list[str], environment: dict[str, str], log: IO[bytes], shows: bool) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=None if shows else log, stderr=log)
