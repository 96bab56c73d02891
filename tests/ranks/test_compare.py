"""`compare` on several ranks: random losses, settings in a `Config`, and ranks that run out of batches."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Net


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def noisy(model: nn.Module, batch: Tensor) -> Tensor:
    """Draws from torch and from Python: other numbers on each rank, and other ones in each step."""
    return squares(model, batch * torch.rand_like(batch)) * (1 + random.random())


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_random_losses_and_a_config(stage: int, reduction: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(7 + rank)
    random.seed(11 + rank)
    before = torch.get_rng_state(), random.getstate()
    batches = [rows(3)(step, 0, rank) for step in range(3)]
    config = zerodp.Config(stage=stage, reduction=reduction)
    found = zerodp.compare(Net, sgd, batches, noisy, config=config)
    assert found, found
    assert found.steps == 3
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@on_ranks(2)
@pytest.mark.parametrize("stage", [3])
def test_ranks_with_fewer_batches_are_told(stage: int) -> None:
    batches = [rows(3)(step, 0, 0) for step in range(2 + dist.get_rank())]
    with pytest.raises(zerodp.ConfigError, match="got 2 on rank 0 and more on rank 1"):
        zerodp.compare(Net, sgd, batches, squares, stage=stage)
    with pytest.raises(zerodp.ConfigError, match="at least one on every rank, got none"):
        zerodp.compare(Net, sgd, [], squares, stage=stage)
