"""Sleep and wake: nothing is left on the device, every use is told why, and training goes on as if nothing had been."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from tests.limits import largest_file
from tests.ranks.oracle import adamw, all_close, close, copied, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net
from zerodp.residual.store import store_of
from zerodp.tiers.host import HostTier


class Normed(Net):
    """With buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(self.norm(x))
        return out


def sharded(stage: int, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = Normed()
    return zerodp.shard(model, adamw(model), stage=stage, **{"units": [Block], **options})


def backward(model: Any, number: int) -> None:
    squares(model, rows(3)(number, 0, dist.get_rank())).backward()


def train(nap: Callable[[Any, Any], None], stage: int, **options: Any) -> dict[str, Tensor]:
    """Three steps with naps in between: after a step, with gradients, and with unreduced ones."""
    model, optimizer = sharded(stage, **options)
    for number in range(3):
        if number == 2:
            with model.no_sync():
                backward(model, 10)
            nap(model, optimizer)
        backward(model, number)
        nap(model, optimizer)
        backward(model, 5 + number)
        optimizer.step()
        nap(model, optimizer)
        optimizer.zero_grad()
    return copied(dict(model.state_dict()))


def held(model: Any) -> dict[str, int]:
    """Bytes by kind once no reduction is under way."""
    model._zerodp.reducer.drain()
    return dict(zerodp.stats(model).memory.now)


def device_bytes(model: Any) -> int:
    memory = zerodp.stats(model).memory
    scalars = memory.now["other_state"]  # AdamW's step counts
    assert scalars <= 4 * 4 * len(list(model.parameters()))
    return sum(memory.now.values()) + memory.reserved - scalars


@on_ranks(2)
@pytest.mark.parametrize(
    ("to", "precision", "options"),
    [
        ("host", None, {}),
        ("disk", "bf16", {}),
        ("host", "bf16", {"unsharded_bytes": "1MB", "ignore_below": 4, "bucket_bytes": 512}),
    ],
    ids=["host fp32", "disk bf16", "host bf16 cached"],
)
def test_results_are_those_without_it(to: str, precision: Any, options: Any, stage: int, tmp_path: Path) -> None:
    slept = []

    def nap(model: Any, optimizer: Any) -> None:
        before = held(model)
        zerodp.sleep(model, optimizer, to=to, path=str(tmp_path) if to == "disk" else None)
        assert device_bytes(model) == 0
        kept = getattr(zerodp.stats(model).memory, to)
        assert all(
            kept.get(kind, 0) >= before[kind] for kind in ("master", "gradients", "first_moment", "second_moment")
        )
        assert "the model is asleep" in zerodp.describe(model)
        zerodp.wake(model)
        after = held(model)
        assert {**after, "unsharded": 0} == {**before, "unsharded": 0}
        slept.append(kept)

    expected = train(lambda *_: None, stage, precision=precision, **options)
    found = train(nap, stage, precision=precision, **options)
    assert len(slept) == 7
    assert any(kept["gradients"] for kept in slept)
    all_close("trained", found, expected)
    assert os.listdir(tmp_path) == []


OFFLOADED: dict[str, tuple[str, dict[str, Any]]] = {
    "host to host": ("host", {"optimizer": "host"}),
    "host to disk": ("disk", {"optimizer": "host", "params": "host"}),
    "disk to host": ("host", {"optimizer": "disk"}),
    "disk to disk": ("disk", {"optimizer": "disk", "params": "disk"}),
    "device, host and disk to host": ("host", {"optimizer": "host", "fraction": 0.7, "host_bytes": 5000}),
    "device, host and disk to disk": ("disk", {"optimizer": "host", "fraction": 0.7, "host_bytes": 5000}),
    "parameters on the host to disk": ("disk", {"params": "host"}),
    "delayed to disk": ("disk", {"optimizer": "host", "delayed_update": 1}),
}


def settled(model: Any) -> Any:
    """The memory once nothing is on its way to a disk."""
    for tier in (*model._zerodp.places.tiers.values(), *store_of(model._zerodp).tiers.values()):
        while getattr(tier, "busy", None):
            tier.ledgers()
    return zerodp.stats(model).memory


@on_ranks(2)
@pytest.mark.parametrize("name", OFFLOADED)
def test_what_is_offloaded_stays_or_goes_farther(name: str) -> None:
    """What rests as far away as asked for stays; the rest goes there, and the bits are the same. In stage 3 where parameters are
    elsewhere, and else in both kinds of stages in turn."""
    to, settings = OFFLOADED[name]
    stage = 3 if "params" in settings or to == "disk" else 1
    options: dict[str, Any] = {"precision": "bf16", "bucket_bytes": 700, "offload": zerodp.Offload(**settings)}

    def nap(model: Any, optimizer: Any) -> None:
        model._zerodp.reducer.drain()
        before, text = settled(model), zerodp.describe(model)
        zerodp.sleep(model, optimizer, to)
        assert device_bytes(model) == 0
        memory = settled(model)
        kinds = ("master", "gradients", "first_moment", "second_moment")
        if to == "disk" and not before.disk.get("master"):  # whose buffers may hold something
            assert not any(memory.host.get(kind) for kind in kinds)
        held = [{kind: place.get(kind, 0) for kind in kinds} for place in (memory.host, memory.disk)]
        assert all(held[1][kind] >= before.disk.get(kind, 0) for kind in kinds)
        assert all(sum(place[kind] for place in held) >= before.now[kind] + before.host.get(kind, 0) for kind in kinds)
        zerodp.wake(model)
        after = settled(model)
        assert {**after.now, "unsharded": 0} == {**before.now, "unsharded": 0}
        assert [after.host.get(kind, 0) for kind in kinds] == [before.host.get(kind, 0) for kind in kinds]
        assert zerodp.describe(model).splitlines()[:5] == text.splitlines()[:5]

    all_close("trained", train(nap, stage, **options), train(lambda *_: None, stage, **options))


@on_ranks(2)
def test_tensors_stay_the_same_and_views_stay_views(stage: int) -> None:
    model, optimizer = sharded(stage)
    backward(model, 0)
    optimizer.step()
    shards = [tensor for _, _, tensor in zerodp.local_shards(model)]
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    mean, parameter = model.norm.running_mean, model.head.weight
    seen = [*shards, *moments, mean, moments[0][:1]]
    before = copied(dict(enumerate(seen)))
    zerodp.sleep(model)
    assert sum(tensor.untyped_storage().nbytes() for tensor in (shards[0], seen[-1])) == 0
    zerodp.wake(model)
    all_close("values", dict(enumerate(seen)), before)
    assert model.norm.running_mean is mean
    assert model.head.weight is parameter
    assert next(iter(optimizer.state.values()))["exp_avg"] is moments[0]
    assert type(mean) is Tensor
    lent = [tensor for _, _, tensor in zerodp.local_shards(model)]
    with torch.no_grad():
        for tensor, again in zip(shards, lent, strict=True):
            assert tensor.data_ptr() == again.data_ptr()
            tensor.fill_(0.5)  # live still
    assert all(
        bool((value == 0.5).all())
        for name, value in model.state_dict().items()
        if "norm.r" not in name and "num" not in name
    )


USES: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "forward": lambda m, o, loss: m(torch.ones(2, 3)),
    "forward of a part": lambda m, o, loss: m.blocks[0].a(torch.ones(2, 6)),
    "backward": lambda m, o, loss: loss.backward(),
    "scaled backward": lambda m, o, loss: o.backward(loss),
    "step": lambda m, o, loss: o.step(),
    "clip": lambda m, o, loss: o.clip_grad_norm_(1.0),
    "zero_grad": lambda m, o, loss: o.zero_grad(),
    "model.zero_grad": lambda m, o, loss: m.zero_grad(),
    "state_dict": lambda m, o, loss: m.state_dict(),
    "load_state_dict": lambda m, o, loss: m.load_state_dict({}),
    "optimizer.state_dict": lambda m, o, loss: o.state_dict(),
    "full_state_dict": lambda m, o, loss: zerodp.full_state_dict(m),
    "full_params": lambda m, o, loss: zerodp.full_params(m).__enter__(),
    "full_grads": lambda m, o, loss: zerodp.full_grads(m),
    "local_shards": lambda m, o, loss: zerodp.local_shards(m),
    "local_shards of gradients": lambda m, o, loss: zerodp.local_shards(m, "gradients"),
    "save": lambda m, o, loss: zerodp.save("/nowhere", m, o),
    "load": lambda m, o, loss: zerodp.load("/nowhere", m, o),
    "unshard": lambda m, o, loss: zerodp.unshard(m, o),
    "sleep": lambda m, o, loss: zerodp.sleep(m),
    "a parameter": lambda m, o, loss: m.head.weight.sum(),
    "a parameter's data": lambda m, o, loss: m.head.weight.data,
    "a buffer": lambda m, o, loss: m.norm.running_mean + 1,
    "a moment": lambda m, o, loss: next(iter(o.state.values()))["exp_avg"].max(),
    "a segment": lambda m, o, loss: o.param_groups[0]["params"][0].norm(),
    "a segment's gradient": lambda m, o, loss: o.param_groups[0]["params"][0].grad,
    "GradScaler": lambda m, o, loss: unscaled(o, loss),
}


def unscaled(optimizer: Any, loss: Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss.detach())
    scaler.unscale_(optimizer)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("rest", ["device", "host", "disk"])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_every_use_is_told(place: str, rest: str, stage: int) -> None:
    """Wherever the optimizer's states rest."""
    model, optimizer = sharded(stage, offload=zerodp.Offload(optimizer=rest))
    backward(model, 0)
    optimizer.step()
    backward(model, 1)
    loss = model(torch.ones(2, 3)).sum()
    zerodp.sleep(model, optimizer, place)
    for name, use in USES.items():
        with pytest.raises(zerodp.ShardedError) as told:
            use(model, optimizer, loss)
        where = {"host": "in host memory", "disk": "on disk"}[place]
        assert f"asleep, its values are {where} (zerodp.sleep): zerodp.wake(model)" in str(told.value), name
    assert model.norm.running_mean.shape == (3,)
    zerodp.wake(model)
    optimizer.step()


@on_ranks(2)
def test_a_full_disk_leaves_everything_where_it_is(stage: int, tmp_path: Path) -> None:
    model, optimizer = sharded(stage)
    backward(model, 0)
    before = copied(dict(model.state_dict()))
    bytes_before = held(model)
    with (
        largest_file(4096 if dist.get_rank() == 1 else 2**30),
        pytest.raises(zerodp.StorageError, match=r"rank 1: offload: [\d,]+ bytes more could not be written"),
    ):
        zerodp.sleep(model, optimizer, "disk", str(tmp_path))
    all_close("still there", dict(model.state_dict()), before)
    assert held(model) == bytes_before
    optimizer.step()


@on_ranks(2)
def test_no_host_memory_on_one_rank_leaves_everything_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = sharded(3)
    backward(model, 0)
    before = copied(dict(model.state_dict()))
    take, calls = HostTier.reserve, iter(range(1000))

    def scarce(tier: Any, *args: Any) -> Any:
        if dist.get_rank() == 1 and next(calls) == 2:
            raise RuntimeError("no memory for 100 bytes on the host")
        return take(tier, *args)

    monkeypatch.setattr(HostTier, "reserve", scarce)
    with pytest.raises(zerodp.StorageError, match="rank 1: sleep: there is no room for the values: no memory for 100"):
        zerodp.sleep(model, optimizer, "host")
    monkeypatch.undo()
    all_close("still there", dict(model.state_dict()), before)
    optimizer.step()
    zerodp.sleep(model, optimizer, "host")
    zerodp.wake(model)


@on_ranks(2)
def test_what_cannot_be_read_stays_asleep(tmp_path: Path) -> None:
    model, optimizer = sharded(3)
    zerodp.sleep(model, optimizer, "disk", str(tmp_path))
    tier = model._zerodp.lending.asleep.tier
    while tier.busy:
        tier.ledgers()
    size, before = os.fstat(tier.file.handle).st_size, b""
    if dist.get_rank() == 0:
        before = exchanged(tier.file.handle, b"\xff" * size)
    with pytest.raises(zerodp.StorageError, match=r"rank 0: .*are not what was written there"):
        zerodp.wake(model)
    with pytest.raises(zerodp.ShardedError, match="asleep"):
        model(torch.ones(2, 3))
    assert device_bytes(model) == 0
    if dist.get_rank() == 0:
        exchanged(tier.file.handle, before)
    zerodp.wake(model)
    backward(model, 0)
    optimizer.step()


def exchanged(handle: int, data: bytes) -> bytes:
    """Write to an open file as another process could; the result is what was there."""
    with open(f"/proc/self/fd/{handle}", "r+b", buffering=0) as other:
        before = os.pread(other.fileno(), len(data), 0)
        os.pwrite(other.fileno(), data, 0)
        os.fsync(other.fileno())
    return before


@on_ranks(2)
def test_mistakes() -> None:
    model, optimizer = sharded(2)
    other, others = sharded(3)
    for call, error, message in (
        (lambda: zerodp.wake(model), zerodp.ShardedError, "this model is awake"),
        (lambda: zerodp.sleep(model, others), zerodp.ConfigError, "was not sharded with this model"),
        (lambda: zerodp.sleep(model, to="moon"), zerodp.ConfigError, "to must be one of 'host', 'disk', got 'moon'"),
        (lambda: zerodp.sleep(model, path="/tmp"), zerodp.ConfigError, 'path is the folder of to="disk"'),
        (
            lambda: zerodp.sleep(model, to="disk", path="/nowhere"),
            zerodp.StorageError,
            "no file can be made in '/nowhere'",
        ),
        (lambda: zerodp.sleep(nn.Linear(1, 1)), zerodp.ConfigError, "expected a model that zerodp.shard returned"),
    ):
        with pytest.raises(error, match=message):
            call()
    with zerodp.full_params(model), pytest.raises(zerodp.ShardedError, match=r"sleep\(\) inside full_params"):
        zerodp.sleep(model)
    model.head.register_forward_hook(lambda *_: zerodp.sleep(model))
    with pytest.raises(zerodp.ShardedError, match=r"sleep\(\) inside a forward or backward pass"):
        model(torch.ones(2, 3))
    zerodp.sleep(other)
    zerodp.wake(other)
    close("weight", torch.tensor(others.param_groups[0]["lr"]), torch.tensor(optimizer.param_groups[0]["lr"]))
