"""What models can be sharded, parameter by parameter."""

from __future__ import annotations

import itertools

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from .core.local import block_of, local_of
from .core.parameter import is_hidden
from .core.wrap import tensor_mesh
from .errors import ConfigError

WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}


def check_model(model: nn.Module) -> None:
    """What no layout can hold is refused by name."""
    _check_alone(model)
    mesh = tensor_mesh(model)
    for name, buffer in model.named_buffers():
        _check_placements(name, buffer, mesh)
        if isinstance(buffer, DTensor) and any(placement.is_shard() for placement in buffer.placements):
            raise ConfigError(
                f"buffer {name!r} is a DTensor with placements {buffer.placements}; buffers must be whole on every rank, Replicate()"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(
                f"parameter {name!r} is uninitialized (a lazy module): run one forward pass before shard()"
            )
        held = local_of(parameter)
        if held.layout.__str__() != "torch.strided" or type(held).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise ConfigError(
                f"parameter {name!r} is a {type(parameter).__name__}; only dense torch.nn.Parameters can be sharded"
            )
        _check_placements(name, parameter, mesh)
        if parameter.dtype.is_complex:
            raise ConfigError(f"parameter {name!r} is complex; store its real and imaginary parts as two parameters")
        if not _dense(held):
            raise ConfigError(
                f"parameter {name!r} of shape {tuple(held.shape)} has strides {held.stride()}, which overlap or leave gaps; "
                "make it from a contiguous tensor"
            )
    _check_memory(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"module {name!r} gives sparse gradients, which cannot be reduced here; build it with sparse=False"
            )


def _check_alone(model: nn.Module) -> None:
    """No other library, and no other model here, keeps these parameters in step."""
    for name, module in model.named_modules():
        others = WRAPPERS & {cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("torch.")}
        if others:
            raise ConfigError(
                f"shard: {f'module {name!r}' if name else 'the model'} is a {sorted(others)[0]} of torch's already, which would reduce the same "
                "gradients once more; give zerodp.shard the plain model"
            )
    for name, parameter in model.named_parameters():
        if is_hidden(parameter):
            raise ConfigError(
                f"shard: parameter {name!r} belongs to a model that is sharded already; shard the whole model once, or zerodp.unshard it first"
            )


def _check_memory(model: nn.Module) -> None:
    """Two Parameters over the same memory change each other; sharded they would not."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in model.named_parameters():
        held = local_of(parameter)
        start = int(held.storage_offset()) * held.itemsize
        if held.numel():
            spans.setdefault(held.untyped_storage()._cdata, []).append((start, start + held.nbytes, name))
    for found in spans.values():
        found.sort()
        for (_, end, one), (start, _, other) in itertools.pairwise(found):
            if start < end:
                raise ConfigError(
                    f"parameters {one!r} and {other!r} are different Parameters over the same memory; tie them by one Parameter under both names, "
                    "or give each memory of its own"
                )


def _check_placements(name: str, tensor: Tensor, mesh: DeviceMesh | None) -> None:
    """A DTensor must be whole tensors, or blocks of them, over the one mesh of all."""
    if not isinstance(tensor, DTensor):
        return
    odd = [placement for placement in tensor.placements if type(placement) not in (Shard, Replicate)]
    if odd:
        raise ConfigError(
            f"{name!r} is a DTensor with placement {odd[0]!r}; parameters can be Shard(dim) or Replicate() over the tensor-parallel mesh: "
            "redistribute it before shard()"
        )
    if tensor.device_mesh != mesh:
        raise ConfigError(
            f"{name!r} is a DTensor over mesh dims {tensor.device_mesh.mesh_dim_names}, others are over {mesh.mesh_dim_names if mesh else None}; "
            "put all on one mesh, with Replicate() over the dims that do not split them"
        )
    sizes, _ = block_of(tensor)
    if tuple(sizes) != tuple(local_of(tensor).shape):
        raise ConfigError(
            f"{name!r} is a DTensor whose local tensor has shape {tuple(local_of(tensor).shape)}, expected {tuple(sizes)} by its placements "
            f"{tensor.placements}; make it by distribute_tensor"
        )


def _dense(parameter: Tensor) -> bool:
    """Whether the elements fill one block of memory, in whatever order of dims."""
    expected = 1
    for stride, size in sorted((st, n) for st, n in zip(parameter.stride(), parameter.shape, strict=True) if n != 1):
        if stride != expected:
            return parameter.numel() == 0
        expected *= size
    return True
