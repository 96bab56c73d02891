"""Tiled linear layers beside the dense ones that they stand for, in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import zerodp
from zerodp import TiledLinear, tile_linears, untile_linears

GRIDS = [(1, 1), (1, 4), (3, 1), (2, 3)]
grids = pytest.mark.parametrize("grid", GRIDS, ids=lambda g: f"{g[0]}x{g[1]}")


def dense(kind: str, bias: bool = True) -> Any:
    torch.manual_seed(0)
    return Conv1D(13, 10) if kind == "conv1d" else nn.Linear(10, 13, bias=bias)


def results(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """(output, gradient of the input)"""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.pow(2).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@grids
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_values_and_gradients_are_the_dense_layers(kind: str, grid: tuple[int, int]) -> None:
    layer, x = dense(kind), torch.randn(3, 7, 10)
    tiled = TiledLinear.from_linear(layer, grid)
    y, dx = results(layer, x)
    tiled_y, tiled_dx = results(tiled, x)
    if grid[0] == 1:
        assert torch.equal(y, tiled_y)
    torch.testing.assert_close(tiled_y, y, rtol=1e-6, atol=1e-6)  # sums in another order, as stated
    torch.testing.assert_close(tiled_dx, dx, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        for tile in tiled.tiles:
            tile.weight.copy_(tile.weight.grad)
            if tile.bias is not None:
                tile.bias.copy_(tile.bias.grad)
    gathered: Any = tiled.to_linear()
    torch.testing.assert_close(gathered.weight, layer.weight.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gathered.bias, layer.bias.grad, rtol=1e-5, atol=1e-5)


def test_the_order_of_sums_is_that_of_the_inputs() -> None:
    layer, x = dense("linear"), torch.randn(5, 10)
    tiled, (w, b) = TiledLinear.from_linear(layer, (3, 2)), (layer.weight.detach(), layer.bias.detach())
    for rows in (slice(0, 6), slice(6, 13)):
        total = nn.functional.linear(x[:, 0:3], w[rows, 0:3], b[rows])
        for columns in (slice(3, 6), slice(6, 10)):
            total = total + nn.functional.linear(x[:, columns], w[rows, columns])
        assert torch.equal(tiled(x)[:, rows], total)


@grids
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_there_and_back_keeps_every_bit(kind: str, grid: tuple[int, int]) -> None:
    layer = dense(kind).bfloat16().eval()
    layer.bias.requires_grad_(False)
    again = TiledLinear.from_linear(layer, grid).to_linear()
    assert type(again) is type(layer)
    assert not again.training
    for (name, a), (other, b) in zip(layer.named_parameters(), again.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(a, b)
        assert (a.dtype, a.requires_grad) == (b.dtype, b.requires_grad)


@grids
@pytest.mark.parametrize("bias", [True, False])
def test_a_dense_state_dict_is_taken(bias: bool, grid: tuple[int, int]) -> None:
    layer, tiled = dense("linear", bias), TiledLinear(10, 13, bias, grid)
    held = dict(layer.state_dict())
    tiled.load_state_dict(held)
    assert list(held) == list(layer.state_dict())  # the caller's stays as it was
    assert torch.equal(tiled.to_linear().weight, layer.weight)  # type: ignore[arg-type]
    model, other = nn.Sequential(nn.ReLU(), tiled), nn.Sequential(nn.ReLU(), dense("linear", bias))
    model.load_state_dict(other.state_dict())
    model.load_state_dict(model.state_dict())  # its own too
    assert torch.equal(model[1].to_linear().weight, other[1].weight)


def test_what_does_not_fit_is_refused() -> None:
    tiled = TiledLinear(10, 13, False, (1, 4))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*bias"):
        tiled.load_state_dict(dense("linear").state_dict())
    with pytest.raises(RuntimeError, match=r"size mismatch for tiles\.3\.weight"):
        tiled.load_state_dict({"weight": torch.zeros(12, 10)})
    with pytest.raises(RuntimeError, match=r"size mismatch for tiles\.0\.weight"):
        tiled.load_state_dict({"weight": torch.zeros(13, 11)})


def test_new_layers_are_drawn_like_dense_ones() -> None:
    torch.manual_seed(0)
    values = torch.cat([p.detach().flatten() for p in TiledLinear(100, 400, tiles=(4, 4)).parameters()])
    assert 0.099 < float(values.abs().max()) <= 0.1  # 1/sqrt(100), not 1/sqrt(25)
    assert abs(float(values.std()) - 0.1 / 3**0.5) < 1e-3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TiledLinear(10, 3, tiles=(1, 4)), "3 features cannot be cut into 4 parts"),
        (lambda: TiledLinear(10, 3, tiles=(0, 1)), "parts of the inputs: expected a whole number of at least 1, got 0"),
        (lambda: TiledLinear(10, 3, tiles=4), r"expected \(parts of the inputs, parts of the outputs\)"),
        (lambda: TiledLinear.from_linear(nn.Bilinear(2, 2, 2)), "got a Bilinear"),
    ],
)
def test_mistakes(make: Any, message: str) -> None:
    with pytest.raises(zerodp.ConfigError, match=message):
        make()
    with pytest.raises(AttributeError, match="a TiledLinear has no 'weight', only its tiles do"):
        TiledLinear(4, 4).weight  # noqa: B018


# ---- whole models


def gpt2() -> Any:
    torch.manual_seed(1)
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=8, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
    )
    return GPT2LMHeadModel(config).eval()


def test_layers_of_a_hugging_face_model_by_size() -> None:
    model, tokens = gpt2(), torch.arange(8)[None]
    before, keys = model(tokens).logits.detach(), list(model.state_dict())
    plain = copy.deepcopy(model)
    assert tile_linears(model, above=16 * 48) is model
    tiled = [name for name, module in model.named_modules() if isinstance(module, TiledLinear)]
    assert tiled == [f"transformer.h.{n}.{part}" for n in (0, 1) for part in ("attn.c_attn", "mlp.c_fc", "mlp.c_proj")]
    torch.testing.assert_close(model(tokens).logits, before, rtol=0, atol=0)  # no part of the inputs is cut
    model.load_state_dict(plain.state_dict())
    untile_linears(model)
    assert list(model.state_dict()) == keys
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))


def test_rules() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))

    def grids_of(tiled: nn.Module) -> dict[str, tuple[int, int]]:
        return {name: m.grid for name, m in tiled.named_modules() if isinstance(m, TiledLinear)}

    assert grids_of(tile_linears(model(), "2.*", (2, 2))) == {"2.0": (2, 2), "2.1": (2, 2)}
    assert grids_of(tile_linears(model(), ["0", "2.1"])) == {"0": (1, 4), "2.1": (1, 4)}
    assert grids_of(tile_linears(model(), lambda name, m: (1, 2) if name == "0" else name == "2.0")) == {
        "0": (1, 2),
        "2.0": (1, 4),
    }
    assert grids_of(tile_linears(model())) == {}
    assert grids_of(tile_linears(model(), above=64)) == {"0": (1, 4), "2.0": (1, 4), "2.1": (1, 4)}


def test_a_layer_used_twice_stays_one() -> None:
    layer = nn.Linear(8, 8)
    model = tile_linears(nn.Sequential(layer, nn.ReLU(), layer), above=64)
    assert isinstance(model[0], TiledLinear)
    assert model[0] is model[2]


def test_what_cannot_be_tiled() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    model[2].register_forward_hook(lambda *_: None)
    assert not any(isinstance(m, TiledLinear) for m in tile_linears(model, above=1).modules())
    for rule, message in (
        ("1", "its weight is shared"),
        ("2", "it has hooks"),
        ("7", "no linear layer is named like '7'"),
    ):
        with pytest.raises(zerodp.ConfigError, match=message):
            tile_linears(model, rule)
    with pytest.raises(zerodp.ConfigError, match="it is the whole model"):
        tile_linears(nn.Linear(8, 8), lambda name, module: True)
