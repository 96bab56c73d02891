"""What the command line says about itself, and about mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zerodp
from zerodp.cli import main
from zerodp.cli.training.settings import Settings, write


def shown(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """(status, output, errors) of a command line that ends in the parser."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    status, output, _ = shown(["--help"], capsys)
    assert status == 0
    assert "train" in output
    assert shown(["--version"], capsys) == (0, f"zerodp {zerodp.__version__}\n", "")


def test_help_of_train_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    status, output, _ = shown(["train", "--help"], capsys)
    assert status == 0
    for name in {*vars(Settings()), "out", "resume"} - {"step_windows"}:
        assert f"--{name.replace('_', '-')} " in output


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "COMMAND"),
        (["tran"], "'tran'"),
        (["train", "--stgae", "2"], "did you mean --stage?"),
        (["train", "--stage", "4"], "expected one of 0, 1, 2, 3, got '4'"),
        (["train", "--precision", "bf61"], "did you mean bf16?"),
        (["train", "--params", "4X"], "--params: expected a count such as 4M"),
        (["train", "--params", "0"], "--params: expected a count"),
        (["train", "--steps", "0"], "at least 1, got '0'"),
        (["train", "--steps", "-3"], "--steps"),
        (["train", "--ranks", "two"], "got 'two'"),
        (["train", "--lr", "nan"], "above 0, got 'nan'"),
        (["train", "--minutes", "inf"], "above 0, got 'inf'"),
        (["train", "--steps"], "expected one argument"),
        (["train", "--data", "/nowhere/at/all"], "no file or folder '/nowhere/at/all'"),
        (["train", "--resume", "/nowhere/at/all"], "no run in this folder"),
        (["train", "--resume", "a", "--out", "b"], "exclude each other"),
        (["train", "--device", "cuda", "--ranks", "1000"], "1000 ranks on this machine"),
        (["train", "--device", "gpu"], "expected one of auto, cpu, cuda"),
        (["train", "surplus"], "surplus"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, output, errors = shown(argv, capsys)
    assert (status, output) == (2, "")
    assert errors.count("\n") == 1
    assert message in errors
    assert "--help" in errors


def test_text_too_short_for_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "short.txt").write_text("too short\n" * 50)
    status, _, errors = shown(["train", "--data", str(tmp_path / "short.txt"), "--out", str(tmp_path / "run")], capsys)
    assert status == 2
    assert "500 bytes of text, too few for --context 256" in errors
    assert not (tmp_path / "run").exists()


def test_a_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes").touch()
    status, _, errors = shown(["train", "--out", str(tmp_path)], capsys)
    assert status == 2
    assert f"--resume {tmp_path}" in errors


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--params", "8M"], "--params 8000000: the run in"),
        (["--seed", "1"], "--seed 1: the run in"),
        (["--ranks", "9"], "too few for 9 ranks"),
        (["--batch", "8"], "windows of text"),
        ([], "the text is not the one"),
    ],
)
def test_what_a_resumed_run_keeps(
    given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, Settings(), digest="of another text")
    status, _, errors = shown(["train", "--resume", str(tmp_path), *given], capsys)
    assert status == 2
    assert message in errors
    assert json.loads((tmp_path / "run.json").read_text())["text"] == "of another text"


def test_torchrun_chooses_the_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    status, _, errors = shown(["train", "--ranks", "4"], capsys)
    assert status == 2
    assert "torchrun has started the ranks" in errors
