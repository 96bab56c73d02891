"""Tensors without memory and ranks without machines: what the engine is given when a step is only pretended.

Fake tensors have shape, dtype, device and a storage of their own, and no values. Whatever meets one becomes fake; the engine's
own messages and the user's token ids stay real. No global state of torch or torch.distributed is touched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..core.arena import Arena
from ..core.mesh import Group, Mesh
from ..core.unit import Flat
from ..errors import ConfigError

CPU = torch.device("cpu")


class FakeArena(Arena):
    """Memory that is only counted."""

    def __init__(self, mode: FakeTensorMode, counted: Callable[[], None]) -> None:
        super().__init__(CPU, beside_activations=True)
        self.mode, self.counted = mode, counted

    def _block(self, nbytes: int, dtype: torch.dtype) -> Tensor:
        return self.empty(nbytes, dtype)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False), _disable_current_modes():
            return FakeTensor(self.mode, torch.empty(numel, dtype=dtype, device="meta"), self.device)

    def add(self, kind: str, nbytes: int) -> None:
        super().add(kind, nbytes)
        self.counted()


class FakeValues:
    """A source (see `materialise`) of parameters and buffers that need no values."""

    def __init__(self, model: nn.Module, mode: FakeTensorMode) -> None:
        self.mode = mode
        for parameter in model.parameters():
            make_fake(parameter, mode, parameter.dtype)

    def values(self, flat: Flat) -> list[Tensor]:
        return [parameter.detach() for parameter in flat.parameters]

    def buffer(self, buffer: Tensor) -> Tensor:
        return fake(buffer, self.mode) if buffer.is_meta else buffer


def new_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake(tensor: Tensor, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> Tensor:
    """A fake of the same form, on the CPU, with a storage of its own."""
    form = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device="meta")
    return FakeTensor(mode, form, CPU)


def make_fake(parameter: nn.Parameter, mode: FakeTensorMode, dtype: torch.dtype) -> None:
    """The same object is a fake parameter from here on; see `materialise.ground`."""
    made: Any = nn.Parameter(fake(parameter, mode, dtype), parameter.requires_grad)
    parameter.__class__ = FakeTensor  # type: ignore[assignment]
    parameter.__dict__.update(made.__dict__)
    torch._C._swap_tensor_impl(parameter, made)


def without_memory(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters are on the meta device; buffers keep their values, which code may look at.

    Raises:
        ConfigError: the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ConfigError(
            f"inputs: the step is tried on a copy of the model, and copying it failed ({type(error).__name__}: {error})"
        ) from error


def fake_inputs(value: Any, mode: FakeTensorMode) -> Any:
    """A nested value with fakes for its tensors; whole numbers that have values keep them, because models look at masks and ids."""

    def one(tensor: Tensor) -> Tensor:
        real = not (tensor.is_meta or tensor.is_floating_point() or tensor.is_complex())
        return tensor.to(CPU) if real else fake(tensor, mode).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, one, value)


# ---- ranks


def fake_mesh(size: int, rank: int, replicate: int = 1) -> Mesh:
    """Of one rank among `size`, in `replicate` rows, with groups that send nothing."""
    columns = size // replicate
    # Numbers below 0, so that nothing takes these for ranks of a real group.
    ranks = [number - size for number in range(size)]
    row = rank // columns
    shard = ranks[row * columns : (row + 1) * columns]
    world = _group(ranks, rank)
    return Mesh(
        world,
        world,
        _group(shard, rank % columns) if replicate > 1 else world,
        _group(ranks[rank % columns :: columns], row),
        _group([ranks[rank]], 0),
        None,
        CPU.type,
        "fake",
    )


def _group(ranks: Iterable[int], rank: int) -> Group:
    ranks = tuple(ranks)
    return Group(ranks, rank, tuple(_fake_group(len(ranks), rank) for _ in range(2)) if len(ranks) > 1 else ())


def _fake_group(size: int, rank: int) -> Any:
    group = dist.ProcessGroup(dist.HashStore(), rank, size)
    made = FakeProcessGroup._create_internal(rank, size)
    group._register_backend(CPU, dist.ProcessGroup.BackendType.CUSTOM, made)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group
