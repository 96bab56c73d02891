"""Who talks to whom: the shard group, the replicate group, the tensor group and the control group of one rank.

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
    """The ranks that train one model: `world` = `data` x `tensor`, and `data` = `replicate` x `shard`.

    Ranks of a tensor group see the same batches and hold parts of the same layers; their collectives are torch's. What is
    decided is decided by all of `world`: `control` is its gloo group beside the data.
    """

    world: Group
    data: Group
    shard: Group
    replicate: Group
    tensor: Group
    control: Any
    device_type: str
    backend: str

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.world, self.data, self.shard, self.replicate, self.tensor

    def place(self, shards: bool) -> tuple[Group, Group]:
        """(shard, replicate) for state that is split over the shard group, or kept whole by every rank."""
        return (self.shard, self.replicate) if shards else (alone(self.data), self.data)


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


def resolve(
    mesh: Any, device: torch.device | None, tensor_mesh: DeviceMesh | None = None, purpose: str = ""
) -> tuple[Mesh, ConfigError | None]:
    """The `mesh` option of `shard()` as ranks that can tell each other their mistakes, and this rank's own, if it has one.

    The lanes are missing still, see `connect`. Meshes with another `purpose` have groups of their own: what is sent over them
    comes in an order of its own.

    Args:
        tensor_mesh: over which parameters are DTensors.

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
    me, data = dist.get_rank(), _members(mesh)
    if me not in data:
        raise ConfigError(f"mesh: rank {me} is not among its ranks {list(data)}; only they may call shard() with it")
    problem = None
    try:
        shard, replicate, parent = _dims(mesh, data)
        world, tensor = _with_tensor(mesh, tensor_mesh, data)
        device_type, backend = _device(parent, device)
    except ConfigError as error:
        problem, world, shard, replicate, tensor = error, data, data, (me,), (me,)
        device_type, backend = _device(dist.group.WORLD, None)
    control = _make(world, f"{purpose}control", "fake" if backend == "fake" else "gloo")
    made = Mesh(
        _group(world), _group(data), _group(shard), _group(replicate), _group(tensor), control, device_type, backend
    )
    return made, problem


def connect(mesh: Mesh, purpose: str = "") -> Mesh:
    """The same mesh with lanes for its data (a collective)."""

    def connected(group: Group, dim: str) -> Group:
        # On gloo messages have tags. Elsewhere only the order tells them apart, and that of replicas is its own.
        lane = f"{purpose}lane" if mesh.backend == "gloo" else f"{purpose}{dim}"
        lanes = (_make(group.ranks, f"{lane}{i}", mesh.backend) for i in range(2 if group.size > 1 else 0))
        return Group(group.ranks, group.rank, tuple(lanes))

    world, tensor = connected(mesh.world, "world"), connected(mesh.tensor, "tensor")
    data, replicate = connected(mesh.data, "replicas"), connected(mesh.replicate, "replicas")
    shard = connected(mesh.shard, "shards")
    return replace(mesh, world=world, data=data, shard=shard, replicate=replicate, tensor=tensor)


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


def meeting(mesh: Any) -> Any:
    """The user's own process group of all the ranks that should call `shard()` with this mesh; None where there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    members = _members(mesh)
    if len(members) == dist.get_world_size():  # so ranks that were given different meshes, or wrong ones, still meet
        return dist.group.WORLD
    if dist.get_rank() not in members:
        return None
    if isinstance(mesh, DeviceMesh):
        return mesh.get_group() if mesh.ndim == 1 else None
    return mesh


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


def _with_tensor(
    mesh: Any, tensor_mesh: DeviceMesh | None, data: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(all ranks that train this model, this rank's tensor group): the data ranks, and for each of them the tensor ranks."""
    if tensor_mesh is None:
        return data, (dist.get_rank(),)
    names, tensor = tensor_mesh.mesh_dim_names, _members(tensor_mesh)
    advice = (
        'make one mesh with both kinds of dims, as init_device_mesh(device, (2, 4), mesh_dim_names=("dp", "tp")), parallelize the model '
        'over mesh["tp"], and pass mesh=mesh["dp"]'
    )
    # Torch takes equal meshes for one another, so the root of the DTensors' mesh may be that of an earlier one. Ranks do not lie.
    root = mesh._get_root_mesh().mesh if isinstance(mesh, DeviceMesh) else None
    if root is None or not set(tensor) <= set(root.flatten().tolist()):
        raise ConfigError(
            f"mesh: the model has DTensor parameters over dims {names}, and this is no part of the same mesh; {advice}"
        )
    along_data, along_tensor = _varying(root, data), _varying(root, tensor)
    if along_data & along_tensor:
        raise ConfigError(
            f"mesh: dims {mesh.mesh_dim_names} share ranks with the DTensor parameters' dims {names}, whose ranks hold parts of one layer; {advice}"
        )
    here = (root == dist.get_rank()).nonzero()[0].tolist()
    both = along_data | along_tensor
    index = tuple(slice(None) if dim in both else place for dim, place in enumerate(here))
    return tuple(root[index].flatten().tolist()), tensor


def _varying(root: torch.Tensor, ranks: tuple[int, ...]) -> set[int]:
    """The dims of the root mesh along which these ranks lie."""
    places = torch.stack([(root == rank).nonzero()[0] for rank in ranks])
    return {dim for dim, column in enumerate(places.unbind(1)) if len(column.unique()) > 1}


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
