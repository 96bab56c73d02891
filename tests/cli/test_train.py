"""`zerodp train` from end to end: what it shows and leaves, how it goes on, and how it runs under torchrun."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.cli.runs import PATIENCE, environment, log, losses, options, ranks_of, resume, train, wait_until

pytestmark = pytest.mark.timeout(400)  # several processes start, one after another


def test_a_run_leaves_log_pictures_table_and_sample(finished: tuple[Path, str]) -> None:
    folder, output = finished
    kept = {path.name for path in folder.iterdir()}
    assert kept == {
        *("run.json", "checkpoints", "log.jsonl", "stages.json", "report.txt", "loss.png", "memory.png"),
        *("forecast.json", "report.html"),
    }
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [record["step"] for record in log(folder)] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in log(folder) if record["validation_loss"]] == [2, 4, 6]
    assert "step 6/6" in output
    assert "Sample:\ndef " in output
    assert (folder / "report.txt").read_text() in output


def test_the_log_has_the_cost_of_each_step(finished: tuple[Path, str]) -> None:
    last = log(finished[0])[-1]
    stages = json.loads((finished[0] / "stages.json").read_text())
    chosen = stages["stages"]["3"]
    assert last["wire_bytes"] == chosen["measured_wire_elements"] * torch.float32.itemsize
    states = sum(last["memory"][kind] for kind in ("parameters", "gradients", "first_moment", "second_moment"))
    assert states == pytest.approx(chosen["measured_bytes"], rel=1e-3)
    assert last["peak_bytes"] >= last["memory_bytes"] >= states


def test_measured_bytes_are_the_papers(finished: tuple[Path, str]) -> None:
    stages = json.loads((finished[0] / "stages.json").read_text())
    numel = stages["parameters"]
    measured = [row["measured_bytes"] for row in stages["stages"].values()]
    assert measured == sorted(measured, reverse=True)
    for row in stages["stages"].values():  # padding and Adam's step counts are all that comes on top
        assert 0 <= row["measured_bytes"] - row["formula_bytes"] < 0.01 * row["formula_bytes"]
        assert 0 <= row["measured_wire_elements"] - row["formula_wire_elements"] < 0.01 * numel


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, cache: Path, text: Path) -> Path:
    """The folder of a run that ended after its first step, for want of time."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    done = train({"--out": folder, "--data": text, "--minutes": "0.00001"}, cache)
    assert done.returncode == 0, done.stderr
    assert f"Go on with: zerodp train --resume {folder}" in done.stdout
    assert len(losses(folder)) == 1
    return folder


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(
    finished: tuple[Path, str], stopped: Path, tmp_path: Path, cache: Path
) -> None:
    """The same losses to the last bit; the second part under another stage, which may not matter either."""
    folder = shutil.copytree(stopped, tmp_path / "run")
    done = resume(folder, cache, "--minutes", "60", "--stage", "1")
    assert done.returncode == 0, done.stderr
    assert losses(folder) == losses(finished[0])
    assert [r["validation_loss"] for r in log(folder)] == [r["validation_loss"] for r in log(finished[0])]


def test_accumulation_and_ranks_see_the_same_text(
    finished: tuple[Path, str], tmp_path: Path, cache: Path, text: Path
) -> None:
    """One rank with twice the backward passes takes the same steps as two ranks."""
    done = train({"--out": tmp_path / "run", "--data": text, "--ranks": 1, "--accumulate": 2}, cache)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(finished[0]), abs=1e-4)


def test_a_run_goes_on_with_more_ranks(finished: tuple[Path, str], stopped: Path, tmp_path: Path, cache: Path) -> None:
    """Four windows per step, on two ranks first and then unevenly on three."""
    folder = shutil.copytree(stopped, tmp_path / "run")
    done = resume(folder, cache, "--minutes", "60", "--ranks", "3")
    assert done.returncode == 0, done.stderr
    assert losses(folder) == pytest.approx(losses(finished[0]), abs=1e-4)


def test_a_killed_rank_under_torchrun_comes_back(tmp_path: Path, cache: Path, text: Path) -> None:
    """By itself, from the newest checkpoint; the steps that are taken again have the losses that they had."""
    given = {"--data": text, "--steps": 40, "--save-every": 5, "--validate-every": 40}
    folder = tmp_path / "run"
    launcher = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--max-restarts", "2", "-m", "zerodp.cli", "train", *options({**given, "--out": folder})]
    variables = environment(XDG_CACHE_HOME=cache, OMP_NUM_THREADS=1, GLOO_SOCKET_IFNAME="lo")
    process = subprocess.Popen(launcher, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(log(folder)) >= 8 or process.poll() is not None)
        before = losses(folder)
        os.kill(ranks_of(folder)[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert 8 <= len(before) < 40
    assert "exitcode: -9" in errors
    assert [record["step"] for record in log(folder)] == list(range(1, 41))
    assert losses(folder)[: len(before)] == before


def test_bf16_on_the_standard_library(tmp_path: Path, cache: Path) -> None:
    done = train({"--out": tmp_path / "run", "--precision": "bf16", "--stage": 2, "--ranks": 1}, cache)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]
    assert log(tmp_path / "run")[-1]["memory"]["master"] > 0


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def test_two_nodes_under_torchrun(finished: tuple[Path, str], tmp_path: Path, cache: Path, text: Path) -> None:
    """Two launchers on loopback, one rank each: the same run as two local ranks."""
    folder, port = tmp_path / "run", str(free_port())
    nodes = []
    for node in range(2):
        launcher = [
            warm.python(),
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
            "--node-rank",
            str(node),
        ]
        launcher += ["--master-addr", "127.0.0.1", "--master-port", port, "-m", "zerodp.cli", "train"]
        command = launcher + options({"--out": folder, "--data": text})
        variables = environment(XDG_CACHE_HOME=cache, OMP_NUM_THREADS=1, GLOO_SOCKET_IFNAME="lo")
        nodes.append(
            subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        shown = [node.communicate(timeout=PATIENCE) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], shown
    assert "step 6/6" in shown[0][0]
    assert shown[1][0] == ""
    assert losses(folder) == losses(finished[0])


def test_what_was_predicted_is_compared_with_what_came(finished: tuple[Path, str]) -> None:
    """States and traffic to the byte; of the time only that there is one."""
    folder, output = finished
    lines = {line["what"]: line for line in json.loads((folder / "forecast.json").read_text())["lines"]}
    for what in ("parameters", "gradients", "optimizer", "unsharded", "sent per step"):
        assert lines[what]["predicted"] == lines[what]["measured"], what
    assert lines["buckets"]["measured"] > 0
    assert lines["seconds per step"]["predicted"] > 0
    assert lines["seconds per step"]["measured"] > 0
    assert "Predicted and measured" in output
    page = (folder / "report.html").read_text()
    for heading in ("Predicted and measured", "Loss (nats per byte)", "Memory of this rank", "One step, simulated"):
        assert f"<h2>{heading}" in page
    assert "(measured)" in page
