"""The planner's order of events is the engine's, and a recorded step has every event of a real one. No test here looks at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerodp
from tests.ranks.oracle import momentum, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net
from zerodp.config import PRECISIONS
from zerodp.core.access import runtime_of
from zerodp.core.stages import STAGES
from zerodp.planning.timeline.calibrate import calibrate
from zerodp.planning.timeline.machine import Link, Machine, Transfer, of_json
from zerodp.planning.timeline.recording import record, replay, wires_of
from zerodp.planning.timeline.rehearsal import RECORDED, Part, rehearse


def steps(model: nn.Module, optimizer: Any, count: int, backwards: int = 1) -> None:
    for _ in range(count):
        for _ in range(backwards):
            squares(model, torch.ones(2, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize(
    "options", [{}, {"prefetch": 0}, {"prefetch": 2}, {"backwards": 2}, {"unsharded_bytes": 1800}], ids=str
)
def test_the_rehearsal_is_the_trace(options: dict[str, Any], stage: int) -> None:
    backwards = options.get("backwards", 1)
    given = {key: value for key, value in options.items() if key != "backwards"}
    model = Net()
    model, optimizer = zerodp.shard(model, momentum(model), stage=stage, units=[Block], **given)
    steps(model, optimizer, 3, backwards)
    zerodp.stats(model).reset()
    steps(model, optimizer, 1, backwards)
    residency = STAGES[stage]
    parts = [
        Part(unit.name, unit.gathered_bytes, residency.shards_parameters, residency.shards_optimizer and not unit.pages)
        for unit in runtime_of(model).units
    ]
    expected = [moment[:3] for moment in rehearse(parts, **options) if moment.kind in RECORDED]
    assert [tuple(event) for event in zerodp.stats(model).trace] == expected


@on_ranks(2)
def test_a_recording_has_the_events_of_a_step_and_leaves_the_wire_as_it_was(stage: int) -> None:
    model = Net()
    model, optimizer = zerodp.shard(model, momentum(model), stage=stage, units=[Block])
    moments = record(model, lambda: steps(model, optimizer, 1), steps=2)
    zerodp.stats(model).reset()
    steps(model, optimizer, 1)
    stats = zerodp.stats(model)
    assert [moment[:3] for moment in moments if moment.kind in RECORDED] == [tuple(event) for event in stats.trace]
    drains = [moment.phase for moment in moments if moment.kind == "drain"]
    assert drains.count("backward") == (4 if STAGES[stage].shards_parameters else 0)
    assert "idle" in drains
    assert all(moment.seconds >= 0 for moment in moments)
    assert stats.wire_bytes > 0


@on_ranks(2, 4)
def test_what_a_replay_sends_is_what_is_sent(stage: int, world_size: int) -> None:
    """At a byte per second the seconds of all transfers of a step are its bytes."""
    model = Net(width=20)
    model, optimizer = zerodp.shard(model, momentum(model), stage=stage, units=[Block], bucket_bytes=2048)
    steps(model, optimizer, 2)
    zerodp.stats(model).reset()
    steps(model, optimizer, 1)
    stats = zerodp.stats(model)
    per_byte = Machine("a byte per second", ((1.0, 1.0),), 1.0, (Link("any", world_size, 0.0, 1.0),), devices=4)
    wires = wires_of(runtime_of(model), per_byte)
    sent = {"gather": wires.gathers, "reduce": wires.reduces}
    launched = [sent[event.kind].get(event.unit, Transfer(0, 0)) for event in stats.trace if event.kind in sent]
    assert sum(transfer.seconds for transfer in launched) == stats.wire_bytes
    count = wires_of(
        runtime_of(model), Machine("a launch", ((1.0, 1.0),), 1.0, (Link("any", world_size, 1.0, 1e30),), devices=4)
    )
    sent = {"gather": count.gathers, "reduce": count.reduces}
    launched = [sent[event.kind].get(event.unit, Transfer(0, 0)) for event in stats.trace if event.kind in sent]
    times = 1 if STAGES[stage].shards_optimizer else 2  # an all-reduce is two, which the engine counts as one
    assert sum(transfer.latency for transfer in launched) == times * stats.launches


@on_ranks(2)
def test_a_replay_waits_for_a_slow_wire_and_not_for_a_fast_one() -> None:
    model = Net()
    model, optimizer = zerodp.shard(model, momentum(model), stage=3, units=[Block])
    moments = record(model, lambda: steps(model, optimizer, 1), steps=2)
    fast, slow = (
        Machine("wire", ((1.0, 1.0),), 1.0, (Link("any", 2, latency, 1e12),), devices=2) for latency in (0.0, 1.0)
    )
    assert replay(model, moments, fast).exposed < 1e-6
    step = replay(model, moments, slow)
    assert step.wire == pytest.approx(
        step.exposed, abs=1e-1
    )  # there are 12 transfers, one behind the other or beside it
    assert 7 < step.exposed < 12


@on_ranks(1, 2)
def test_a_calibration_is_the_same_on_all_ranks(world_size: int) -> None:
    found = calibrate(torch.device("cpu"), PRECISIONS["bf16"].param_dtype, seconds=0.001)
    everyone: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everyone, found)
    assert all(one == found for one in everyone)
    assert of_json(found.as_json()) == found
    assert found.source == "measured"
    assert 0.4 <= found.shared_rate <= 1


@on_ranks(4)
def test_nodes_are_measured_inside_and_across() -> None:
    """As LOCAL_WORLD_SIZE says, here two nodes of two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        found = calibrate(torch.device("cpu"), seconds=0.001)
    assert found.devices == 2
    assert {link.ranks for link in found.inside} == {2}
    assert {link.ranks for link in found.across} == {4}
