"""`zerodp plan` as a user calls it: table, JSON and page, and one line for each mistake."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import zerodp
from tests import warm
from tests.cli.runs import environment
from tests.cli.test_usage import shown
from zerodp.cli import main

SMALL = ["plan", "--params", "7.5e9", "--world-size", "64"]


def output(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def test_json_is_the_contracts_object(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output([*SMALL, "--json"], capsys))
    assert set(found["stages"]) == {"0", "1", "2", "3"}
    for row in found["stages"].values():
        assert {"model_state_bytes", "zerodp_state_bytes", "wire_elements"} <= set(row)
    assert [row["model_state_bytes"] for row in found["stages"].values()] == [
        120_000_000_000,
        31_406_250_000,
        16_640_625_000,
        1_875_000_000,
    ]
    assert found["recommended"] == 2
    assert found == zerodp.plan(7.5e9, world_size=64).as_json()


def test_the_table_says_what_it_rests_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = output([*SMALL, "--device-memory", "32GB"], capsys)
    for words in (
        "120 GB",
        "31.4 GB",
        "16.6 GB",
        "1.88 GB",
        "16 bytes per parameter",
        "largest parameters",
        "Stage 2",
        "yes",
    ):
        assert words in text, words


def test_every_option_reaches_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    options = {
        "world_size": 64, "replicate": 2, "tensor_parallel": 4, "device_memory": "80GB", "host_memory": "200GB", "disk_memory": "1TB",
        "link_bandwidth": "25GB", "host_bandwidth": "12GB", "device_flops": 3e14, "headroom": 0.2, "precision": "fp16",
        "optimizer": "adamw", "bytes_per_parameter": 18, "batch": 3, "sequence": 1024, "accumulate": 2, "checkpointing": "full",
        "offload_optimizer": "host", "offload_params": "disk", "offload_activations": "host", "prefetch": 2,
        "unsharded_bytes": "1GB", "bucket_bytes": "100MB", "stage": 3,
    }  # fmt: skip
    argv = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    found = output(
        ["plan", "--params", "20B", "--sequence-parallel", "--partition-activations", "--json", *argv], capsys
    )
    given = {**options, "sequence_parallel": True, "partition_activations": True}
    assert json.loads(found) == zerodp.plan(20_000_000_000, **given).as_json()  # type: ignore[arg-type]


def test_shapes_and_configs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--layers", "12", "--hidden", "768", "--heads", "12", "--vocab", "50257", "--sequence", "1024"]
    by_shape = json.loads(output(["plan", *shape, "--world-size", "8", "--json"], capsys))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    by_config = json.loads(output(["plan", "--config", str(tmp_path), "--world-size", "8", "--json"], capsys))
    assert by_shape["parameters"] == by_config["parameters"] == 124_439_808
    assert by_shape["stages"] == by_config["stages"]


def test_a_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.html"
    assert output([*SMALL, "--html", str(path)], capsys) == ""
    assert path.read_text().startswith("<!DOCTYPE html>")
    assert "function device(p)" in path.read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plan"], "--world-size"),
        (["plan", "--world-size", "8"], "give one model"),
        (["plan", "--params", "1e9", "--layers", "3", "--world-size", "8"], "give one model"),
        (["plan", "--layers", "3", "--world-size", "8"], "missing: --hidden, --heads"),
        (
            ["plan", "--layers", "3", "--hidden", "64", "--heads", "7", "--world-size", "8"],
            "--heads: 7 heads do not divide",
        ),
        ([*SMALL[:-1], "0"], "at least 1, got '0'"),
        (["plan", "--params", "-5", "--world-size", "8"], "--params"),
        (["plan", "--params", "7.5 billion", "--world-size", "8"], "expected a count such as"),
        ([*SMALL, "--optimizer", "adm"], "did you mean adam?"),
        ([*SMALL, "--device-memory", "80"], "--device-memory: '80' has no unit; write \"80GB\""),
        ([*SMALL, "--device-memory", "-80GB"], "--device-memory"),
        ([*SMALL, "--tensor-parallel", "5"], "--world-size: 64 devices are not divisible"),
        ([*SMALL, "--bytes-per-parameter", "17"], "--bytes-per-parameter: with 16-bit"),
        ([*SMALL, "--partition-activations"], "--partition-activations: splits"),
        ([*SMALL, "--headroom", "2"], "--headroom: expected a part"),
        ([*SMALL, "--stage", "4"], "expected one of 0, 1, 2, 3"),
        ([*SMALL, "--jsn"], "did you mean --json?"),
        ([*SMALL, "--html", "/nowhere/at/all.html"], "--html /nowhere/at/all.html: No such file"),
        (["plan", "--config", "/nowhere/at/all", "--world-size", "8"], "expected a Hugging Face config.json"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, errors = shown(argv, capsys)
    assert (status, out) == (2, "")
    assert errors.count("\n") == 1
    assert message in errors


def test_without_rich_the_table_is_plain(tmp_path: Path) -> None:
    code = "import sys, importlib.util; from zerodp.cli import main; importlib.util.find_spec = lambda name: None\n"
    code += f"sys.exit(main({SMALL}))"
    (tmp_path / "script.py").write_text(code)
    done = subprocess.run(
        [warm.python(), str(tmp_path / "script.py")], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{zerodp.plan(7.5e9, world_size=64)}\n"


def test_the_document_is_what_the_planner_says() -> None:
    """docs/planning.md is made by a command; a change of a formula shows there."""
    script = Path(__file__).parents[2] / "bench" / "planning.py"
    done = subprocess.run([warm.python(), str(script)], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")


def test_a_config_is_traced_and_a_shape_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(argv: list[str]) -> str:
        assert main(argv) == 0
        return capsys.readouterr().out  # transformers has its own remarks on the other stream

    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 100}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}))
    traced = ["plan", "--config", str(config), "--world-size", "64", "--batch", "3", "--sequence", "16", "--trace"]
    found = json.loads(said([*traced, "--simulate", "--json"]))
    assert len(found["simulated"]) == 2
    trace = found["trace"]
    assert [unit["name"] for unit in trace["units"]] == ["(root)", "transformer.h.0", "transformer.h.1"]
    assert found["stages"]["2"]["kinds"]["activations"] == trace["peak_bytes"] > trace["saved_bytes"] > 0
    assert f"in {trace['peak_phase']} of '{trace['peak_unit']}'" in " ".join(said(traced).split())
    shape = ["plan", "--layers", "2", "--hidden", "64", "--heads", "2", "--vocab", "100", "--sequence", "32"]
    shape += ["--world-size", "1024", "--stage", "3", "--simulate", "--units", "branch"]
    first, last = json.loads(output([*shape, "--json"], capsys))["simulated"]
    assert (first["rank"], last["rank"], first["stage"]) == (0, 1023, 3)
    assert first["launches"] == 5 * 3
    assert "rank 1023 of 1024, stage 3, simulated" in " ".join(output(shape, capsys).split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--params", "1e9", "--simulate"], "--simulate: a count of parameters is no module"),
        (["--params", "1e9", "--trace"], "--trace: runs the module of a --config"),
        (["--params", "1e9", "--units", "half"], "half"),
        (["--params", "1e9", "--vocab", "100"], "--vocab: is of a shape"),
        (["--config", "none.json", "--units", "linear"], "--units: cuts a count or a shape"),
        (["--config", "none.json", "--trace"], "none.json: no such file"),
    ],
)
def test_what_cannot_be_run_is_said(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["plan", "--world-size", "8", *arguments]))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
