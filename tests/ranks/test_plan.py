"""The planner against measurement: what it says a rank holds and sends is what a sharded model holds and sends, exactly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerodp
from tests.ranks.oracle import adamw, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.test_memory import aligned
from tests.ranks.toys import Block, Net
from zerodp.core.stages import STAGES, Residency
from zerodp.planning import automatic
from zerodp.planning.estimate import Estimate, estimate
from zerodp.planning.plan import model_of
from zerodp.planning.recommend import STATE_SHARE
from zerodp.planning.setup import Setup

OPTIMIZER = ("master", "first_moment", "second_moment")


def half_frozen() -> nn.Module:
    model = Net(width=20)
    model.blocks[1].requires_grad_(False)
    model.emb.bfloat16()
    model.emb.register_forward_pre_hook(lambda module, inputs: (inputs[0].to(module.weight.dtype),))
    model.emb.register_forward_hook(lambda module, inputs, output: output.to(model.head.weight.dtype))
    return model


def predicted(model: nn.Module, stage: Any, **options: Any) -> Estimate:
    """For this rank; `exact` as on gloo."""
    units = options.pop("units", None)
    setup = Setup(dist.get_world_size(), exact=True, **{"precision": None, **options})
    return estimate(model_of(model, setup, units), setup, stage, dist.get_rank())


def measured(model: nn.Module) -> dict[str, int]:
    now = zerodp.stats(model).memory.now
    return {
        "parameters": now["parameters"],
        "gradients": now["gradients"],
        "optimizer": sum(now[kind] for kind in OPTIMIZER),
    }


def same(found: Estimate, model: nn.Module) -> None:
    now = measured(model)
    assert {kind: found.kinds[kind] for kind in now} == now
    assert found.zerodp_state_bytes == sum(now.values())


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("precision", [None, "bf16", "low"])
def test_held_bytes_are_those_measured(precision: Any, stage: int, world_size: int) -> None:
    """Every two of stage, ranks, precision and model meet."""
    make = (Net, half_frozen)[(stage + world_size.bit_length() + (precision == "bf16")) % 2]
    precision = zerodp.Precision(torch.bfloat16, grad_dtype=torch.bfloat16) if precision == "low" else precision
    torch.manual_seed(0)
    model = make()
    found = predicted(model, stage, precision=precision, units=[Block])
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[Block], precision=precision)
    for step in range(2):
        optimizer.zero_grad()
        squares(model, rows(3)(step, 0, dist.get_rank())).backward()
        optimizer.step()
    same(found, model)


@on_ranks(1, 2)
@pytest.mark.parametrize("make", [Net, half_frozen])
def test_offload_holds_and_moves_what_is_planned(make: Any, stage: int, world_size: int) -> None:
    """On the device, on the host, and over the link between them."""
    for precision, optimizer, params in (
        (None, "host", "device"),
        ("bf16", "host", "device"),
        (None, "host", "host"),
        ("bf16", "host", "host"),
        (None, "device", "host"),
        ("bf16", "device", "host"),
    ):
        if params != "device" and stage < 3:
            continue
        torch.manual_seed(0)
        model = make()
        options = {"precision": precision, "units": [Block], "offload_optimizer": optimizer, "offload_params": params}
        found = predicted(model, stage, **options)
        offload = zerodp.Offload(optimizer=optimizer, params=params)
        model, stepper = zerodp.shard(
            model, adamw(model), stage=stage, units=[Block], precision=precision, offload=offload
        )
        stats = zerodp.stats(model)
        for step in range(2):
            stats.reset()
            stepper.zero_grad()
            squares(model, rows(3)(step, 0, dist.get_rank())).backward()
            stepper.step()
        same(found, model)
        assert found.tiers["host"] == sum(n for kind, n in stats.memory.host.items() if kind != "other_state")
        if optimizer == "host" and params == "device":
            assert found.host_link_bytes == sum(stats.link_bytes)


@on_ranks(2)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_accumulation_holds_what_is_planned(precision: str | None, stage: int) -> None:
    model = Net()
    found = predicted(model, stage, precision=precision, accumulate=2)
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, precision=precision)
    for micro in range(2):
        squares(model, rows(3)(0, micro, dist.get_rank())).backward()
    optimizer.step()
    same(found, model)


@on_ranks(4)
def test_hybrid_meshes_and_mixed_stages(stage: int) -> None:
    model = Net()
    found = predicted(model, stage, replicate=2, units=[Block])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[Block], mesh=mesh)
    squares(model, rows(3)(0, 0, dist.get_rank())).backward()
    optimizer.step()
    same(found, model)


@on_ranks(2)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw", "rmsprop"])
def test_optimizers_keep_the_moments_planned(optimizer: str) -> None:
    makes: dict[str, Any] = {
        "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
        "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        "adamw": torch.optim.AdamW,
        "rmsprop": torch.optim.RMSprop,
    }
    model = Net()
    found = predicted(model, 3, optimizer=optimizer)
    model, sharded = zerodp.shard(model, makes[optimizer](model.parameters()), stage=3)
    squares(model, rows(3)(0, 0, dist.get_rank())).backward()
    sharded.step()
    same(found, model)


@on_ranks(1, 2, 4)
def test_wire_is_as_planned(stage: int, world_size: int) -> None:
    """Every two of stage, ranks and options meet."""
    every: list[dict[str, Any]] = [{}, {"bucket_bytes": 4096}, {"accumulate": 2}, {"unsharded_bytes": 20_000}]
    for options in every[(stage + world_size.bit_length()) % 2 :: 2]:
        model = Net(width=48)
        found = predicted(model, stage, precision="bf16", units=[Block], **options)
        backwards = options.get("accumulate", 1)
        given = {key: value for key, value in options.items() if key != "accumulate"}
        model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[Block], precision="bf16", **given)
        for step in range(3):
            zerodp.stats(model).reset()
            for micro in range(backwards):
                squares(model, rows(3)(step, micro, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
        zerodp.full_grads(model)
        stats = zerodp.stats(model)
        assert stats.wire_elements == found.sent_elements, options
        assert stats.wire_bytes == found.sent_bytes, options
        assert stats.launches == found.operations, options


@on_ranks(2, 4)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_memory_in_use_is_as_planned(precision: str | None, stage: int, world_size: int) -> None:
    model = aligned(layers=6, width=128)
    found = predicted(model, stage, precision=precision, units=[nn.Linear])
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[nn.Linear], precision=precision)
    for _ in range(3):
        zerodp.stats(model).reset()
        squares(model, torch.ones(2, 128)).backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = zerodp.stats(model).memory.peak
    assert peak["unsharded"] == found.kinds["unsharded"]
    assert peak["buckets"] == found.kinds["buckets"]


@on_ranks(2)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_sums_that_go_to_disk_take_one_piece(precision: str | None, stage: int) -> None:
    """Each unit travels in several pieces."""
    model = aligned(layers=6, width=128)
    options: dict[str, Any] = {"precision": precision, "units": [nn.Linear], "bucket_bytes": 2**14}
    found = predicted(model, stage, **options, offload_optimizer="disk")
    model, optimizer = zerodp.shard(
        model, adamw(model), stage=stage, offload=zerodp.Offload(optimizer="disk"), **options
    )
    for _ in range(2):
        zerodp.stats(model).reset()
        squares(model, torch.ones(2, 128)).backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = zerodp.stats(model).memory.peak
    assert peak["unsharded"] == found.kinds["unsharded"]
    assert peak["buckets"] == found.kinds["buckets"]


# ---- stage="auto"


def residencies(model: nn.Module) -> list[Residency]:
    return [unit.flats[0].residency for unit in model._zerodp.units]


@contextlib.contextmanager
def free(nbytes: float) -> Iterator[None]:
    """Each rank's share of the host is as if `nbytes` were free for it, and far more on the last rank."""
    real, n = automatic.free_bytes, dist.get_world_size()
    automatic.free_bytes = lambda device: int(nbytes * n * (1 if dist.get_rank() < n - 1 else 100))
    try:
        yield
    finally:
        automatic.free_bytes = real


def large() -> nn.Module:
    return aligned(layers=6, width=128)


def auto(free_for_each: float, **options: Any) -> tuple[nn.Module, Any]:
    """Sharded with so much room, what the model itself takes included."""
    model = large()
    own = sum(p.nbytes for p in model.parameters())
    with free(free_for_each - own):
        return zerodp.shard(model, adamw(model), stage="auto", units=[nn.Linear], **options)


@on_ranks(4)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_auto_takes_the_least_communication_that_fits(precision: str | None, stage: int) -> None:
    needed = predicted(large(), stage, precision=precision, units=[nn.Linear]).device_bytes
    model, optimizer = auto(needed / STATE_SHARE + 64, precision=precision)
    assert residencies(model) == [STAGES[stage]] * 6
    squares(model, torch.ones(2, 128)).backward()
    optimizer.step()
    assert zerodp.stats(model).memory.total_peak <= needed + 4096  # step counts and the like


@on_ranks(4)
def test_auto_keeps_units_gathered_while_there_is_room() -> None:
    """Between stages 3 and 2, some units are of either, the same on all ranks."""
    lower, upper = (predicted(large(), s, units=[nn.Linear]).device_bytes for s in (3, 2))
    budget = (lower + upper) / 2
    model, optimizer = auto(budget / STATE_SHARE)
    found = residencies(model)
    assert 0 < found.count(STAGES[2]) < 6
    assert found.count(STAGES[2]) + found.count(STAGES[3]) == 6
    for _ in range(2):
        squares(model, torch.ones(2, 128)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert zerodp.stats(model).memory.total_peak <= budget + 4096


@on_ranks(2)
def test_auto_refuses_what_cannot_fit() -> None:
    needed = predicted(large(), 3, units=[nn.Linear]).device_bytes
    with pytest.raises(zerodp.ConfigError, match=r"found no stage that fits: stage 3 needs .* on each of 2 ranks"):
        auto(needed * 0.9)


@on_ranks(1, 2)
def test_auto_with_the_memory_of_this_machine(world_size: int) -> None:
    """A small model fits whole; without an optimizer too."""
    model, _ = zerodp.shard(Net(), stage="auto", ignore=["head.*"])
    assert residencies(model) == [STAGES[0]] * len(model._zerodp.units)
    assert automatic.free_bytes(torch.device("cpu")) > 2**20


@on_ranks(1, 2)
def test_auto_keeps_to_what_is_offloaded(world_size: int) -> None:
    """Parameters rest on the host in the last stage alone; on the CPU the host's memory is the device's."""
    model, _ = auto(2**40, offload=zerodp.Offload(params="host"))
    assert residencies(model) == [STAGES[3]] * 6
    one = predicted(large(), 2, units=[nn.Linear], offload_optimizer="host")
    with pytest.raises(zerodp.ConfigError, match="found no stage that fits: stage 3 needs"):
        auto(one.device_bytes / 2, offload=zerodp.Offload(optimizer="host"))
