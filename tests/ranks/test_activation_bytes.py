"""What checkpointed inputs take: bytes on the device, on the host and on disk, gathers, and no growth."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from tests.limits import largest_file
from tests.ranks.oracle import squares
from tests.ranks.pool import on_ranks
from tests.ranks.test_activations import WORLD, ours, store
from tests.ranks.toys import Block, Net
from zerodp.residual import store as stores
from zerodp.residual.store import store_of
from zerodp.tiers.disk import DiskTier

case = pytest.mark.case


class Wide(Net):
    def __init__(self, width: int = 64, depth: int = 4):
        super().__init__(width, depth)


def kept(model: nn.Module, x: Tensor) -> tuple[Tensor, Any]:
    zerodp.stats(model).reset()
    loss = squares(model, x)
    return loss, zerodp.stats(model).memory


@case("B39")
@on_ranks(2, 4)
@pytest.mark.parametrize("when", ["before", "after"])
def test_bytes_fall_to_one_nth(when: str, stage: int, world_size: int) -> None:
    """1 MiB for each block, and one gather of it per block and pass."""
    model = Wide()
    apply = lambda: zerodp.apply_activation_checkpointing(model, partition=dist.group.WORLD)  # noqa: E731
    names = list(model.state_dict())
    if when == "before":
        assert apply() is model
    zerodp.shard(model, stage=stage, units=[Block])
    if when == "after":
        apply()
    assert list(model.state_dict()) == names
    assert isinstance(model.blocks[0], Block)
    x = torch.ones(4096, 3)
    loss, memory = kept(model, x)
    assert memory.now["activations"] == 4 * 2**20 // world_size
    assert sum(memory.host.values()) == sum(memory.disk.values()) == 0
    loss.backward()
    stats = zerodp.stats(model)
    assert (stats.memory.now["activations"], stats.memory.now["unsharded"]) == (0, 0)
    rows = {row.unit: row for row in stats.comm if row.dtype == torch.float32 and row.elements >= 2**17}
    assert sorted(rows) == [f"blocks.{index}" for index in range(4)]
    gathers = [
        row for row in stats.comm if row.unit == "blocks.1" and row.elements == 2**18 // world_size * (world_size - 1)
    ]
    assert [(row.op, row.count, row.wire_bytes) for row in gathers] == [
        ("all_gather", 1, 2**20 // world_size * (world_size - 1))
    ]


@on_ranks(2)
@pytest.mark.parametrize("offload", ["host", "disk"])
def test_off_the_device(offload: str, stage: int) -> None:
    model, _ = zerodp.shard(Wide(), stage=stage, units=[Block])
    zerodp.apply_activation_checkpointing(model, units=[Block], partition=dist.group.WORLD, offload=offload)
    loss, memory = kept(model, torch.ones(1024, 3))
    assert memory.now["activations"] == 0
    there = {"host": memory.host, "disk": memory.disk}[offload]
    assert there["activations"] == 4 * 2**18 // 2
    loss.backward()
    memory = zerodp.stats(model).memory
    assert memory.host["activations"] == memory.disk["activations"] == 0
    assert {"host": memory.host_peak, "disk": memory.disk_peak}[offload]["activations"] == 4 * 2**18 // 2
    assert f"activations, {offload}" in zerodp.describe(model)


@on_ranks(2)
def test_room_in_host_memory_comes_first() -> None:
    model, _ = zerodp.shard(Wide(depth=6), stage=1, units=[Block])
    one = 2**18
    offload = zerodp.Offload(activations="disk", host_bytes=2 * one)
    zerodp.apply_activation_checkpointing(model, offload=offload)
    loss, memory = kept(model, torch.ones(1024, 3))
    assert memory.disk["activations"] == 4 * one
    loss.backward()
    assert zerodp.stats(model).memory.disk["activations"] == 0


@on_ranks(2)
def test_one_tensor_given_to_all_blocks_rests_once() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8)]) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.rand(64, 8) > 0.5
            for (layer,) in self.blocks:
                x = ours(WORLD)(lambda x, mask, layer=layer: torch.where(mask, layer(x), x), x, mask)
            return x

    model = Masked()
    loss = model(torch.ones(64, 8)).sum()
    assert store().arena.now["activations"] == (3 * 64 * 8 * 4 + 64 * 8) // 2
    loss.backward()
    assert store().arena.now["activations"] == 0


@on_ranks(2)
def test_the_file_does_not_grow_with_varying_lengths() -> None:
    """40 steps: beside what is on its way to the file nothing is held that the longest sequence did not need."""
    model, _ = zerodp.shard(Wide(16, 2), stage=3, units=[Block])
    zerodp.apply_activation_checkpointing(model, units=[Block], partition=dist.group.WORLD, offload="disk")
    lengths = torch.randint(1, 513, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    for step, length in enumerate([512, 512, 512, *lengths]):
        with mock.patch.object(stores, "DiskTier", partial(DiskTier, buffer_bytes=0)):  # made at first use
            squares(model, torch.ones(length, 3)).backward()
        model.zero_grad()
        (tier,) = store_of(model._zerodp).tiers.values()
        if step == 2:
            reserved, end = model._zerodp.arena.reserved, tier.file.end
    assert model._zerodp.arena.reserved <= reserved
    assert tier.largest == 512 * 16 * 4 // 2
    assert tier.host.arena.reserved <= 2 * 4 * tier.largest  # buffers are cut for the longest, however slow the disk
    assert tier.file.end <= 2 * end


@on_ranks(1)
def test_full_disk_is_an_error_and_training_goes_on() -> None:
    """Where there is one rank; with more see test_activation_errors.py."""
    model, _ = zerodp.shard(Wide(depth=3), stage=1, units=[Block])
    zerodp.apply_activation_checkpointing(model, offload="disk")
    with (
        largest_file(2**18),
        pytest.raises(zerodp.StorageError, match=r"bytes more could not be written in .*bytes free"),
    ):
        squares(model, torch.ones(1024, 3))
    gc.collect()
    loss, memory = kept(model, torch.ones(1024, 3))
    assert memory.disk["activations"] == 3 * 2**18
    loss.backward()
    assert zerodp.stats(model).memory.disk["activations"] == 0
