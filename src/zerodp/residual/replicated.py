"""Which tensors are the same on all ranks of a group: decided by their contents, and by all ranks alike.

Only what every rank has may be split over the ranks. Each call asks anew, because a wrong answer would be wrong values:
the ranks exchange one small message with a fingerprint of each tensor's memory, shape and dtype.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..core import mesh as meshes
from ..core.comm import Comm
from ..errors import ConfigError

PURPOSE = "activations "
MAX_INPUTS = 63  # of one call; further ones stay whole
CHUNK = 2**20  # elements fingerprinted at a time: bounds the memory it takes
SPREAD = -7046029254386353131  # odd


class Partition:
    """The ranks over which inputs are split, and their way to talk, opened at the first use (a collective)."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self.ranks = members(mesh)
        self.era = meshes.era()
        self._comm: Comm | None = None

    @property
    def comm(self) -> Comm:
        if self._comm is None:
            mesh, problem = meshes.resolve(self.mesh, None, purpose=PURPOSE)
            if problem is not None:
                raise problem
            self._comm = Comm(mesh, exact=False, check=True)
            self._comm.mesh = meshes.connect(mesh, PURPOSE)
        return self._comm

    @property
    def stands(self) -> bool:
        """Whether it can still be used; the same on all ranks, as a failure is on all of them."""
        return self.era == meshes.era()

    def replicated(self, spans: Sequence[tuple[Tensor, Any]], label: str) -> list[bool]:
        """For each (memory, description), whether all ranks have the same (a collective of one small message)."""
        message = torch.zeros(MAX_INPUTS + 1, dtype=torch.int64, device="cpu")
        spans = spans[:MAX_INPUTS]
        if spans:
            contents = torch.stack([fingerprint(memory) for memory, _ in spans]).tolist()
            for place, (content, (_, description)) in enumerate(zip(contents, spans, strict=True)):
                message[place] = (content ^ zlib.crc32(repr(description).encode())) or 1  # 0: there is none
        rows = self.comm.exchange(message, f"the other ranks' inputs of {label!r}").wait()
        return ((rows == rows[0]).all(0) & (rows[0] != 0)).tolist()  # type: ignore[no-any-return]


def members(mesh: Any) -> tuple[int, ...]:
    """The ranks of a process group or 1-D mesh.

    Raises:
        ConfigError: neither, no process group, or one that this rank is not in.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "partition needs a process group and none is initialised. Start the script with 'torchrun --nproc-per-node N script.py' and "
            "call torch.distributed.init_process_group() first"
        )
    if mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(f"partition: rank {dist.get_rank()} is not in this process group; only its ranks may use it")
    if isinstance(mesh, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(mesh))
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"partition: expected a ProcessGroup, a 1-D DeviceMesh or the name of a mesh dim, got {mesh!r}"
        )
    if mesh.ndim != 1:
        raise ConfigError(
            f"partition: expected one mesh dim, got {mesh.mesh_dim_names or mesh.ndim}; pass that slice of the mesh, such as mesh['tp']"
        )
    ranks = tuple(mesh.mesh.tolist())
    if dist.get_rank() not in ranks:
        raise ConfigError(f"partition: rank {dist.get_rank()} is not among the mesh's ranks {list(ranks)}")
    return ranks


def named_dim(name: str, tensors: Sequence[Any]) -> DeviceMesh:
    """The mesh dim of this name of the DTensors among `tensors`.

    Raises:
        ConfigError: none of them has such a mesh.
    """
    seen: list[str] = []
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            names = tensor.device_mesh.mesh_dim_names or ()
            if name in names:
                return tensor.device_mesh[name]
            seen += [other for other in names if other not in seen]
    has = f"have the dims {', '.join(map(repr, seen))}" if seen else "are no DTensors"
    raise ConfigError(
        f"partition: no mesh has a dim {name!r}: the parameters and inputs {has}; pass the slice itself, such as mesh[{name!r}]"
    )


def fingerprint(memory: Tensor) -> Tensor:
    """64 bits (a scalar int64 on the tensor's device) that depend on every bit of a 1-D contiguous tensor and on its place."""
    words = memory.view(WORDS[memory.dtype.itemsize]) if memory.dtype.itemsize <= 8 else memory.view(torch.int64)
    weights = _weights(memory.device)
    total = words.new_zeros((), dtype=torch.int64)
    for chunk in words.split(CHUNK):
        mixed = chunk.to(torch.int64, copy=True).mul_(
            SPREAD
        )  # or values that differ in high bits only were hardly told apart
        mixed ^= mixed >> 29
        total = total * SPREAD + mixed.mul_(weights[: chunk.numel()]).sum()
    return total


WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Odd numbers without a pattern."""
    generator = torch.Generator().manual_seed(64)
    with torch.inference_mode(False):
        weights = torch.randint(-(2**63), 2**63 - 1, (CHUNK,), generator=generator, dtype=torch.int64, device="cpu")
        return (weights | 1).to(device)
