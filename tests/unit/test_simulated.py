"""The engine on ranks that are not there, at sizes that no machine here has, against the closed forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerodp
from zerodp.config import Config
from zerodp.core.stages import STAGES
from zerodp.errors import ConfigError
from zerodp.planning.estimate import estimate
from zerodp.planning.gpt import gpt_step
from zerodp.planning.models import CUTS, Shape, gpt_units
from zerodp.planning.plan import model_of
from zerodp.planning.setup import Setup
from zerodp.planning.simulated import Simulation, simulate

SHAPE = Shape(3, 64, 4, 100, 32)
STATES = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("master", "first_moment", "second_moment"),
}


def agrees(found: Simulation, step: Any, setup: Setup, stage: int, rank: int) -> None:
    planned = estimate(model_of(step.model, setup, step.config.units), setup, stage, rank)
    assert found.wire_elements == planned.sent_elements
    assert found.wire_bytes == planned.sent_bytes
    assert found.launches == planned.operations
    for kind, parts in STATES.items():
        assert sum(found.now[part] for part in parts) == planned.kinds[kind], kind
    assert found.peak["unsharded"] == planned.kinds["unsharded"]
    assert found.peak["buckets"] == planned.kinds["buckets"]


@pytest.mark.parametrize(("world_size", "stage"), [(64, 3), (1024, 2), *((4096, stage) for stage in STAGES)])
def test_first_and_last_rank_are_as_the_closed_forms_say(world_size: int, stage: int) -> None:
    setup = Setup(world_size, bucket_bytes=2**20)
    step = gpt_step(SHAPE, 1, None, "block", setup.precision)
    for rank in (0, world_size - 1):
        agrees(simulate(step, setup, stage, rank), step, setup, stage, rank)


@pytest.mark.parametrize(
    "options",
    [
        {"replicate": 8},
        {"accumulate": 2},
        {"precision": None, "optimizer": "momentum"},
        {"precision": "fp16", "optimizer": 3},
        {"exact": True, "checkpointing": "full"},
    ],
    ids=str,
)
def test_other_settings(options: dict[str, Any]) -> None:
    setup = Setup(64, **options)
    step = gpt_step(SHAPE, 1, None, "block", setup.precision)
    found = simulate(step, setup, 2, 63)
    planned = estimate(model_of(step.model, setup, step.config.units), setup, 2, 63)
    assert found.wire_elements == planned.sent_elements
    assert found.launches == planned.operations
    assert sum(found.now[k] for k in ("parameters", "gradients", "master")) == sum(
        planned.kinds[k] for k in ("parameters", "gradients")
    ) + planned.kinds["optimizer"] - sum(found.now[k] for k in ("first_moment", "second_moment")) - (
        found.now["other_state"] if options.get("optimizer") == 3 else 0
    )


@pytest.mark.parametrize("cut", CUTS)
def test_the_module_of_a_shape_has_its_units(cut: str) -> None:
    step = gpt_step(SHAPE, 1, None, cut, None)
    plan = zerodp.plan(step.model, world_size=1, precision="fp32", units=step.config.units)
    made = {unit.name: unit.numel for unit in plan.model.units}
    said = dict(gpt_units(SHAPE, cut))
    assert made.keys() == said.keys()
    assert sum(made.values()) == sum(said.values())
    if cut != "linear":  # there the norms stay with the root
        assert made == said


def test_smaller_units_take_less() -> None:
    sizes = []
    for cut in CUTS:
        found = zerodp.plan(SHAPE, world_size=64, stage=3, units=cut, simulate=True)
        assert [one.rank for one in found.simulated] == [0, 63]
        sizes.append((found.estimates[3].kinds["unsharded"], found.simulated[1].peak["unsharded"]))
    planned, seen = zip(*sizes, strict=True)
    assert list(planned) == sorted(planned, reverse=True)
    assert list(seen) == sorted(seen, reverse=True)


def test_a_trillion_parameters_say_which_units_would_help() -> None:
    options: dict[str, Any] = {"world_size": 1024, "device_memory": "80GB", "checkpointing": "full"}
    found = zerodp.plan(Shape(128, 25600, 256, 50257, 1024), **options)
    assert not found.fits
    assert "smaller units (attention and MLP apart)" in found.recommendation.remedies
    assert zerodp.plan(Shape(128, 25600, 256, 50257, 1024), units="branch", **options).fits


def test_activations_are_those_of_the_trace() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(3)))
    found = zerodp.plan(model, world_size=8, precision="fp32", inputs=torch.zeros(4000, 32), stage=0, simulate=True)
    assert found.trace is not None
    assert found.simulated[0].activations_bytes == pytest.approx(found.trace.peak_bytes, rel=0.01)
    assert found.simulated[0].peak_bytes == pytest.approx(found.estimates[0].device_bytes, rel=0.01)
    shown = found.as_json()
    assert shown["trace"]["peak_bytes"] == found.trace.peak_bytes
    assert [one["rank"] for one in shown["simulated"]] == [0, 7]


def test_no_process_group_is_made_or_touched() -> None:
    zerodp.plan(SHAPE, world_size=16, simulate=True)
    assert not dist.is_initialized()


def test_the_events_are_the_engines() -> None:
    step = gpt_step(SHAPE, 1, None, "block", Config(precision="bf16").precision)
    trace = simulate(step, Setup(64), 3).trace
    names = [event.unit for event in trace if event.kind == "reduce"]
    assert names == [f"blocks.{i}" for i in (2, 1, 0)] + ["(root)"]
    assert trace[-1].kind == "step"


def test_ranks_that_do_not_exist() -> None:
    step = gpt_step(SHAPE, 1, None, "block", None)
    with pytest.raises(ConfigError, match="expected a rank of 0 to 3, got 4"):
        simulate(step, Setup(4), 3, rank=4)
    with pytest.raises(ConfigError, match="a shape needs a vocabulary and a sequence"):
        zerodp.plan(Shape(2, 64, 4), world_size=4, simulate=True)
