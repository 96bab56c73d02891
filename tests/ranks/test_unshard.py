"""After `unshard` nothing is left of the sharded model: no memory, no file, and no waiting for Python's cycle collector."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerodp
from tests.ranks.oracle import adamw, copied, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net
from zerodp import Offload
from zerodp.core.access import runtime_of

CASES: dict[str, dict[str, Any]] = {
    "on the device": {"stage": 3, "unsharded_bytes": "1MB"},
    "on the device, bf16": {"stage": 1, "precision": "bf16"},
    "on the host": {"stage": 3, "offload": Offload(optimizer="host", params="host"), "precision": "bf16"},
    "on the host, delayed": {"stage": 2, "offload": Offload(optimizer="host", delayed_update=1)},
    "on disk": {"stage": 3, "offload": Offload(optimizer="disk", params="disk")},
}


def files() -> list[str]:
    """Files of the disk tier that this process has open."""
    found = []
    for handle in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{handle}"))
        except OSError:  # the list's own
            continue
    return [name for name in found if "/zerodp-" in name]


@on_ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_unshard_gives_everything_back_at_once(name: str) -> None:
    """With gradients, states and pages there, the collector off; the plain model and optimizer go on training."""
    torch.manual_seed(0)
    gc.collect()
    before = files()
    net = Net()
    model, optimizer = zerodp.shard(net, adamw(net), units=[Block], bucket_bytes=700, **CASES[name])
    for step in range(3):
        optimizer.zero_grad()
        squares(model, rows(3)(step, 0, dist.get_rank())).backward()
        optimizer.step()
    assert (len(files()) > len(before)) == (name == "on disk")
    runtime = runtime_of(model)
    arena, tiers = runtime.arena, dict(runtime.places.tiers)
    del runtime
    assert (
        list(arena.lasting)
        or any(getattr(tier, "host", tier).arena.lent for tier in tiers.values())
        or name == "on disk"
    )
    gc.disable()
    try:
        expected = copied(model.state_dict())
        model, optimizer = zerodp.unshard(model, optimizer)
        assert files() == before
        assert [kind for _, kind in arena.lasting] == []
        assert arena.reserved == 0
        for tier in tiers.values():
            host = getattr(tier, "host", tier).arena
            assert (host.reserved, host.lent, host.total) == (0, 0, 0)
    finally:
        gc.enable()
    assert type(model) is Net
    assert all(torch.equal(p, expected[key]) for key, p in model.state_dict().items())
    optimizer.zero_grad()
    squares(model, rows(3)(9, 0, 0)).backward()
    optimizer.step()
    assert all(state["step"] == 4 for state in optimizer.state.values())


@on_ranks(2)
def test_unshard_inside_full_params_is_refused() -> None:
    model, _ = zerodp.shard(nn.Linear(3, 2))
    with pytest.raises(zerodp.ShardedError, match="inside full_params"), zerodp.full_params(model):
        zerodp.unshard(model)
    assert model(torch.ones(1, 3)).isfinite().all()
