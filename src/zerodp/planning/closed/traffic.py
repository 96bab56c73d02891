"""What crosses the wire and the host link in one step, in elements or bytes."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.stages import Residency
from .symbols import Number, choose

# ---- the paper's counts: a ring's (N - 1) / N taken as 1


def paper_elements(numel: Number, residency: Residency) -> Number:
    """2Ψ: gradients reduced (Ψ), and gradients or parameters gathered (Ψ); 3Ψ where parameters are gathered twice."""
    return numel * choose(residency.shards_parameters, 3, 2)


# ---- this library's


def sent_elements(
    whole: Number,
    shard_ranks: Number,
    replicas: Number,
    residency: Residency,
    backwards: Number = 1,
    gathers: Number = None,
) -> dict[str, Number]:
    """Elements that one rank sends per step of one flat of `whole` elements, padding included, by operation.

    shard_ranks: ranks of the shard group, 1 where the optimizer is not sharded; replicas: copies of that group;
    backwards: reduced backward passes per step. Stage 3 gathers for each forward and each backward, or `gathers` times where pages
    are kept between uses.
    """
    other = (shard_ranks - 1) / shard_ranks
    gathers = choose(residency.shards_parameters, 2 * backwards if gathers is None else gathers, 1)
    return {
        "all_gather": whole * other * gathers,
        "reduce_scatter": whole * other * backwards,
        "all_reduce": 2 * whole / shard_ranks * (replicas - 1) / replicas * backwards,
    }


def launches(
    pieces: int, sharded: bool, replicated: bool, residency: Residency, backwards: int = 1, gathers: int | None = None
) -> int:
    """Collectives of one flat per step, which travels in `pieces`; a group of one rank launches nothing."""
    gathers = (2 * backwards if gathers is None else gathers) if residency.shards_parameters else 1
    return pieces * (sharded * (gathers + backwards) + replicated * backwards)


# ---- FSDP (Zhao et al., 2023): traffic across hosts per device, M bytes of parameters, W ranks, G to a host


def cross_host_bytes(strategy: str, parameter_bytes: Number, ranks: Number, per_host: Number) -> Number:
    """Bytes that one device sends across hosts per step for "hybrid", "replicated" or "full" sharding."""
    other = parameter_bytes * (ranks - 1) / ranks
    return {"hybrid": 2 * other / per_host, "replicated": 2 * other, "full": 3 * other}[strategy]


# ---- ZeRO-Offload: bytes over the host link


def offload_bytes(numel: Number, element_bytes: Number = 2) -> Number:
    """4M in 16 bits, for all devices together: gradients down and parameters up, the least of all cuts of the step."""
    return 2 * element_bytes * numel


# What of 16M rests on the device: parameters 2M, gradients 2M, and the update's fp32 state 12M.
OFFLOAD_PLACEMENTS: Mapping[str, Mapping[str, bool]] = {
    "all on the device": {"gradients": True, "update": True},
    "gradients on the host": {"gradients": False, "update": True},
    "update on the host": {"gradients": True, "update": False},
    "gradients and update on the host": {"gradients": False, "update": False},
}


def offload_device_bytes(numel: Number, gradients: Number, update: Number) -> Number:
    """Device bytes in mixed precision with the gradients and the update here, or on the host."""
    return numel * (2 + choose(gradients, 2, 0) + choose(update, 12, 0))
