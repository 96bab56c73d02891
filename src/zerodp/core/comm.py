"""The only place that calls collectives. It launches, counts, waits, and turns waits that can never end into errors.

It knows tensors and groups; it does not know parameters, stages or schedules.

On gloo the data moves by pairs of sends and receives straight from and into the buffers: gloo's own all-gather copies
everything once more through fresh memory, which costs five times as much. Elsewhere the backend's collectives are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from .. import errors
from ..errors import RankMismatchError, ZeroError
from .arena import Parts
from .mesh import Group, Mesh, beside, drop_groups
from .watch import WATCH

GATHER, REDUCE, CONTROL = 0, 1, 2  # lanes: none waits behind another

# torch 2.13 renames these; older releases have only the old names. The group's own methods: what torch.distributed wraps
# around them costs as much again.
_all_gather = getattr(dist.ProcessGroup, "all_gather_single", None) or dist.ProcessGroup._allgather_base
_reduce_scatter = getattr(dist.ProcessGroup, "reduce_scatter_single", None) or dist.ProcessGroup._reduce_scatter_base
_all_to_all = getattr(dist.ProcessGroup, "all_to_all_single", None) or dist.ProcessGroup.alltoall_base


def _asynchronous(options: Any) -> Any:
    options.asyncOp = True
    return options


_GATHERS = _asynchronous(distributed_c10d.AllgatherOptions())
_SCATTERS = _asynchronous(distributed_c10d.ReduceScatterOptions())
_EXCHANGES = _asynchronous(distributed_c10d.AllToAllOptions())


@dataclass
class CommRow:
    """Collectives of one kind for one unit. `elements` and `wire_bytes` are what this rank sent, padding included."""

    op: str
    unit: str
    dtype: torch.dtype
    elements: int = 0
    wire_bytes: int = 0
    count: int = 0


class Handle:
    """A collective under way."""

    __slots__ = ("comm", "group", "lane", "result", "sequence", "what", "works")

    def __init__(
        self, comm: Comm, works: Sequence[Any], group: Group, lane: int, what: str, result: Any = None
    ) -> None:
        self.comm, self.works, self.group, self.what, self.result = comm, works, group, what, result
        if works:
            self.lane = comm.lane_names[group, lane]
            self.sequence = WATCH.launched(self.lane, what)

    def wait(self) -> Any:
        """Wait, on the current stream where there is one, and return the result.

        Raises:
            RankMismatchError: the other ranks wait for something else, so this can never end.
            ZeroError: a rank is gone, or the time limit of the process group has passed.
        """
        if self.works:
            WATCH.current = self
            try:
                for work in self.works:
                    work.wait()
            except RuntimeError as error:
                raise self.comm.failed(error, self.what) from error
            finally:
                WATCH.current = None
            self.works = ()
        return self.result

    def __del__(self) -> None:
        # A model may be dropped while its last gathers are under way. Their buffers must outlive them: gloo would leave the
        # messages unread, and everything behind them on the same connection.
        if self.works and self.comm.broken is None:
            _orphans.extend(self.works)


_orphans: list[Any] = []


def _finish_orphans() -> None:
    """Before new groups or models: every rank has launched these, so they end."""
    while _orphans:
        with contextlib.suppress(RuntimeError):  # of a group that is gone
            _orphans.pop().wait()


class Comm:
    """All communication of one sharded model."""

    def __init__(self, mesh: Mesh, exact: bool, check: bool) -> None:
        _finish_orphans()
        self.mesh, self.exact = mesh, exact
        self.pairwise = mesh.backend == "gloo"
        self.rows: dict[tuple[str, str, torch.dtype], CommRow] = {}
        self.number = WATCH.number(mesh.world.ranks)
        self.lane_names = LaneNames(self.number)
        self.watched = check and mesh.world.size > 1 and mesh.backend != "fake"
        if self.watched:
            WATCH.start()
        self.broken: str | None = None
        self.last_event: Callable[[], str] = lambda: "nothing yet"

    # ---- data

    def all_gather(
        self,
        out: Tensor,
        group: Group,
        unit: str,
        parts: Parts | None = None,
        op: str = "all_gather",
        count: int = 1,
    ) -> Handle:
        """Fill `out` [size * n] from every rank's own n elements, which already stand at this rank's place in it.

        parts: the ranks' parts of `out`, where the caller has them.
        """
        if group.size == 1:
            return Handle(self, (), group, GATHER, unit)
        n = out.numel() // group.size
        parts = Parts(out, group.size, group.rank) if parts is None else parts
        self.count(op, unit, out.dtype, n * (group.size - 1), count)
        what = f"the gather of unit {unit!r}"
        pg = self._lane(group, GATHER, what)
        if self.pairwise:
            works: list[Any] = []
            own, tag = [parts[group.rank]], _tag(self.number, unit)
            for peer in group.peers:
                works += (pg.recv([parts[peer]], peer, tag), pg.send(own, peer, tag))
        else:
            works = [_all_gather(pg, out, parts[group.rank], _GATHERS)]
        return Handle(self, works, group, GATHER, what)

    def receive_parts(self, group: Group) -> int:
        """How many ranks' parts of space `reduce_scatter` needs to receive."""
        if group.size == 1:
            return 0
        return 1 if not self.exact else group.size - 1 if self.pairwise else group.size

    @property
    def lands(self) -> bool:
        """Whether one of the received parts may lie apart from the others."""
        return self.pairwise or not self.exact

    def reduce_scatter(
        self,
        bucket: Tensor,
        receive: list[Tensor],
        group: Group,
        unit: str,
        parts: Parts | None = None,
        op: str = "reduce_scatter",
    ) -> Handle:
        """Send each rank its part of `bucket` [size * n]. The result is a list of [n] whose sum, in that order, is this rank's.

        receive: `receive_parts` tensors [n], one behind the other in memory unless `lands`; parts: the ranks' parts of
        `bucket`, where the caller has them.
        """
        n = bucket.numel() // group.size
        parts = Parts(bucket, group.size, group.rank) if parts is None else parts
        if group.size == 1:
            return Handle(self, (), group, REDUCE, unit, [parts[0]])
        self.count(op, unit, bucket.dtype, n * (group.size - 1), 1)
        what = f"the reduction of unit {unit!r}"
        pg = self._lane(group, REDUCE, what)
        works: list[Any] = []
        if not self.exact:
            works = [_reduce_scatter(pg, receive[0], bucket, _SCATTERS)]
        elif self.pairwise:
            tag = _tag(self.number, unit)
            for peer in group.peers:
                space = receive[peer - (peer > group.rank)]  # the sum is in rank order, whatever the order of the peers
                works += (pg.recv([space], peer, tag), pg.send([parts[peer]], peer, tag))
            receive = [*receive[: group.rank], parts[group.rank], *receive[group.rank :]]
        else:
            whole = receive[0].as_strided((bucket.numel(),), (1,))
            works = [_all_to_all(pg, whole, bucket, [], [], _EXCHANGES)]
        return Handle(self, works, group, REDUCE, what, receive)

    def broadcast(self, tensor: Tensor, unit: str, group: Group) -> None:
        """The values of the group's first rank to all of it; waits."""
        if group.size > 1 and tensor.numel():
            self.count("broadcast", unit, tensor.dtype, tensor.numel() if group.rank == 0 else 0, 1)
            what = f"the broadcast of unit {unit!r}"
            pg, values = self._lane(group, GATHER, what), [_bytes(tensor)]
            if not self.pairwise:
                works = [dist.broadcast(values[0], group=pg, group_src=0, async_op=True)]
            elif group.rank == 0:
                works = [pg.send(values, peer, _tag(self.number, unit)) for peer in group.peers]
            else:
                works = [pg.recv(values, 0, _tag(self.number, unit))]
            Handle(self, works, group, GATHER, what).wait()

    # ---- tensor parallelism: torch's own collectives over the mesh of a DTensor, which it waits for

    def redistribute(self, tensor: Any, placements: tuple[Any, ...], unit: str) -> Any:
        """A DTensor with other placements; the same one where it has these."""
        if tensor.placements == placements:
            return tensor
        self._raise_if_broken()
        changes = zip(tensor.placements, placements, strict=True)
        if any(
            now != then and not now.is_replicate() for now, then in changes
        ):  # a part of a whole is taken without the wire
            self.count("redistribute", unit, tensor.dtype, tensor._local_tensor.numel(), 1)
        return tensor.redistribute(placements=placements)

    def full(self, tensor: Any, unit: str) -> Tensor:
        """The whole of a DTensor, on every rank."""
        self._raise_if_broken()
        self.count("redistribute", unit, tensor.dtype, tensor._local_tensor.numel(), 1)
        return tensor.full_tensor()  # type: ignore[no-any-return]

    # ---- control: small messages on the host, ints and floats

    def exchange(self, message: Tensor, what: str) -> Handle:
        """Every rank's `message` [k], as [size, k] in rank order."""
        world = self.mesh.world
        if world.size == 1 or self.mesh.backend == "fake":
            return Handle(self, (), world, CONTROL, what, message.expand(world.size, -1))
        self._raise_if_broken()
        out = message.new_empty(world.size * message.numel())
        work = _all_gather(self.mesh.control, out, message, _GATHERS)
        return Handle(self, [work], world, CONTROL, what, WATCH.lends(out, message).view(world.size, -1))

    def exchange_objects(self, value: Any, what: str) -> list[Any]:
        """Every rank's picklable `value`, in rank order. Slow: for set-up, disagreements and errors."""
        data = _encoded(value)
        sizes = self.exchange(torch.tensor([data.numel()], device="cpu"), what).wait()[:, 0].tolist()
        rows = self.exchange(_padded(data, max(sizes)), what).wait()
        return [_decoded(row[:size]) for row, size in zip(rows, sizes, strict=True)]

    # ---- bookkeeping and failure

    def count(self, op: str, unit: str, dtype: torch.dtype, elements: int, count: int) -> None:
        row = self.rows.get((op, unit, dtype))
        if row is None:
            row = self.rows[(op, unit, dtype)] = CommRow(op, unit, dtype)
        row.elements += elements
        row.wire_bytes += elements * dtype.itemsize
        row.count += count

    def _lane(self, group: Group, lane: int, what: str) -> Any:
        self._raise_if_broken()
        return group.lanes[lane]

    def _raise_if_broken(self) -> None:
        if self.broken is not None:
            raise ZeroError(f"this model can no longer communicate, after: {self.broken}")

    def failed(self, error: Exception, what: str) -> ZeroError:
        """The error to raise when a wait broke: the verdict of the watch on any rank, or that a rank is gone."""
        verdict = WATCH.verdict(self.number) if self.watched else None
        self.broken = verdict[1] if verdict else f"{what} failed: {str(error).splitlines()[0][:200]}"
        drop_groups()
        if verdict is not None:
            return getattr(errors, verdict[0], ZeroError)(verdict[1])
        return ZeroError(
            f"rank {self.mesh.world.rank}: {what} failed, because another rank ended or closed its connection, or the process "
            f"group's time limit passed. Last here: {self.last_event()}. Look at the other ranks' own errors first. ({self.broken})"
        )

    def mismatch(self, text: str) -> RankMismatchError:
        """Ranks disagree: nothing may be launched any more, here or elsewhere."""
        self.broken = text
        if self.watched:
            WATCH.tell(self.number, RankMismatchError.__name__, text)
        drop_groups()
        return RankMismatchError(text)

    def tell(self, error: ZeroError) -> bool:
        """This rank has met an error of its own: the others raise it where they wait for this one; see control.spread."""
        if not self.watched or self.broken is not None:
            return False
        self.broken = str(error)
        drop_groups()
        return WATCH.tell(self.number, type(error).__name__, f"rank {self.mesh.world.rank}: {error}")

    def sever(self) -> None:
        """Close this rank's connections, so that a blocked wait ends: a receive that times out does just that."""
        mesh = self.mesh
        groups = [(mesh.control, mesh.world)]
        if self.pairwise:
            groups += [(pg, group) for group in mesh.groups for pg in group.lanes]
        for pg, group in groups:
            for peer in group.peers if pg is not None else ():
                with contextlib.suppress(RuntimeError):  # this is the point
                    pg.recv([torch.empty(1, device="cpu")], peer, 9).wait(datetime.timedelta(milliseconds=1))


class Channel:
    """Values between the ranks of a mesh, for what checkpoints agree on; on a group of their own, so from any thread, where `apart`.

    The group's own methods are called, not torch.distributed's functions: those refuse a group that the user's script has destroyed
    at its end, while a save may still be under way.
    """

    def __init__(self, mesh: Mesh, apart: bool) -> None:
        self.world, self.group = mesh.world, beside(mesh) if apart else mesh.control

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value (what JSON holds), in rank order, on every rank."""
        return self._spread(value, everywhere=True)

    def collect(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on rank 0; nothing elsewhere."""
        return self._spread(value, everywhere=False)

    def _spread(self, value: Any, everywhere: bool) -> list[Any]:
        data = _encoded(value)
        if self.group is None:
            return [_decoded(data)]
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.world.size)]
        self._wait(self.group.allgather([sizes], [torch.tensor([data.numel()], device="cpu")]), *sizes)
        mine = _padded(data, max(int(size) for size in sizes))
        gets = everywhere or self.world.rank == 0
        rows = [mine.new_empty(mine.numel()) for _ in sizes] if gets else []
        if everywhere:
            self._wait(self.group.allgather([rows], [mine]), mine, *rows)
        else:
            self._wait(self.group.gather(rows, mine, 0), mine, *rows)
        return [_decoded(row[: int(size)]) for row, size in zip(rows, sizes, strict=gets)]

    def _wait(self, work: Any, *tensors: Tensor) -> None:
        WATCH.lends(*tensors)
        try:
            work.wait()
        except RuntimeError as error:
            raise ZeroError(
                f"rank {self.world.rank}: another rank ended or closed its connection during a save or load of a checkpoint, or the process "
                f"group's time limit passed. Look at the other ranks' own errors first. ({str(error).splitlines()[0][:200]})"
            ) from error


def _encoded(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _padded(data: Tensor, numel: int) -> Tensor:
    return torch.cat([data, data.new_zeros(numel - data.numel())])


def _decoded(data: Tensor) -> Any:
    return json.loads(ctypes.string_at(data.data_ptr(), data.numel()))


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Every rank's picklable value over one of the user's own process groups, the world if None, in rank order."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


class LaneNames(dict[tuple[Group, int], str]):
    """(group, lane) -> what the watch calls that queue of one model's launches."""

    def __init__(self, number: str) -> None:
        self.number = number

    def __missing__(self, key: tuple[Group, int]) -> str:
        self[key] = name = f"{self.number}:{key[1]}:{'-'.join(map(str, key[0].ranks))}"
        return name


@functools.cache
def _tag(number: str, unit: str) -> int:
    """Messages of different models and units never meet, so a rank in another order cannot get another unit's values."""
    return zlib.crc32(f"{number} {unit}".encode()) % 2**30


def _bytes(tensor: Tensor) -> Tensor:
    """Any dtype travels as bytes."""
    return tensor.view(-1).view(torch.uint8)
