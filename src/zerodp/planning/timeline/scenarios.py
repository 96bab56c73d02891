"""What the papers measured, simulated: growing and fixed batches, slow links, prefetch, many devices, a training that takes years.

Machines are assumed (`machine.MACHINES`), so only how figures move is meant, not the figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...core.stages import STAGES
from ..models import Shape, of_shape
from ..recommend import most_that_fit
from ..setup import Setup
from .machine import MACHINES
from .predict import predict, tokens_per_backward
from .simulate import Timeline

V100 = MACHINES["dgx-2"]
# The last stage that leaves parameters whole on every rank, and the last of all.
WHOLE, SHARDED = (max(n for n, row in STAGES.items() if row.shards_parameters == split) for split in (False, True))
B8 = Shape(40, 4096, 32, 50257, 1024)  # ZeRO-Infinity's 8B
B60 = Shape(75, 8192, 32, 50257, 1024)  # ZeRO's 60B
B100 = Shape(125, 8192, 64, 50257, 1024)  # and its 100B


def step(shape: Shape, stage: int, machine: Any = V100, **options: Any) -> Timeline:
    """One simulated step of a GPT in 16 bits."""
    setup = Setup.of({"precision": "fp16", **options})
    found = predict(of_shape(shape, setup.dtypes), setup, stage, machine)
    assert found is not None, "a shape with a sequence, and no offload"
    return found


def flops_per_device(shape: Shape, stage: int, machine: Any = V100, **options: Any) -> float:
    """The model's FLOPs per second and device, as the papers count them: recomputation is part of it."""
    setup = Setup.of({"precision": "fp16", **options})
    model, found = of_shape(shape, setup.dtypes), step(shape, stage, machine, **options)
    per_token = (8 if setup.checkpointing == "full" else 6) * model.numel / setup.tensor_parallel
    return float(per_token * (tokens_per_backward(model, setup) or 0) * setup.accumulate / found.seconds)


def growing_batch(devices: Sequence[int] = (64, 128, 256, 400), grows: bool = True) -> Iterator[tuple[int, int, float]]:
    """(devices, samples per tensor parallel group, FLOPs per second and device) of 60B at stage 2, as ZeRO's Figure 3.

    The batch is the largest that fits 32 GB, or the one that fits the fewest devices.
    """
    options: dict[str, Any] = {"tensor_parallel": 16, "checkpointing": "full", "partition_activations": True}
    batch = 0
    for count in devices:
        if grows or not batch:
            setup = Setup.of({"world_size": count, "device_memory": "32GB", "precision": "fp16", **options})
            batch = most_that_fit(of_shape(B60, setup.dtypes), setup, WHOLE)["batch"]
        yield count, batch, flops_per_device(B60, WHOLE, world_size=count, batch=batch, **options)


def hundred_billion() -> float:
    """FLOPs per second and device of 100B on 400 devices at stage 2, with 32 samples per tensor parallel group of 16."""
    options: dict[str, Any] = {"tensor_parallel": 16, "checkpointing": "full", "partition_activations": True}
    return flops_per_device(B100, WHOLE, world_size=400, batch=32, **options)


def slowing_links(
    factors: Sequence[float] = (1, 1 / 4, 1 / 16, 1 / 64), devices: int = 64
) -> Iterator[tuple[float, float, float]]:
    """(part of the links' bandwidth, seconds at stage 2, seconds at stage 3) of 8B."""
    for factor in factors:
        machine = V100.with_bandwidth(factor)
        options: dict[str, Any] = {"world_size": devices, "batch": 2, "checkpointing": "full"}
        second, third = (step(B8, stage, machine, **options).seconds for stage in (WHOLE, SHARDED))
        yield factor, second, third


def prefetching(batches: Sequence[int] = (1, 2, 4, 8, 16), devices: int = 64) -> Iterator[tuple[int, float, float]]:
    """(samples per device, seconds without prefetch, seconds with one unit ahead) of 8B at stage 3, as ZeRO-Infinity's Figure 6d."""
    for batch in batches:
        options: dict[str, Any] = {"world_size": devices, "batch": batch, "checkpointing": "full"}
        without, ahead = (step(B8, SHARDED, prefetch=units, **options).seconds for units in (0, 1))
        yield batch, without, ahead


def weak_scaling(
    stage: int, devices: Sequence[int] = (1, 16, 64, 256, 1024), machine: Any = V100, shape: Shape = B8, batch: int = 8
) -> Iterator[tuple[int, float]]:
    """(devices, part of one device's speed that each keeps) with the same batch on each."""
    first = 0.0
    for count in devices:
        seconds = step(shape, stage, machine, world_size=count, batch=batch, checkpointing="full").seconds
        first = first or seconds
        yield count, first / seconds
