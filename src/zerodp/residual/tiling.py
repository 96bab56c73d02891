"""Memory-centric tiling: a linear layer as a grid of small ones, each of which is gathered, used and given back by itself.

It knows modules and their weights; that a tile travels alone is all that it tells the engine.
"""

from __future__ import annotations

import fnmatch
import math
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ..checks import whole
from ..core.module import ShardedModule
from ..errors import ConfigError

M = TypeVar("M", bound=nn.Module)
ABOVE = 2**24  # weights of a layer with fewer elements are small beside what else a unit has
CONV1D = "transformers.pytorch_utils.Conv1D"  # a linear layer whose weight lies the other way round


class Tile(nn.Module):
    """Part of a linear layer: some of its inputs (`columns` of a dense weight) to some of its outputs (`rows`).

    transposed: the weight is [inputs, outputs], as in GPT-2's Conv1D.
    """

    travels_alone = True  # the automatic rule makes it a unit, also inside another one

    def __init__(self, rows: slice, columns: slice, fan_in: int, bias: bool, transposed: bool, **options: Any) -> None:
        super().__init__()
        self.rows, self.columns, self.fan_in, self.transposed = rows, columns, fan_in, transposed
        shape = (columns.stop - columns.start, rows.stop - rows.start)
        self.weight = nn.Parameter(torch.empty(shape if transposed else shape[::-1], **options))
        self.bias = nn.Parameter(torch.empty(shape[1], **options)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The distribution of torch's own linear layer, of the whole layer's width."""
        bound = 1 / math.sqrt(self.fan_in)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.t() if self.transposed else self.weight, self.bias)

    def part(self, key: str) -> tuple[slice, ...]:
        """Where this tile's "weight" or "bias" lies in the dense layer's."""
        if key == "bias":
            return (self.rows,)
        return (self.columns, self.rows) if self.transposed else (self.rows, self.columns)

    def extra_repr(self) -> str:
        return f"rows={self.rows.start}:{self.rows.stop}, columns={self.columns.start}:{self.columns.stop}"


class TiledLinear(nn.Module):
    """A linear layer in `tiles`, (parts of the inputs, parts of the outputs), used one after the other.

    Under `zerodp.shard` in stage 3 each tile is gathered for its own use, so that the layer's working memory is one tile's (two with
    prefetch). With one part of the inputs each output is one dense product, the same as the dense layer's; with several the partial
    products are added up in the order of the inputs, the bias with the first, in the dtype of the output.

    `load_state_dict` takes the dense layer's "weight" and "bias" as well as its own "tiles.N.weight", "tiles.N.bias".

    Args:
        in_features, out_features, bias, device, dtype: as of `torch.nn.Linear`; parts may be of unequal size.
        tiles: parts of the inputs and of the outputs.

    Shape: [..., in_features] to [..., out_features].

    Raises:
        ConfigError: fewer features than parts.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        tiles: tuple[int, int] = (1, 4),
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.grid = in_features, out_features, _grid(tiles)
        columns, rows = (_cuts(n, parts) for n, parts in zip((in_features, out_features), self.grid, strict=True))
        options = {"device": device, "dtype": dtype}
        self.tiles = nn.ModuleList(
            Tile(row, column, in_features, bias and column.start == 0, transposed, **options)
            for row in rows
            for column in columns
        )
        self.dense_class: type[nn.Module] = nn.Linear  # what `to_linear` gives

    @classmethod
    def from_linear(cls, linear: Any, tiles: tuple[int, int] = (1, 4)) -> TiledLinear:
        """The same layer in tiles, which are copies: same values, dtype, device, mode, and which parameters train.

        Args:
            linear: a `torch.nn.Linear`, or a `Conv1D` of transformers.

        Raises:
            ConfigError: another layer, one with hooks, or one whose weight is a DTensor.
        """
        problem = _cannot(linear)
        if problem is not None:
            raise ConfigError(f"TiledLinear.from_linear: {problem}")
        weight, bias, transposed = linear.weight, linear.bias, not isinstance(linear, nn.Linear)
        n_in, n_out = weight.shape if transposed else reversed(weight.shape)
        made = cls(n_in, n_out, bias is not None, tiles, device="meta", dtype=weight.dtype, transposed=transposed)
        for tile in made._tiles:
            for key, whole_one in (("weight", weight), ("bias", bias)):
                if getattr(tile, key) is not None:
                    values = whole_one.detach()[tile.part(key)].clone(memory_format=torch.contiguous_format)
                    setattr(tile, key, nn.Parameter(values, requires_grad=whole_one.requires_grad))
        made.dense_class = type(linear)
        return made.train(linear.training)

    @torch.no_grad()
    def to_linear(self) -> Any:
        """The dense layer, a copy. Of a sharded model inside `zerodp.full_params` only."""
        first = self._tiles[0]
        with torch.device("meta"):
            sizes = (self.in_features, self.out_features)
            dense: Any = self.dense_class(*(sizes[::-1] if first.transposed else sizes))
        for key in ("weight", "bias"):
            parts = [(tile.part(key), getattr(tile, key)) for tile in self._tiles if getattr(tile, key) is not None]
            if not parts:
                dense.register_parameter(key, None)
                continue
            values = parts[0][1].new_empty(self.dense_shape(key))
            for place, part in parts:
                values[place] = part
            setattr(dense, key, nn.Parameter(values, requires_grad=parts[0][1].requires_grad))
        return dense.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        tiles, width = self._tiles, self.grid[0]
        inputs = [x[..., tile.columns] for tile in tiles[:width]] if width > 1 else [x]
        outputs = []
        for start in range(0, len(tiles), width):
            total = tiles[start](inputs[0])
            for tile, part in zip(tiles[start + 1 : start + width], inputs[1:], strict=True):
                total = total + tile(part)
            outputs.append(total)
        return torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]

    def dense_shape(self, key: str) -> tuple[int, ...]:
        """Of the dense layer's "weight" or "bias"."""
        sizes = (self.in_features, self.out_features)
        return sizes[1:] if key == "bias" else sizes if self._tiles[0].transposed else sizes[::-1]

    @property
    def _tiles(self) -> list[Tile]:
        return list(self.tiles)  # type: ignore[arg-type]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for key in ("weight", "bias"):
            shape = self.dense_shape(key)
            places = [(n, tile.part(key)) for n, tile in enumerate(self._tiles) if getattr(tile, key) is not None]
            dense: Any = state_dict.pop(prefix + key, None) if places else None  # else torch tells that it is too much
            for number, part in places if dense is not None else ():
                state_dict[f"{prefix}tiles.{number}.{key}"] = dense[part] if dense.shape == shape else dense
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            raise AttributeError(
                f"a TiledLinear has no {name!r}, only its tiles do: tiles[N].{name}. to_linear() gives the dense layer; leave layers out of "
                "zerodp.tile_linears whose weights other code reads"
            )
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, tiles={self.grid}"


def tile_linears(model: M, rule: Any = None, tiles: tuple[int, int] = (1, 4), above: int = ABOVE) -> M:
    """Put a `TiledLinear` with the same values in the place of linear layers of `model`, before `zerodp.shard`.

    Args:
        model: any module; `torch.nn.Linear` and transformers' `Conv1D` layers of it are looked at, not their subclasses.
        rule: which layers: glob patterns over their names, or a function `(name, module)` that returns True, False or a pair of
            tiles of its own; None = those whose weight has at least `above` elements.
        tiles: parts of the inputs and of the outputs, where the rule does not say.
        above: elements of a weight.

    Layers that share their weight with another module, that have hooks, or whose weights are DTensors are left by the size rule.

    Returns:
        The same model. Build the optimizer after this.

    Raises:
        ConfigError: a layer that is asked for by name or function and cannot be tiled, a pattern that names no layer, or a sharded
            model.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"tile_linears: expected a torch.nn.Module, got {type(model).__name__}")
    if any(isinstance(module, ShardedModule) for module in model.modules()):
        raise ConfigError("tile_linears: this model is sharded already; tile it before zerodp.shard")
    linears = {name: module for name, module in model.named_modules() if _is_linear(module)}
    chosen = _chosen(linears, rule, _grid(tiles), above)
    shared = _shared(model)
    for name, grid in chosen.items():
        problem = (
            f"its {shared[id(linears[name])]} is shared" if id(linears[name]) in shared else _cannot(linears[name])
        )
        if problem is None and not name:
            problem = "it is the whole model; use TiledLinear.from_linear"
        if problem is not None and rule is not None:
            raise ConfigError(f"tile_linears: layer {name!r} cannot be tiled: {problem}")
        if problem is None:
            _put(model, linears[name], TiledLinear.from_linear(linears[name], grid))
    return model


def untile_linears(model: M) -> M:
    """Dense layers in the place of every `TiledLinear`, with the same values: `tile_linears` undone, after `zerodp.unshard`.

    Raises:
        ConfigError: a sharded model.
    """
    if any(isinstance(module, ShardedModule) for module in model.modules()):
        raise ConfigError("untile_linears: this model is sharded; zerodp.unshard(model) first")
    for module in list(model.modules()):
        if isinstance(module, TiledLinear):
            _put(model, module, module.to_linear())
    return model


def _put(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """In every place where the old module is."""
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = new


def _chosen(linears: dict[str, nn.Module], rule: Any, tiles: tuple[int, int], above: int) -> dict[str, tuple[int, int]]:
    if rule is None:
        return {name: tiles for name, module in linears.items() if _numel(module) >= above}
    if callable(rule):
        said = {name: rule(name, module) for name, module in linears.items()}
        return {name: tiles if one is True else _grid(one) for name, one in said.items() if one}
    patterns = (rule,) if isinstance(rule, str) else tuple(rule)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in linears):
            raise ConfigError(
                f"tile_linears: no linear layer is named like {pattern!r}; the model has {', '.join(map(repr, list(linears)[:6]))}, ..."
            )
    return {name: tiles for name in linears if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}


def _is_linear(module: nn.Module) -> bool:
    kind = type(module)
    return kind is nn.Linear or f"{kind.__module__}.{kind.__qualname__}" == CONV1D


def _numel(module: Any) -> int:
    return int(module.weight.numel())


def _cannot(module: nn.Module) -> str | None:
    """Why this module cannot be tiled."""
    if not _is_linear(module):
        return f"expected a torch.nn.Linear or a Conv1D of transformers, got a {type(module).__name__}"
    if isinstance(module.weight, DTensor):
        return "its weight is a DTensor, which tensor parallelism splits already"
    if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
        return "it has hooks, which would be lost; register them afterwards"
    return None


def _shared(model: nn.Module) -> dict[int, str]:
    """Modules that have a parameter which another module has too: id -> its key."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            holders.setdefault(id(parameter), []).append((module, key))
    return {id(m): key for p, held in holders.items() if p != id(None) and len(held) > 1 for m, key in held}


def _grid(tiles: Any) -> tuple[int, int]:
    if not isinstance(tiles, (tuple, list)) or len(tiles) != 2:
        raise ConfigError(f"tiles: expected (parts of the inputs, parts of the outputs), such as (1, 4), got {tiles!r}")
    for name, parts in zip(("inputs", "outputs"), tiles, strict=True):
        whole(f"tiles, parts of the {name}", parts, least=1)
    return tiles[0], tiles[1]


def _cuts(features: int, parts: int) -> list[slice]:
    """`parts` slices of nearly equal size."""
    if features < parts:
        raise ConfigError(f"tiles: {features} features cannot be cut into {parts} parts")
    bounds = [features * number // parts for number in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(bounds)]
