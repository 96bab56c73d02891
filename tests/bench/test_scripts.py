"""The benchmark scripts run, on tiny models, and what they write is whole. No test here looks at a time."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import warm

BENCH = Path(__file__).parents[2] / "bench"
pytestmark = pytest.mark.timeout(300)


def bench(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [warm.python(), str(BENCH / script), *arguments], env=env, capture_output=True, text=True, timeout=280
    )


def written(folder: Path) -> dict[str, Any]:
    """The one file of results in `folder`, which names versions and never the machine."""
    (path,) = folder.glob("*.json")
    content: dict[str, Any] = json.loads(path.read_text())
    assert content["versions"]["torch"]
    assert os.uname().nodename not in path.read_text()
    return content


def test_gpu_check_runs_on_the_cpu(tmp_path: Path) -> None:
    done = bench("gpu_check.py", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    content = written(tmp_path)
    exact = [row for row in content["right"] if "fp32" in row["what"]]
    assert [row["difference"] for row in exact] == [0.0] * 4
    assert all(row["ok"] for row in (*content["right"], *content["fragments"]))
    assert [row["allocations"] for row in content["fragments"]] == [0, 0]
    speeds = {row["what"]: row["tokens_s"] for row in content["speed"]}
    assert speeds.keys() == {"plain torch, autocast", "FSDP2", *(f"zerodp stage {s}" for s in range(4))}
    assert all(speed > 0 for speed in speeds.values())
    offload = content["offload"]
    assert {row["what"] for row in offload["speed"]} == {
        "plain torch, autocast",
        "zerodp, host",
    }  # the others need a GPU
    assert all(row["tokens_s"] > 0 and row["why"] is None for row in offload["speed"])
    assert {row["layers"] for row in offload["largest"]} == {2}
    assert (offload["hidden"]["copies_us"], offload["hidden"]["events"] > 0) == (0, True)


def test_checkpoints_are_compared_with_plain_files(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text("<!-- begin: checkpoints -->\n<!-- end: checkpoints -->\n")
    tiny = ("--dim", "64", "--layers", "2", "--rounds", "1", "--methods", "zerodp3,fsdp2", "--folder", str(tmp_path))
    done = bench("checkpoints.py", *tiny, "--page", str(page), "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    times = written(tmp_path)["times"]
    assert {name: {kind for kind, taken in one.items() if taken} for name, one in times.items()} == {
        "zerodp3": {"save", "save, plain", "load", "load, plain", "stall"},
        "fsdp2": {"save", "save, plain", "load", "load, plain"},
    }
    assert "| FSDP2 | " in page.read_text()


def test_offload_is_measured_beside_its_limits(tmp_path: Path) -> None:
    page = tmp_path / "offload.md"
    page.write_text("<!-- begin: offload -->\n<!-- end: offload -->\n")
    tiny = (
        "--dim",
        "256",
        "--layers",
        "4",
        "--rounds",
        "1",
        "--seconds",
        "0.05",
        "--no-deepspeed",
        "--folder",
        str(tmp_path),
    )
    done = bench("offload.py", *tiny, "--page", str(page), "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = written(tmp_path)
    assert found["host"]["seconds"].keys() == {"bare fused AdamW", "host fp32", "host bf16"}
    # Masters and moments come and go; a gradient that was still in memory, as its write had not ended, is not read.
    assert 24 <= found["disk"]["cycle_bytes"] / found["elements"] <= 28 * 1.06
    assert 0 < found["disk"]["step_bytes"] <= found["disk"]["cycle_bytes"]
    runs = found["memory"]
    assert runs["offload"]["losses"] == runs["offload, limited"]["losses"] == runs["device"]["losses"]
    assert runs["offload"]["disk"] > 2 * runs["allowed"]
    assert "bare fused AdamW" in page.read_text()


def test_delayed_updates_are_compared(tmp_path: Path) -> None:
    page = tmp_path / "offload.md"
    page.write_text("<!-- begin: delayed -->\n<!-- end: delayed -->\n")
    done = bench(
        "delayed.py", "--params", "20k", "--steps", "42", "--every", "21", "--page", str(page), "--out", str(tmp_path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = written(tmp_path)["losses"]
    assert losses["ordinary"]["21"] == losses["delayed"]["21"]  # until then every update has arrived
    assert losses["ordinary"]["42"] != losses["delayed"]["42"]
    assert "| 42 | " in page.read_text()


def test_run_compares_methods_and_their_losses(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text("<!-- begin: loopback -->\n<!-- end: loopback -->\n")
    quick = ("--quick", "--no-memory", "--methods", "zerodp1,ddp", "--page", str(page))
    done = bench("run.py", *quick, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    content = written(tmp_path)
    summary = content["summary"]
    assert {name: row["losses_agree"] for name, row in summary.items()} == {"zerodp1": True, "ddp": True}
    assert all(row["step_s"] > 0 and row["peak_bytes_per_param"] > 0 for row in summary.values())
    (ratio,) = content["ratios"]
    assert ratio["what"] == "zerodp1 / ddp"
    assert ratio["value"] == pytest.approx(summary["zerodp1"]["step_s"] / summary["ddp"]["step_s"])
    assert "zerodp stage 1" in done.stdout
    assert f"| zerodp1 / ddp | {ratio['value']:.3f} |" in page.read_text()


def test_run_refuses_an_unknown_method() -> None:
    done = bench("run.py", "--methods", "zerodp9")
    assert done.returncode == 2
    assert "zerodp9" in done.stderr


def test_run_says_when_the_network_cannot_be_limited(tmp_path: Path) -> None:
    done = bench("run.py", "--quick", "--methods", "ddp", "--link", "no-such-rate", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped: no rate-limited network" in done.stdout
    assert not list(tmp_path.iterdir())


def test_overhead_counts_each_phase(tmp_path: Path) -> None:
    tiny = ("--layers", "2", "--steps", "3", "--methods", "zerodp3", "--settings", "no wire,2 ranks")
    done = bench("overhead.py", *tiny, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = written(tmp_path)["per_block"]
    assert set(found) == {"zerodp3, no wire", "zerodp3, 2 ranks"}
    assert found["zerodp3, 2 ranks"]["forward"]["gloo_us"] > 0
    assert found["zerodp3, no wire"]["forward"]["gloo_us"] == 0


def test_overhead_profiles_functions(tmp_path: Path) -> None:
    done = bench("overhead.py", "--layers", "2", "--steps", "2", "--settings", "no wire", "--profile", "zerodp3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "core/reducer.py" in done.stdout


def test_breakdown_fills_its_part_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "profile.md"
    page.write_text("before\n<!-- begin: breakdown -->\nold\n<!-- end: breakdown -->\nafter\n")
    small = ("--dim", "32", "--layers", "1", "--steps", "1", "--methods", "zerodp3", "--page", str(page))
    done = bench("breakdown.py", *small)
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("<!-- end: breakdown -->\nafter\n")
    assert "old" not in text
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert {"compute", "wait for the wire", "optimizer", "Python and autograd"} <= rows.keys()
    assert "1 reduce in backward" in text


SMALL = ("--dim", "64", "--layers", "2", "--ctx", "32")


def test_scaling_is_measured_and_simulated(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- begin: scaling -->\n<!-- end: scaling -->\n")
    done = bench("scaling.py", *SMALL, "--ranks", "1,2", "--steps", "1", "--out", str(tmp_path), "--page", str(page))
    assert done.returncode == 0, done.stdout + done.stderr
    content = written(tmp_path)
    assert content["samples_per_second"].keys() == {"1", "2"}
    assert all(rate > 0 for row in content["samples_per_second"].values() for rate in row.values())
    assert [row[0] for row in content["simulated"]] == ["1", "16", "64", "256", "1,024"]
    assert "Simulated" in page.read_text()


def test_a_slow_wire_is_measured_in_forward_and_backward(tmp_path: Path) -> None:
    done = bench("latency.py", *SMALL, "--rounds", "1", "--latency", "0.001", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = written(tmp_path)["found"]
    assert {"stage 2", "stage 3", "stage 3, no prefetch"} <= found.keys()
    # four gathers of 1 ms each, none of them hidden; the wire is made so that they cannot be faster
    assert found["stage 3, no prefetch"]["forward"] > 0.003


def test_simulated_steps_stand_beside_measured_ones(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- begin: validation 2 ranks -->\n<!-- end: validation 2 ranks -->\n")
    tiny = (*SMALL, "--methods", "zerodp3", "--rounds", "1", "--seconds", "0.001")
    done = bench("validate.py", *tiny, "--out", str(tmp_path), "--page", str(page))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = written(tmp_path)["found"]["zerodp3"]
    assert len(rows) == 3
    assert all(row["simulated"] >= row["exposed"] >= 0 and row["measured"] > 0 for row in rows.values())
    assert "| 2 ranks, zerodp stage 3, loopback |" in page.read_text()


def test_predicted_and_measured_by_stage(tmp_path: Path) -> None:
    tiny = ("--params", "60k", "--steps", "3", "--context", "32", "--stages", "3", "--out", str(tmp_path))
    done = bench("predicted.py", *tiny)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line["what"]: line for line in written(tmp_path)["stages"]["3"]["lines"]}
    assert lines["optimizer"]["predicted"] == lines["optimizer"]["measured"]
    assert "| stage | states | measured |" in done.stdout


def test_what_the_papers_saw_is_what_the_page_shows() -> None:
    """The block of docs/step-time.md is made by a command, and nothing in it is measured."""
    done = bench("simulated.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout in (BENCH.parent / "docs" / "step-time.md").read_text()
