"""Models whose states do not fit the memory that is given: refused by the planner, and trained with states elsewhere."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import adamw, all_close, copied, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.test_memory import aligned
from zerodp.offload import places, stepping
from zerodp.tiers.disk import DiskTier

WIDTH, LAYERS = 128, 8
NUMEL = LAYERS * WIDTH * WIDTH
LOW = zerodp.Precision(torch.bfloat16, grad_dtype=torch.bfloat16)
STATES = 14 * NUMEL // 2  # bytes of a rank of two at stage 3
SOME = 64 * 1024  # step counts and the like
BUFFERS = (
    2 * 14 * (WIDTH * WIDTH // 2)
)  # on their way to and from disk, however slow it is: states of the units that step now and next


def plan(**options: Any) -> zerodp.Plan:
    given = {"precision": LOW, "units": [nn.Linear], "exact": True, "headroom": 0, **options}
    return zerodp.plan(aligned(LAYERS, WIDTH), world_size=2, **given)


def trained(**options: Any) -> tuple[dict[str, Tensor], Any]:
    """Weights after three steps, and the memory of the last two."""
    torch.manual_seed(0)
    model = aligned(LAYERS, WIDTH)
    model, optimizer = zerodp.shard(model, adamw(model), stage=3, units=[nn.Linear], precision=LOW, **options)
    for step in range(3):
        squares(model, rows(WIDTH)(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            zerodp.stats(model).reset()
    memory = zerodp.stats(model).memory
    return copied(dict(model.state_dict())), memory


@on_ranks(2)
def test_states_beyond_the_devices_budget_train_with_offload_only() -> None:
    """On a device for 4 of the 7 bytes per parameter. The same weights to the last bit."""
    budget = 4 * NUMEL
    refused = plan(device_memory=budget)
    assert refused.fits is False
    assert "on the host" in refused.reason
    assert plan(device_memory=budget, offload_optimizer="host", offload_params="host").fits
    expected, whole = trained()
    assert whole.total_peak >= STATES > budget
    weights, memory = trained(offload=zerodp.Offload(optimizer="host", params="host"))
    assert memory.total_peak <= budget
    all_close("weight", weights, expected)


@on_ranks(2)
def test_states_beyond_the_hosts_budget_train_from_disk() -> None:
    """On a host for 3 of the 7 bytes per parameter what is left over is on disk; or all of it, with buffers only in memory."""
    budget = 3 * NUMEL
    assert plan(device_memory="1GB", host_memory=budget, offload_optimizer="host").estimates[3].problems
    expected, _ = trained()
    for room, offload in (
        (budget, zerodp.Offload(optimizer="host", host_bytes=budget)),
        (0, zerodp.Offload(optimizer="disk", params="disk")),
    ):
        with (
            mock.patch.object(places, "DiskTier", partial(DiskTier, buffer_bytes=BUFFERS)),
            mock.patch.object(stepping, "WINDOW_NUMEL", 1),
        ):
            weights, memory = trained(offload=offload)
        states = sum(memory.host.values()) + sum(memory.disk.values())
        assert sum(memory.host.values()) <= room + BUFFERS + SOME
        assert sum(memory.disk.values()) > 0
        assert memory.host["gradients"] == memory.disk.get("gradients", 0) == 0  # the step has used them
        assert states >= 6 * NUMEL
        all_close("weight", weights, expected)
