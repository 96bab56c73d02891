"""Backward passes that take another way than the list says, where the data chooses the experts of a rank: it may be ahead of the others,
or behind, at every place where they must meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerodp
from tests.ranks import test_order
from tests.ranks.oracle import Task, agree_with, rows
from tests.ranks.pool import on_ranks
from tests.ranks.test_order import NUM_EXPERTS, decaying

WIDTH = 6
Batch = tuple[Tensor, int]  # rows, step


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Mixture(test_order.Mixture):
    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))


class Trunk(nn.Module):
    """Gives what each part of it gives, the head's last. The last block is not used."""

    def __init__(self, checkpoints: str = "") -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.first = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Mixture() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, times: int = 1) -> list[Tensor]:
        x = self.first(x)
        found = [x]
        for block in [*self.blocks[:3]] * times:
            x = checkpoint(block, x, use_reentrant=self.checkpoints == "reentrant") if self.checkpoints else block(x)
            found.append(x)
        return [*found, self.head(x)]


def batch(step: int, part: int, rank: int) -> Batch:
    return rows(3)(step, part, rank)[:3], step


def last(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0])[-1].square().mean()  # type: ignore[no-any-return]


def of_the_trunk_at_times(model: nn.Module, batch: Batch) -> Tensor:
    found = model(batch[0])
    return found[-2 if batch[1] % 3 == 2 else -1].square().mean()  # type: ignore[no-any-return]


def of_the_middle_at_times(model: nn.Module, batch: Batch) -> Tensor:
    found = model(batch[0])
    return found[1 if batch[1] % 3 == 2 else -1].square().mean()  # type: ignore[no-any-return]


def after_a_forward_for_nothing(model: nn.Module, batch: Batch) -> Tensor:
    model(batch[0] * 2)
    return last(model, batch)


def of_two_forwards(model: nn.Module, batch: Batch) -> Tensor:
    return last(model, batch) + last(model, (batch[0].flip(0) * 1.5, batch[1]))


def of_blocks_used_twice_at_times(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0], 2 if batch[1] % 3 == 2 else 1)[-1].square().mean()  # type: ignore[no-any-return]


LOSSES = [
    last,
    of_blocks_used_twice_at_times,
    of_the_trunk_at_times,
    of_the_middle_at_times,
    after_a_forward_for_nothing,
    of_two_forwards,
]
by_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__.replace("_", " "))


def everywhere(loss: Any, build: Any, units: list[Any]) -> None:
    agree_with(
        Task(build, batch, loss, steps=6, optimizer=decaying),
        {"stage": 2, "units": units},
        *({"stage": 3, "units": units, "prefetch": prefetch} for prefetch in (1, 0 if len(units) > 1 else 3)),
    )


@on_ranks(2, 3)
@by_loss
def test_experts_inside_blocks(loss: Any) -> None:
    everywhere(loss, Trunk, [Mixture])


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("plain", last),
        ("plain", of_two_forwards),
        ("reentrant", last),
        ("not reentrant", last),
        ("not reentrant", of_two_forwards),
    ],
    ids=["plain", "plain, two forwards", "reentrant", "not reentrant", "not reentrant, two forwards"],
)
def test_experts_that_are_units(kind: str, loss: Any) -> None:
    """Computed again by a checkpoint they are used in the order of forward, before their backward. (After two forwards the parts that re-entrant ones
    give are reduced apart, see test_checkpointing.)"""
    everywhere(loss, lambda: Trunk("" if kind == "plain" else kind), [Mixture, Expert])


@on_ranks(2)
def test_nothing_is_reduced_in_forward() -> None:
    """Also where it needs a unit once more, after a backward in which a block got some of its gradients only."""
    torch.manual_seed(0)
    model = Trunk()
    model, optimizer = zerodp.shard(model, decaying(model), stage=3, units=[Mixture])
    for step in range(9):
        of_blocks_used_twice_at_times(model, batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    events = {(event.kind, event.phase) for event in zerodp.stats(model).trace}
    assert ("reduce", "backward") in events
    assert ("reduce", "forward") not in events
