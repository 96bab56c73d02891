"""What crosses the wire: elements and operations of a step, exactly, by stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerodp
from tests.ranks.oracle import momentum, squares
from tests.ranks.pool import on_ranks
from tests.ranks.test_memory import aligned

WIDTH, LAYERS = 96, 4  # 9216 elements a layer: multiples of 64 for 2, 3 and 4 ranks
NUMEL = LAYERS * WIDTH * WIDTH
sharded_stages = pytest.mark.parametrize("stage", [1, 2, 3], ids="zero{}".format)


def counted(micro: tuple[bool, ...] = (True,), steps: int = 2, **options: Any) -> zerodp.Stats:
    """Collectives of so many steps in the steady state."""
    model = aligned(LAYERS, WIDTH)
    model, optimizer = zerodp.shard(model, momentum(model), **{"units": [nn.Linear], **options})

    def step() -> None:
        for synced in micro:
            x = torch.ones(2, WIDTH)
            if synced:
                squares(model, x).backward()
            else:
                with model.no_sync():
                    squares(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    zerodp.stats(model).reset()
    for _ in range(steps):
        step()
    zerodp.full_grads(model)  # nothing is under way any more, and there is no gradient that would travel
    return zerodp.stats(model)


def elements(stats: zerodp.Stats, *ops: str) -> int:
    return sum(row.elements for row in stats.comm if row.op in ops)


@on_ranks(1, 2, 3, 4)
def test_elements_of_a_step_are_those_of_the_paper(stage: int, world_size: int) -> None:
    """2 and 2 and 2 and 3 times the parameters, times (N - 1) / N. Every two of options, stage and ranks meet."""
    every: list[dict[str, Any]] = [{}, {"bucket_bytes": 4096}, {"prefetch": 0}, {"units": None}]
    options = every[(stage + world_size) % 4]
    stats = counted(stage=stage, **options)
    once = NUMEL * (world_size - 1) // world_size
    assert stats.wire_elements == 2 * (3 if stage == 3 else 2) * once
    assert stats.wire_bytes == 4 * stats.wire_elements
    if stage == 0:
        assert elements(stats, "all_reduce") == stats.wire_elements
    else:
        assert elements(stats, "reduce_scatter") == 2 * once
        assert elements(stats, "all_gather") == 2 * (2 if stage == 3 else 1) * once


@on_ranks(2)
@sharded_stages
def test_operations_of_a_step(stage: int) -> None:
    """One reduction and one gather per unit, a second gather in stage 3; in pieces, as many times more."""
    for options, pieces in (({}, 1), ({"bucket_bytes": WIDTH * WIDTH * 4 // 3}, 3)):
        rows = counted(stage=stage, steps=1, **options).comm
        for op, times in (("all_gather", 2 if stage == 3 else 1), ("reduce_scatter", 1)):
            counts = {row.unit: row.count for row in rows if row.op == op}
            assert counts == {str(unit): times * pieces for unit in range(LAYERS)}


@on_ranks(2)
def test_low_precision_halves_the_bytes(stage: int) -> None:
    stats = counted(stage=stage, precision="bf16")
    assert stats.wire_elements == 2 * (3 if stage == 3 else 2) * NUMEL // 2
    assert stats.wire_bytes == 2 * stats.wire_elements
    assert {row.dtype for row in stats.comm} == {torch.bfloat16}


@on_ranks(2)
@pytest.mark.parametrize("micro", [(True, True, True), (False, False, True)], ids=["synced", "no_sync"])
def test_accumulation(micro: tuple[bool, ...], stage: int) -> None:
    """Every synchronised backward is reduced; stage 3 gathers for each forward and each backward."""
    stats = counted(micro, steps=1, stage=stage)
    once, reductions = NUMEL // 2, sum(micro)
    if stage == 0:
        assert elements(stats, "all_reduce") == 2 * reductions * once
    else:
        assert elements(stats, "reduce_scatter") == reductions * once
        assert elements(stats, "all_gather") == (2 * len(micro) if stage == 3 else 1) * once


@on_ranks(2)
def test_what_is_kept_is_not_gathered_again() -> None:
    """With a budget for everything stage 3 sends what stage 2 sends; for two of four layers, something between."""
    one = WIDTH * WIDTH * 4
    sent = [counted(stage=3, steps=1, unsharded_bytes=budget * one).wire_elements for budget in (0, 1, 2, LAYERS)]
    assert sent[0] == 3 * NUMEL // 2
    assert sent[-1] == 2 * NUMEL // 2
    assert sent[0] > sent[1] > sent[2] > sent[3]


@on_ranks(2)
def test_evaluation_gathers_once(stage: int) -> None:
    model = aligned(LAYERS, WIDTH)
    model, _ = zerodp.shard(model, stage=stage, units=[nn.Linear])
    for _ in range(2):
        zerodp.stats(model).reset()
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
    assert zerodp.stats(model).wire_elements == (NUMEL // 2 if stage == 3 else 0)


@on_ranks(2)
@sharded_stages
def test_frozen_units_are_not_reduced(stage: int) -> None:
    model = aligned(LAYERS, WIDTH)
    for index in (0, 2):
        model[index].requires_grad_(False)
    model, optimizer = zerodp.shard(model, momentum(model), stage=stage, units=[nn.Linear])
    for _ in range(2):
        zerodp.stats(model).reset()
        squares(model, torch.ones(2, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = zerodp.stats(model)
    assert elements(stats, "reduce_scatter") == NUMEL // 2 // 2
    gathered = {row.unit for row in stats.comm if row.op == "all_gather"}
    assert gathered == ({"0", "1", "2", "3"} if stage == 3 else {"1", "3"})


@on_ranks(4)
def test_hybrid_mesh(stage: int) -> None:
    """Gathers and reductions inside each half, then an all-reduce of the shard between the halves."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    stats = counted(stage=stage, mesh=mesh, steps=1)
    inside, shard = NUMEL // 2, NUMEL // 2
    if stage == 0:
        assert stats.wire_elements == 2 * NUMEL * 3 // 4
    else:
        assert elements(stats, "all_gather") == (2 if stage == 3 else 1) * inside
        assert elements(stats, "reduce_scatter") == inside
        assert elements(stats, "all_reduce") == 2 * shard // 2


@on_ranks(2)
def test_padding_is_counted_and_small(stage: int) -> None:
    """26 elements in one unit: 4 starts at multiples of 64, 128 for each of two ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    model, optimizer = zerodp.shard(model, momentum(model), stage=stage)
    for _ in range(2):
        zerodp.stats(model).reset()
        squares(model, torch.ones(2, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    zerodp.full_grads(model)
    assert zerodp.stats(model).wire_elements == (3 if stage == 3 else 2) * 128


@on_ranks(2)
def test_reset_clears(stage: int) -> None:
    stats = counted(stage=stage)
    assert stats.wire_elements > 0
    assert stats.launches == sum(row.count for row in stats.comm) > 0
    stats.reset()
    assert (stats.wire_elements, stats.wire_bytes, stats.launches, stats.comm, stats.trace) == (0, 0, 0, [], [])
