"""However a run ends, all of its processes end, and the user knows where things stand.

One run is all cold interpreters, as a user's is; the others, whose work is the same, start warm.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from tests.cli.runs import is_running, log, progress_of, ranks_of, started, wait_until

pytestmark = pytest.mark.timeout(400)
SOON = 90.0  # seconds; a few on an idle machine


def ended_cleanly(folder: Path) -> None:
    """Saved at the step where the log ends, with a report."""
    progress = progress_of(folder)
    assert progress["step"] == log(folder)[-1]["step"]
    assert f"--resume {folder}" in (folder / "report.txt").read_text()
    assert not list(folder.glob("rank*.log"))


def test_a_signal_to_the_launcher(tmp_path: Path, cache: Path, text: Path) -> None:
    folder = tmp_path / "run"
    with started({"--out": folder, "--data": text}, cache) as process:
        workers = ranks_of(folder)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=SOON)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert b"Sample:" in output
    assert errors == b""
    assert not any(map(is_running, workers.values()))
    ended_cleanly(folder)


def test_a_signal_to_one_rank_ends_all_at_the_same_step(tmp_path: Path, cache: Path, text: Path) -> None:
    folder = tmp_path / "run"
    with started({"--out": folder, "--data": text}, cache) as process:
        os.kill(ranks_of(folder)[1], signal.SIGTERM)
        _, errors = process.communicate(timeout=SOON)
    assert process.returncode == 128 + signal.SIGTERM, errors
    ended_cleanly(folder)


def test_ctrl_c_on_a_terminal(tmp_path: Path, cache: Path, text: Path) -> None:
    """The key itself, so that the whole process group is interrupted, and the panel is seen."""
    folder = tmp_path / "run"
    terminal, inner = os.openpty()
    shown: list[bytes] = []
    reader = threading.Thread(target=read_all, args=(terminal, shown))
    take_terminal = lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0)  # noqa: E731
    reader.start()
    how = {"stdout": inner, "python": sys.executable, "preexec_fn": take_terminal}
    with started({"--out": folder, "--data": text, "--ranks": 1}, cache, **how) as process:
        os.write(terminal, b"\x03")
        process.wait(timeout=SOON)
    os.close(inner)
    reader.join()
    os.close(terminal)
    output = b"".join(shown).decode()
    assert process.returncode == 128 + signal.SIGINT
    assert "validation loss" in output
    assert "╭" in output  # the panel's corner
    assert "Sample:" in output
    ended_cleanly(folder)


def read_all(terminal: int, shown: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # the other end is closed
        while chunk := os.read(terminal, 1 << 16):
            shown.append(chunk)


def test_a_killed_rank_ends_the_run(tmp_path: Path, cache: Path, text: Path) -> None:
    folder = tmp_path / "run"
    with started({"--out": folder, "--data": text}, cache) as process:
        workers = ranks_of(folder)
        os.kill(workers[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=SOON)
    assert process.returncode == 1
    lines = errors.decode().splitlines()
    assert lines == [
        f"zerodp train: rank 1 was killed by SIGKILL; the other ranks were stopped. Log: {folder}/rank1.log"
    ]
    assert not any(map(is_running, workers.values()))


def test_a_failing_rank_is_named_with_its_error(tmp_path: Path, cache: Path, text: Path) -> None:
    """A folder that stops being writable: the log cannot be written."""
    folder = tmp_path / "run"
    with started({"--out": folder, "--data": text, "--ranks": 1}, cache) as process:
        (folder / "log.jsonl").unlink()
        (folder / "log.jsonl").mkdir()
        _, errors = process.communicate(timeout=SOON)
    assert process.returncode == 1
    assert errors.decode().count("\n") == 1
    assert "rank 0 failed: IsADirectoryError" in errors.decode()


def test_no_rank_outlives_its_launcher(tmp_path: Path, cache: Path, text: Path) -> None:
    folder = tmp_path / "run"
    with started({"--out": folder, "--data": text}, cache, stdout=subprocess.DEVNULL) as process:
        workers = ranks_of(folder)
        process.kill()
        began = time.monotonic()
        wait_until(lambda: not any(map(is_running, workers.values())), SOON)
    assert time.monotonic() - began < SOON
    assert progress_of(folder)["step"] == log(folder)[-1]["step"]
