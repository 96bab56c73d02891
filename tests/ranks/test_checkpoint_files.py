"""The files of a checkpoint: whole or not at all, checked before anything changes, kept and found by time, written aside."""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerodp
from tests.limits import largest_file
from tests.ranks.checkpoints import Odd
from tests.ranks.oracle import all_close
from tests.ranks.pool import on_ranks
from tests.ranks.toys import toy_b
from zerodp.checkpoint import manifest, report


def small(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = toy_b()
    return zerodp.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), **options)


def train(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def flip(folder: Path) -> None:
    """One bit of the first weight's values."""
    box = manifest.load(folder).tensors["model.0.weight"].boxes[0]
    data = bytearray((folder / box.file).read_bytes())
    data[box.offset + 5] ^= 4
    (folder / box.file).write_bytes(data)


def shrink(folder: Path) -> None:
    path = folder / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-7])


def lose(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()


def spoil_manifest(folder: Path) -> None:
    path = folder / manifest.NAME
    path.write_text(path.read_text().replace('"world_size":2', '"world_size":3'))


def lose_manifest(folder: Path) -> None:
    (folder / manifest.NAME).unlink()


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped bit": (flip, r"__._0\.distcp is damaged.*0\.weight"),
    "cut short": (shrink, r"__1_0\.distcp has \d+ bytes, expected \d+"),
    "missing file": (lose, r"__1_0\.distcp: No such file"),
    "manifest": (spoil_manifest, r"zerodp\.json is damaged"),
    "no manifest": (lose_manifest, r"zerodp\.json is missing"),
}


@on_ranks(2)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_before_anything_changes(damage: str, tmp_path: Path) -> None:
    """On all ranks alike, and `latest` gives the one before, where the damage shows from outside."""
    model, optimizer = small()
    train(model, optimizer)
    zerodp.save(tmp_path / "good", model, optimizer)
    train(model, optimizer)
    zerodp.save(tmp_path / "bad", model, optimizer)
    spoil, message = DAMAGE[damage]
    train(model, optimizer)
    before = {**model.state_dict(), **optimizer.state_dict()["state"]["0.weight"]}
    if dist.get_rank() == 0:
        spoil(tmp_path / "bad")
        assert damage != "flipped bit" or report(tmp_path / "bad")["damaged"]
    dist.barrier()
    with pytest.raises(zerodp.CheckpointError, match=message):
        zerodp.load(tmp_path / "bad", model, optimizer)
    after = {**model.state_dict(), **optimizer.state_dict()["state"]["0.weight"]}
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert zerodp.latest(tmp_path) == tmp_path / ("bad" if damage == "flipped bit" else "good")
    zerodp.load(tmp_path / "good", model, optimizer)
    train(model, optimizer)


@on_ranks(2)
@pytest.mark.case("B150")
def test_a_disk_that_is_full_on_one_rank(tmp_path: Path) -> None:
    """Both ranks raise, nothing is left behind, what stood there still does, and training goes on."""
    torch.manual_seed(0)
    model = nn.Linear(100, 100)
    model, optimizer = zerodp.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    zerodp.save(tmp_path / "x", model, optimizer)
    with largest_file(10_000) if dist.get_rank() == 1 else contextlib.nullcontext():
        message = r"rank 1: save to .*File too large.*limit on the size"
        with pytest.raises(zerodp.CheckpointError, match=message):
            zerodp.save(tmp_path / "x", model, optimizer)
        saving = zerodp.save(tmp_path / "x", model, optimizer, asynchronous=True)
        with pytest.raises(zerodp.CheckpointError, match="asynchronous save to .*" + message):
            zerodp.save(tmp_path / "x", model, optimizer)  # what fails in the background is raised at the next call
        assert saving is not None
        assert saving.done
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert report(tmp_path / "x")["damaged"] == []
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    zerodp.save(tmp_path / "x", model, optimizer)


@on_ranks(2)
def test_a_crash_between_two_moves(tmp_path: Path) -> None:
    """The checkpoint that was moved aside is found, and the next save clears up."""
    model, optimizer = small()
    zerodp.save(tmp_path / "x", model, optimizer, extra={"number": 1})
    if dist.get_rank() == 0:
        (tmp_path / "x").rename(tmp_path / ".x.previous")
        (tmp_path / ".x.saving-0123abcd").mkdir()
        (tmp_path / ".xy.saving-0123abcd").mkdir()
    dist.barrier()
    assert zerodp.latest(tmp_path) == tmp_path / ".x.previous"
    assert zerodp.load(tmp_path / "x", model, optimizer) == {"number": 1}
    zerodp.save(tmp_path / "x", model, optimizer, extra={"number": 2})
    assert {path.name for path in tmp_path.iterdir()} == {"x", ".xy.saving-0123abcd"}
    assert zerodp.load(tmp_path / "x", model, optimizer) == {"number": 2}
    if dist.get_rank() == 0:  # and a crash before the old one was deleted
        shutil.copytree(tmp_path / "x", tmp_path / ".x.previous")
    dist.barrier()
    assert zerodp.latest(tmp_path) == tmp_path / "x"
    zerodp.save(tmp_path / "x", model, optimizer, extra={"number": 3})
    assert {path.name for path in tmp_path.iterdir()} == {"x", ".xy.saving-0123abcd"}
    assert zerodp.load(tmp_path / "x", model, optimizer) == {"number": 3}


@on_ranks(2)
def test_keep_and_latest(tmp_path: Path) -> None:
    model, optimizer = small()
    (tmp_path / "notes").mkdir(exist_ok=True)
    assert zerodp.latest(tmp_path) is None
    for number in (3, 1, 2):
        zerodp.save(tmp_path / f"step{number}", model, optimizer, keep=2)
        assert zerodp.latest(tmp_path) == tmp_path / f"step{number}"
    assert {path.name for path in tmp_path.iterdir()} == {"notes", "step1", "step2"}
    assert zerodp.latest(tmp_path / "nothing") is None


@on_ranks(2)
def test_asynchronous_saves_hold_the_values_of_their_moment(stage: int, tmp_path: Path) -> None:
    """B156: what changes at once is not seen by the save; the second save waits for the first and uses its memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(500, 700), nn.Linear(700, 500))
    model, optimizer = zerodp.shard(model, torch.optim.AdamW(model.parameters()), stage=stage)
    model(torch.ones(1, 500)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

    def fill(value: float) -> None:
        with torch.no_grad():
            for _, _, piece in zerodp.local_shards(model):
                piece.fill_(value)
        for state in optimizer.state.values():
            state["exp_avg"].fill_(value)

    def everything() -> set[float]:
        tensors = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
        return {one for tensor in [*tensors, *model.state_dict().values()] for one in tensor.unique().tolist()}

    fill(1.0)
    saving = zerodp.save(tmp_path / "a", model, optimizer, asynchronous=True)
    fill(2.0)
    zerodp.save(tmp_path / "b", model, optimizer, asynchronous=True)
    fill(3.0)
    assert saving is not None
    assert saving.done
    for name, value in (("a", 1.0), ("b", 2.0)):
        zerodp.load(tmp_path / name, model, optimizer)
        assert everything() == {value}
    assert zerodp.save(tmp_path / "c", model, optimizer) is None


@on_ranks(2)
@pytest.mark.parametrize("change", ["step", "written", "load_state_dict", "load"])
def test_changes_wait_for_the_copy_of_an_asynchronous_save(change: str, stage: int, tmp_path: Path) -> None:
    """The copy goes on beside training, here slowly; whatever changes what it copies waits for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 70), nn.Linear(70, 50))
    model, optimizer = zerodp.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), stage=stage)

    def step() -> None:
        model(torch.ones(1, 50)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def changed(how: str) -> None:
        if how == "step":
            step()
        elif how == "written":
            with zerodp.full_params(model, write=True), torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(1)
        elif how == "load_state_dict":
            model.load_state_dict({name: torch.ones_like(tensor) for name, tensor in now.items()})
        else:
            zerodp.load(tmp_path / "other", model, optimizer)

    step()
    zerodp.save(tmp_path / "other", model, optimizer)
    step()
    now = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moments = {name: state["exp_avg"].clone() for name, state in optimizer.state_dict()["state"].items()}
    staging = importlib.import_module("zerodp.checkpoint.save")._Staging
    copy = staging.__call__

    def slowly(self: Any, values: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return copy(self, values)

    staging.__call__ = slowly
    try:
        saving = zerodp.save(tmp_path / "x", model, optimizer, asynchronous=True)
        assert saving is not None
        assert not saving.done
        changed(change)
        saving.wait()
    finally:
        staging.__call__ = copy
    zerodp.load(tmp_path / "x", model, optimizer)
    all_close("weights", dict(model.state_dict()), now)
    all_close("moments", {name: s["exp_avg"] for name, s in optimizer.state_dict()["state"].items()}, moments)


class Refuses:
    """What a user may give as `extra`; its state_dict runs on rank 0 only."""

    def state_dict(self) -> dict[str, Any]:
        raise KeyError("mine")


@on_ranks(2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_fails_on_one_rank_fails_on_all(asynchronous: bool, tmp_path: Path) -> None:
    """Of the user's own, or for want of memory for the copy; training and saving go on."""
    model, optimizer = small()
    train(model, optimizer)
    with pytest.raises(zerodp.CheckpointError, match="KeyError"):
        zerodp.save(tmp_path / "x", model, optimizer, extra={"mine": Refuses()}, asynchronous=asynchronous)
    if asynchronous:
        staging = importlib.import_module("zerodp.checkpoint.save")._Staging
        copy = staging.__call__

        def fails(self: Any, values: torch.Tensor) -> torch.Tensor:
            raise MemoryError

        if dist.get_rank() == 1:
            staging.__call__ = fails
        try:
            saving = zerodp.save(tmp_path / "x", model, optimizer, asynchronous=True)
            with pytest.raises(zerodp.CheckpointError, match=r"rank 1: .*MemoryError"):
                saving.wait()  # type: ignore[union-attr]
        finally:
            staging.__call__ = copy
    assert zerodp.latest(tmp_path) is None
    assert not list(tmp_path.iterdir())
    train(model, optimizer)
    zerodp.save(tmp_path / "x", model, optimizer)
    assert zerodp.latest(tmp_path) == tmp_path / "x"


@on_ranks(2)
def test_full_params_are_left_before_a_save_or_load(stage: int, tmp_path: Path) -> None:
    model, optimizer = small(stage=stage)
    zerodp.save(tmp_path / "x", model, optimizer)
    with zerodp.full_params(model, write=True):
        with pytest.raises(zerodp.ShardedError, match=r"save\(\) inside full_params"):
            zerodp.save(tmp_path / "y", model, optimizer)
        with pytest.raises(zerodp.ShardedError, match=r"load\(\) inside full_params"):
            zerodp.load(tmp_path / "x", model, optimizer)


@on_ranks(2, 3)
def test_each_rank_reads_and_writes_its_own_bytes(world_size: int, tmp_path: Path) -> None:
    """Weights and two moments, 12 bytes an element: each rank moves its share, plus scalars and tables."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 700), nn.Linear(700, 512))
    numel = sum(p.numel() for p in model.parameters())
    model, optimizer = zerodp.shard(model, torch.optim.AdamW(model.parameters()), bucket_bytes=2**20)
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    traffic = zerodp.stats(model).checkpoint
    zerodp.save(tmp_path / "x", model, optimizer)
    own = 12 * sum(piece.numel() for _, _, piece in zerodp.local_shards(model))
    assert own < 12 * numel / world_size * 1.1
    assert own <= traffic.bytes_written <= own + 100_000
    zerodp.load(tmp_path / "x", model, optimizer)
    assert own <= traffic.bytes_read <= own + 50_000


@on_ranks(2)
def test_random_state_and_loss_scale(tmp_path: Path) -> None:
    model, optimizer = small(precision="fp16")
    optimizer.backward(model(torch.ones(2, 3)).float().sum() * 1e30)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.skipped_steps == 1
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler.step()
    zerodp.save(tmp_path / "x", model, optimizer, extra={"scheduler": scheduler})
    expected = torch.rand(3), random.random()
    model, optimizer = small(precision="fp16")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    extra = zerodp.load(tmp_path / "x", model, optimizer)
    got = torch.rand(3), random.random()
    assert torch.equal(got[0], expected[0])
    assert got[1] == expected[1]
    assert (optimizer.skipped_steps, optimizer.loss_scale) == (1, 2.0**15)
    scheduler.load_state_dict(extra["scheduler"])
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (1, 0.1 * 0.1)
    other, other_optimizer = small()
    zerodp.load(tmp_path / "x", other, other_optimizer)
    assert other_optimizer.loss_scale == 1.0


@on_ranks(1)
@pytest.mark.case("B145")
def test_settings_are_those_that_were_saved(tmp_path: Path) -> None:
    def build(decay: float) -> tuple[Any, Any]:
        model = nn.Linear(3, 1, bias=False)
        nn.init.ones_(model.weight)
        return zerodp.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=decay))

    zerodp.save(tmp_path / "x", *build(0.1))
    model, optimizer = build(0.5)
    zerodp.load(tmp_path / "x", model, optimizer)
    (model(torch.zeros(1, 3)).sum() * 0).backward()
    optimizer.step()
    assert torch.allclose(model.state_dict()["weight"], torch.tensor(0.99))


class Unknown:
    """No plain value."""


@on_ranks(2)
def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = small()
    _, other = small()
    with pytest.raises(zerodp.ConfigError, match=r"extra\['thing'\] holds objects"):
        zerodp.save(tmp_path / "x", model, optimizer, extra={"thing": Unknown()})
    with pytest.raises(zerodp.ConfigError, match="extra must be a dict"):
        zerodp.save(tmp_path / "x", model, optimizer, extra=[1])  # type: ignore[arg-type]
    with pytest.raises(zerodp.ConfigError, match="not sharded with this model"):
        zerodp.save(tmp_path / "x", model, other)
    with pytest.raises(zerodp.ConfigError, match="keep must be"):
        zerodp.save(tmp_path / "x", model, optimizer, keep=0)
    with pytest.raises(zerodp.ConfigError, match=r"zerodp\.shard"):
        zerodp.save(tmp_path / "x", toy_b())
    with pytest.raises(zerodp.RankMismatchError, match=r"save\(\) was called differently"):
        zerodp.save(tmp_path / f"x{dist.get_rank()}", model, optimizer)
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_folders_of_others_are_not_touched(tmp_path: Path) -> None:
    model, optimizer = small()
    mine = tmp_path / "mine"
    if dist.get_rank() == 0:
        mine.mkdir()
        (mine / "letter.txt").write_text("keep me")
        (tmp_path / "empty").mkdir()
    dist.barrier()
    with pytest.raises(zerodp.ConfigError, match="is no checkpoint of zerodp"):
        zerodp.save(mine, model, optimizer)
    zerodp.save(tmp_path / "empty", model, optimizer)
    assert (mine / "letter.txt").read_text() == "keep me"
    with pytest.raises(zerodp.CheckpointError, match=r"mine holds no checkpoint"):
        zerodp.load(mine, model)
    with pytest.raises(zerodp.CheckpointError, match=r"its newest one is .*empty"):
        zerodp.load(tmp_path, model)
    with pytest.raises(zerodp.CheckpointError, match="no such file or folder"):
        zerodp.load(tmp_path / "nowhere", model)


@on_ranks(2)
@pytest.mark.case("B148")
def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    model, optimizer = small()
    zerodp.save(tmp_path / "x", model, optimizer)
    other = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1), nn.Linear(1, 1))
    other, _ = zerodp.shard(other)
    with pytest.raises(
        zerodp.CheckpointError,
        match=r"missing: 3\.bias, 3\.weight; of another shape: 0\.bias: \(5,\) in the checkpoint, \(6,\)",
    ):
        zerodp.load(tmp_path / "x", other)
    fewer, _ = zerodp.shard(nn.Sequential(nn.Linear(3, 5)))
    with pytest.raises(zerodp.CheckpointError, match=r"unexpected: 2\.bias, 2\.weight"):
        zerodp.load(tmp_path / "x", fewer)
    zerodp.save(tmp_path / "weights", model)
    with pytest.raises(zerodp.CheckpointError, match="holds no optimizer state"):
        zerodp.load(tmp_path / "weights", model, optimizer)
    parts = toy_b()
    parts, grouped = zerodp.shard(parts, torch.optim.AdamW([{"params": parts[0].parameters()}]))
    with pytest.raises(
        zerodp.CheckpointError, match=r"parameter group 0 .* differs .*2\.bias, 2\.weight only on one side"
    ):
        zerodp.load(tmp_path / "x", parts, grouped)


@on_ranks(2)
def test_nothing_is_saved_inside_a_pass(tmp_path: Path) -> None:
    class Curious(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.then: Any = None

        def forward(self, x: torch.Tensor) -> Any:
            self.then()
            return self.layer(x)

    model, _ = zerodp.shard(Curious())
    for call in (zerodp.save, zerodp.load):
        model.then = lambda call=call: call(tmp_path / "x", model)
        with pytest.raises(zerodp.ShardedError, match="inside a forward or backward pass"):
            model(torch.ones(1, 2))


@on_ranks(2)
def test_weights_only_and_the_manifest(tmp_path: Path) -> None:
    """Tensors are read without pickle: by the manifest's offsets alone."""
    torch.manual_seed(1)
    model, _ = zerodp.shard(Odd())
    zerodp.save(tmp_path / "x", model)
    expected = model.state_dict()
    told = json.loads((tmp_path / "x" / manifest.NAME).read_text())
    assert told["facts"]["world_size"] == 2
    assert told["aliases"] == {"model.head.weight": "model.embedding.weight"}
    files = [name for name, _, _ in told["files"]]
    for key, tensor in told["tensors"].items():
        found = torch.empty(tensor["shape"], dtype=getattr(torch, tensor["dtype"]))
        for offsets, sizes, file, offset, num_bytes, *_ in tensor["boxes"]:
            data = (tmp_path / "x" / files[file]).read_bytes()[offset : offset + num_bytes]
            values = torch.frombuffer(bytearray(data), dtype=found.dtype).view(sizes) if data else torch.empty(sizes)
            found[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))] = values
        assert torch.equal(found, expected[key.removeprefix("model.")])
