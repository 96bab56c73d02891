"""ZeRO's named configurations: each switch changes its own line of `zerodp.stats` and no other.

Two data-parallel by two tensor-parallel ranks; blocks that torch has split by columns and rows, so that their inputs are the same on
the ranks of a tensor group.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerodp
from tests.ranks.oracle import adamw, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net
from zerodp.config import PRESETS
from zerodp.residual.activations import Checkpointed
from zerodp.residual.store import store_of

TOKENS, WIDTH, DEPTH = 128, 64, 3
INPUTS = DEPTH * TOKENS * WIDTH * 4  # bytes of the blocks' inputs
KEPT = ("parameters", "gradients", "master", "first_moment", "second_moment", "activations")


def trained(config: zerodp.Config, **options: Any) -> tuple[dict[str, int], zerodp.Stats, nn.Module]:
    """What rests on this rank between forward and backward of the second step, as one line for each kind and place."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Net(WIDTH, DEPTH)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
    model, optimizer = zerodp.shard(model, adamw(model), config, mesh=mesh["dp"], units=[Block], **options)
    x = torch.randn(TOKENS, 3, generator=torch.Generator().manual_seed(mesh["dp"].get_local_rank()))
    squares(model, x).backward()
    optimizer.step()
    zerodp.stats(model).reset()
    loss = squares(model, x)
    stats = zerodp.stats(model)
    memory = stats.memory
    lines = {kind: memory.now[kind] for kind in KEPT}
    lines |= {"host": sum(memory.host.values()), "disk": sum(memory.disk.values())}
    loss.backward()
    return lines, stats, model


def changed(before: dict[str, int], after: dict[str, int]) -> set[str]:
    return {line for line in before if before[line] != after[line]}


def wire(stats: zerodp.Stats) -> dict[tuple[str, str], int]:
    """Elements over the data-parallel ranks and those of split inputs, apart from torch's own."""
    return {(row.op, row.unit): row.elements for row in stats.comm if row.op != "redistribute"}


@on_ranks(4)
def test_each_switch_changes_its_own_line() -> None:
    found = {name: trained(zerodp.Config.preset(name)) for name in PRESETS}
    lines = {name: each[0] for name, each in found.items()}
    # P_a: half of each input on two ranks, and one gather of it for each block
    assert changed(lines["C1"], lines["C2"]) == changed(lines["C3"], lines["C4"]) == {"activations"}
    for whole, split in (("C1", "C2"), ("C3", "C4")):
        assert lines[whole]["activations"] == 0  # autograd's own, as with torch's checkpoint
        assert lines[split]["activations"] == INPUTS // 2
        more = wire(found[split][1])
        gathers = {key: n - wire(found[whole][1]).get(key, 0) for key, n in more.items()}
        assert {key: n for key, n in gathers.items() if n} == {
            ("all_gather", f"blocks.{index}"): TOKENS * WIDTH // 2 for index in range(DEPTH)
        }
    # P_a+cpu: the same bytes on the host
    assert changed(lines["C4"], lines["C5"]) == {"activations", "host"}
    assert (lines["C5"]["activations"], lines["C5"]["host"]) == (0, INPUTS // 2)
    # P_os+g beside P_os: gradients are sharded, and nothing else
    for one, two in (("C1", "C3"), ("C2", "C4")):
        assert changed(lines[one], lines[two]) == {"gradients"}
        assert lines[two]["gradients"] == lines[one]["gradients"] // 2
    # P_os beside nothing: gradients stay whole, optimizer states fall
    none, _, _ = trained(zerodp.Config.preset("C1", stage=0))
    assert changed(none, lines["C1"]) == {"first_moment", "second_moment"}


@on_ranks(4)
def test_constant_buffers_change_the_buckets_only() -> None:
    """C_B: the most bytes of one collective; a unit's reduction comes in pieces, received one after the other's size."""
    large, stats, _ = trained(zerodp.Config.zero_100b())
    small, pieces, _ = trained(zerodp.Config.zero_100b(), bucket_bytes=2**12)
    assert changed(large, small) == set()
    assert sum(row.count for row in pieces.comm) > sum(row.count for row in stats.comm)
    assert pieces.wire_elements == stats.wire_elements
    deep: list[dict[str, int]] = []
    for depth in (2, 8):
        model, optimizer = zerodp.shard(*built(Net(WIDTH, depth)), stage=3, units=[Block])
        for _ in range(2):
            squares(model, torch.ones(8, 3)).backward()
            optimizer.step()
            optimizer.zero_grad()
        deep.append({kind: zerodp.stats(model).memory.peak[kind] for kind in ("buckets", "unsharded")})
    assert deep[0] == deep[1]


def built(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, adamw(model)


@on_ranks(2)
def test_presets_on_ranks_of_ones_own() -> None:
    """Without DTensors the ranks to split over are named; shard() applies what unshard() takes back."""
    model = Net(8, 2)
    optimizer = adamw(model)
    with pytest.raises(zerodp.ConfigError, match="no parameter of this model is a DTensor"):
        zerodp.shard(model, optimizer, zerodp.Config.zero_100b())
    assert type(model) is Net
    model, optimizer = zerodp.shard(
        model, optimizer, zerodp.Config.zero_100b(partition_activations=dist.group.WORLD, stage=3)
    )
    loss = squares(model, torch.ones(64, 3))
    assert zerodp.stats(model).memory.now["activations"] == 2 * 64 * 8 * 4 // 2
    loss.backward()
    optimizer.step()
    zerodp.unshard(model, optimizer)
    assert [type(block) for block in model.blocks] == [Block, Block]
    twin, _ = zerodp.shard(Net(8, 2), checkpoint_activations=["blocks.1"], offload=zerodp.Offload(activations="host"))
    assert [isinstance(block, Checkpointed) for block in twin.blocks] == [False, True]
    loss = squares(twin, torch.ones(64, 3))
    assert zerodp.stats(twin).memory.host["activations"] == 64 * 8 * 4
    assert store_of(twin._zerodp).tiers


def test_presets_are_the_papers() -> None:
    """Table 3: P_os or P_os+g, and what P_a does; C_B and M_D are in all of them."""
    configs = {name: zerodp.Config.preset(name) for name in ("C1", "C2", "C3", "C4", "C5")}
    assert [config.stage for config in configs.values()] == [1, 1, 2, 2, 2]
    assert [config.partition_activations for config in configs.values()] == [False, True, False, True, True]
    assert [config.offload.activations for config in configs.values()] == ["device"] * 4 + ["host"]
    assert zerodp.Config.zero_100b() == configs["C4"]
    assert zerodp.Config.zero_100b(precision="bf16", stage=1).precision == zerodp.Config(precision="bf16").precision
    with pytest.raises(zerodp.ConfigError, match="unknown preset 'C6'"):
        zerodp.Config.preset("C6")
    with pytest.raises(zerodp.ConfigError, match="unknown option"):
        zerodp.Config.zero_100b(stages=3)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"partition_activations": True}, "partition_activations: what is split or moved"),
        ({"offload": zerodp.Offload(activations="host")}, "offload: what is split or moved"),
        ({"offload": 3}, "offload: expected 'host' or zerodp.Offload"),
        ({"checkpoint_activations": 3}, "checkpoint_activations: expected module classes"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(zerodp.ConfigError, match=text):
        zerodp.Config(**options)
