"""The promise: fp32 training is the same to the last bit, whatever the stage, the units, the buckets, the prefetch and the
memory budget; and equal to plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.oracle import Task, adamw, momentum, parity, rows, run, same
from tests.ranks.pool import on_ranks
from tests.ranks.test_optimizers import ELEMENTWISE
from tests.ranks.toys import Block, Lion, Net

STEPS = 5  # a difference shows in the first update, or in the second, which is the first with moments


def by_layers(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


# optimizer, micro-batches (whether each is synchronised), steps, and two layouts
TRAININGS: dict[
    str, tuple[Callable[[nn.Module], torch.optim.Optimizer], tuple[bool, ...], int, list[dict[str, Any]]]
] = {
    "AdamW": (adamw, (True,), 20, [{"units": by_layers}, {"units": [Block]}]),
    "AdamW fused, synced": (
        ELEMENTWISE["AdamW fused"],
        (True, True),
        STEPS,
        [{"units": [Block], "bucket_bytes": 700}, {"units": ["blocks.1"], "bucket_bytes": 4}],
    ),
    "SGD, no_sync": (momentum, (False, True), STEPS, [{"units": [Block]}, {"units": by_layers, "bucket_bytes": "1GB"}]),
}
STAGE_3_ONLY: list[dict[str, Any]] = [
    {"units": [Block], "prefetch": 0},
    {"units": [Block], "prefetch": 3},
    {"units": [Block], "unsharded_bytes": 2000, "prefetch": 0},
    {"units": [Block], "unsharded_bytes": 5000},
    {"units": by_layers, "unsharded_bytes": "1MB", "bucket_bytes": 512, "prefetch": 2},
    {"check": False},
]


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("training", TRAININGS)
def test_every_stage_and_layout(training: str, world_size: int) -> None:
    """Equal to the oracle, bitwise on two ranks and within 1e-6 on more; and bitwise among themselves."""
    optimizer, micro, steps, layouts = TRAININGS[training]
    task = Task(Net, rows(3), optimizer=optimizer, steps=steps, micro=micro)
    reference = parity(task, stage=0, tolerance=0.0 if world_size == 2 else 1e-6)
    for stage in range(4):
        for options in layouts if world_size == 2 else layouts[:1]:
            same(run(task, stage=stage, **options), reference)


@on_ranks(2, 3)
def test_any_residency(world_size: int) -> None:
    """Prefetch and memory budget of stage 3."""
    task = Task(Net, rows(3), optimizer=adamw, steps=STEPS, micro=(False, True))
    reference = parity(task, stage=2, tolerance=0.0 if world_size == 2 else 1e-6)
    for options in STAGE_3_ONLY:
        same(run(task, stage=3, **options), reference)


OTHERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    name: ELEMENTWISE[name] for name in ("Adagrad", "RMSprop", "NAdam")
} | {"Lion": lambda model: Lion(model.parameters())}


@on_ranks(2, 3)
@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers(name: str, world_size: int) -> None:
    task = Task(Net, rows(3), optimizer=OTHERS[name], steps=STEPS)
    reference = parity(task, stage=0, tolerance=0.0 if world_size == 2 else 1e-5)
    for stage in (1, 2, 3):
        same(run(task, stage=stage, units=[Block]), reference)


def everything(step: int, model: nn.Module, optimizer: Any) -> None:
    """A training in which everything changes: rates, frozen parts, and a group that joins late."""
    net: Any = model
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (1 + step / 10)
    net.blocks[0].requires_grad_(not 2 <= step < 5)
    if step == 3:
        optimizer.add_param_group({"params": list(net.head.parameters()), "lr": 0.05, "weight_decay": 0.2})


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    net: Any = model
    biases = [p for p in [*net.emb.parameters(), *net.blocks.parameters()] if p.dim() == 1]
    weights = [p for p in [*net.emb.parameters(), *net.blocks.parameters()] if p.dim() == 2]
    return torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.01, weight_decay=0.1)


@on_ranks(2, 3)
def test_while_everything_changes(world_size: int) -> None:
    task = Task(Net, rows(3), optimizer=two_groups, steps=7, micro=(False, True), between=everything)
    reference = parity(task, stage=0, tolerance=0.0 if world_size == 2 else 1e-6)
    for stage in (1, 2, 3):
        same(run(task, stage=stage, units=[Block]), reference)
