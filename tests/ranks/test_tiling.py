"""Tiled layers under `shard`: the oracle's results at every stage, one tile's memory, and dense weights from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerodp
from tests.ranks.oracle import adamw, close, copied, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.test_big_models import saved
from zerodp import TiledLinear, tile_linears

WIDTH = 64


class Wide(nn.Module):
    """A block whose two layers are large beside all else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


def net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, WIDTH), nn.Sequential(Wide(), Wide()), nn.Linear(WIDTH, 3))


def trained(model: Any, optimizer: Any, ranks: range) -> list[float]:
    """Two steps, each on the batches of `ranks`."""
    losses = []
    for number in range(2):
        for rank in ranks:
            loss = squares(model, rows(3)(number, 0, rank)) / (
                1 if isinstance(model, zerodp.ShardedModule) else len(ranks)
            )
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@on_ranks(2)
@pytest.mark.parametrize("grid", [(1, 4), (2, 3)], ids=["1x4", "2x3"])
def test_training_is_that_of_plain_torch(grid: tuple[int, int], stage: int) -> None:
    plain, model = (tile_linears(net(), above=WIDTH * WIDTH, tiles=grid) for _ in range(2))
    expected = trained(plain, adamw(plain), range(2))
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage)
    units = {unit for unit in zerodp.describe(model).split() if ".tiles." in unit}
    assert len(units) == 4 * grid[0] * grid[1]
    found = trained(model, optimizer, range(dist.get_rank(), dist.get_rank() + 1))
    assert found == [2 * loss for loss in expected[dist.get_rank() :: 2]]
    for name, value in model.state_dict().items():
        close(name, value, plain.state_dict()[name])


@on_ranks(2)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_working_memory_is_a_tiles(prefetch: int) -> None:
    def peak(tiles: tuple[int, int] | None) -> int:
        model = net() if tiles is None else tile_linears(net(), "1.*", tiles)
        model, optimizer = zerodp.shard(model, adamw(model), prefetch=prefetch, units=None if tiles else [nn.Linear])
        trained(model, optimizer, range(dist.get_rank(), dist.get_rank() + 1))
        zerodp.stats(model).reset()
        trained(model, optimizer, range(dist.get_rank(), dist.get_rank() + 1))
        return zerodp.stats(model).memory.peak["unsharded"]

    layer = 4 * 4 * WIDTH * WIDTH  # bytes
    small = 4 * 16 * WIDTH  # biases, norms and the outer layers
    dense = peak(None)
    assert (1 + prefetch) * layer <= dense
    for parts in (2, 4, 8):
        assert peak((1, parts)) <= (1 + prefetch) * (layer / parts + small)


@on_ranks(2)
def test_a_dense_state_dict_is_taken_and_given_back(stage: int) -> None:
    dense, model = net(), net()
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.add_(1)
    tile_linears(model, above=WIDTH * WIDTH, tiles=(2, 2))
    model, _ = zerodp.shard(model, stage=stage)
    model.load_state_dict(dense.state_dict())
    with zerodp.full_params(model):
        layer: Any = model[1][0].up
        close("inside", layer.to_linear().weight.detach(), dense[1][0].up.weight.detach())
    plain, _ = zerodp.unshard(model)
    zerodp.untile_linears(plain)
    for name, value in copied(dict(dense.state_dict())).items():
        close(name, plain.state_dict()[name], value)


@on_ranks(2)
def test_dense_weights_of_a_file_go_into_tiles(tmp_path: Path) -> None:
    dense = net()
    path = saved(dense, tmp_path / "dense.safetensors")
    with torch.device("meta"):
        model = net()
    tile_linears(model, above=WIDTH * WIDTH, tiles=(2, 2))
    model, _ = zerodp.shard(model, weights=path)
    plain, _ = zerodp.unshard(model)
    zerodp.untile_linears(plain)
    for name, value in dense.state_dict().items():
        close(name, plain.state_dict()[name], value)
    small = tile_linears(nn.Sequential(nn.Linear(3, WIDTH)), "0")
    with pytest.raises(zerodp.CheckpointError, match=r"missing: '0\.tiles|does not fit"):
        zerodp.shard(small, weights=path)


@on_ranks(2)
def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = net()
    tile_linears(model, above=WIDTH * WIDTH)
    model, _ = zerodp.shard(model)
    with zerodp.full_params(model):
        bound = 1 / (4 * WIDTH) ** 0.5
        largest = max(float(p.detach().abs().max()) for p in model[1][0].down.parameters())
        assert 0.9 * bound < largest <= bound


@on_ranks(2)
def test_a_sharded_model_is_refused() -> None:
    model, _ = zerodp.shard(tile_linears(net(), above=WIDTH * WIDTH))
    assert isinstance(model[1][0].up, TiledLinear)
    for function in (tile_linears, zerodp.untile_linears):
        with pytest.raises(zerodp.ConfigError, match=r"sharded"):
            function(model)
