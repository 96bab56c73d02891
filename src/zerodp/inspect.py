"""Looking inside a sharded model: `describe` and `stats`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .checkpoint import traffic
from .checkpoint.traffic import Traffic
from .config import PLACES
from .core.access import runtime_of
from .core.arena import KINDS
from .core.comm import CommRow
from .core.optimizer import ShardedOptimizer
from .core.runtime import Event, Runtime
from .core.unit import Flat
from .offload.home import is_elementwise, moment_kind
from .offload.sleeping import is_emptied
from .offload.source import Kept
from .residual.store import store_of


@dataclass(frozen=True)
class Memory:
    """Bytes on this rank by kind, `now` and at their `peak` since the last reset.

    parameters: in the dtype of compute, where they rest (in fp32 the shards themselves); gradients: reduced ones, and whole
    ones where the stage keeps them; master: sharded copies in another dtype; first_moment, second_moment, other_state: of the
    optimizer; unsharded: pages and checkpointed inputs gathered for use; buckets: gradient staging and receive space;
    activations: inputs of checkpointed blocks, or this rank's parts of them. host and disk: what rests there, by the same kinds,
    now and at its peak; not in the totals, which are of the device. reserved: of the memory that pages, buckets, sharded
    gradients and activations come from, in use or idle; allocations: how often more of it was asked for since `shard()`.
    """

    now: dict[str, int]
    peak: dict[str, int]
    total_now: int
    total_peak: int
    pinned: tuple[
        tuple[str, int], ...
    ] = ()  # (unit, bytes) of pages given back while a tensor of the user still sees them
    host: dict[str, int] = field(default_factory=dict)
    host_peak: dict[str, int] = field(default_factory=dict)
    disk: dict[str, int] = field(default_factory=dict)
    disk_peak: dict[str, int] = field(default_factory=dict)
    reserved: int = 0
    allocations: int = 0


class Stats:
    """What one rank's engine has done and holds; a live view, see `reset`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def comm(self) -> list[CommRow]:
        return [*self._runtime.comm.rows.values(), *store_of(self._runtime).rows]

    @property
    def trace(self) -> list[Event]:
        return [Event(*event) for event in self._runtime.trace]

    @property
    def wire_elements(self) -> int:
        """Elements this rank sent, padding included."""
        return sum(row.elements for row in self.comm)

    @property
    def wire_bytes(self) -> int:
        return sum(row.wire_bytes for row in self.comm)

    @property
    def launches(self) -> int:
        return sum(row.count for row in self.comm)

    @property
    def memory(self) -> Memory:
        self._runtime.look()
        arena = self._runtime.arena
        states = state_bytes(self._runtime.optimizer)
        host, disk = (self._away(place, states[place]) for place in ("host", "disk"))
        pinned = tuple(arena.pinned())  # looks at what was handed back, so that only what is really seen still counts
        now = {**dict.fromkeys(KINDS, 0), **arena.now, **states["device"]}
        state = sum(now[kind] for kind in ("first_moment", "second_moment", "other_state"))
        peak = {kind: max(now[kind], arena.peak.get(kind, 0)) for kind in now}
        total = sum(now.values())
        return Memory(
            now, peak, total, arena.total_peak + state, pinned, *host, *disk, arena.reserved, arena.allocations
        )

    def _away(self, place: str, states: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
        """What rests on host or disk, now and at its peak: activations, model states in the tiers, and what the optimizer made there."""
        now, peak = store_of(self._runtime).bytes_at(place, self._runtime.places.ledgers())
        for kind, nbytes in states.items() if place == "host" else ():
            if nbytes:
                now[kind], peak[kind] = now.get(kind, 0) + nbytes, peak.get(kind, 0) + nbytes
        return now, peak

    @property
    def link_bytes(self) -> tuple[int, int]:
        """Bytes of model states that left the device for host or disk, and that came back."""
        return self._runtime.places.link.out, self._runtime.places.link.back

    @property
    def checkpoint(self) -> Traffic:
        """Bytes of checkpoints that this rank read and wrote, and how long its last save kept it."""
        return traffic.of(self._runtime)

    def reset(self) -> None:
        """Start counting collectives, events and peaks anew."""
        self._runtime.comm.rows.clear()
        self._runtime.trace.clear()
        self._runtime.arena.reset_peaks()
        store_of(self._runtime).reset()
        self._runtime.places.reset()


def state_bytes(optimizer: ShardedOptimizer | None) -> dict[str, dict[str, int]]:
    """Bytes of this rank's optimizer state by place and kind."""
    found = {place: {"first_moment": 0, "second_moment": 0, "other_state": 0} for place in PLACES}
    for segment, state in optimizer.state.items() if optimizer is not None else ():
        place = segment.flat.homes[segment.segment.piece].place  # type: ignore[attr-defined]
        for key, value in state.items():
            if isinstance(value, Tensor) and not is_emptied(value):
                kind = moment_kind(key) if is_elementwise(value, segment) else "other_state"
                found[place][kind] += value.nbytes
    return found


def stats(model: nn.Module) -> Stats:
    """Collectives, memory and events of this rank; see `Stats`."""
    return Stats(runtime_of(model))


def describe(model: nn.Module) -> str:
    """The units of a sharded model, what of each rests where on this rank, and bytes by kind."""
    runtime = runtime_of(model)
    mesh = runtime.comm.mesh
    lines = [
        f"{type(model).__name__} on rank {mesh.world.rank} of {mesh.world.size} ({mesh.device_type}, {mesh.backend})"
        + (f", {mesh.data.size} data-parallel x {mesh.tensor.size} tensor-parallel" if mesh.tensor.size > 1 else "")
    ]
    width = max(len(unit.name) for unit in runtime.units)
    for unit in runtime.units:
        for flat in unit.flats:
            numel = flat.layout.numel
            where = "sharded" if flat.pages or flat.full is None else "whole"
            split = f"1/{flat.group.size}" + (f" x {flat.replicas.size} replicas" if flat.replicas.size > 1 else "")
            parts = sum(one.split for one in flat.locals)
            tensor = f", {parts} of them tensor-parallel parts" if parts else ""
            rest = f", {_name(flat.shard_dtype)} shard" if flat.shard_dtype != flat.param_dtype else ""
            grads = (
                ("gradients " + ("sharded" if flat.residency.shards_gradients else "whole"))
                if flat.trains
                else "frozen"
            )
            lines.append(
                f"  {unit.name:{width}}  {len(flat.parameters):4} parameters {numel:>14,} elements  {_name(flat.param_dtype)} "
                f"{where}{rest}, optimizer {split}, {grads}{tensor}{_elsewhere(flat)}"
            )
    memory = Stats(runtime).memory
    lines += [f"  {kind:14} {memory.now[kind]:>16,} bytes now {memory.peak[kind]:>16,} peak" for kind in memory.now]
    lines.append(f"  {'reserved':14} {memory.reserved:>16,} bytes for what comes and goes")
    for place, now, peak in (("host", memory.host, memory.host_peak), ("disk", memory.disk, memory.disk_peak)):
        lines += [
            f"  {kind + ', ' + place:22} {now[kind]:>8,} bytes now {peak[kind]:>16,} peak" for kind in now if peak[kind]
        ]
    lines += [
        f"  {ledger.place} {ledger.note}: {ledger.fetched_bytes:,} bytes read, {ledger.written_bytes:,} written"
        for ledger in (*store_of(runtime).ledgers, *runtime.places.ledgers())
        if ledger.note
    ]
    if runtime.lending.asleep is not None:
        lines.append(f"  {runtime.lending.asleep.message}")
    lines += [f"  pinned by a tensor outside: unit {name!r}, {nbytes:,} bytes" for name, nbytes in memory.pinned]
    return "\n".join(lines)


def _elsewhere(flat: Flat) -> str:
    """What of a flat rests off the device, and how much of it where there are several places."""
    numels = {"optimizer states": Counter[str](), "parameters": Counter[str]()}
    for home in flat.homes:
        numels["optimizer states" if flat.trains else "parameters"][home.place] += home.numel
        if isinstance(home.source, Kept):
            numels["parameters"][home.source.place] += home.numel
    text = ""
    for what, found in numels.items():
        share = "" if len(found) == 1 else "{:.0%} of "
        text += "".join(
            f", {share.format(numel / found.total())}{what} on {place}"
            for place, numel in found.items()
            if place != "device"
        )
    return text


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
