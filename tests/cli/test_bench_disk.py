"""`zerodp bench disk`: real requests on a real folder, small and short."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_usage import shown
from tests.limits import largest_file
from zerodp.cli import main
from zerodp.cli.benching.disk import step
from zerodp.tiers.disk import IN_FLIGHT, REQUEST_BYTES
from zerodp.tiers.measure import Trial, measure

QUICK = ["--size", "16MiB", "--seconds", "0.005"]


def run(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main(["bench", "disk", *more, *QUICK]) == 0
    return capsys.readouterr().out


def test_json_has_every_rate_and_the_bytes_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--params", "1M", "--precision", "bf16", "--optimizer", "adamw", "--ranks", "4", "--sharing", "2"]
    found: dict[str, Any] = json.loads(run(capsys, str(tmp_path), "--json", *options))
    assert os.listdir(tmp_path) == []
    rates = found["rates"]
    assert len(rates) == 2 * 4 * 3 + 1 + (2 if found["direct"] else 0)
    assert all(rate["bandwidth"] > 0 for rate in rates)
    for what in ("read", "write"):
        mine = [r for r in rates if r["what"] == what and r["direct"] == found["direct"]]
        assert found["best"][what]["bandwidth"] == max(r["bandwidth"] for r in mine)
        own = next(r for r in mine if (r["request_bytes"], r["in_flight"]) == (REQUEST_BYTES, IN_FLIGHT))
        assert found["tier"][what] == own["bandwidth"]
    optimizer, parameters = found["step"]["optimizer"], found["step"]["params"]
    assert (optimizer["read_bytes"], optimizer["written_bytes"]) == (8_000_000, 8_000_000)  # 16 bytes of half of them
    assert (parameters["read_bytes"], parameters["written_bytes"]) == (2_000_000, 1_000_000)
    assert optimizer["seconds"] == pytest.approx(16_000_000 / found["both"])


def test_the_table_says_what_follows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, str(tmp_path), "--params", "1e9")
    assert "requests of 4 MiB, 4 reads and 4 writes in flight" in said
    assert 'step with optimizer="disk": 16.0 GB read and 16.0 GB written' in said


@pytest.mark.parametrize(
    ("stage", "precision", "nbytes"),
    [(0, "bf16", 4 * 12), (1, "bf16", 12), (2, "bf16", 16), (3, "fp32", 16)],
)
def test_what_rests_on_disk_follows_the_stage(stage: int, precision: str, nbytes: int) -> None:
    """Of a million parameters on four ranks that share a disk, with Adam: bytes of the whole model's states."""
    given = argparse.Namespace(params=1e6, ranks=4, stage=stage, precision=precision, optimizer="adam")
    found = step(given, 4, 1e9)
    for what in ("read_bytes", "written_bytes", "resting_bytes"):
        assert found["optimizer"][what] == nbytes * 10**6
    assert ("params" in found) == (stage == 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["/nowhere/at/all"], "no file can be made in '/nowhere/at/all'"),
        (["--size", "1MB"], "--size 1MB: expected at least"),
        (["--size", "lots"], "--size: expected a number of bytes"),
        (["--ranks", "2", "--sharing", "3"], "--sharing 3: there are 2 ranks"),
    ],
)
def test_wrong_usage(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, errors = shown(["bench", "disk", *options], capsys)
    assert status == 2
    assert errors.count("\n") == 1
    assert message in errors


def test_a_full_disk_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with largest_file(2**20):
        status, _, errors = shown(["bench", "disk", str(tmp_path), *QUICK], capsys)
    assert (status, "could not be written" in errors) == (2, True)


def test_bytes_are_those_that_were_asked_for(tmp_path: Path) -> None:
    """Every byte that is counted is moved: the file has no holes after the writes, and reads see what is there."""
    trial = Trial(str(tmp_path), 2**20)
    rate = trial.rate("write", 4096, 2, 0.05)
    assert rate.bandwidth * 0.05 >= 4096
    trial.rate("read", 2**16, 2, 0.001)  # writes all of it first
    with open(f"/proc/self/fd/{trial.file.handle}", "rb") as file:
        assert all(any(file.read(4096)) for _ in range(2**20 // 4096))
    trial.close()
    with pytest.raises(ValueError, match="multiples of 4096"):
        measure(str(tmp_path), 2**20, [1000], [1], 0.001)
