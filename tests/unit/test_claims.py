"""Claims of the checklist that the planner answers: which configurations of the papers fit the papers' machines, and in what order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerodp
from zerodp.core.stages import STAGES
from zerodp.planning.closed import activations, states
from zerodp.planning.estimate import estimate
from zerodp.planning.models import Shape, of_shape
from zerodp.planning.setup import Setup

LOW = zerodp.Precision(torch.float16, grad_dtype=torch.float16)  # 16-bit gradients, as the papers count
V100: dict[str, Any] = {"device_memory": "32GiB", "precision": LOW, "sequence": 1024}
VOCABULARY = 50257


def fits(shape: Shape, stage: int, **options: Any) -> bool:
    """With a tenth of each device left free."""
    setup = Setup(**{**V100, "checkpointing": "full", **options})
    return not estimate(of_shape(shape, LOW), setup, stage).problems


def gpt(layers: int, hidden: int, heads: int) -> Shape:
    return Shape(layers, hidden, heads, VOCABULARY, 1024)


# The paper's configurations, as far as they differ here: constant buffers and reused memory are always on.
CONFIGURATIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "C1": (1, {}),
    "C2": (1, {"partition_activations": True}),
    "C3": (2, {}),
    "C4": (2, {"partition_activations": True}),
    "C5": (2, {"partition_activations": True, "offload_activations": "host"}),
}


def that_fit(model: Shape, batch: int) -> set[str]:
    machines = {"world_size": 400, "tensor_parallel": 16, "batch": batch}
    return {name for name, (stage, options) in CONFIGURATIONS.items() if fits(model, stage, **machines, **options)}


def test_170_billion_fit_on_400_devices_with_everything_on() -> None:
    """16 samples at once: only with the checkpoints on the host. A model a fifth larger does not fit even so."""
    assert that_fit(gpt(212, 8192, 64), batch=16) == {"C5"}
    assert that_fit(gpt(260, 8192, 64), batch=16) == set()


def test_100_billion_fit_with_partitioned_activations() -> None:
    """The size and batch of the paper's fastest run. What is not partitioned does not fit at a quarter of the batch."""
    hundred = gpt(125, 8192, 64)
    assert that_fit(hundred, batch=32) == {"C4", "C5"}
    assert that_fit(hundred, batch=8).isdisjoint({"C1", "C3"})


def test_40_to_150_billion_in_the_papers_order() -> None:
    """Figure 6: each configuration takes a larger model than the one before, but C3 less than C2."""

    def layers(name: str) -> int:
        stage, options = CONFIGURATIONS[name]
        machines = {"world_size": 400, "tensor_parallel": 16, "batch": 16}
        return max(n for n in range(0, 260, 20) if n == 0 or fits(gpt(n, 8192, 64), stage, **machines, **options))

    most = {name: layers(name) for name in CONFIGURATIONS}
    assert most["C1"] < most["C3"] < most["C2"] < most["C4"] < most["C5"]


def test_13_billion_without_model_parallelism() -> None:
    """Stage 2 on 128 devices. Data parallelism of its time, with one fused fp32 buffer for all gradients, ends at 1.4 billion."""
    assert fits(gpt(62, 4096, 32), 2, world_size=128, batch=2)

    def data_parallel_bytes(numel: float, layers: int, hidden: int) -> float:
        model_states = states.paper_bytes(numel, 128, STAGES[0], states.policy(2, 2))
        return float(model_states + 4 * numel + activations.checkpoint_bytes(1024, 1, hidden, layers))

    usable = 0.9 * 32 * 2**30
    assert data_parallel_bytes(1.3e9, 40, 1536) < usable < data_parallel_bytes(1.56e9, 48, 1600)
    assert fits(gpt(48, 1600, 16), 0, world_size=128)  # with constant buffers it fits


def test_the_largest_models_on_16_devices_are_in_the_papers_order() -> None:
    """One DGX-2: data parallel 1.4, stage 2 10, optimizer on the host 13, stage 3 20, all on the host 70, all on disk 1000 billion."""
    away = {"offload_optimizer": "host", "host_memory": "93GB"}
    all_away = {**away, "offload_params": "host", "offload_activations": "host"}
    on_disk = {**all_away, "offload_optimizer": "disk", "offload_params": "disk", "disk_memory": "1750GB"}
    ways: list[tuple[int, dict[str, Any]]] = [(0, {}), (2, {}), (2, away), (3, {}), (3, all_away), (3, on_disk)]
    options = {**V100, "world_size": 16, "checkpointing": "full"}
    most = [zerodp.plan(1e9, **options, **given).largest[stage]["parameters"] for stage, given in ways]
    assert most == sorted(set(most))
    printed = [1.4e9, 10e9, 13e9, 20e9, 70e9]
    assert all(mine >= theirs for mine, theirs in zip(most, printed, strict=False))


def test_a_trillion_parameters_fit_the_disk_of_one_node() -> None:
    """16 bytes each are 16 of 28 TB; the host keeps what is on its way."""
    on_disk = {"offload_optimizer": "disk", "offload_params": "disk", "disk_memory": "1750GB", "host_memory": "93GB"}
    found = zerodp.plan(1e12, world_size=16, **V100, **on_disk, checkpointing="full").estimates[3]
    assert 16 * found.tiers["disk"] == pytest.approx(16e12, rel=1e-9)
    assert not any(problem.startswith(("disk", "host")) for problem in found.problems)


def test_a_real_model_of_7_5_billion_costs_what_the_paper_says() -> None:
    """Figure 1 from shapes on the meta device: per parameter 16, 4 + 12/64, 2 + 14/64 and 16/64 bytes, padding below a thousandth."""
    with torch.device("meta"):
        blocks = [nn.TransformerEncoderLayer(4096, 32, 16384, batch_first=True) for _ in range(36)]
        model = nn.Sequential(nn.Embedding(VOCABULARY, 4096), *blocks)
    numel = sum(p.numel() for p in model.parameters())
    assert numel == pytest.approx(7.5e9, rel=0.01)
    found = zerodp.plan(model, world_size=64, precision=LOW).estimates
    for stage, per_parameter in enumerate([16, 4 + 12 / 64, 2 + 14 / 64, 16 / 64]):
        assert found[stage].model_state_bytes == pytest.approx(per_parameter * numel, rel=1e-12)
        held = per_parameter - (2 / 64 if stage == 3 else 0)  # no 16-bit shard rests beside the master
        assert held <= found[stage].zerodp_state_bytes / numel < held * 1.001
