"""The order of events, literally: the specification of the schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerodp
from tests.ranks.oracle import momentum, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net


def events(stage: int, micro_batches: int = 1, **options: Any) -> list[str]:
    """One step in the steady state, as "phase: kind unit"; blocks are called by number."""
    model = Net()
    model, optimizer = zerodp.shard(model, momentum(model), stage=stage, units=[Block], **options)
    for _ in range(3):
        zerodp.stats(model).reset()
        for _ in range(micro_batches):
            squares(model, torch.ones(2, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    short = {"(root)": "root", "blocks.0": "0", "blocks.1": "1", "blocks.2": "2"}
    return [f"{e.phase}: {e.kind} {short.get(e.unit, e.unit)}".strip() for e in zerodp.stats(model).trace]


STAGE_3 = """
forward: gather root
forward: gather 0
forward: use root
forward: gather 1
forward: use 0
forward: free 0
forward: gather 2
forward: use 1
forward: free 1
forward: use 2
forward: free 2
forward: free root
backward: gather root
backward: gather 2
backward: use root
backward: gather 1
backward: use 2
backward: reduce 2
backward: free 2
backward: use 1
backward: gather 0
backward: reduce 1
backward: free 1
backward: use 0
backward: reduce 0
backward: free 0
backward: reduce root
backward: free root
idle: step
"""

STAGE_3_WITHOUT_PREFETCH = """
forward: gather root
forward: use root
forward: gather 0
forward: use 0
forward: free 0
forward: gather 1
forward: use 1
forward: free 1
forward: gather 2
forward: use 2
forward: free 2
forward: free root
backward: gather root
backward: use root
backward: gather 2
backward: use 2
backward: reduce 2
backward: free 2
backward: gather 1
backward: use 1
backward: reduce 1
backward: free 1
backward: gather 0
backward: use 0
backward: reduce 0
backward: free 0
backward: reduce root
backward: free root
idle: step
"""

STAGES_1_AND_2 = """
forward: use root
forward: use 0
forward: use 1
forward: use 2
backward: reduce 2
backward: reduce 1
backward: reduce 0
backward: reduce root
idle: gather root
idle: gather 0
idle: gather 1
idle: gather 2
idle: step
"""

STAGE_0 = """
forward: use root
forward: use 0
forward: use 1
forward: use 2
backward: reduce 2
backward: reduce 1
backward: reduce 0
backward: reduce root
idle: step
"""


@on_ranks(2)
@pytest.mark.parametrize(
    ("stage", "options", "expected"),
    [
        (0, {}, STAGE_0),
        (1, {}, STAGES_1_AND_2),
        (2, {}, STAGES_1_AND_2),
        (3, {"prefetch": 1}, STAGE_3),
        (3, {"prefetch": 0}, STAGE_3_WITHOUT_PREFETCH),
    ],
    ids=["zero0", "zero1", "zero2", "zero3", "zero3 without prefetch"],
)
def test_order_of_events(stage: int, options: dict[str, Any], expected: str) -> None:
    assert events(stage, **options) == expected.strip().splitlines()


@on_ranks(2)
def test_micro_batches_all_go_alike() -> None:
    """Reductions of the one before are still under way when a forward begins; pages come ahead all the same."""
    *once, step = STAGE_3.strip().splitlines()
    assert events(3, micro_batches=2) == [*once, *once, step]


@on_ranks(2)
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_so_many_units_alive_and_no_more(prefetch: int) -> None:
    """The root, which is in use all along, the unit in use, and those in flight."""
    alive: set[str] = set()
    used: set[str] = set()
    for event in events(3, prefetch=prefetch):
        _, kind, *unit = event.split()
        if kind == "gather":
            assert unit[0] not in alive, event
            alive.add(unit[0])
        elif kind == "use":
            assert unit[0] in alive, event
            used.add(unit[0])
        elif kind == "free":
            assert unit[0] in used, event
            alive.remove(unit[0])
        assert len(alive) <= 2 + prefetch, event
    assert alive == set()


@on_ranks(2, 3)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_gathers_and_reductions_are_in_the_same_order_on_all_ranks(prefetch: int) -> None:
    mine = [event for event in events(3, prefetch=prefetch) if " gather " in event or " reduce " in event]
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    assert all(theirs == mine for theirs in every)


@on_ranks(2)
def test_first_step_has_the_order_of_the_later_ones() -> None:
    """Registration order is call order here, so the list is right from the start."""
    model = Net()
    model, optimizer = zerodp.shard(model, momentum(model), stage=3, units=[Block])
    seen = []
    for _ in range(3):
        zerodp.stats(model).reset()
        squares(model, torch.ones(2, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(zerodp.stats(model).trace)
    assert seen[0] == seen[1] == seen[2]


class Shuffled(nn.Module):
    """Registered in another order than called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (2, 0, 3, 1):
            x = self.blocks[index](x)
        return x


@on_ranks(2)
def test_order_of_use_is_learnt() -> None:
    """From the third step at the latest nothing is gathered in vain, and the gathers follow the calls."""
    model = Shuffled()
    model, optimizer = zerodp.shard(model, momentum(model), stage=3, units=[Block])
    for _ in range(4):
        zerodp.stats(model).reset()
        squares(model, torch.ones(2, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    gathers = [(event.phase, event.unit[-1]) for event in zerodp.stats(model).trace if event.kind == "gather"]
    forward, backward = [("forward", u) for u in "2031"], [("backward", u) for u in "1302"]
    assert gathers == forward + backward


@on_ranks(2)
@pytest.mark.parametrize("budget", [1, 2, 4])
def test_kept_units_are_used_without_a_gather(budget: int) -> None:
    """The last blocks of the forward are the first of the backward: what is kept of them is not gathered again."""
    model = nn.Sequential(*(Block(8) for _ in range(4)))
    one = 4 * (2 * 128 + 2 * 64)
    model, optimizer = zerodp.shard(model, momentum(model), stage=3, units=[Block], unsharded_bytes=budget * one)
    for _ in range(3):
        zerodp.stats(model).reset()
        squares(model, torch.ones(2, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    gathers = [
        event.unit for event in zerodp.stats(model).trace if event.kind == "gather" and event.phase == "backward"
    ]
    assert gathers == [str(unit) for unit in range(3 - budget, -1, -1)]
