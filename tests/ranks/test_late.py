"""Copies between host and device that end late, as they do on an accelerator: the same bits, whoever could be too early."""

from __future__ import annotations

from typing import Any

import pytest

from tests.late import LateTier
from tests.ranks.oracle import all_close, close
from tests.ranks.pool import on_ranks
from tests.ranks.test_offload import DELAYED, Story, delayed, delayed_oracle, told
from tests.ranks.test_offload_cases import scaled
from zerodp import Offload
from zerodp.offload.elsewhere import Elsewhere
from zerodp.tiers.disk import DiskTier


def late(patch: pytest.MonkeyPatch) -> None:
    """From here on model states in host memory are as far from the device as on an accelerator."""
    patch.setattr("zerodp.offload.places.HostTier", LateTier)
    patch.setattr("zerodp.tiers.disk.HostTier", LateTier)
    patch.setattr("zerodp.tiers.disk.DiskTier.put", in_time)
    patch.setattr(Elsewhere, "sums_in_place", False)


def in_time(tier: DiskTier, *values: Any, put: Any = DiskTier.put) -> Any:
    """First values are waited for, as on an accelerator."""
    ticket = put(tier, *values)
    tier.host.stream.synchronize()
    return ticket


PLACES = {
    "states": (Offload(optimizer="host"), 2),
    "parameters": (Offload(params="host"), 3),
    "both": (Offload(optimizer="host", params="host"), 3),
    "states on disk": (Offload(optimizer="disk"), 2),
    "all on disk": (Offload(optimizer="disk", params="disk"), 3),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("name", PLACES)
def test_the_same_bits(name: str, world_size: int) -> None:
    """Each place in one precision on one rank, and in the other on two."""
    offload, stage = PLACES[name]
    precision = ("fp32", "bf16")[(list(PLACES).index(name) + world_size) % 2]
    options = {"stage": stage, "precision": precision, "prefetch": 2}
    reference = told(Offload(), **options)
    with pytest.MonkeyPatch.context() as patch:
        late(patch)
        told(offload, **options).equals(reference)


@on_ranks(2)
@pytest.mark.parametrize("place", DELAYED)
@pytest.mark.parametrize("looks", [False, True])
def test_a_delayed_update(looks: bool, place: str) -> None:
    """Each place with whole and with sharded parameters."""
    stage = (1, 3)[(list(DELAYED).index(place) + looks) % 2]
    with pytest.MonkeyPatch.context() as patch:
        late(patch)
        mine = delayed(place, 5, 2, looks, stage=stage)
    for number, (one, other) in enumerate(zip(mine, delayed_oracle(5, 2), strict=True)):
        all_close(f"step {number}:", one, other)


@on_ranks(2)
def test_gradients_are_there_when_they_are_read() -> None:
    seen = []
    for offload in (Offload(), Offload(optimizer="host")):
        with pytest.MonkeyPatch.context() as patch:
            late(patch)
            story = Story(offload, stage=2)
            story.backward()
            seen.append([one.grad.clone() for one in story.optimizer.param_groups[0]["params"]])
    for mine, theirs in zip(*seen, strict=True):
        close("gradient", mine, theirs)


@on_ranks(2)
def test_grad_scaler() -> None:
    """Gradients are unscaled where they rest, when they are there."""
    found = []
    for late_copies, settings in ((False, {}), (True, {"optimizer": "host"}), (True, {"optimizer": "disk"})):
        with pytest.MonkeyPatch.context() as patch:
            if late_copies:
                late(patch)
            story = Story(Offload(**settings), stage=2)
            found.append(scaled(story.model, story.optimizer, explicit=False))
    for one in found[1:]:
        all_close("scaled", dict(enumerate(one)), dict(enumerate(found[0])))
