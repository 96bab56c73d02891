"""Runs of `zerodp train` with tiny settings, in processes of their own, which are warm unless a test asks for another start."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import zerodp
from tests import warm
from zerodp.checkpoint.own import open_own

ROOT = Path(__file__).parents[2]
PATIENCE = 180.0  # seconds for a run of a few steps, which takes about ten, on a busy machine
TINY = {"--params": "60k", "--context": "32", "--batch": "2", "--steps": "6", "--validate-every": "2", "--sample": "5"}
ENDLESS = {"--steps": "1000000", "--validate-every": "1000000"}


def options(given: Mapping[str, object]) -> list[str]:
    return [str(part) for option in {**TINY, **given}.items() for part in option]


def environment(**more: object) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), **{key: str(value) for key, value in more.items()}}


def train(given: Mapping[str, object], cache: Path) -> subprocess.CompletedProcess[str]:
    """`zerodp train` to its end."""
    command = [warm.python(), "-m", "zerodp.cli", "train", *options(given)]
    return subprocess.run(
        command, env=environment(XDG_CACHE_HOME=cache), capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def resume(folder: Path, cache: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [warm.python(), "-m", "zerodp.cli", "train", "--resume", str(folder), *more]
    return subprocess.run(
        command, env=environment(XDG_CACHE_HOME=cache), capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@contextlib.contextmanager
def started(
    given: Mapping[str, object],
    cache: Path,
    stdout: IO[bytes] | int = subprocess.PIPE,
    python: str | None = None,
    **how: Any,
) -> Iterator[subprocess.Popen[bytes]]:
    """A run under way, in a process group of its own, after its first steps. Nothing of it is left at the end."""
    command = [python or warm.python(), "-m", "zerodp.cli", "train", *options({**ENDLESS, **given})]
    how = {"start_new_session": True, **how}
    process = subprocess.Popen(
        command, env=environment(XDG_CACHE_HOME=cache), stdout=stdout, stderr=subprocess.PIPE, **how
    )
    try:
        wait_until(lambda: len(log(Path(str(given["--out"])))) >= 2 or process.poll() is not None)
        assert process.poll() is None, process.communicate()[1].decode()
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def log(folder: Path) -> list[dict[str, Any]]:
    path = folder / "log.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in log(folder)]


def progress_of(folder: Path) -> dict[str, Any]:
    """What the newest checkpoint of a run says of how far it is."""
    path = zerodp.latest(folder / "checkpoints")
    assert path is not None
    with open_own(path) as source:
        return {key: source.value(f"zerodp.extra.{key}") for key in ("step", "seconds")}


def ranks_of(folder: Path) -> dict[int, int]:
    """Rank -> process id of the workers of the run in `folder`; where they are warm, of the programs that stand for them."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if str(folder).encode() in (process / "cmdline").read_bytes().split(b"\0"):
                variables = (process / "environ").read_bytes().split(b"\0")
                found.update(
                    {int(v.removeprefix(b"RANK=")): int(process.name) for v in variables if v.startswith(b"RANK=")}
                )
    return found


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    try:
        return "State:\tZ" not in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(happened: Any, patience: float = PATIENCE) -> None:
    limit = time.monotonic() + patience
    while not happened():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.1)
