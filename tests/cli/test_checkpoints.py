"""`zerodp inspect` and `zerodp export`: one process, no process group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import zerodp
from tests.ranks.pool import Pool
from tests.ranks.toys import toy_b
from zerodp import cli


def write(path: Path) -> None:
    torch.manual_seed(0)
    model = toy_b()
    model, optimizer = zerodp.shard(model, torch.optim.AdamW(model.parameters()))
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    zerodp.save(path, model, optimizer, extra={"epoch": 7})


@pytest.fixture
def checkpoint(ranks: Pool, tmp_path: Path) -> Path:
    ranks.run(2, write, tmp_path / "x")
    return tmp_path / "x"


def test_inspect(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(checkpoint), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["facts"]["world_size"], found["extra"], found["damaged"]) == (3, 2, ["epoch"], [])
    shapes = {tensor["name"]: (tensor["shape"], tensor["dtype"], tensor["bytes"]) for tensor in found["tensors"]}
    assert shapes["model.0.weight"] == ([5, 3], "float32", 60)
    assert shapes["optimizer.state.0.weight.exp_avg"] == ([5, 3], "float32", 60)
    assert cli.main(["inspect", str(checkpoint)]) == 0
    shown = capsys.readouterr().out
    for text in ("step 3", "by 2 ranks, stage 3", "model.2.bias", "every byte is as it was written"):
        assert text in shown


def test_inspect_finds_damage_anywhere(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where no reader of this library looks, such as DCP's own table."""
    for name in (".metadata", "__1_0.distcp"):
        data = bytearray((checkpoint / name).read_bytes())
        data[len(data) // 2] ^= 1
        (checkpoint / name).write_bytes(data)
    assert cli.main(["inspect", str(checkpoint), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["damaged"]) == 2
    assert cli.main(["inspect", str(checkpoint), "--json", "--no-check"]) == 0
    assert json.loads(capsys.readouterr().out)["damaged"] is None
    (checkpoint / "__0_0.distcp").unlink()
    assert cli.main(["inspect", str(checkpoint)]) == 1
    assert "DAMAGED __0_0.distcp: No such file" in capsys.readouterr().out


def test_export(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file

    assert cli.main(["export", str(checkpoint), str(tmp_path / "out"), "--max-shard", "70", "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert len([name for name in files if name.endswith(".safetensors")]) == 2
    found = {}
    for name in files:
        if name.endswith(".safetensors"):
            found.update(load_file(tmp_path / "out" / name))
    assert set(found) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert cli.main(["export", str(checkpoint), str(tmp_path / "one")]) == 0
    assert "model.safetensors" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "nowhere"], "no checkpoint of zerodp"),
        (["export", "nowhere", "out"], "no checkpoint of zerodp"),
        (["export", "x", "x"], "exists already"),
        (["export", "x", "out", "--max-shard", "many"], "expected a number of bytes"),
        (["export", "x"], "required: OUT"),
    ],
)
def test_wrong_usage(
    arguments: list[str], message: str, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.chdir(checkpoint.parent)
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
