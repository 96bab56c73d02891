"""How a parameter holds the part of it that this rank has: an ordinary one is that part itself, a DTensor has it inside.

The engine lays out, gathers and reduces local tensors only. What the user sees (the whole shape, a DTensor's placements) and where
the local tensor lies in it is known here, and nothing else is: no units, no passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

if TYPE_CHECKING:
    from .comm import Comm

# The slot itself: the twin of a hidden DTensor traps its attribute.
get_inner = DTensor._local_tensor.__get__  # type: ignore[attr-defined]
set_inner = DTensor._local_tensor.__set__  # type: ignore[attr-defined]


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return get_inner(tensor) if isinstance(tensor, DTensor) else tensor


def block_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(sizes, origin) of this rank's block of a DTensor, by its placements."""
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


class Local:
    """Of an ordinary parameter, which is its own local tensor.

    shape: of the whole; size, strides: of the local tensor; origin: where that begins in the whole.
    split: other ranks of the tensor group hold other parts; first: of the ranks that hold the same part, this is the first.
    """

    split = False

    def __init__(self, parameter: Tensor, leads: bool) -> None:
        held = local_of(parameter)
        self.shape, self.size, self.first = parameter.shape, held.shape, leads
        self.strides, self.whole_strides = dense_strides(held), dense_strides(parameter)
        self.origin: tuple[int, ...] = (0,) * len(self.shape)

    @property
    def begins(self) -> bool:
        """Whether this rank's tensor-parallel part is the first one, and the first of its copies."""
        return self.first and not any(self.origin)

    # Slots of C, because they run for every parameter of every page: (parameter, local tensor) -> None, and back.
    put: Any = staticmethod(Tensor.data.__set__)  # type: ignore[attr-defined]
    held: Any = staticmethod(Tensor.data.__get__)  # type: ignore[attr-defined]

    def part(self, value: Tensor, comm: Comm, unit: str) -> Tensor:
        """The local part of a value that is whole, or distributed in whatever way."""
        return value

    def full(self, part: Tensor, comm: Comm, unit: str) -> Tensor:
        """The whole of which `part` is the local part (a collective of the tensor group)."""
        return part

    def dressed(self, part: Tensor) -> Tensor:
        """`part` as the parameter shows it."""
        return part


class Distributed(Local):
    """Of a DTensor over a tensor-parallel mesh. `leads` is not asked: its placements tell which ranks hold the same."""

    def __init__(self, parameter: Any, leads: bool) -> None:
        super().__init__(parameter, leads)
        self.mesh, self.placements = parameter.device_mesh, parameter.placements
        self.specs: dict[torch.dtype, DTensorSpec] = {parameter.dtype: parameter._spec}
        self.split = any(placement.is_shard() for placement in self.placements)
        places = zip(self.mesh.get_coordinate(), self.placements, strict=True)
        self.first = all(place == 0 or placement.is_shard() for place, placement in places)
        _, self.origin = block_of(parameter)

    def put(self, parameter: Any, part: Tensor) -> None:
        if part.dtype != parameter.dtype or part.device != parameter.device:
            # The outside has a dtype of its own, which only another DTensor's can replace.
            parameter.data = self.dressed(part)
            parameter._spec = self._spec(part.dtype)
        set_inner(parameter, part)

    held = staticmethod(get_inner)

    def part(self, value: Tensor, comm: Comm, unit: str) -> Tensor:
        if isinstance(value, DTensor):
            return local_of(comm.redistribute(value, self.placements, unit))
        return value[tuple(slice(at, at + n) for at, n in zip(self.origin, self.size, strict=True))]

    def full(self, part: Tensor, comm: Comm, unit: str) -> Tensor:
        return comm.full(self.dressed(part), unit)

    def dressed(self, part: Tensor) -> Tensor:
        return DTensor(part, self._spec(part.dtype), requires_grad=False)

    def _spec(self, dtype: torch.dtype) -> DTensorSpec:
        if dtype not in self.specs:
            meta = TensorMeta(self.shape, self.whole_strides, dtype)
            self.specs[dtype] = DTensorSpec(self.mesh, self.placements, tensor_meta=meta)
        return self.specs[dtype]


def local(parameter: nn.Parameter, leads: bool) -> Local:
    """
    Args:
        leads: whether this rank is the first of its tensor group.
    """
    return (Distributed if isinstance(parameter, DTensor) else Local)(parameter, leads)


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides; `shard()` has refused those that leave gaps or overlap."""
    return tuple(tensor.stride()) if tensor.numel() else tuple(torch.empty(tensor.shape, device="meta").stride())
