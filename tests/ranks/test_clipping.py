"""One norm for the whole model: the same number on every rank, whatever the stage, the buckets and the world size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerodp
from tests.ranks.oracle import Task, adamw, all_close, close, parity, rows, same, squares, total_norm
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net, ToyA, ToyA2, X, toy_b

case = pytest.mark.case
CLIPPED = torch.tensor([0.98174, 0.96349, 0.94523, 0.92697])


def sharded(model: nn.Module, **options: Any) -> tuple[nn.Module, zerodp.ShardedOptimizer]:
    return zerodp.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def backward(model: nn.Module, factor: float = 1.0) -> None:
    model(factor * (dist.get_rank() + 1) * X).backward()


@case("B12", "B14")
@on_ranks(2)
def test_norm_is_global_and_a_plain_number(stage: int) -> None:
    model, optimizer = sharded(ToyA(), stage=stage)
    backward(model)
    norm = optimizer.clip_grad_norm_(1.0)
    assert type(norm) is float
    assert norm == pytest.approx(8.2158, abs=1e-4)
    optimizer.step()
    close("w", model.state_dict()["w"], CLIPPED, 1e-5)


@case("B14")
@on_ranks(2)
def test_norm_when_nothing_is_clipped(stage: int) -> None:
    model, optimizer = sharded(ToyA(), stage=stage)
    backward(model)
    assert optimizer.clip_grad_norm_(math.inf) == pytest.approx(8.2158, abs=1e-4)
    assert optimizer.clip_grad_norm_(100.0) == pytest.approx(8.2158, abs=1e-4)
    optimizer.step()
    close("w", model.state_dict()["w"], torch.tensor([0.85, 0.7, 0.55, 0.4]), 1e-6)


@case("B13")
@on_ranks(2)
def test_replicated_parameters_count_once(stage: int) -> None:
    model, optimizer = sharded(ToyA2(), stage=stage, ignore="first")
    backward(model)
    assert optimizer.clip_grad_norm_(1.0) == pytest.approx(8.2158, abs=1e-4)
    optimizer.step()
    state = model.state_dict()
    close("w", torch.cat([state["first"], state["second"]]), CLIPPED, 1e-5)


@case("B15")
@on_ranks(2)
@pytest.mark.parametrize(("p", "expected"), [(1.0, 15.0), (2.0, 8.2158), (3.0, 6.9624), (math.inf, 6.0), ("inf", 6.0)])
def test_other_norms(p: float, expected: float, stage: int) -> None:
    model, optimizer = sharded(ToyA2(), stage=stage, units=lambda name, module: False)
    backward(model)
    norm = optimizer.clip_grad_norm_(1.0, norm_type=float(p))
    assert norm == pytest.approx(expected, abs=1e-4)
    gradients = zerodp.full_grads(model)
    close("clipped", torch.cat([gradients["first"], gradients["second"]]), 1.5 * X / norm, 1e-5)


@case("B16")
@on_ranks(2)
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_norm_does_not_depend_on_the_layout(p: float) -> None:
    """Whole, in three buckets, and one per parameter, at every stage."""
    layouts: list[dict[str, Any]] = [{}, {"bucket_bytes": 512}, {"bucket_bytes": 4}, {"units": [nn.Linear]}]
    seen = set()
    for stage in range(4):
        for layout in layouts:
            torch.manual_seed(0)
            model, optimizer = sharded(
                nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 7)), stage=stage, **layout
            )
            squares(model, rows(3)(0, 0, dist.get_rank())).backward()
            norm = optimizer.clip_grad_norm_(0.1, norm_type=p)
            optimizer.step()
            seen.add((norm, *(tensor.double().sum().item() for tensor in model.state_dict().values())))
    assert len(seen) == 1


@case("B16")
@on_ranks(2, 3, 4)
def test_clipped_training_is_the_same_in_every_stage_and_layout(world_size: int) -> None:
    task = Task(Net, rows(3), optimizer=adamw, max_norm=0.1, steps=5)
    first = parity(task, stage=0, tolerance=1e-6)
    for stage in (1, 2, 3):
        same(parity(task, stage=stage, tolerance=1e-6, units=[Block], bucket_bytes=512), first)


@case("B18")
@on_ranks(2)
def test_accumulated_then_clipped(stage: int) -> None:
    model, optimizer = sharded(ToyA(), stage=stage)
    for factor in (1.0, 2.0):
        backward(model, factor / 2)
    assert optimizer.clip_grad_norm_(1.0) == pytest.approx(12.3238, abs=1e-4)
    optimizer.step()
    close("w", model.state_dict()["w"], CLIPPED, 1e-5)  # the direction is the same, and so is the clipped length


@on_ranks(2)
def test_second_clip_finds_the_clipped_norm(stage: int) -> None:
    model, optimizer = sharded(ToyA(), stage=stage)
    backward(model)
    optimizer.clip_grad_norm_(1.0)
    assert optimizer.clip_grad_norm_(1.0) == pytest.approx(1.0, abs=1e-5)


@on_ranks(2)
def test_norm_without_gradients_is_zero(stage: int) -> None:
    _, optimizer = sharded(toy_b(), stage=stage)
    assert optimizer.clip_grad_norm_(1.0) == 0.0


@on_ranks(2)
def test_norm_sees_frozen_parameters_as_nothing(stage: int) -> None:
    model = toy_b()
    model[0].requires_grad_(False)
    model, optimizer = sharded(model, stage=stage)
    squares(model, rows(3)(0, 0, dist.get_rank())).backward()
    gradients = zerodp.full_grads(model)
    assert set(gradients) == {"2.weight", "2.bias"}
    assert optimizer.clip_grad_norm_(1.0) == pytest.approx(total_norm(gradients.values()), rel=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_norm_of_bad_gradients_is_bad_on_all_ranks(bad: float, stage: int) -> None:
    """Only rank 0's shard holds the bad element."""
    model = nn.Linear(128, 1, bias=False)
    model, optimizer = sharded(model, stage=stage)
    x = torch.ones(1, 128)
    if dist.get_rank() == 0:
        x[0, 0] = bad
    model(x).sum().backward()
    norm = optimizer.clip_grad_norm_(1.0)
    assert math.isnan(norm) if math.isnan(bad) else norm == bad


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_torchs_own_clipping_is_refused_not_silent(stage: int) -> None:
    model, _ = sharded(ToyA(), stage=stage)
    backward(model)
    with pytest.raises(zerodp.ShardedError, match="clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@on_ranks(2)
def test_small_gradients_beside_a_large_one_count(stage: int) -> None:
    """2^14 and 4095 ones: added up one by one in fp32, all ones would be lost, and with them 8e-6 of the norm."""
    model = nn.Linear(4096, 1, bias=False)
    model, optimizer = sharded(model, stage=stage)
    x = torch.full((1, 4096), 1.0)
    x[0, 0] = 2.0**14
    model(x).sum().backward()
    assert optimizer.clip_grad_norm_(math.inf) == pytest.approx(math.sqrt(2.0**28 + 4095), rel=2**-22)


@on_ranks(2)
def test_all_ranks_get_the_same_number(stage: int) -> None:
    model, optimizer = sharded(toy_b(), stage=stage)
    squares(model, rows(3)(0, 0, dist.get_rank())).backward()
    norm = optimizer.clip_grad_norm_(0.1)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, norm)
    assert len(set(every)) == 1
    state = model.state_dict()
    assert all(tensor.isfinite().all() for tensor in state.values())
    all_close("state", dict(state), dict(model.state_dict()))
