"""Who shares with whom: hybrid meshes, parts of the world, a stage per unit, parameters that stay whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerodp
from tests.ranks.oracle import Oracle, Task, Zero, adamw, all_close, close, momentum, named, parity, rows, same, squares
from tests.ranks.pool import on_ranks
from tests.ranks.test_memory import aligned
from tests.ranks.toys import Block, Net

HYBRID = ("replicate", "shard")


@on_ranks(4)
@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)], ids=str)
def test_hybrid_training_matches(shape: tuple[int, int], stage: int) -> None:
    """With and without `no_sync`: every stage, and every shape, has both."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=HYBRID)
    micro = ((True,), (False, True))[(stage + shape[0] // 2) % 2]
    task = Task(Net, rows(3), optimizer=adamw, micro=micro, max_norm=0.5)
    parity(task, stage=stage, mesh=mesh, units=[Block], tolerance=1e-6)


@on_ranks(4)
@pytest.mark.parametrize("stage", [1, 2, 3], ids="zero{}".format)
def test_hybrid_shards_over_its_own_dim_only(stage: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=HYBRID)
    model = aligned()
    numel = sum(p.numel() for p in model.parameters())
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, mesh=mesh, units=[nn.Linear])
    squares(model, torch.ones(2, 64)).backward()
    optimizer.step()
    now = zerodp.stats(model).memory.now
    assert now["first_moment"] == now["second_moment"] == numel * 4 // 2


@on_ranks(4)
def test_slice_of_a_larger_mesh(stage: int) -> None:
    """The other dim of the mesh trains a model of its own."""
    world = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("other", *HYBRID))
    train_in_part(stage, world[HYBRID], part=dist.get_rank() // 2)


@on_ranks(4)
@pytest.mark.parametrize("kind", ["mesh", "group"])
def test_part_of_the_world(kind: str, stage: int) -> None:
    part = dist.get_rank() // 2
    if kind == "mesh":
        train_in_part(stage, init_device_mesh("cpu", (2, 2), mesh_dim_names=("part", "dp"))["dp"], part)
    else:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        train_in_part(stage, groups[part], part)


def train_in_part(stage: int, mesh: Any, part: int) -> None:
    """Two ranks train with each other only; bitwise as on two ranks alone."""
    place = dist.get_rank() % 2
    task = Task(Net, lambda step, micro, rank: rows(3)(step, micro, 2 * part + rank), brief=False)
    model, optimizer = task.build(place)
    subject = Zero(model, optimizer, stage=stage, mesh=mesh)
    expected = Oracle(task, 2).run(place)
    for step, record in enumerate(expected):
        squares(subject.model, task.batch(step, 0, place)).backward()
        all_close("gradient", subject.gradients(), record.gradients)
        subject.optimizer.step()
        subject.optimizer.zero_grad()
        all_close("parameter", subject.parameters(), record.parameters)


STAGE_MAPS: list[dict[str, int]] = [
    {"blocks.*": 3, "*": 1},
    {"blocks.0": 0, "blocks.1": 1, "blocks.2": 2, "*": 3},
    {"(root)": 2, "*": 3},
]


@on_ranks(2)
@pytest.mark.parametrize("stages", STAGE_MAPS, ids=lambda stages: "-".join(map(str, stages.values())))
@pytest.mark.parametrize("micro", [(True, True), (False, True)], ids=["synced", "no_sync"])
def test_stage_per_unit(stages: dict[str, int], micro: tuple[bool, ...]) -> None:
    task = Task(Net, rows(3), optimizer=adamw, micro=micro, max_norm=0.5)
    records = parity(task, stage=stages, units=[Block], tolerance=1e-6)
    same(records, parity(task, stage=3, units=[Block], tolerance=1e-6))


@on_ranks(2)
def test_stage_per_unit_decides_what_is_gathered() -> None:
    model = Net()
    model, optimizer = zerodp.shard(model, adamw(model), stage={"blocks.[01]": 3, "*": 0}, units=[Block])
    for _ in range(2):
        zerodp.stats(model).reset()
        squares(model, torch.ones(2, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = zerodp.stats(model)
    assert {row.unit for row in stats.comm if row.op == "all_gather"} == {"blocks.0", "blocks.1"}
    assert {row.unit for row in stats.comm if row.op == "all_reduce"} == {"(root)", "blocks.2"}
    assert {e.unit for e in stats.trace if e.kind == "gather"} == {"blocks.0", "blocks.1"}


WHOLE: list[dict[str, Any]] = [
    {"ignore": "head.*"},
    {"ignore": ["*.bias", "emb.*"]},
    {"ignore_below": 30},
    {"ignore": "*"},
    {"ignore_below": 10**6},
]


@on_ranks(2, 3)
def test_parameters_that_stay_whole(stage: int, world_size: int) -> None:
    """Every two of stage, ranks and options meet."""
    task = Task(Net, rows(3), optimizer=adamw, micro=(False, True))
    for options in WHOLE[(stage + world_size) % 2 :: 2]:
        with named(options):
            parity(task, stage=stage, units=[Block], tolerance=0.0 if world_size == 2 else 1e-6, **options)


@on_ranks(2)
def test_whole_parameters_are_replicated_in_values_and_state() -> None:
    model = Net()
    names = {"head.weight", "head.bias"}
    start = model.head.weight.detach().clone()
    model, optimizer = zerodp.shard(model, adamw(model), stage=3, ignore=["head.*"])
    close("read anywhere", model.head.weight.detach().clone(), start)
    squares(model, rows(3)(0, 0, dist.get_rank())).backward()
    optimizer.step()
    owned = {name: tensor for name, _, tensor in zerodp.local_shards(model) if name in names}
    assert {name: tensor.numel() for name, tensor in owned.items()} == {"head.weight": 18, "head.bias": 3}
    assert {row.op for row in zerodp.stats(model).comm if row.unit not in ("(root)",) and "blocks" not in row.unit} >= {
        "all_reduce"
    }
    every: list[Any] = [None] * 2
    dist.all_gather_object(every, model.head.weight.detach().clone())
    close("equal on all ranks", every[0], every[1])


def second_layers(name: str, module: nn.Module) -> bool:
    return name.endswith(".b")


@on_ranks(3)
@pytest.mark.parametrize("units", [None, [Block], ["blocks.?"], ["emb", "head", "blocks.1.*"], second_layers])
def test_any_units(units: Any, stage: int) -> None:
    parity(Task(Net, rows(3), optimizer=momentum), stage=stage, units=units, tolerance=1e-6)


@on_ranks(2)
def test_automatic_units() -> None:
    """Repeated blocks each, a large embedding and a large head apart, the rest together."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok = nn.Embedding(5000, 32)
            self.pos = nn.Embedding(7, 32)
            self.blocks = nn.ModuleList(Block(32) for _ in range(3))
            self.norm = nn.LayerNorm(32)
            self.head = nn.Linear(32, 5000, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tok(ids) + self.pos(ids % 7)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    model, _ = zerodp.shard(Model(), stage=3)
    model(torch.arange(5)).sum().backward()
    units = {event.unit for event in zerodp.stats(model).trace if event.unit}
    assert units == {"(root)", "tok", "head", "blocks.0", "blocks.1", "blocks.2"}
    text = zerodp.describe(model)
    assert all(unit in text for unit in units)
