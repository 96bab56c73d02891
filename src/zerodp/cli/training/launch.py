"""Local ranks: starts one worker process per rank, passes signals on, and ends them all when one fails."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from .stopping import INTERRUPTED, LIFELINE, SIGNALS

POLL = 0.1  # seconds between looks at the workers
SETTLE = 1.0  # seconds after a failure in which its consequences on other ranks show


class Launcher:
    """The worker processes of one run, in rank order."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.command, self.folder = command, folder
        self.workers: list[subprocess.Popen[bytes]] = []
        self.interrupts = 0

    def run(self, ranks: int, threads: int) -> int:
        """Start the ranks and stay until the last has ended. The result is the exit status."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        signal.pthread_sigmask(
            signal.SIG_BLOCK, SIGNALS
        )  # workers inherit this: none can die of a signal while it starts
        try:
            for rank in range(ranks):
                self._start(rank, environment(rank, ranks, threads, store.port))
            for number in SIGNALS:
                signal.signal(number, self._caught)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            return self._report(self._watch())
        finally:
            for worker in self.workers:
                worker.kill()
                worker.wait()

    def _start(self, rank: int, environment: dict[str, str]) -> None:
        """Standard error goes to a file, so that the panel of the first rank stays whole; nothing is ever written to stdin."""
        with self._log(rank).open("wb") as log:
            stdout = None if rank == 0 else log
            self.workers.append(
                subprocess.Popen(self.command, env=environment, stdin=subprocess.PIPE, stdout=stdout, stderr=log)
            )

    def _caught(self, number: int, frame: FrameType | None) -> None:
        """Pass the signal on; a second Ctrl-C does not wait any more."""
        self.interrupts += number == signal.SIGINT
        for worker in self.workers:
            worker.send_signal(number if self.interrupts < 2 else signal.SIGKILL)

    def _watch(self) -> list[int | None]:
        """The exit statuses when all have ended, or (None for those still there) a moment after the first failure."""
        while True:
            statuses = [worker.poll() for worker in self.workers]
            if None not in statuses:
                return statuses
            if any(map(_is_failure, statuses)):
                time.sleep(SETTLE)
                return [worker.poll() for worker in self.workers]
            time.sleep(POLL)

    def _report(self, statuses: list[int | None]) -> int:
        failed = [rank for rank, status in enumerate(statuses) if _is_failure(status)]
        if not failed:
            for rank in range(len(statuses)):
                if not self._log(rank).stat().st_size:
                    self._log(rank).unlink()
            return max(status or 0 for status in statuses)
        if sys.stdout.isatty():
            print("\x1b[?25h", end="")  # a panel that was cut short has left the cursor hidden
        if self.interrupts > 1:
            text = "stopped at once by a second Ctrl-C"
        else:
            text = self._account(
                min(failed, key=lambda rank: ((statuses[rank] or 0) > 0, self._log(rank).stat().st_mtime)), statuses
            )
        print(f"zerodp train: {text}", file=sys.stderr)
        return 1 if self.interrupts < 2 else 128 + signal.SIGINT

    def _account(self, rank: int, statuses: list[int | None]) -> str:
        """What became of the rank that failed first: a kill comes before the errors that it causes on the others."""
        status, log = statuses[rank] or 0, self._log(rank)
        if status < 0:
            what = f"was killed by {signal.Signals(-status).name}"
        else:
            lines = log.read_text(errors="replace").strip().splitlines()
            what = f"failed: {lines[-1].removeprefix(f'[rank{rank}]: ')}" if lines else f"ended with status {status}"
        others = "; the other ranks were stopped" if len(statuses) > 1 else ""
        return f"rank {rank} {what}{others}. Log: {log}"

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"


def _is_failure(status: int | None) -> bool:
    return status is not None and status != 0 and status not in INTERRUPTED


def environment(rank: int, ranks: int, threads: int, port: int) -> dict[str, str]:
    """What torchrun would set; the launcher hosts the store, and gloo takes the loopback interface, which needs no network."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    return {
        "GLOO_SOCKET_IFNAME": loopback[0] if loopback else "",
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
