"""What a machine's links and processors cost: links of a latency and a bandwidth, a rate of compute over work size, memory. Made by hand or by `zerodp bench links`.

Figures in, seconds out; it knows no models and no schedules.
"""

from __future__ import annotations

import bisect
import dataclasses
import difflib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError

FORMAT = "zerodp links 1"
OPS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Link:
    """A collective's cost between the ranks of one group.

    op: "all_gather", "reduce_scatter" or "all_reduce", or "any"; ranks: of the group that these figures are for;
    latency: seconds of a collective of that group besides its bytes; bandwidth: bytes per second that one rank sends (for links
    across nodes: that one node sends); launch_seconds and launch_bandwidth: what of these two the launch keeps the training thread for.
    """

    op: str
    ranks: int
    latency: float
    bandwidth: float
    launch_seconds: float = 0.0
    launch_bandwidth: float = math.inf


@dataclass(frozen=True)
class Transfer:
    """One collective in seconds: of its launch, then until its bytes move, and while they move when nothing else does."""

    latency: float
    seconds: float
    launch: float = 0.0


def together(transfers: Sequence[Transfer]) -> Transfer:
    """One after another on the same lane."""
    return Transfer(
        sum(one.latency for one in transfers),
        sum(one.seconds for one in transfers),
        sum(one.launch for one in transfers),
    )


@dataclass(frozen=True)
class Machine:
    """Devices alike, in nodes alike.

    compute: (FLOPs of one operation, FLOPs per second reached with it), rising; memory_bandwidth: bytes read and written per second;
    inside, across: links between the ranks of one node, and of several; devices: of a node; pairwise: every rank sends to every
    other, as on gloo, instead of round a ring; shared_rate: the rate at which compute and a transfer go on while both are under way
    (1: neither feels the other; 0.5: they share one processor); message_seconds: of one small message between all ranks.
    """

    name: str
    compute: tuple[tuple[float, float], ...]
    memory_bandwidth: float
    inside: tuple[Link, ...]
    across: tuple[Link, ...] = ()
    devices: int = 1
    pairwise: bool = False
    shared_rate: float = 1.0
    message_seconds: float = 0.0
    source: str = "assumed"

    def flops(self, work: float) -> float:
        """FLOPs per second with operations of `work` FLOPs, between the measured points on logarithmic scales."""
        sizes = [size for size, _ in self.compute]
        place = bisect.bisect_left(sizes, work)
        if place == 0 or place == len(sizes):
            return self.compute[max(place - 1, 0)][1]
        (a, low), (b, high) = self.compute[place - 1], self.compute[place]
        part = math.log(work / a) / math.log(b / a)
        return float(low * (high / low) ** part)

    def compute_seconds(self, flops: float, work: float) -> float:
        """For `flops` in operations of `work` each."""
        return flops / self.flops(work) if flops else 0.0

    def memory_seconds(self, nbytes: float) -> float:
        return nbytes / self.memory_bandwidth

    def transfer(self, op: str, size: int, stride: int, sent_bytes: float, launches: int = 1) -> Transfer:
        """What a collective costs in which every rank sends `sent_bytes`, in a group of `size` ranks, every `stride`-th one.

        Ranks are numbered node by node. Groups side by side do the same at the same time, and share what leaves a node.
        """
        members = max(1, min(size, self.devices // stride))
        crossing = size > members and bool(self.across)
        link = _nearest(self.across if crossing else self.inside, op, size)
        latency = link.latency * (size - 1) / max(link.ranks - 1, 1)
        bandwidth = link.bandwidth
        if crossing:
            away = members * (size - members) / (size - 1) if self.pairwise else 1.0
            bandwidth /= away * (self.devices // members)
            if members > 1:
                bandwidth = min(bandwidth, _nearest(self.inside, op, members).bandwidth)
        started = min(
            sent_bytes / link.launch_bandwidth, sent_bytes / bandwidth
        )  # bytes that the launch itself has moved
        launched = min(link.launch_seconds, latency)
        return Transfer(
            (latency - launched) * launches, sent_bytes / bandwidth - started, launched * launches + started
        )

    def with_bandwidth(self, factor: float) -> Machine:
        """The same machine with links of another bandwidth."""
        return dataclasses.replace(
            self,
            inside=tuple(dataclasses.replace(one, bandwidth=one.bandwidth * factor) for one in self.inside),
            across=tuple(dataclasses.replace(one, bandwidth=one.bandwidth * factor) for one in self.across),
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values, which `of_json` takes back."""
        values = dataclasses.asdict(self)
        for row in (*values["inside"], *values["across"]):
            if row["launch_bandwidth"] == math.inf:
                del row["launch_bandwidth"]
        return {"format": FORMAT, **values}


def _nearest(links: tuple[Link, ...], op: str, ranks: int) -> Link:
    """Of this operation, for the group size nearest to `ranks`."""
    fitting = [one for one in links if one.op == op] or [one for one in links if one.op == "any"] or list(links)
    return min(fitting, key=lambda one: abs(math.log(one.ranks / ranks)))


def of_json(values: Mapping[str, Any]) -> Machine:
    """
    Raises:
        ConfigError: these are not the values of a machine.
    """
    if values.get("format") != FORMAT:
        raise ConfigError(
            f"links: expected format {FORMAT!r}, got {values.get('format')!r}; `zerodp bench links` writes such a file"
        )
    known = {field.name for field in dataclasses.fields(Machine)}
    try:
        given: dict[str, Any] = {key: value for key, value in values.items() if key in known}
        for key in ("inside", "across"):
            given[key] = tuple(Link(**row) for row in given.get(key, ()))
        given["compute"] = tuple((float(work), float(rate)) for work, rate in given["compute"])
        found = Machine(**given)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"links: not a whole set of figures ({error}); `zerodp bench links` writes such a file"
        ) from None
    figures = [found.memory_bandwidth, found.devices, *(rate for _, rate in found.compute)]
    figures += [figure for link in (*found.inside, *found.across) for figure in (link.bandwidth, link.ranks)]
    if not (found.compute and found.inside and all(figure > 0 for figure in figures) and 0 < found.shared_rate <= 1):
        raise ConfigError(
            "links: rates, bandwidths and counts must be above 0, and there must be some of compute and inside"
        )
    return found


def machine_of(given: Machine | str | os.PathLike[str]) -> Machine:
    """A machine as it is, by its name in `MACHINES`, or from a file of `zerodp bench links`.

    Raises:
        ConfigError: neither a known name nor a readable file.
    """
    if isinstance(given, Machine):
        return given
    if str(given) in MACHINES:
        return MACHINES[str(given)]
    path = Path(given)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        near = difflib.get_close_matches(str(given), MACHINES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; names are {', '.join(MACHINES)}"
        raise ConfigError(
            f"links: no file {str(given)!r} ({error.strerror}) and no machine of that name{hint}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"links: {path} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"links: {path} holds no object")
    return of_json(values)


def _gpu_node(name: str, peak: float, memory: float, inside: float, across: float, devices: int) -> Machine:
    """A node of GPUs from its makers' figures: half the peak with large operations, a tenth with small ones, NCCL's usual latencies."""
    curve = ((1e8, 0.04), (1e9, 0.12), (1e10, 0.26), (1e11, 0.40), (1e12, 0.50))
    return Machine(
        name,
        tuple((work, part * peak) for work, part in curve),
        0.8 * memory,
        (Link("any", devices, 6e-6 * (devices - 1), inside),),
        (Link("any", 2 * devices, 1e-5 * (2 * devices - 1), across),),
        devices,
        shared_rate=0.95,
        message_seconds=1e-4,
    )


# Assumed, from the makers' data sheets; what a machine really does, `zerodp bench links` measures.
MACHINES = {
    "dgx-2": _gpu_node("dgx-2", 125e12, 900e9, 120e9, 100e9, 16),
    "dgx-a100": _gpu_node("dgx-a100", 312e12, 2.0e12, 230e9, 200e9, 8),
    "dgx-h100": _gpu_node("dgx-h100", 990e12, 3.35e12, 360e9, 400e9, 8),
}
