"""Who talks to whom: the shard group, the replicate group and the control group of one rank.

Groups are made once per process and reused, because making one is a collective and costs sockets; a broken set is dropped.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
_dropped: list[Any] = []
_drops = 0


def era() -> tuple[Any, int]:
    """While this stays equal, groups that were made can be used: the same world, and no failure since."""
    return dist.group.WORLD, _drops


def drop_groups() -> None:
    """After a failure, messages may still be under way in the old groups: the next `shard()` makes new ones."""
    global _drops
    _drops += 1
    _dropped.extend(_cache.values())
    _cache.clear()


def _forget_dropped() -> None:
    """Let torch forget broken groups, or their threads would live as long as the process."""
    while _dropped:
        dist.destroy_process_group(_dropped.pop())


def resolve(mesh: Any, device: torch.device | None, purpose: str = "") -> tuple[Mesh, ConfigError | None]:
    """The `mesh` option of `shard()` as ranks that can tell each other their mistakes, and this rank's own, if it has one.

    The lanes are missing still, see `connect`. Meshes with another `purpose` have groups of their own: what is sent over them
    comes in an order of its own.

    Raises:
        ConfigError: no process group, or one that this rank is not in; no other rank waits for it then.
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
        _dropped.clear()  # they went with their world
        WATCH.forget()
    me, world = dist.get_rank(), _members(mesh)
    if me not in world:
        raise ConfigError(f"mesh: rank {me} is not among its ranks {list(world)}; only they may call shard() with it")
    problem = None
    try:
        shard, replicate, parent = _dims(mesh, world)
        device_type, backend = _device(parent, device)
    except ConfigError as error:
        problem, shard, replicate = error, world, (me,)
        device_type, backend = _device(dist.group.WORLD, None)
    control = _make(world, f"{purpose}control", "fake" if backend == "fake" else "gloo")
    return Mesh(_group(world), _group(shard), _group(replicate), control, device_type, backend), problem


def connect(mesh: Mesh, purpose: str = "") -> Mesh:
    """The same mesh with lanes for its data (a collective)."""

    def connected(group: Group, dim: str) -> Group:
        # On gloo messages have tags. Elsewhere only the order tells them apart, and that of replicas is its own.
        lane = f"{purpose}lane" if mesh.backend == "gloo" else f"{purpose}{dim}"
        lanes = (_make(group.ranks, f"{lane}{i}", mesh.backend) for i in range(2 if group.size > 1 else 0))
        return Group(group.ranks, group.rank, tuple(lanes))

    world, replicate = connected(mesh.world, "replicas"), connected(mesh.replicate, "replicas")
    return replace(mesh, world=world, shard=connected(mesh.shard, "shards"), replicate=replicate)


def beside(mesh: Mesh) -> Any:
    """A gloo group for checkpoints, whose messages another thread may exchange while training goes on (a collective)."""
    return _make(mesh.world.ranks, "checkpoint", "gloo")


def _members(mesh: Any) -> tuple[int, ...]:
    """All ranks of a mesh or group; of the world, where it is neither."""
    if mesh is dist.GroupMember.NON_GROUP_MEMBER:
        return ()
    if isinstance(mesh, DeviceMesh):
        return tuple(mesh.mesh.flatten().tolist())
    return tuple(dist.get_process_group_ranks(mesh if isinstance(mesh, dist.ProcessGroup) else None))


def _dims(mesh: Any, world: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
    """(this rank's shard group, its replicate group, the process group they come from)."""
    me = dist.get_rank()
    if mesh is None or isinstance(mesh, dist.ProcessGroup):
        return world, (me,), mesh or dist.group.WORLD
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh: expected a DeviceMesh or a ProcessGroup, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names
    if mesh.ndim == 1:
        return world, (me,), mesh.get_group()
    if mesh.ndim != 2 or names != ("replicate", "shard"):
        raise ConfigError(
            f'mesh: expected one dim, or two named ("replicate", "shard"), got dims {names or mesh.ndim}; of a larger mesh pass that slice'
        )
    rows = mesh.mesh.tolist()
    row = next(r for r in rows if me in r)
    return tuple(row), tuple(r[row.index(me)] for r in rows), mesh.get_group("shard")


def _device(parent: Any, device: torch.device | None) -> tuple[str, str]:
    """(device type, its backend): the one asked for, else the accelerator that the group serves, else the CPU."""
    backends = {d.type: parent._get_backend(d).name() for d in parent._device_types}
    accelerators = [kind for kind, backend in backends.items() if backend not in ("gloo", "fake")]
    device_type = device.type if device is not None else (accelerators or ["cpu"])[0]
    if device_type not in backends:
        raise ConfigError(
            f"device: the process group's backend serves {', '.join(backends)}, not {device_type!r}; pick another device or backend"
        )
    if device_type != "cpu" and backends[device_type] != "fake" and not torch.accelerator.is_available():
        raise ConfigError(
            f"device: torch finds no {device_type!r} on this machine; pick 'cpu', or install torch for it"
        )
    return device_type, backends[device_type]


def _group(ranks: tuple[int, ...]) -> Group:
    return Group(ranks, ranks.index(dist.get_rank()), ())


def _make(ranks: Sequence[int], lane: str, backend: str) -> Any:
    """A process group of its own for these ranks, so that nothing of the user's can queue in front."""
    if len(ranks) == 1:
        return None
    key = (tuple(ranks), lane, backend)
    if key not in _cache:
        _forget_dropped()
        # Torch names a group of some ranks by how many groups this rank is in. That may differ by rank, so the whole
        # world's groups are made the other way, which names them by the calls so far.
        local = len(ranks) < dist.get_world_size()
        _cache[key] = dist.new_group(list(ranks), timeout=_timeout(), backend=backend, use_local_synchronization=local)
    return _cache[key]


def _timeout() -> datetime.timedelta:
    """The limit the user gave to init_process_group."""
    world: Any = dist.group.WORLD
    for device in world._device_types:
        limit = getattr(world._get_backend(device).options, "_timeout", None)
        if limit is not None:
            return limit  # type: ignore[no-any-return]
    return dist.default_pg_timeout
