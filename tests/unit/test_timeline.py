"""The event simulator on schedules computed by hand, the machines' arithmetic, and what the papers saw (simulated)."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import zerodp
from zerodp.cli.benching.links import table
from zerodp.config import PRECISIONS
from zerodp.errors import ConfigError
from zerodp.planning import picture
from zerodp.planning.models import Model, of_count, of_units
from zerodp.planning.page import html
from zerodp.planning.setup import Setup
from zerodp.planning.timeline import scenarios
from zerodp.planning.timeline.calibrate import line
from zerodp.planning.timeline.machine import MACHINES, Link, Machine, Transfer, machine_of, of_json, together
from zerodp.planning.timeline.predict import HALF, predict
from zerodp.planning.timeline.program import Wires, program
from zerodp.planning.timeline.recording import medians
from zerodp.planning.timeline.rehearsal import Moment
from zerodp.planning.timeline.simulate import Launch, Mark, Span, Timeline, Wait, Work, run, timeline

# ---- the simulator


def test_a_transfer_is_hidden_by_work_and_the_rest_is_waited_for() -> None:
    spans, marks = run([Work(2), Launch(1, "gather", 1, 2, "a"), Work(1.5, "b"), Wait(1), Mark()])
    assert marks == [5]
    assert spans == [
        Span("compute", 0, 2, "", ""),
        Span("compute", 2, 3.5, "b", ""),
        Span("gather", 2, 5, "a", ""),
        Span("wait", 3.5, 5, "", ""),
    ]


def test_a_lane_carries_one_after_the_other() -> None:
    spans, _ = run([Launch(1, "gather", 0, 2), Launch(2, "gather", 0.5, 1), Wait(2)])
    assert [(s.lane, s.start, s.end) for s in spans] == [("gather", 0, 2), ("gather", 2, 3.5), ("wait", 0, 3.5)]


def test_lanes_share_the_wire() -> None:
    """Two at half speed until one has ended; a latency takes nothing of the wire."""
    spans, _ = run([Launch(1, "gather", 0, 2), Launch(2, "reduce", 1, 2), Wait(1), Wait(2)])
    assert [(s.lane, s.end) for s in spans if s.lane != "wait"] == [("gather", 3), ("reduce", 4)]


def test_compute_and_a_transfer_that_need_the_same_processor() -> None:
    """At half the rate each: one second of work takes two, after which half of the transfer is left."""
    spans, marks = run([Launch(1, "gather", 0, 2), Work(1), Wait(1), Mark()], shared_rate=0.5)
    assert marks == [3]
    assert ("compute", 0, 2) in [(s.lane, s.start, s.end) for s in spans]


def test_only_the_last_step_is_shown_with_what_the_one_before_left_under_way() -> None:
    step = [Moment("use", "a", "forward", 1.0), Moment("gather", "a", "idle"), Moment("step", "", "idle")]
    wires = Wires(gathers={"a": Transfer(0, 3)})
    found = timeline(program(step, wires))
    assert (found.seconds, found.compute, found.exposed, found.wire) == (4, 1, 3, 3)
    assert found.overlap == 0
    assert found.spans[0] == Span("gather", 0, 3, "a", "idle")
    assert timeline(program(step, Wires())) == Timeline(1, 1, 0, 0, (Span("compute", 0, 1, "a", "forward"),))


def test_launches_keep_the_thread_and_reductions_are_awaited_in_turn() -> None:
    """The first reduction is awaited when the second is launched, its sum is added up then, and the rest before the step."""
    step = [
        Moment("reduce", "a", "backward", 1.0),
        Moment("reduce", "b", "backward"),
        Moment("drain", "", "idle"),
        Moment("update", "", "idle", 5.0),
    ]
    wires = Wires(reduces=dict.fromkeys("ab", Transfer(0, 4, launch=1)), sums={"a": 2, "b": 3}, message=0.5)
    spans, marks = run(program([*step, Moment("step", "", "idle")], wires, repeats=1))
    # 0-1 launch, 1-2 work, 2-3 launch, wait for a (1-5), 5-7 sum, wait for b (5-9), 9-12 sum, 12-17.5 message and update
    assert [(s.start, s.end) for s in spans if s.lane == "reduce"] == [(1, 5), (5, 9)]
    assert [(s.start, s.end) for s in spans if s.lane == "wait"] == [(3, 5), (7, 9)]
    assert marks == [17.5]


def test_halfway_through_a_backward_earlier_reductions_are_awaited() -> None:
    step = [Moment("reduce", "a", "backward"), Moment("drain", "", "backward", 1.0), Moment("step", "", "idle")]
    assert run(program(step, Wires(reduces={"a": Transfer(0, 4)}), repeats=1))[1] == [5]


# ---- whole steps by hand: three units of 1 s forward and 2 s backward, half a second for each transfer

THREE = of_units("three", [(f"blocks.{i}", 64.0) for i in range(3)], PRECISIONS["fp32"])


def machine(seconds: float = 0.5) -> Machine:
    """On which 128 FLOPs take a second, and half of 64 fp32 parameters `seconds`."""
    return Machine("by hand", ((1.0, 128.0),), math.inf, (Link("any", 2, 0.0, 128 / seconds),), devices=2)


def by_hand(stage: int, **options: Any) -> Timeline:
    found = predict(THREE, Setup(2, precision="fp32", sequence=1, **options), stage, machine())
    assert found is not None
    return found


def test_stage_3_by_hand() -> None:
    """Waits: for the first gather of each pass, and for the last reduction. The last gather begins halfway through a backward."""
    found = by_hand(3)
    assert (found.seconds, found.compute, found.exposed, found.wire) == pytest.approx((10.5, 9.0, 1.5, 4.5))
    gathers = [(s.unit[-1], s.start, s.end) for s in found.spans if s.lane == "gather"]
    begin = 6 + 2 * HALF
    expected = [("0", 0, 0.5), ("1", 0.5, 1), ("2", 1.5, 2), ("2", 3.5, 4), ("1", 4, 4.5), ("0", begin, begin + 0.5)]
    assert [name for name, _, _ in gathers] == [name for name, _, _ in expected]
    assert [g[1:] for g in gathers] == [pytest.approx(e[1:]) for e in expected]
    assert [s.start for s in found.spans if s.lane == "reduce"] == pytest.approx([6, 8, 10])


def test_stage_3_without_prefetch_waits_for_every_gather() -> None:
    """Six gathers of half a second, two of them beside a reduction (a quarter more would be hidden: 0.5 shared is 1.0), and the last one's sum."""
    found = by_hand(3, prefetch=0)
    assert found.exposed == pytest.approx(0.5 * 4 + 1.0 * 2 + 0.5)


def test_stages_1_and_2_by_hand() -> None:
    """All gathers are launched after the step, and only the first one is waited for."""
    for stage in (1, 2):
        found = by_hand(stage)
        assert (found.seconds, found.exposed, found.wire) == (10.0, 1.0, 3.0)


def test_stage_0_reduces_among_replicas_twice_the_bytes() -> None:
    found = by_hand(0)
    assert (found.seconds, found.exposed) == (10.0, 1.0)  # twice half of the bytes: a second for the last unit


def test_kept_units_are_not_gathered_again() -> None:
    """Those of the forward stay for the backward, whose first gather was waited for half a second."""
    assert by_hand(3, unsharded_bytes=3 * 64 * 4).seconds == pytest.approx(10.0)


def test_accumulation_repeats_the_passes() -> None:
    assert by_hand(2, accumulate=2).compute == 18.0


def test_nothing_is_simulated_without_tokens_or_with_offload() -> None:
    assert predict(THREE, Setup(2, precision="fp32"), 3, machine()) is None
    assert predict(THREE, Setup(2, precision="fp32", sequence=1, offload_optimizer="host"), 3, machine()) is None
    away = Setup(2, precision="fp32", sequence=1, checkpointing="full", offload_activations="host")
    assert predict(THREE, away, 3, machine()) is None


# ---- machines


def test_rates_between_measured_points() -> None:
    one = dataclasses.replace(machine(), compute=((1e2, 1e3), (1e4, 1e5)))
    assert [one.flops(work) for work in (1, 1e2, 1e4, 1e9)] == [1e3, 1e3, 1e5, 1e5]
    assert one.flops(1e3) == pytest.approx(1e4)
    assert one.compute_seconds(5e5, 1e4) == 5


def test_links_inside_and_across_nodes() -> None:
    inside, across = Link("any", 4, 3.0, 100.0), Link("any", 8, 7.0, 40.0)
    nodes = Machine("nodes", ((1.0, 1.0),), 1.0, (inside,), (across,), devices=4)
    assert nodes.transfer("all_gather", 4, 1, 200) == Transfer(3, 2)
    assert nodes.transfer("all_gather", 8, 1, 200) == Transfer(7, 5)  # one ring, through one node's whole bandwidth
    assert nodes.transfer("all_gather", 2, 4, 200) == Transfer(1, 20)  # four rings side by side
    assert nodes.transfer("all_gather", 2, 2, 200) == Transfer(1, 2)  # every second rank of one node
    pairs = dataclasses.replace(nodes, pairwise=True)
    assert (
        pairs.transfer("all_gather", 8, 1, 7).seconds == 7 * (4 * 4 / 7) / 40
    )  # each of a node's 4 ranks sends to 4 outside
    assert nodes.with_bandwidth(0.5).transfer("all_gather", 8, 1, 200).seconds == 10


def test_the_nearest_group_and_the_right_operation_decide() -> None:
    links = (Link("all_gather", 2, 1.0, 10.0), Link("all_gather", 8, 7.0, 80.0), Link("reduce_scatter", 2, 1.0, 5.0))
    one = Machine("sizes", ((1.0, 1.0),), 1.0, links, devices=16)
    assert one.transfer("all_gather", 16, 1, 80) == Transfer(15, 1)
    assert one.transfer("reduce_scatter", 8, 1, 10, launches=2) == Transfer(14, 2)


def test_what_the_launch_moves_is_not_waited_for_again() -> None:
    one = dataclasses.replace(machine(), inside=(Link("any", 2, 3.0, 10.0, launch_seconds=1.0, launch_bandwidth=40.0),))
    assert one.transfer("all_gather", 2, 1, 80) == Transfer(2, 6, 3)
    assert together([Transfer(1, 2, 3), Transfer(4, 5, 6)]) == Transfer(5, 7, 9)


def test_a_line_through_times() -> None:
    assert line([10, 20, 40], [2, 3, 5]) == pytest.approx((1, 10))
    assert line([10, 20], [2, 2])[1] == math.inf


def test_a_machine_goes_to_a_file_and_back(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    for one in (machine(), *MACHINES.values()):
        path.write_text(json.dumps(one.as_json(), allow_nan=one.memory_bandwidth == math.inf))
        assert machine_of(path) == one
    assert machine_of("dgx-2") is MACHINES["dgx-2"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "holds no object"),
        ('{"format": "other"}', "expected format 'zerodp links 1', got 'other'"),
        ('{"format": "zerodp links 1", "name": "x"}', "not a whole set of figures"),
    ],
)
def test_files_that_are_none(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "links.json").write_text(content)
    with pytest.raises(ConfigError, match="links: ") as raised:
        machine_of(tmp_path / "links.json")
    assert message in str(raised.value)


def test_figures_must_be_possible() -> None:
    for wrong in ({"memory_bandwidth": 0}, {"shared_rate": 0}, {"compute": []}, {"inside": []}, {"devices": 0}):
        with pytest.raises(ConfigError, match="must be above 0"):
            of_json({**MACHINES["dgx-2"].as_json(), **wrong})
    with pytest.raises(ConfigError, match="did you mean 'dgx-2'"):
        machine_of("dgx2")


def test_one_rank_has_no_links_for_many() -> None:
    alone = dataclasses.replace(machine(), inside=(Link("any", 1, 0.0, 1e12),), devices=1)
    assert Setup(1, links=alone).links is alone
    with pytest.raises(
        ConfigError, match="links: 'by hand' was measured by one rank, which sends nothing, and the plan is for 2"
    ):
        Setup(2, links=alone)


def test_links_in_words_say_who_sends() -> None:
    text = table(dataclasses.replace(machine(), memory_bandwidth=1e9, across=(Link("any", 4, 0.0, 2e9),)))
    assert "GB/s that a rank sends, 2 ranks" in text
    assert "2.00 GB/s that a node sends, 4 ranks" in text


def test_a_recording_is_the_median_of_steps_that_are_alike() -> None:
    events = [("use", "a", "forward"), ("step", "", "idle")]
    other = ([("use", "b", "forward")], [0.0, 100.0])
    steps = [(events, [0.0, 1.0, 4.0]), other, (events, [10.0, 12.0, 13.0]), (events, [20.0, 23.0, 25.0])]
    assert medians(steps) == [Moment("use", "a", "forward", 2.0), Moment("step", "", "idle", 2.0)]


# ---- what the papers saw, simulated


def test_60b_gains_from_64_to_400_devices_only_as_the_batch_grows() -> None:
    """S25: per-device speed at 128, 256 and 400 is above that at 64 with the batches that fit, and not with the batch of 64."""
    grown, fixed = list(scenarios.growing_batch()), list(scenarios.growing_batch(grows=False))
    batches = [batch for _, batch, _ in grown]
    assert batches == sorted(batches)
    assert batches[0] < batches[-1]
    first = grown[0][2]
    assert fixed[0] == grown[0]
    assert all(rate > first for _, _, rate in grown[1:])
    assert all(rate <= first for _, _, rate in fixed[1:])


def test_100b_runs_near_the_papers_rate() -> None:
    """S23: the paper has 38 TFLOPS on each of 400 V100."""
    assert 38e12 < scenarios.hundred_billion() < 45e12


def test_stage_3_falls_behind_stage_2_as_links_slow() -> None:
    """Less and less is hidden; where the wire is all, it sends half as much again."""
    found = list(scenarios.slowing_links())
    behind = [third - second for _, second, third in found]
    ratios = [third / second for _, second, third in found]
    assert behind == sorted(behind)
    assert ratios[0] < 1.05 < 1.1 < min(ratios[1:])
    assert 1.45 < ratios[-1] < 1.6


def test_prefetch_gains_less_with_larger_batches() -> None:
    gains = [without / ahead for _, without, ahead in scenarios.prefetching()]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 1.1 > gains[-1] > 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weak_scaling_is_nearly_linear_to_1024_devices(stage: int) -> None:
    """S63, the simulated part. A little above 1 is right: the more devices, the less of the optimizer's update for each."""
    kept = [part for _, part in scenarios.weak_scaling(stage)]
    assert kept[0] == 1
    assert all(0.95 < part < 1.1 for part in kept)


# ---- the plan


def test_a_trillion_parameters_take_more_than_a_year_on_1024_v100() -> None:
    """S27, by FLOPs alone at a rate that ZeRO reached (40 TFLOPS), and by simulated steps, which take longer."""
    year, by_flops = 365 * 86400, zerodp.plan(1e12, world_size=1024, sequence=1024, tokens=300e9, device_flops=40e12)
    least = by_flops.training_seconds(3)
    assert least is not None
    assert least == pytest.approx(6 * 1e12 * 300e9 / (1024 * 40e12))
    assert least > year
    options: dict[str, Any] = {"tensor_parallel": 16, "checkpointing": "full", "batch": 8, "sequence": 1024}
    simulated = zerodp.plan(1e12, world_size=1024, tokens=300e9, links="dgx-2", **options)
    taken = simulated.training_seconds(3)
    assert taken is not None
    assert taken > year
    step = simulated.timelines[3].seconds
    assert taken == pytest.approx(300e9 / (8 * 1024 * 64) * step)
    assert "training time" in str(simulated)
    assert any("simulated, with dgx-2 (assumed)" in line for line in simulated.assumptions)


def test_a_plan_has_no_times_unless_something_is_known_of_them() -> None:
    plain = zerodp.plan(7.5e9, world_size=64)
    assert plain.timelines == {}
    assert plain.training_seconds(2) is None
    assert zerodp.plan(7.5e9, world_size=64, links="dgx-2").timelines == {}  # no sequence
    without_rate = zerodp.plan(7.5e9, world_size=64, tokens=1e9, sequence=1024)
    assert without_rate.training_seconds(2) is None
    assert any(line.startswith("no training time: it needs") for line in without_rate.assumptions)
    assert not any("training time" in line for line in plain.assumptions)


def test_prediction_follows_the_units_of_a_model() -> None:
    """Twice the layers, about twice the step; a model with one device sends nothing."""
    setup = Setup(1, sequence=1024)
    one = predict(of_count(1e9, setup.dtypes, 1024), setup, 3, MACHINES["dgx-2"])
    assert one is not None
    assert (one.wire, one.exposed, one.overlap) == (0, 0, 1)
    small, large = (
        predict(
            Model("m", of_units("m", [(f"b.{i}", 1e8) for i in range(n)], setup.dtypes).units),
            setup,
            3,
            MACHINES["dgx-2"],
        )
        for n in (4, 8)
    )
    assert small is not None
    assert large is not None
    assert large.seconds == pytest.approx(2 * small.seconds, rel=1e-3)


# ---- pictures


def test_a_timeline_as_a_picture() -> None:
    """Well-formed, with a box for each span that says what it is, and none outside the picture."""
    found = by_hand(3)
    root = ElementTree.fromstring(picture.of_timeline(found))
    boxes = root.findall("{*}rect")
    assert len(boxes) == len(found.spans)
    assert all(0 <= float(box.get("x", "-1")) <= picture.WIDTH for box in boxes)
    told = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "compute blocks.0 forward, 1 s" in told
    assert "wait, 500 ms" in told
    assert {text.text for text in root.findall("{*}text")} >= {"compute", "gather", "reduce", "10.5 s"}


def test_curves_as_a_picture() -> None:
    root = ElementTree.fromstring(picture.curves({"a": [(1, 2.0), (2, 4.0)], "b <": [(1, 3.0), (2, 0.5)]}, "MB", 0))
    assert len(root.findall("{*}polyline")) == 2
    assert [text.text for text in root.findall("{*}text")] == ["4 MB", "0", "a", "b <", "1", "2"]
    assert picture.curves({}) == ""


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(2e-7, "0.2 us"), (1.5e-3, "1.5 ms"), (0.25, "250 ms"), (90, "90 s"), (86400, "8.64e+04 s"), (3e7, "347 days")],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert picture.duration(seconds) == words


def test_the_page_shows_the_simulated_step() -> None:
    options: dict[str, Any] = {"world_size": 64, "sequence": 1024, "batch": 2}
    page = html(zerodp.plan(8e9, links="dgx-2", **options), [("A heading & more", "<p>and its body</p>")])
    assert "<h2>One step, simulated</h2>" in page
    assert "<h2>A heading &amp; more</h2><p>and its body</p>" in page
    assert "One step, simulated" not in html(zerodp.plan(8e9, **options))
