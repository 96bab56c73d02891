"""`zerodp bench` as a user calls it: measurements on local ranks and under torchrun, and one line for each mistake."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.cli.runs import PATIENCE, environment
from tests.cli.test_plan import output
from tests.cli.test_usage import shown
from zerodp.cli.benching import tune
from zerodp.cli.benching.links import table
from zerodp.planning.timeline.machine import machine_of

TINY = ("--params", "60k", "--context", "32", "--batch", "2", "--steps", "1")
MODEL = """
import torch
from torch import nn

def make(device):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(3)))

    def step(model, optimizer):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, torch.optim.SGD(model.parameters(), lr=0.1), step

def fails(device):
    raise RuntimeError("no such luck")
"""


def bench(*argv: str, cwd: Path | None = None, start: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [warm.python(), *(start or ("-m", "zerodp.cli")), "bench", *argv]
    return subprocess.run(
        command, env=environment(), cwd=cwd, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """(file, what was printed) of a short measurement."""
    path = tmp_path_factory.mktemp("links") / "links.json"
    done = bench("links", "--seconds", "0.001", "--out", str(path), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return path, json.loads(done.stdout)


def test_links_are_measured_and_written(links: tuple[Path, dict[str, Any]]) -> None:
    path, printed = links
    assert json.loads(path.read_text()) == printed
    assert {(row["op"], row["ranks"]) for row in printed["inside"]} == {("all_gather", 2), ("reduce_scatter", 2)}
    assert all(row["latency"] >= 0 and row["bandwidth"] > 0 for row in printed["inside"])
    assert len(printed["compute"]) >= 3
    assert (printed["devices"], printed["pairwise"], printed["source"]) == (2, True, "measured")


def test_a_plan_takes_the_links(links: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--layers", "4", "--hidden", "256", "--heads", "4", "--sequence", "128")
    argv = ["plan", *shape, "--world-size", "2", "--links", str(links[0]), "--tokens", "1B"]
    found = json.loads(output([*argv, "--json"], capsys))
    for row in found["stages"].values():
        step = row["step"]
        assert step["seconds"] >= step["compute"] > 0
        assert step["wire"] > 0
        assert row["training_seconds"] == pytest.approx(1e9 / (2 * 128) * step["seconds"])
    assert found["links"] == links[1]["name"]
    text = output(argv, capsys)
    for words in ("step, simulated", "of it waiting", "training time"):
        assert words in text


def test_links_as_a_table(links: tuple[Path, dict[str, Any]]) -> None:
    text = table(machine_of(links[0]))
    for words in ("all-gather", "reduce-scatter", "GB/s that a rank sends, 2 ranks", "GFLOP/s", "small message"):
        assert words in text


def test_links_under_torchrun() -> None:
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "zerodp.cli")
    done = bench("links", "--seconds", "0.001", "--json", start=start)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["devices"] == 2


def test_tune_is_no_worse_than_the_defaults() -> None:
    done = bench("tune", *TINY, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["tried"][0]["options"] == {}
    assert {knob for one in found["tried"] for knob in one["options"]} == set(tune.KNOBS)
    assert found["seconds"] <= found["default_seconds"]
    assert bool(found["options"]) == (found["seconds"] < found["default_seconds"])


def test_tune_takes_a_model_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    done = bench("tune", "--model", "mine:make", "--stage", "2", "--steps", "1", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the defaults" in done.stdout
    assert "prefetch" not in done.stdout  # stage 2 gathers nothing for use


def test_a_rank_that_fails_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    done = bench("tune", "--model", "mine:fails", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "failed: RuntimeError: no such luck" in done.stderr


def test_only_a_faster_candidate_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are given here: prefetch 2 is faster alone, and loses the match in the second case."""
    for in_match, expected in ((0.5, {"prefetch": 2}), (1.5, {})):
        tuner = tune.Tuner(tune.torch.device("cpu"), {"spare": None, "steps": 1})
        tuner.gathered_bytes = tuner.largest_bytes = tuner.bucket_bytes = 100
        asked: list[dict[str, int]] = []

        def seconds(options: dict[str, int], asked: list[Any] = asked, in_match: float = in_match) -> float:
            asked.append(options)
            again = asked.count(options) > 1
            return (in_match if again else 0.9) if options == {"prefetch": 2} else 1.0

        monkeypatch.setattr(tuner, "seconds", seconds)
        found = tuner.tune()
        assert found.options == expected
        assert found.default_seconds == 1.0
        assert {"unsharded_bytes": 25} in asked
        assert {"prefetch": 2, "bucket_bytes": 25} in asked


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["bench"], "WHAT"),
        (["bench", "link"], "'link'"),
        (["bench", "links", "--rank", "2"], "did you mean --ranks?"),
        (["bench", "links", "--seconds", "0"], "above 0"),
        (["bench", "links", "--out", "/nowhere/at/all/links.json"], "there is no folder /nowhere/at/all"),
        (["bench", "links", "--device", "cuda", "--ranks", "1000"], "1000 ranks on this machine"),
        (["bench", "tune", "--model", "json"], "expected module:function, got 'json'"),
        (["bench", "tune", "--model", "json:nothing"], "got 'json:nothing'"),
        (["bench", "tune", "--spare", "much"], "--spare: expected a number of bytes"),
        (["bench", "tune", "--stage", "4"], "expected one of 0, 1, 2, 3"),
        (["plan", "--params", "1e9", "--world-size", "2", "--links", "dgx2"], "did you mean 'dgx-2'?"),
        (["plan", "--params", "1e9", "--world-size", "2", "--tokens", "0"], "--tokens"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, errors = shown(argv, capsys)
    assert (status, out) == (2, "")
    assert errors.count("\n") == 1
    assert message in errors


def test_ranks_are_torchruns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "torchrun has started the ranks" in shown(["bench", "links", "--ranks", "2"], capsys)[2]


def test_every_measurement_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = shown(["bench", "--help"], capsys)
    assert status == 0
    for name in ("links", "tune"):
        assert name in text
