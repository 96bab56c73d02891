"""The only place that calls collectives. It launches, counts, waits, and turns waits that can never end into errors.

It knows tensors and groups; it does not know parameters, stages or schedules.

On gloo the data moves by pairs of sends and receives straight from and into the buffers: gloo's own all-gather copies
everything once more through fresh memory, which costs five times as much. Elsewhere the backend's collectives are used.
"""

from __future__ import annotations

import datetime
import functools
import json
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RankMismatchError, ZeroError
from .mesh import Group, Mesh, drop_groups

GATHER, REDUCE = 0, 1  # lanes: neither waits behind the other
CONTROL = "control"

# torch 2.13 renames these; older releases have only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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

    __slots__ = ("comm", "lane", "result", "sequence", "what", "works")

    def __init__(self, comm: Comm, works: Sequence[Any], lane: str, what: str, result: Any = None) -> None:
        self.comm, self.works, self.lane, self.what, self.result = comm, works, lane, what, result
        self.sequence = comm.launched[lane] = comm.launched.get(lane, 0) + 1
        comm.history.append((lane, self.sequence, what))

    def wait(self) -> Any:
        """Wait, on the current stream where there is one, and return the result.

        Raises:
            RankMismatchError: the other ranks wait for something else, so this can never end.
            ZeroError: a rank is gone, or the time limit of the process group has passed.
        """
        if self.works:
            watch = self.comm.watch
            watch.current = self
            try:
                for work in self.works:
                    work.wait()
            except RuntimeError as error:
                raise self.comm.failed(error, self.what) from error
            finally:
                watch.current = None
            self.works = ()
        return self.result


class Comm:
    """All communication of one sharded model."""

    def __init__(self, mesh: Mesh, exact: bool, check: bool) -> None:
        self.mesh, self.exact = mesh, exact
        self.pairwise = mesh.backend == "gloo"
        self.rows: dict[tuple[str, str, torch.dtype], CommRow] = {}
        self.launched: dict[str, int] = {}  # per lane
        self.history: deque[tuple[str, int, str]] = deque(maxlen=64)
        self.broken: str | None = None
        self.last_event: Callable[[], str] = lambda: "nothing yet"
        self.watch = Watch(self, enabled=check and mesh.world.size > 1 and mesh.backend != "fake")

    # ---- data

    def all_gather(self, out: Tensor, group: Group, unit: str, op: str = "all_gather", count: int = 1) -> Handle:
        """Fill `out` [size * n] from every rank's own n elements, which already stand at this rank's place in it."""
        if group.size == 1:
            return Handle(self, (), lane_name(group, GATHER), unit)
        n = out.numel() // group.size
        parts = out.split(n)
        self.count(op, unit, out.dtype, n * (group.size - 1), count)
        what = f"the gather of unit {unit!r}"
        pg = self._lane(group, GATHER, what)
        if self.pairwise:
            own = parts[group.rank]
            tag = _tag(unit)
            works = [
                w for peer in _peers(group) for w in (pg.send([own], peer, tag), pg.recv([parts[peer]], peer, tag))
            ]
        else:
            works = [_all_gather(out, parts[group.rank], group=pg, async_op=True)]
        return Handle(self, works, lane_name(group, GATHER), what)

    def receive_numel(self, numel: int, group: Group) -> int:
        """Elements of receive space that `reduce_scatter` of `numel` elements needs."""
        if group.size == 1:
            return 0
        if not self.exact:
            return numel // group.size
        return numel // group.size * (group.size - 1 if self.pairwise else group.size)

    def reduce_scatter(
        self, bucket: Tensor, receive: Tensor, group: Group, unit: str, op: str = "reduce_scatter"
    ) -> Handle:
        """Send each rank its part of `bucket` [size * n]. The result is a list of [n] whose sum, in that order, is this rank's."""
        n = bucket.numel() // group.size
        parts = list(bucket.split(n))
        if group.size == 1:
            return Handle(self, (), lane_name(group, REDUCE), unit, parts)
        self.count(op, unit, bucket.dtype, n * (group.size - 1), 1)
        what = f"the reduction of unit {unit!r}"
        pg = self._lane(group, REDUCE, what)
        if not self.exact:
            return Handle(
                self,
                [_reduce_scatter(receive, bucket, group=pg, async_op=True)],
                lane_name(group, REDUCE),
                what,
                [receive],
            )
        space = list(receive.split(n))
        if not self.pairwise:
            return Handle(
                self,
                [dist.all_to_all_single(receive, bucket, group=pg, async_op=True)],
                lane_name(group, REDUCE),
                what,
                space,
            )
        works, tag = [], _tag(unit)
        for peer in _peers(group):
            works += [pg.send([parts[peer]], peer, tag), pg.recv([space[peer - (peer > group.rank)]], peer, tag)]
        space.insert(group.rank, parts[group.rank])
        return Handle(self, works, lane_name(group, REDUCE), what, space)

    def broadcast(self, tensor: Tensor, unit: str) -> None:
        """Rank 0's values to every rank of the mesh; waits."""
        world = self.mesh.world
        if world.size > 1:
            self.count("broadcast", unit, tensor.dtype, tensor.numel() if world.rank == 0 else 0, 1)
            what = f"the broadcast of unit {unit!r}"
            pg = self._lane(world, GATHER, what)
            Handle(
                self,
                [dist.broadcast(_bytes(tensor), group=pg, group_src=0, async_op=True)],
                lane_name(world, GATHER),
                what,
            ).wait()

    # ---- control: small messages on the host, ints and floats

    def exchange(self, message: Tensor, what: str) -> Handle:
        """Every rank's `message` [k], as [size, k] in rank order."""
        world = self.mesh.world
        if world.size == 1 or self.mesh.backend == "fake":
            return Handle(self, (), CONTROL, what, message.expand(world.size, -1))
        self._raise_if_broken()
        out = message.new_empty(world.size * message.numel())
        work = _all_gather(out, message, group=self.mesh.control, async_op=True)
        return Handle(self, [work], CONTROL, what, out.view(world.size, -1))

    def exchange_objects(self, value: Any, what: str) -> list[Any]:
        """Every rank's picklable `value`, in rank order. Slow: for set-up, disagreements and errors."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self.exchange(torch.tensor([data.numel()]), what).wait()[:, 0].tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        rows = self.exchange(padded, what).wait()
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)]

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
        verdict = self.watch.verdict()
        self.broken = verdict or f"{what} failed: {str(error).splitlines()[0][:200]}"
        drop_groups()
        if verdict is not None:
            return RankMismatchError(verdict)
        return ZeroError(
            f"rank {self.mesh.world.rank}: {what} failed, because another rank ended or closed its connection, or the process "
            f"group's time limit passed. Last here: {self.last_event()}. Look at the other ranks' own errors first. ({self.broken})"
        )

    def mismatch(self, text: str) -> RankMismatchError:
        """Ranks disagree: nothing may be launched any more, here or elsewhere."""
        self.broken = text
        drop_groups()
        return RankMismatchError(text)

    def close(self) -> None:
        self.watch.close()


class Watch:
    """Looks at a wait that takes long: what is every rank waiting for, and can that still come?

    A rank waits for launch k of a lane. If each rank of a set waits for a launch that some other rank of the set has not
    made, none of them can go on. Ranks that are not waiting here (computing, saving, sleeping) are never suspected.
    """

    PATIENCE, INTERVAL = 2.0, 0.5  # seconds

    _numbers: ClassVar[dict[tuple[int, ...], int]] = {}

    def __init__(self, comm: Comm, enabled: bool) -> None:
        self.current: Handle | None = None
        self.enabled, self.comm = enabled, comm
        if not enabled:
            return
        world = comm.mesh.world
        number = Watch._numbers[world.ranks] = Watch._numbers.get(world.ranks, 0) + 1  # the same on all ranks
        self.store = dist.PrefixStore(
            f"zerodp/{'-'.join(map(str, world.ranks))}/{number}", dist.distributed_c10d._get_default_store()
        )
        self._publish({})
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="zerodp-watch", daemon=True).start()

    def close(self) -> None:
        if self.enabled:
            self._closed.set()

    def verdict(self) -> str | None:
        """What any rank has found, if one has."""
        if not self.enabled:
            return None
        try:
            for _ in range(
                6
            ):  # the finder writes before it breaks, but this rank may see the break first through a third one
                if self.store.check(["verdict"]):
                    return self.store.get("verdict").decode()
                time.sleep(0.05)
        except (RuntimeError, dist.DistError):
            pass  # the store lives in rank 0's process, which may be the one that is gone
        return None

    def _publish(self, state: dict[str, Any]) -> None:
        self.store.set(str(self.comm.mesh.world.rank), json.dumps(state))

    def _run(self) -> None:
        seen: Handle | None = None
        since = 0.0
        published, suspects = False, ""
        while not self._closed.wait(self.INTERVAL):
            handle = self.current
            if handle is None or handle is not seen:
                seen, since, suspects = handle, time.monotonic(), ""
                if published:
                    self._publish({})
                    published = False
            elif time.monotonic() - since > self.PATIENCE:
                try:
                    if not published:
                        self._publish(self._state(handle))
                        published = True
                    found = self._stuck()
                    if found and found == suspects and self.current is handle:
                        if not self.store.check(["verdict"]):
                            self.store.set("verdict", found)
                        self._break()
                        return
                    suspects = found
                except (RuntimeError, dist.DistError):
                    return  # the store is gone, and with it rank 0: the connections tell the same

    def _state(self, handle: Handle) -> dict[str, Any]:
        group = _members(self.comm.mesh, handle.lane)
        return {
            "lane": handle.lane, "sequence": handle.sequence, "what": handle.what, "launched": dict(self.comm.launched),
            "history": list(self.comm.history),
            "group": list(group), "last": self.comm.last_event(),
        }  # fmt: skip

    def _stuck(self) -> str:
        """The report if this rank is in a set that can never go on, else ''."""
        world = self.comm.mesh.world
        states = [json.loads(self.store.get(str(r))) for r in range(world.size)]
        stuck = {r for r, s in enumerate(states) if s}
        for _ in range(world.size):
            stuck = {
                r
                for r in stuck
                if any(q != r and world.ranks[q] in states[r]["group"] and _misses(states[q], states[r]) for q in stuck)
            }
        if world.rank not in stuck:
            return ""
        lines = [
            f"rank {r} waits for {s['what']}, after {s['last']}" if s else f"rank {r} is not waiting"
            for r, s in enumerate(states)
        ]
        return (
            "the ranks wait for different things and would wait for ever: "
            + "; ".join(lines)
            + ". Every rank must call the same modules, "
            "backward passes, steps and collective functions of zerodp in the same order; inside zerodp.full_params() forward passes need not match"
        )

    def _break(self) -> None:
        """Close this rank's connections, so that the blocked wait ends: a receive that times out does just that."""
        mesh = self.comm.mesh
        groups = [(mesh.control, mesh.world)]
        if self.comm.pairwise:
            groups += [(pg, g) for g in (mesh.world, mesh.shard, mesh.replicate) for pg in g.lanes]
        for pg, group in groups:
            for peer in range(group.size):
                if peer != group.rank and pg is not None:
                    try:
                        pg.recv([torch.empty(1)], peer, 9).wait(datetime.timedelta(milliseconds=1))
                    except RuntimeError:
                        pass  # this is the point


def _misses(state: dict[str, Any], wait: dict[str, Any]) -> bool:
    """Whether the rank in `state` has not launched what `wait` waits for, or something else in its place."""
    lane, sequence = wait["lane"], wait["sequence"]
    if state["launched"].get(lane, 0) < sequence:
        return True
    return any(
        a == lane and n == sequence and what != wait["what"] for a, n, what in state["history"] if lane != CONTROL
    )


def gather_objects(value: Any) -> list[Any]:
    """Every rank's picklable value over the user's own world group, in rank order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def lane_name(group: Group, lane: int) -> str:
    return f"{lane}:{'-'.join(map(str, group.ranks))}"


@functools.cache
def _tag(unit: str) -> int:
    """Messages of different units never meet, so a rank in another order cannot get another unit's values."""
    return zlib.crc32(unit.encode()) % 2**30


def _members(mesh: Mesh, lane: str) -> tuple[int, ...]:
    return mesh.world.ranks if lane == CONTROL else tuple(map(int, lane.split(":")[1].split("-")))


def _peers(group: Group) -> list[int]:
    """The others, each rank beginning with its right neighbour so that no rank is everyone's first."""
    return [(group.rank + i) % group.size for i in range(1, group.size)]


def _bytes(tensor: Tensor) -> Tensor:
    """Any dtype travels as bytes."""
    return tensor.view(-1).view(torch.uint8)
