"""Who talks to whom: the shard group, the replicate group and the control group of one rank.

Groups are made once per process and reused, because making one is a collective and costs sockets; a broken set is dropped.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ConfigError
from .watch import WATCH


@dataclass(frozen=True, eq=False)
class Group:
    """Some ranks, in order, and this process's place among them. `lanes` are independent queues of collectives."""

    ranks: tuple[int, ...]
    rank: int
    lanes: tuple[Any, ...]
    size: int = field(init=False)
    peers: tuple[int, ...] = field(
        init=False
    )  # the others, beginning with the right neighbour: no rank is everyone's first

    def __post_init__(self) -> None:
        size = len(self.ranks)
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "peers", tuple((self.rank + i) % size for i in range(1, size)))


@dataclass(frozen=True)
class Mesh:
    """The ranks that train one model: `world` = `replicate` x `shard`; `control` is a gloo group beside the data."""

    world: Group
    shard: Group
    replicate: Group
    control: Any
    device_type: str
    backend: str

    def place(self, shards: bool) -> tuple[Group, Group]:
        """(shard, replicate) for state that is split over the shard group, or kept whole by every rank."""
        return (self.shard, self.replicate) if shards else (alone(self.world), self.world)


def alone(group: Group) -> Group:
    """The group of this rank only."""
    return Group((group.ranks[group.rank],), 0, ())


_cache: dict[Any, Any] = {}
_cache_world: Any = None


def drop_groups() -> None:
    """After a failure, messages may still be under way in the old groups: the next `shard()` makes new ones."""
    _cache.clear()


def resolve(mesh: Any, device: torch.device | None) -> Mesh:
    """The `mesh` option of `shard()` as groups.

    Raises:
        ConfigError: no process group, or a mesh that is not 1-D or ("replicate", "shard").
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "shard() needs a process group and none is initialised. Start the script with "
            "'torchrun --nproc-per-node N script.py' and call torch.distributed.init_process_group() first"
        )
    global _cache_world
    if _cache_world is not dist.group.WORLD:
        _cache_world = dist.group.WORLD
        _cache.clear()
        WATCH.forget()
    world, shard, replicate, parent = _ranks(mesh)
    types = [d.type for d in parent._device_types]
    accelerators = [t for t in types if parent._get_backend(torch.device(t)).name() not in ("gloo", "fake")]
    device_type = device.type if device is not None else (accelerators or ["cpu"])[0]
    if device_type not in types:
        raise ConfigError(
            f"device: the process group's backend serves {', '.join(types)}, not {device_type!r}; pick another device or backend"
        )
    backend = parent._get_backend(torch.device(device_type)).name()
    return Mesh(
        _group(world, 2, backend),
        _group(shard, 2, backend),
        _group(replicate, 2, backend),
        _make(world, "control", "fake" if backend == "fake" else "gloo"),
        device_type,
        backend,
    )


def _ranks(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], Any]:
    """(all ranks, this rank's shard group, this rank's replicate group, the process group they come from)."""
    me = dist.get_rank()
    if mesh is None or isinstance(mesh, dist.ProcessGroup):
        group = mesh or dist.group.WORLD
        ranks = tuple(dist.get_process_group_ranks(group))
        if me not in ranks:
            raise ConfigError(f"mesh: rank {me} is not in the process group of ranks {list(ranks)}")
        return ranks, ranks, (me,), group
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh: expected a DeviceMesh or a ProcessGroup, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names
    if mesh.ndim == 1:
        ranks = tuple(mesh.mesh.flatten().tolist())
        return ranks, ranks, (me,), mesh.get_group()
    if mesh.ndim != 2 or names != ("replicate", "shard"):
        raise ConfigError(
            f'mesh: expected one dim, or two named ("replicate", "shard"), got dims {names or mesh.ndim}; of a larger mesh pass that slice'
        )
    rows = mesh.mesh.tolist()
    row = next((r for r in rows if me in r), None)
    if row is None:
        raise ConfigError(f"mesh: rank {me} is not in the mesh {rows}")
    column = tuple(r[row.index(me)] for r in rows)
    return tuple(r for line in rows for r in line), tuple(row), column, mesh.get_group("shard")


def _group(ranks: tuple[int, ...], num_lanes: int, backend: str) -> Group:
    lanes = tuple(_make(ranks, f"lane{i}", backend) for i in range(num_lanes if len(ranks) > 1 else 0))
    return Group(ranks, ranks.index(dist.get_rank()), lanes)


def _make(ranks: Sequence[int], lane: str, backend: str) -> Any:
    """A process group of its own for these ranks, so that nothing of the user's can queue in front."""
    if len(ranks) == 1:
        return None
    key = (tuple(ranks), lane, backend)
    if key not in _cache:
        _cache[key] = dist.new_group(list(ranks), timeout=_timeout(), backend=backend, use_local_synchronization=True)
    return _cache[key]


def _timeout() -> datetime.timedelta:
    """The limit the user gave to init_process_group."""
    world: Any = dist.group.WORLD
    for device in world._device_types:
        limit = getattr(world._get_backend(device).options, "_timeout", None)
        if limit is not None:
            return limit  # type: ignore[no-any-return]
    return dist.default_pg_timeout
