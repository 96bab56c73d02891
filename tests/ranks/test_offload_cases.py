"""Public bug reports on offloading, failures of the disk, and what the books say of tiers."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from tests.limits import largest_file
from tests.ranks.oracle import Task, adamw, all_close, close, rows, run, same, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Lion, Net, ToyA, X, toy_b
from zerodp import Offload
from zerodp.offload import capacity
from zerodp.tiers.disk import BUFFER_BYTES

case = pytest.mark.case
places = pytest.mark.parametrize("place", ["host", "disk"])


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def toy_a(place: str, stage: int = 3, **options: Any) -> tuple[Any, Any]:
    model = ToyA()
    return zerodp.shard(model, sgd(model), stage=stage, offload=Offload(optimizer=place), **options)


def backward(model: nn.Module, factor: float = 1.0) -> None:
    model((dist.get_rank() + 1) * factor * X).backward()


@case("B07", "B08")
@on_ranks(2)
@places
def test_backwards_add_up(place: str, stage: int) -> None:
    for synced in (True, False):
        model, optimizer = toy_a(place, stage)
        if synced:
            backward(model)
        else:
            with model.no_sync():
                backward(model)
        backward(model, 2.0)
        close("gradient", zerodp.full_grads(model)["w"], 4.5 * X, 1e-6)
        optimizer.step()
        close("w", model.state_dict()["w"], 1 - 0.45 * X, 1e-6)


@case("B09")
@on_ranks(2)
@places
def test_accumulated_then_clipped(place: str) -> None:
    model, optimizer = toy_a(place, stage=2)
    for factor in (1.0, 2.0):
        backward(model, factor / 2)
    assert optimizer.clip_grad_norm_(1.0) == pytest.approx(12.3238, abs=1e-4)
    optimizer.step()
    close("w", model.state_dict()["w"], 1 - 0.1 * X / X.norm(), 1e-5)


@case("B17")
@on_ranks(2)
@places
def test_edited_gradients_count(place: str) -> None:
    model, optimizer = toy_a(place)
    backward(model)
    for _, _, part in zerodp.local_shards(model, "gradients"):
        part.mul_(0.1)
    assert optimizer.clip_grad_norm_(100.0) == pytest.approx(0.82158, abs=1e-5)
    optimizer.step()
    close("w", model.state_dict()["w"], 1 - 0.015 * X, 1e-6)


@case("B23", "B154")
@on_ranks(2)
def test_all_tiers_learn_alike() -> None:
    for make in (lambda m: torch.optim.Adam(m.parameters(), lr=0.01), lambda m: sgd(m, momentum=0.9)):
        task = Task(toy_b, rows(3), optimizer=make, steps=20)
        reference = run(task)
        for place in ("host", "disk"):
            same(run(task, offload=Offload(optimizer=place)), reference)


@case("B29")
@on_ranks(2)
@places
def test_an_overflow_on_one_rank_is_seen_by_all(place: str) -> None:
    precision = zerodp.Precision(torch.float16, init_scale=4096.0)
    model = nn.Linear(128, 1, bias=False)
    model, optimizer = zerodp.shard(model, sgd(model), precision=precision, offload=Offload(optimizer=place))
    before = model.state_dict()["weight"]
    x = torch.ones(1, 128)
    if dist.get_rank() == 0:
        x[0, 0] = float("inf")
    optimizer.backward(model(x).sum())
    optimizer.step()
    assert optimizer.last_step_skipped
    assert optimizer.loss_scale == 2048.0
    close("weight", model.state_dict()["weight"], before)


@case("B136")
@on_ranks(2)
@places
def test_the_update_of_later_parameters(place: str) -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(torch.ones(count) for count in (5, 1, 1000))

        def forward(self) -> Tensor:
            return sum((part.sum() for part in self.parts), torch.zeros(()))

    model: Any = Three()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1)
    model, optimizer = zerodp.shard(model, optimizer, precision="bf16", offload=Offload(optimizer=place))
    for expected in (0.9, 0.8):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, value in model.state_dict().items():
            close(name, value, torch.full_like(value, expected), 1e-6)


@case("B144")
@on_ranks(2)
@places
def test_groups_in_another_order_than_the_model(place: str) -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        p = list(model.parameters())
        return torch.optim.AdamW([{"params": [p[3], p[0]]}, {"params": [p[1], p[2]], "lr": 0.1}], lr=0.01)

    def moved(step: int, model: nn.Module, optimizer: Any) -> None:
        if isinstance(optimizer, zerodp.ShardedOptimizer):
            optimizer.load_state_dict(optimizer.state_dict())

    task = Task(toy_b, rows(3), optimizer=optimizer, steps=4)
    reference = run(task)
    same(run(task, offload=Offload(optimizer=place)), reference)
    task.between = moved
    same(run(task, offload=Offload(optimizer=place)), reference)


@case("B155")
@on_ranks(2)
def test_a_parameter_larger_than_a_piece() -> None:
    task = Task(lambda: nn.Linear(3, 1001), rows(3), optimizer=adamw)
    same(run(task, bucket_bytes=4000, offload=Offload(optimizer="disk", params="disk")), run(task))


# ---- a disk that fails


@case("B152")
@on_ranks(2)
@pytest.mark.parametrize("delayed", [False, 1])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_file_is_an_error_on_every_rank(damage: str, delayed: bool | int) -> None:
    """In the step itself, or where the update runs beside training, until the next one ends."""
    torch.manual_seed(0)
    model: Any = Net()
    offload = Offload(optimizer="disk", delayed_update=delayed)
    model, optimizer = zerodp.shard(model, adamw(model), units=[Block], offload=offload)
    for step in range(2):
        squares(model, rows(3)(step, 0, dist.get_rank())).backward()
        if step == 1 and dist.get_rank() == 1:
            tier = model._zerodp.places.tiers["disk"]
            tier.ledgers()  # what is being written has arrived
            if damage == "cut":
                os.ftruncate(tier.file.handle, 4096)
            else:
                os.pwrite(os.open(f"/proc/self/fd/{tier.file.handle}", os.O_WRONLY), b"\x01\x02\x03", 5)
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()

    def goes_on() -> None:
        optimizer.step()
        if delayed:  # found beside the pass, or at the next step
            optimizer.zero_grad()
            squares(model, rows(3)(2, 0, dist.get_rank())).backward()
            optimizer.step()

    with pytest.raises(zerodp.StorageError, match=r"offload: " if delayed else r"^rank 1: offload: "):
        goes_on()


@case("B153")
@on_ranks(2)
def test_nothing_is_left_in_the_folder() -> None:
    """Whatever ends a run; and two of them never meet."""
    with tempfile.TemporaryDirectory() as folder:
        offload = Offload(optimizer="disk", path=folder)
        runs = []
        for number in range(3):
            torch.manual_seed(0)
            model: Any = Net()
            model, optimizer = zerodp.shard(model, adamw(model), units=[Block], offload=offload)
            runs.append((model, optimizer))
            if number == 1:
                with pytest.raises(ValueError, match="in the middle"):
                    raise ValueError("in the middle of a run")
                runs.pop()
        for step in range(2):
            for model, optimizer in runs:
                squares(model, rows(3)(step, 0, dist.get_rank())).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert os.listdir(folder) == []
        first, second = (model.state_dict() for model, _ in runs)
        all_close("parameter", first, second)


@on_ranks(2)
def test_a_disk_without_room_is_found_before_anything_moves() -> None:
    """By all ranks, and what was passed in is as before."""
    model = nn.Linear(64, 64)
    optimizer = adamw(model)
    with largest_file(8192), pytest.raises(zerodp.StorageError, match="bytes more could not be written"):
        zerodp.shard(model, optimizer, offload=Offload(optimizer="disk"))
    with pytest.raises(zerodp.StorageError, match="no file can be made"):
        zerodp.shard(model, optimizer, offload=Offload(optimizer="disk", path="/nowhere" if dist.get_rank() else None))


# ---- the books


@case("B68")
@on_ranks(2)
def test_bytes_by_place_and_over_the_link() -> None:
    """ZeRO-Offload's: with 16-bit gradients 2Ψ down and 2Ψ up per step, and 2Ψ on the device where there is one rank to a shard."""
    numel = 4 * 128 * 128
    model: Any = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)))
    precision = zerodp.Precision(torch.bfloat16, grad_dtype=torch.bfloat16)
    for place in ("host", "disk"):
        model, optimizer = zerodp.shard(model, adamw(model), precision=precision, offload=Offload(optimizer=place))
        stats = zerodp.stats(model)
        for _ in range(2):
            stats.reset()
            squares(model, rows(128)(0, 0, dist.get_rank())).backward()
            zerodp.full_grads(model)  # the last reduction has arrived
            memory = stats.memory
            optimizer.step()
            optimizer.zero_grad()
        share = numel // dist.get_world_size()
        assert stats.link_bytes == (2 * share, 2 * share)
        assert memory.now["parameters"] == 2 * share
        assert memory.now["gradients"] == memory.now["master"] == memory.now["first_moment"] == 0
        there = memory.host if place == "host" else memory.disk
        kinds = ("gradients", "master", "first_moment", "second_moment")
        assert [there[kind] for kind in kinds] == [2 * share, 4 * share, 4 * share, 4 * share]
        text = zerodp.describe(model)
        assert f"optimizer states on {place}" in text
        model, _ = zerodp.unshard(model, optimizer)


def test_the_plan_counts_what_is_on_its_way() -> None:
    """The disk tier's buffers, in host memory."""
    plan = zerodp.plan(1e9, world_size=4, offload_optimizer="disk")
    assert plan.estimates[3].disk_buffer_bytes == BUFFER_BYTES
    assert zerodp.plan(1e9, world_size=4, offload_optimizer="host").estimates[3].disk_buffer_bytes == 0


def test_settings_that_cannot_work() -> None:
    for options, message in (
        (
            {"optimizer": "hots"},
            r"optimizer: expected one of 'device', 'host', 'disk', got 'hots'; did you mean 'host'",
        ),
        ({"fraction": 0.0}, "fraction: expected a number above 0"),
        ({"fraction": 1.5}, "a share is at most 1.0"),
        (
            {"fraction": 0.5, "params": "host"},
            "fraction: the share of the optimizer states that leaves the device; say",
        ),
        ({"host_bytes": "4GB", "path": "/tmp"}, "host_bytes: nothing leaves the device; say what does by optimizer="),
        ({"optimizer": "host", "delayed_update": 0}, "delayed_update: expected a whole number of at least 1"),
        ({"params": "disk", "delayed_update": True}, "the update runs beside the next pass where"),
        ({"optimizer": "host", "host_bytes": "1 parsec"}, "host_bytes: expected a number of bytes"),
    ):
        with pytest.raises(zerodp.ConfigError, match=message):
            Offload(**options)
    with pytest.raises(zerodp.ConfigError, match="in zerodp this is 'offload'"):
        zerodp.Config.of(None, {"offload_optimizer": True})
    assert zerodp.Config(offload="host").offload == Offload(optimizer="host")


@on_ranks(2)
def test_parameters_leave_the_device_in_stage_3_only() -> None:
    model = toy_b()
    with pytest.raises(zerodp.ConfigError, match="params='host' needs stage 3"):
        zerodp.shard(model, adamw(model), stage=2, offload=Offload(params="host"))


def scaled(model: Any, optimizer: Any, explicit: bool) -> list[Tensor]:
    """Steps with torch's own scaler, the third of which overflows on the last rank; scales and what the model has at the end."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    scales = []
    for step in range(5):
        for micro in range(2):
            x = rows(3)(step, micro, dist.get_rank())
            if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
                x[0, 0] = float("inf")
            scaler.scale(squares(model, x)).backward()
        if explicit and dist.get_rank() == 0:  # unscaling is no collective
            scaler.unscale_(optimizer)
        if step == 4:
            if dist.get_rank() != 0 or not explicit:
                scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(torch.tensor(scaler.get_scale()))
    assert optimizer.skipped_steps == 1
    return [*scales, *model.state_dict().values()]


@on_ranks(2)
@pytest.mark.parametrize("explicit", [False, True])
def test_grad_scaler(explicit: bool, stage: int) -> None:
    """Wherever gradients rest: the same bits. Every stage, and either way to unscale, has either precision once."""
    found = []
    precision = ("fp32", "bf16")[(stage + explicit) % 2]
    for settings in ({}, {"optimizer": "host"}, {"optimizer": "disk"}, {"optimizer": "host", "host_bytes": 5000}):
        torch.manual_seed(0)
        model: Any = Net()
        options: dict[str, Any] = {"stage": stage, "units": [Block], "bucket_bytes": 700, "precision": precision}
        model, optimizer = zerodp.shard(model, adamw(model), offload=Offload(**settings), **options)
        found.append(scaled(model, optimizer, explicit))
    for one in found[1:]:
        all_close("scaled", dict(enumerate(one)), dict(enumerate(found[0])))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@on_ranks(2)
def test_the_room_that_is_asked_for_is_enough(precision: str, stage: int) -> None:
    """Also for the gradients of two steps, where updates run beside the next pass."""
    asked: list[int] = []
    report = capacity.report
    for delayed in (False, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                capacity, "report", lambda folder, host, disk: asked.append(host) or report(folder, host, disk)
            )
            torch.manual_seed(0)
            model: Any = Net()
            offload = Offload(optimizer="host", delayed_update=delayed)
            model, optimizer = zerodp.shard(model, adamw(model), stage=stage, precision=precision, offload=offload)
        for step in range(4):
            squares(model, rows(3)(step, 0, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
        peak = zerodp.stats(model).memory.host_peak
        assert sum(size for kind, size in peak.items() if kind not in ("buckets", "unsharded")) <= asked[-1]
    numel = sum(p.numel() for p in Net().parameters())
    assert asked[1] - asked[0] >= 4 * numel / dist.get_world_size()


@on_ranks(2)
def test_frozen_parameters_rest_once() -> None:
    """Also with a delayed update; trained later, they are updated at once, as forward reads the master itself."""
    torch.manual_seed(0)
    model: Any = Net()
    model.blocks.requires_grad_(False)
    offload = Offload(optimizer="host", params="host", delayed_update=1)
    model, optimizer = zerodp.shard(model, adamw(model), stage=3, units=[Block], offload=offload)
    flats = [flat for flat in model._zerodp.flats() if not flat.trains]
    assert flats
    assert all(home.source.is_master for flat in flats for home in flat.homes)
    model.blocks.requires_grad_(True)
    for step in range(3):
        squares(model, rows(3)(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    masters = model.state_dict()
    with zerodp.full_params(model):
        behind = {name for name, value in model.named_parameters() if not torch.equal(value, masters[name])}
    assert behind == {name for name, _ in model.named_parameters() if not name.startswith("blocks")}


@on_ranks(2)
def test_hooks_and_counters_of_the_optimizer_see_one_step() -> None:
    class Counting(Lion):
        steps = 0

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            self.steps += 1
            super().step(closure)

    torch.manual_seed(0)
    model: Any = Net()
    optimizer: Any = Counting(model.parameters())
    model, optimizer = zerodp.shard(
        model, optimizer, units=[Block], bucket_bytes=700, offload=Offload(optimizer="disk")
    )
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for _ in range(2):
        squares(model, rows(3)(0, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert calls == ["before", "after"] * 2
    assert optimizer.steps == 2
