"""Stages and world sizes give one and the same training."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import Task, adamw, all_close, close, named, parity, rows, run, same
from tests.ranks.pool import on_ranks
from tests.ranks.test_situations import SITUATIONS
from tests.ranks.toys import Net, ToyA, X, toy_b

case = pytest.mark.case


class TiedWithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.middle = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))))


@case("B19")
@on_ranks(1, 2, 4)
def test_tied_mlp_with_an_unused_branch(stage: int, world_size: int) -> None:
    """What has no gradient on any rank is not decayed either, as in plain torch. Every stage with both kinds of units."""
    units: Any = (None, [nn.Linear])[(stage + world_size.bit_length()) % 2]

    def decayed(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)

    task = Task(TiedWithUnused, rows(8), optimizer=decayed, steps=4)
    records = parity(task, stage=stage, units=units, tolerance=0.0 if world_size <= 2 else 1e-6)
    untouched, _ = task.build(0)
    for name, parameter in untouched.named_parameters():
        if name.startswith("unused"):
            close(name, records[-1].parameters[name], parameter.detach())


@case("B20")
@on_ranks(2)
def test_norm_in_bf16_stays(stage: int) -> None:
    """Neither a loss scale that was never applied nor gradients that were never zeroed show in the second step's norm."""
    model = ToyA()
    model, optimizer = zerodp.shard(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=stage, precision="bf16")
    for _ in range(2):
        model((dist.get_rank() + 1) * X).backward()
        assert optimizer.clip_grad_norm_(1e9) == pytest.approx(8.22, rel=2**-8)
        optimizer.step()
        optimizer.zero_grad()


@case("B21")
@on_ranks(2, 3)
def test_all_ranks_start_from_rank_0(stage: int) -> None:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*toy_b(), nn.BatchNorm1d(1))
    model[3].running_mean.fill_(dist.get_rank() + 5)
    torch.manual_seed(0)
    expected = nn.Sequential(*toy_b(), nn.BatchNorm1d(1))
    expected[3].running_mean.fill_(5)
    model, _ = zerodp.shard(model, stage=stage)
    all_close("start", dict(model.state_dict()), dict(expected.state_dict()))
    close("buffer", model[3].running_mean, torch.tensor([5.0]))


@case("B22")
@on_ranks(2)
def test_uneven_token_counts_with_a_sum_and_a_global_divisor(stage: int) -> None:
    """Three tokens of gradient 2 on one rank, one of gradient 10 on the other: (3 * 2 + 10) / 4."""
    for reduction, divisor, expected in (("sum", 4, 4.0), ("mean", 2, 4.0), ("mean", None, 6.0)):
        model = nn.Linear(1, 1, bias=False)
        model, _ = zerodp.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, reduction=reduction)
        tokens = torch.full((3, 1), 2.0) if dist.get_rank() == 0 else torch.full((1, 1), 10.0)
        (model(tokens).sum() / (divisor or len(tokens))).backward()
        assert zerodp.full_grads(model)["weight"].item() == expected


@on_ranks(2, 3)
def test_sum_instead_of_mean(stage: int, world_size: int) -> None:
    """Every two of stage, ranks and micro-batches meet."""
    for micro in [(True,), (True, True), (False, True)][(stage + world_size) % 2 :: 2]:
        with named(micro):
            task = Task(Net, rows(3), micro=micro, reduction="sum")
            parity(task, stage=stage, reduction="sum", tolerance=0.0 if world_size == 2 else 1e-6)


def slowed(method: Callable[..., Any], seed: int) -> Callable[..., Any]:
    """The same collective, late by a random moment that differs between the ranks."""
    jitter = random.Random(seed)

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(jitter.random() * 0.002)
        return method(*args, **kwargs)

    return late


@case("B24")
@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3], ids="zero{}".format)
def test_slow_and_uneven_communication_changes_nothing(stage: int) -> None:
    from zerodp.core.comm import Comm, Handle

    task = Task(toy_b, rows(3), optimizer=adamw, steps=10)
    options = {"stage": stage, "units": [nn.Linear], "bucket_bytes": 256}
    reference = parity(task, prefetch=0, **options)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Comm, "all_gather"), (Comm, "reduce_scatter"), (Handle, "wait")):
            patch.setattr(owner, name, slowed(getattr(owner, name), seed=dist.get_rank()))
        for prefetch in (0, 2):
            records = run(task, prefetch=prefetch, **options)
            assert all(tensor.isfinite().all() for tensor in records[-1].parameters.values())
            same(records, reference)


@case("B25")
@on_ranks(1)
def test_one_rank_is_an_ordinary_case(stage: int) -> None:
    task = Task(toy_b, rows(3), optimizer=adamw, steps=4, micro=(False, True), max_norm=0.1)
    parity(task, stage=stage, tolerance=1e-7)
    model, optimizer = task.build(0)
    model, optimizer = zerodp.shard(model, optimizer, stage=stage)
    fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model(rows(3)(0, 0, 0)).sum().backward()
    assert set(zerodp.full_grads(model)) == set(fresh)
    optimizer.step()
    model.load_state_dict(fresh)
    all_close("loaded back", dict(model.state_dict()), fresh)
    with zerodp.full_params(model):
        close("gathered", model[0].weight.detach().clone(), fresh["0.weight"])
    assert "0.weight" in optimizer.state_dict()["state"]
    model, optimizer = zerodp.unshard(model, optimizer)
    assert type(model) is nn.Sequential


@on_ranks(1)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_situation_on_one_rank(situation: str) -> None:
    task = SITUATIONS[situation]
    for stage in range(4):
        parity(task, stage=stage)


@on_ranks(2, 3, 4)
def test_awkward_sizes(stage: int, world_size: int) -> None:
    """Layers whose sizes are drawn at random, from 1 element to more than a shard: three models, of which each stage has all."""
    sizes = random.Random((stage + world_size) % 3)
    widths = [3, *(sizes.choice([1, 2, 7, 15, 33, 64]) for _ in range(4)), 2]

    def model() -> nn.Module:
        layers = [nn.Linear(a, b, bias=b != 7) for a, b in itertools.pairwise(widths)]
        return nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))

    task = Task(model, rows(3), optimizer=adamw)
    parity(task, stage=stage, units=[nn.Linear], tolerance=0.0 if world_size == 2 else 1e-6)


@on_ranks(2)
def test_other_reduction_than_in_rank_order(stage: int) -> None:
    """exact=False: the backend's own reduce-scatter; two terms have one sum."""
    parity(Task(Net, rows(3)), stage=stage, exact=False)


@on_ranks(2)
def test_float64_models(stage: int) -> None:
    def batch(step: int, micro: int, rank: int) -> Tensor:
        return rows(3)(step, micro, rank).double()

    parity(Task(lambda: Net().double(), batch), stage=stage)
