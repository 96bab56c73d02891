"""Whatever figures a user gives: a result, or one clear line and status 2. Never a traceback, and never a silent guess."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import warm
from tests.cli.runs import environment
from zerodp.cli import main

ODD = (
    "", " ", "-1", "-0", "0", "1", "2", "3", "+5", "5 ", "1.5", "1e3", "1e400", "1e-400", "nan", "inf", "-inf", "NaN", "1_000", "0x10", "½", "٣",
    "9" * 30, "80", "80GB", "80 GiB", "-80GB", "80G", "GB", "0GB", "1e9GB", "0.1B", "1e-30GB", "many", "None", "true", "a\nb", "🦀", "--", "host", "adam",
    "full", "bf16", "16", "7B", "1T", "1e30T",
)  # fmt: skip
COUNTS = (
    "--params", "--layers", "--hidden", "--heads", "--vocab", "--world-size", "--replicate", "--tensor-parallel", "--bytes-per-parameter", "--batch",
    "--sequence", "--accumulate", "--prefetch", "--stage",
)  # fmt: skip
BYTES = (
    "--device-memory", "--host-memory", "--disk-memory", "--link-bandwidth", "--host-bandwidth", "--unsharded-bytes",
    "--bucket-bytes",
)  # fmt: skip
OTHERS = (
    "--device-flops", "--headroom", "--precision", "--optimizer", "--checkpointing", "--offload-optimizer", "--offload-params", "--offload-activations",
    "--config",
)  # fmt: skip
FLAGS = ("--sequence-parallel", "--partition-activations", "--json")
SANE = {
    "--params": ["7.5e9", "350k", "1T"], "--world-size": ["64", "1", "7"], "--replicate": ["2"], "--tensor-parallel": ["4"],
    "--batch": ["3"], "--sequence": ["1024"], "--stage": ["2"], "--device-memory": ["80GB", "24GiB"], "--headroom": ["0.2"],
}  # fmt: skip


def said(argv: list[str]) -> tuple[int, str, str]:
    """(status, output, errors) of a command line, whichever way it ends."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            status = main(argv)
        except SystemExit as ended:
            status = int(ended.code or 0)
    return status, output.getvalue(), errors.getvalue()


def is_one_clear_line(errors: str, command: str) -> bool:
    return (
        errors.count("\n") == 1
        and errors.startswith(f"zerodp {command}: ")
        and f"(see zerodp {command} --help)" in errors
    )


@st.composite
def options(draw: Any) -> list[str]:
    names = draw(st.lists(st.sampled_from(COUNTS + BYTES + OTHERS), unique=True, max_size=5))
    argv = [name for name in draw(st.lists(st.sampled_from(FLAGS), unique=True)) if name != "--json"] + ["--json"]
    for name in dict.fromkeys(["--params", "--world-size", *names]):
        value = draw(st.sampled_from([*SANE.get(name, []) * 20, *ODD]))
        argv.append(f"{name}={value}")
    return argv


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(options())
def test_plan_takes_any_figures(argv: list[str]) -> None:
    status, output, errors = said(["plan", *argv])
    if status == 0:
        found = json.loads(output, parse_constant=lambda name: pytest.fail(f"{name} in the output of {argv}"))
        assert set(found["stages"]) == {"0", "1", "2", "3"}
        assert all(row["model_state_bytes"] > 0 for row in found["stages"].values())
        assert errors == ""
    else:
        assert (status, output) == (2, ""), argv
        assert is_one_clear_line(errors, "plan"), (argv, errors)


@pytest.mark.parametrize("name", [*COUNTS, *BYTES, *OTHERS])
@pytest.mark.parametrize("value", ["-1", "nan", "many", ""])
def test_plan_names_the_option_that_is_wrong(name: str, value: str) -> None:
    model = (
        {"--layers": "2", "--hidden": "64", "--heads": "2"}
        if name in ("--layers", "--hidden", "--heads")
        else {"--params": "1e9"}
    )
    argv = {**({} if name == "--config" else model), "--world-size": "8", name: value}
    status, output, errors = said(["plan", *(f"{option}={given}" for option, given in argv.items())])
    assert (status, output) == (2, "")
    assert is_one_clear_line(errors, "plan")
    assert name in errors or name == "--config"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--params=1e9", "--world-size=8", "--device-memory=80"], "--device-memory: '80' has no unit; write \"80GB\""),
        (["--params=1e9", "--world-size=8", "--optimizer=adm"], "did you mean adam?"),
        (["--params=1e9", "--world-size=8", "--tensor-parallel=3"], "8 devices are not divisible"),
        (["--layers=4", "--hidden=96", "--heads=3", "--world-size=8", "--tensor-parallel=2"], "--tensor-parallel: 2 ranks do not divide"),
        (["--params=1e30", "--world-size=8"], "--params: at most"),
        (["--params=7.5", "--world-size=8"], "--params: expected a count such as 4M, 350k or 7.5e9, got '7.5'"),
        (["--layers=99999999", "--hidden=64", "--heads=1", "--world-size=8"], "--layers: at most"),
    ],
)  # fmt: skip
def test_plan_says_what_to_write(argv: list[str], message: str) -> None:
    status, _, errors = said(["plan", *argv])
    assert status == 2
    assert message in errors
    assert is_one_clear_line(errors, "plan")


def test_less_than_a_byte_is_one() -> None:
    status, output, _ = said(["plan", "--params=2", "--world-size=64", "--json"])
    assert status == 0
    assert [row["model_state_bytes"] for row in json.loads(output)["stages"].values()] == [32, 8, 4, 1]


def test_who_reads_the_output_may_go() -> None:
    command = [warm.python(), "-m", "zerodp.cli", "plan", "--params=1e9", "--world-size=8"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


TRAIN = (
    "--params", "--context", "--steps", "--minutes", "--batch", "--accumulate", "--lr", "--seed", "--stage", "--precision", "--ranks", "--threads",
    "--device", "--validate-every", "--save-every", "--sample", "--resume", "--out",
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(TRAIN), st.sampled_from(ODD), max_size=4))
def test_train_takes_any_figures(given_options: dict[str, str]) -> None:
    """The data is not there, so that no run begins: what is said is said about it or about an option before it."""
    argv = [f"{name}={value}" for name, value in given_options.items() if name != "--resume" or value]
    status, output, errors = said(["train", "--data=/nowhere/at/all", *argv])
    assert (status, output) == (2, "")
    assert is_one_clear_line(errors, "train"), errors


@pytest.mark.parametrize("command", ["inspect", "export"])
@pytest.mark.parametrize("kind", ["absent", "file", "empty folder", "odd name", "none"])
def test_checkpoints_that_are_none(command: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty folder").mkdir()
    path = {"odd name": "a\nb🦀", "none": ""}.get(kind, str(tmp_path / kind))
    out = [str(tmp_path / "out")] if command == "export" else []
    status, output, errors = said([command, path, *out])
    assert (status, output) == (2, "")
    assert is_one_clear_line(errors, command), errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["-1", "0", "many", "5", ""])
def test_export_with_a_wrong_size(size: str, tmp_path: Path) -> None:
    status, _, errors = said(["export", str(tmp_path), str(tmp_path / "out"), f"--max-shard={size}"])
    assert status == 2
    assert is_one_clear_line(errors, "export")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: MODEL, BATCHES, LOSS"),
        (["json", "json:loads", "json:loads"], "a module, a colon and a function in it are needed"),
        (["no_such_module:f", "json:loads", "json:loads"], "No module named 'no_such_module'"),
        (["json:lods", "json:loads", "json:loads"], "has no attribute 'lods'"),
        (["json:__name__", "json:loads", "json:loads"], "__name__ is no function but str"),
        (["json:loads", "json:loads", "json:loads", "--stage=4"], "expected one of 0, 1, 2, 3"),
        (["json:loads", "json:loads", "json:loads", "--tolerance=-1"], "expected a number above 0"),
        (["json:loads", "json:loads", "json:loads", "--steps=0"], "at least 1"),
        (["json:loads", "json:loads", "json:loads", "--precision=bf61"], "did you mean bf16?"),
        (["json:loads", "json:loads", "json:loads", "--ranks=0"], "at least 1"),
    ],
)
def test_compare_with_wrong_arguments(argv: list[str], message: str) -> None:
    status, output, errors = said(["compare", *argv])
    assert (status, output) == (2, "")
    assert message in errors
    assert is_one_clear_line(errors, "compare")
