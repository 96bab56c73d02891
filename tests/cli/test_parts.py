"""The parts of `zerodp train` that need no ranks: text, model, schedule, progress, log and formulas."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from zerodp.cli.training import forecast, report
from zerodp.cli.training.gpt import GPT, parameter_count, shape_for
from zerodp.cli.training.ledger import formula_bytes, formula_wire_elements
from zerodp.cli.training.panel import Lines, Progress, clock, decimal
from zerodp.cli.training.settings import Settings, replace_file, resolve, write
from zerodp.cli.training.text import Corpus, open_corpus
from zerodp.cli.training.trainer import Record, learning_rate
from zerodp.core.stages import STAGES
from zerodp.inspect import Memory


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def corpus_of(tmp_path: Path, content: bytes) -> Corpus:
    (tmp_path / "text").write_bytes(content)
    return open_corpus(str(tmp_path / "text"), context=8)


# ---- text


def test_every_byte_is_training_or_validation(tmp_path: Path) -> None:
    content = bytes(range(250)) * 40
    corpus = corpus_of(tmp_path, content)
    assert sorted(corpus.bytes.tolist()) == sorted(content)
    assert 0.04 < 1 - corpus.training / len(content) < 0.06


def test_training_windows_never_touch_validation_text(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, b"x" * 4000)
    starts = torch.cat([corpus.training_starts(64, 8, seed=0, step=step) for step in range(200)])
    assert starts.min() >= 0
    assert starts.max() == corpus.training - 8 - 1  # the last that has a next byte for each of its 8
    assert corpus.validation_starts(32, 8).min() == corpus.training
    assert corpus.validation_starts(32, 8).max() + 8 + 1 == len(corpus.bytes)


def test_targets_are_the_next_bytes(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, bytes(range(256)) * 4)
    inputs, targets = corpus.windows(torch.tensor([3, 40]), 5)
    assert inputs.tolist() == [[3, 4, 5, 6, 7], [40, 41, 42, 43, 44]]
    assert targets.tolist() == [[4, 5, 6, 7, 8], [41, 42, 43, 44, 45]]


def test_steps_and_seeds_read_different_text(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, b"x" * 100_000)
    first = corpus.training_starts(16, 8, seed=0, step=1)
    assert torch.equal(first, corpus.training_starts(16, 8, seed=0, step=1))
    assert not torch.equal(first, corpus.training_starts(16, 8, seed=0, step=2))
    assert not torch.equal(first, corpus.training_starts(16, 8, seed=1, step=1))


def test_the_cache_follows_the_files(tmp_path: Path) -> None:
    old = corpus_of(tmp_path, b"old text " * 100)
    assert corpus_of(tmp_path, b"old text " * 100).digest == old.digest
    new = corpus_of(tmp_path, b"new text, longer " * 100)
    assert new.digest != old.digest
    assert bytes(new.bytes[:8].tolist()) == b"new text"


def test_a_folder_is_read_in_order_without_hidden_files(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "c.txt").write_bytes(b"C" * 300)
    (folder / "a.txt").write_bytes(b"A" * 300)
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_bytes(b"?" * 300)
    corpus = open_corpus(str(folder), context=8)
    training = bytes(corpus.bytes[: corpus.training].tolist())
    assert training == b"A" * 300 + b"C" * 270  # the last of 20 blocks is held out


def test_the_standard_library_is_enough() -> None:
    assert open_corpus(None, context=1024).training > 1_000_000


# ---- model


@pytest.mark.parametrize("asked", [60_000, 1_000_000, 4_000_000, 124_000_000, 1_000_000_000])
def test_the_shape_is_near_what_was_asked(asked: int) -> None:
    depth, width = shape_for(asked)
    assert width % 64 == 0
    assert 32 <= width / depth <= 128
    assert parameter_count(depth, width) == pytest.approx(asked, rel=0.05 if asked > 100_000 else 0.5)


@pytest.mark.parametrize(("depth", "width"), [(1, 64), (3, 128)])
def test_parameters_are_counted_right(depth: int, width: int) -> None:
    assert sum(p.numel() for p in GPT(depth, width, context=16).parameters()) == parameter_count(depth, width)


def test_the_model_looks_back_only() -> None:
    model = GPT(2, 64, context=16)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 9:] = 0
    with torch.no_grad():
        assert torch.allclose(model(tokens)[0, :9], model(changed)[0, :9], atol=1e-5)


def test_positions_matter() -> None:
    model = GPT(1, 64, context=16)
    with torch.no_grad():
        there, back = model(torch.tensor([[1, 2, 3]]))[0, -1], model(torch.tensor([[2, 1, 3]]))[0, -1]
    assert not torch.allclose(there, back, atol=1e-6)


def test_generation_goes_on_beyond_the_context() -> None:
    model = GPT(1, 64, context=16)
    texts = [model.generate(b"def ", 30, torch.Generator().manual_seed(1)) for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 34
    assert texts[0].startswith(b"def ")


# ---- schedule, settings, progress


def test_the_learning_rate_rises_and_falls() -> None:
    settings = Settings(steps=200, lr=1.0)
    rates = [learning_rate(settings, step) for step in range(1, 201)]
    assert rates[:10] == [pytest.approx((step + 1) / 10) for step in range(10)]
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_a_run_of_one_step_has_a_learning_rate() -> None:
    assert 0 < learning_rate(Settings(steps=1, lr=1.0), 1) <= 1


def test_what_is_given_comes_before_what_was_saved(tmp_path: Path) -> None:
    write(tmp_path, Settings(params=1000, steps=50, stage=1), "digest")
    resumed = resolve({"steps": 70}, tmp_path)
    assert (resumed.params, resumed.steps, resumed.stage) == (1000, 70, 1)
    assert resolve({"steps": 70}, None).params == Settings().params
    assert resolve({"batch": 2}, tmp_path, ranks=4).ranks == 4


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    replace_file(tmp_path / "file", b"old")
    replace_file(tmp_path / "file", b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"new")]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1234, "1.2 kB"), (65_300_000, "65.3 MB"), (123e9, "123 GB"), (5e15, "5000.0 TB")],
)
def test_sizes_in_words(value: float, text: str) -> None:
    assert decimal(value) == text


def test_clock() -> None:
    assert [clock(s) for s in (5, 65, 3600, 7325)] == ["0:05", "1:05", "1:00:00", "2:02:05"]


def record(step: int, validation_loss: float | None = None) -> Record:
    """Steps of two seconds, of 1,024 tokens each."""
    return Record(step, 2.0, 1e-3, 0.5, 512.0, 1000, 2000, 3000, {"parameters": 2000}, 2.0 * step, validation_loss)


def test_time_left_and_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(Progress(Settings(steps=110, batch=2), first_step=0))
    for step in range(1, 11):
        lines.show(record(step))
    assert capsys.readouterr().out == (
        "step 10/110  loss 2.000  validation loss -  tokens/s 512  memory per rank 2.0 kB  wire per step 1.0 kB  time left 3:20\n"
    )
    lines.show(record(11, validation_loss=1.5))
    assert "validation loss 1.500" in capsys.readouterr().out


def test_a_time_limit_bounds_the_time_left() -> None:
    progress = Progress(Settings(steps=110, batch=2, minutes=1), first_step=0)
    progress.update(record(1))
    assert progress.left(record(1)) == pytest.approx(58)


# ---- log and report


def test_a_resumed_log_ends_where_the_run_goes_on(tmp_path: Path) -> None:
    log = report.Log(tmp_path, step=0)
    for step in range(1, 6):
        log.add(record(step))
    with log.path.open("a") as file:
        file.write('{"step": 6, "cut sho')
    resumed = report.Log(tmp_path, step=3)
    resumed.add(record(4))
    assert [r["step"] for r in report.read_log(tmp_path)] == [1, 2, 3, 4]


def test_what_is_not_finite_is_null_in_the_log(tmp_path: Path) -> None:
    log = report.Log(tmp_path, step=0)
    log.add(dataclasses.replace(record(1), gradient_norm=float("inf")))
    assert report.read_log(tmp_path)[0]["gradient_norm"] is None


def test_a_report_without_a_step(tmp_path: Path) -> None:
    assert "no steps" in report.write(tmp_path, [], [], Settings(), None, b"def x")
    assert not (tmp_path / report.LOSS).exists()


def test_a_resumed_run_compares_its_own_steps_and_what_is_offloaded(tmp_path: Path) -> None:
    settings = Settings(params=100_000, offload="host", stage=2, ranks=2)
    found = forecast.forecast(settings, corpus_of(tmp_path, b"x" * 4000), torch.device("cpu"), 0, False)
    one = found.estimates[2]
    assert (one.kinds["gradients"], one.kinds["optimizer"]) == (0, 0)
    assert one.tiers["host"] > 0
    peak = {
        "parameters": 1,
        "gradients": 2,
        "master": 3,
        "first_moment": 4,
        "second_moment": 5,
        "unsharded": 6,
        "buckets": 7,
    }
    memory = Memory(peak, peak, 28, 28, host_peak={"master": 30, "gradients": 12})
    records = [dataclasses.replace(record(step), wire_bytes=10 if step <= 5 else 50) for step in range(1, 9)]
    logged = [dataclasses.asdict(one) for one in records]
    lines = {line.what: line for line in forecast.compare(found, logged, memory, 100, first=5)}
    assert lines["sent per step"].measured == 50
    assert (lines["on the host"].predicted, lines["on the host"].measured) == (one.tiers["host"], 42)
    assert "on the disk" not in lines
    ended = {line.what: line for line in forecast.compare(found, logged, memory, 100, first=8)}
    assert (ended["sent per step"].measured, ended["parameters"].measured) == (None, None)


# ---- formulas


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_papers_first_figure(stage: int, gigabytes: float) -> None:
    """7.5B parameters on 64 ranks."""
    assert formula_bytes(STAGES[stage], 7_500_000_000, 64, "bf16") / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_fp32_has_no_master() -> None:
    assert [formula_bytes(STAGES[stage], 1000, 2, "fp32") for stage in range(4)] == [16_000, 12_000, 10_000, 8_000]


def test_the_papers_volume() -> None:
    assert [formula_wire_elements(STAGES[stage], 1000, 4) for stage in range(4)] == [1500, 1500, 1500, 2250]
