"""What one device holds and sends under a stage: the closed forms applied to a model and a setup."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..core.layout import build
from ..core.stages import STAGES, Residency
from ..core.wrap import ROOT
from ..tiers.disk import BUFFER_BYTES
from .closed import activations, states, traffic
from .models import FlatSpec, Model, UnitSpec
from .setup import Setup
from .timeline.rehearsal import Part, rehearse

STATES = ("parameters", "gradients", "optimizer")
KINDS = (*STATES, "unsharded", "buckets", "activations", "buffers")
Stage = int | Mapping[str, int]  # for all units, or by unit name


@dataclass(frozen=True)
class Estimate:
    """One device under one stage, in bytes and elements of one step.

    model_state_bytes: by the paper's formula; kinds: what this library holds at its peak, by kind; tiers: bytes per device
    on host and disk; wire_elements: the paper's count; sent_elements, sent_bytes, operations: this library's, per rank;
    host_link_bytes: to and from host or disk; flops: of compute; seconds: by part, where a bandwidth or rate is known.
    """

    stage: Stage
    model_state_bytes: float
    kinds: dict[str, float]
    tiers: dict[str, float]
    wire_elements: float
    sent_elements: float
    sent_bytes: float
    operations: int
    host_link_bytes: float
    flops: float | None
    seconds: dict[str, float]
    problems: tuple[str, ...]  # what does not fit, in words; empty also where no memory is known
    disk_buffer_bytes: float = 0.0  # of host memory besides, for what is on its way to and from disk

    @property
    def zerodp_state_bytes(self) -> float:
        """Parameters, gradients and optimizer state on the device; padding included where the units are known."""
        return sum(self.kinds[kind] for kind in STATES)

    @property
    def device_bytes(self) -> float:
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Placed:
    """A flat with its place: elements of its buffer, of this rank's part of it, of parameters in that part, and of the largest of its pieces."""

    spec: FlatSpec
    residency: Residency
    ranks: int
    replicas: int
    whole: float
    shard: float
    owned: float
    pieces: int
    piece: float


def residency_of(unit: UnitSpec, stage: Stage) -> Residency:
    return unit.residency or STAGES[stage if isinstance(stage, int) else stage[unit.name]]


def place(model: Model, unit: UnitSpec, setup: Setup, stage: Stage, rank: int = 0) -> Iterator[Placed]:
    """Where the unit's flats lie; padding and owners only where the units are those that `shard()` makes."""
    residency = residency_of(unit, stage)
    data_ranks = setup.shard_ranks * setup.replicate
    ranks, replicas = (setup.shard_ranks, setup.replicate) if residency.shards_optimizer else (1, data_ranks)
    bucket = setup.bucket_bytes_on(ranks)
    for flat in unit.flats:
        if model.exact:
            numels = [int(numel) for numel in flat.numels]
            layout = build(numels, ranks, replicas, max(bucket // flat.compute, 1))
            whole, shard = layout.padded_numel, layout.shard_numel
            mine = layout.segments(rank % ranks)
            yield Placed(
                flat,
                residency,
                ranks,
                replicas,
                whole,
                shard,
                sum(s.numel for s in mine),
                len(layout.pieces),
                max(layout.piece_numels),
            )
        else:
            numel = sum(flat.numels) / setup.tensor_parallel
            pieces = math.ceil(numel * flat.compute / bucket)
            piece = min(numel, bucket / flat.compute) / ranks
            yield Placed(flat, residency, ranks, replicas, numel, numel / ranks, numel / ranks, pieces, piece)


def place_all(model: Model, setup: Setup, stage: Stage, rank: int) -> dict[str, list[Placed]]:
    """Of each unit. Units whose flats are alike, as the blocks of most models are, are asked for once."""
    found: dict[tuple[Residency, tuple[FlatSpec, ...]], list[Placed]] = {}
    units = {}
    for unit in model.units:
        alike = residency_of(unit, stage), unit.flats
        if alike not in found:
            found[alike] = list(place(model, unit, setup, stage, rank))
        units[unit.name] = found[alike]
    return units


def sizes(flat: FlatSpec, setup: Setup) -> states.Sizes:
    return states.Sizes(flat.compute, flat.rest, flat.gradient, setup.moments)


def held_bytes(flats: list[Placed], setup: Setup) -> Counter[str]:
    """What these flats hold, by kind, on the device and away from it."""
    total: Counter[str] = Counter()
    for flat, count in Counter(flats).items():
        held = states.held(
            flat.residency,
            sizes(flat.spec, setup),
            flat.whole,
            flat.shard,
            flat.owned,
            alone=flat.ranks == 1,
            accumulates=setup.accumulate > 1,
            optimizer_away=setup.offload_optimizer != "device",
            parameters_away=setup.offload_params != "device",
            trains=flat.spec.trains,
            together=setup.offload_params == setup.offload_optimizer,
        )
        total.update({kind: count * nbytes for kind, nbytes in held.items()})
    return total


def transient_bytes(units: Mapping[str, list[Placed]], setup: Setup) -> dict[str, float]:
    """The most that units in use need: gathered pages, and gradient buckets on their way."""
    paged = [[f for f in flats if f.residency.shards_parameters] for flats in units.values()]
    gathered = sum(f.whole * f.spec.compute for flats in paged for f in flats)
    total = {"unsharded": 0.0, "buckets": 0.0}
    summed = sum(f.shard * f.spec.gradient for flats in units.values() for f in flats if f.spec.trains)
    opened = sum(
        f.whole * f.spec.compute for f in units.get(ROOT, ()) if f.residency.shards_gradients and f.spec.trains
    )
    for is_root, flats in {(name == ROOT, tuple(flats)) for name, flats in units.items()}:
        one = {"unsharded": 0.0, "buckets": 0.0}
        piece = max((f.piece * f.spec.gradient for f in flats if f.spec.trains), default=0)
        for place, f in enumerate(flats):
            found = states.in_use(
                f.residency,
                sizes(f.spec, setup),
                f.whole,
                0,
                1 + setup.prefetch,
                f.ranks,
                f.replicas,
                setup.exact,
                setup.accumulate > 1,
                opened if not is_root and place == 0 else 0,
                f.owned,
                optimizer_away=setup.offload_optimizer != "device",
                copied=setup.copies_sums,
                leaving=states.leaving(piece, summed, setup.exact) if place == 0 else 0,
            )
            one["unsharded"] += found["unsharded"]
            one["buckets"] += found["buckets"] if f.spec.trains else 0
        total = {kind: max(total[kind], one[kind]) for kind in total}
    root = sum(f.whole * f.spec.compute for f in units.get(ROOT, ()) if f.residency.shards_parameters)
    total["unsharded"] = min(total["unsharded"] + root + setup.unsharded_bytes, gathered)
    return total


def activation_bytes(model: Model, setup: Setup) -> dict[str, float]:
    """`here` on the device and `away` on another tier; nothing where neither a trace nor shape and sequence are known."""
    shape, sequence = model.shape, setup.sequence or (model.shape.sequence if model.shape else None)
    trace = model.traces.get(setup.checkpointing == "full")
    if trace is not None:
        found = {"kept": trace.saved_bytes, "working": trace.peak_bytes - trace.saved_bytes}
        return _placed(found, len(model.units), setup)
    if shape is None or sequence is None:
        return {"here": 0, "away": 0}
    found = activations.model_bytes(
        sequence,
        setup.batch,
        shape.hidden,
        shape.heads,
        shape.vocabulary,
        shape.layers,
        setup.tensor_parallel,
        setup.sequence_parallel,
        setup.checkpointing == "none",
        setup.checkpointing == "full",
        setup.tensor_parallel if setup.partition_activations else 1,
        setup.dtypes.param_dtype.itemsize,
    )
    return _placed(found, shape.layers, setup)


def _placed(found: Mapping[str, float], layers: int, setup: Setup) -> dict[str, float]:
    if setup.offload_activations == "device":
        return {"here": found["kept"] + found["working"], "away": 0}
    passing = found["kept"] * min(2 / layers, 1)  # one goes while the next is made
    return {"here": passing + found["working"], "away": found["kept"]}


def part(name: str, flats: list[Placed]) -> Part:
    """A unit as far as the order of events goes."""
    return Part(
        name,
        round(sum(f.whole * f.spec.compute for f in flats if f.residency.shards_parameters)),
        pages=any(f.residency.shards_parameters for f in flats),
        renewed=any(f.ranks > 1 and not f.residency.shards_parameters for f in flats),
        trains=any(f.spec.trains for f in flats),
    )


def gathers_of(units: Mapping[str, list[Placed]], setup: Setup) -> dict[str, int]:
    """How often a step gathers each unit that the stage gathers for use: twice a backward pass, less what is kept between uses."""
    names = [name for name, flats in units.items() if any(f.residency.shards_parameters for f in flats)]
    if not setup.unsharded_bytes or not names:
        return dict.fromkeys(names, 2 * setup.accumulate)
    found = _rehearsed(
        tuple(part(*one) for one in units.items()), setup.prefetch, setup.unsharded_bytes, setup.accumulate
    )
    return {name: found[name] for name in names}


@functools.lru_cache(64)  # a search for what fits asks for the same again and again
def _rehearsed(parts: tuple[Part, ...], prefetch: int, unsharded_bytes: int, backwards: int) -> Counter[str]:
    moments = rehearse(parts, prefetch, unsharded_bytes, backwards)
    return Counter(moment.unit for moment in moments if moment.kind == "gather")


def sent(units: Mapping[str, list[Placed]], setup: Setup, gathers: Mapping[str, int]) -> tuple[float, float, int]:
    """(elements, bytes, operations) that one rank sends in a step; gathers: as of `gathers_of`."""
    elements, nbytes, operations = 0.0, 0.0, 0
    for name, flat in ((name, flat) for name, flats in units.items() for flat in flats):
        spec, residency = flat.spec, flat.residency
        if not spec.trains and not residency.shards_parameters:
            continue
        times = gathers.get(name)
        by_op = traffic.sent_elements(flat.whole, flat.ranks, flat.replicas, residency, setup.accumulate, times)
        if not spec.trains:
            by_op = {"all_gather": by_op["all_gather"]}
        elements += sum(by_op.values())
        nbytes += sum(numel * element_bytes(op, flat, setup) for op, numel in by_op.items())
        gathers_only = 0 if spec.trains else setup.accumulate * flat.pieces * (flat.ranks > 1)
        operations += (
            traffic.launches(
                flat.pieces, flat.ranks > 1, spec.trains and flat.replicas > 1, residency, setup.accumulate, times
            )
            - gathers_only
        )
    return elements, nbytes, operations


def element_bytes(op: str, flat: Placed, setup: Setup) -> float:
    """Bytes per element on the wire. An all-reduce is a reduction, and a gather of the sums in the dtype that they rest in."""
    spec, reduce_dtype = flat.spec, setup.dtypes.reduce_dtype
    reduced = spec.compute if reduce_dtype is None else reduce_dtype.itemsize
    if op != "all_reduce":
        return spec.compute if op == "all_gather" else reduced
    first = spec.gradient if flat.residency.shards_gradients else spec.compute
    later = first if flat.residency.shards_gradients else max(first, states.ACCUMULATED_BYTES)
    return (reduced + (first + later * (setup.accumulate - 1)) / setup.accumulate) / 2


def host_link_bytes(
    units: Mapping[str, list[Placed]], setup: Setup, checkpoints: float, gathers: Mapping[str, int]
) -> float:
    """Per device and step: gradients down and parameters up, pages for each gather, checkpoints there and back."""
    total = 2 * checkpoints * setup.accumulate
    for name, flat in ((name, flat) for name, flats in units.items() for flat in flats):
        params_away = flat.residency.shards_parameters and setup.offload_params != "device"
        if flat.spec.trains and setup.offload_optimizer != "device":
            if flat.residency.shards_gradients:  # each backward's sum leaves
                total += setup.accumulate * flat.shard * flat.spec.gradient
            else:
                total += flat.owned * (flat.spec.compute if setup.accumulate == 1 else states.ACCUMULATED_BYTES)
            total += 0 if params_away else flat.shard * flat.spec.compute
        if params_away:
            total += gathers[name] * flat.shard * flat.spec.compute
    return total


def estimate(model: Model, setup: Setup, stage: Stage, rank: int = 0) -> Estimate:
    """One device's bytes and wire under a stage (or one per unit)."""
    units = place_all(model, setup, stage, rank)
    flats = [flat for placed in units.values() for flat in placed]
    held, acts = held_bytes(flats, setup), activation_bytes(model, setup)
    kinds = {kind: float(held[kind]) for kind in STATES}
    kinds.update(transient_bytes(units, setup), activations=acts["here"], buffers=float(model.buffer_bytes))
    tiers = dict.fromkeys(("host", "disk"), 0.0)
    for tier, nbytes in (
        (setup.offload_optimizer, held["optimizer_away"]),
        (setup.offload_params, held["parameters_away"]),
        (setup.offload_activations, acts["away"]),
    ):
        if tier in tiers:
            tiers[tier] += nbytes
    buffers = min(tiers["disk"], BUFFER_BYTES)
    by_paper = {unit.name: residency_of(unit, stage) for unit in model.units}
    numels = {unit.name: unit.numel / setup.tensor_parallel for unit in model.units}
    policy = setup.policy
    gathers = gathers_of(units, setup)
    elements, nbytes, operations = sent(units, setup, gathers)
    link = host_link_bytes(units, setup, acts["away"], gathers)
    flops = step_flops(model, setup)
    rates = (
        ("compute", flops, setup.device_flops),
        ("wire", nbytes, setup.link_bandwidth),
        ("host link", link, setup.host_bandwidth),
    )
    return Estimate(
        stage,
        sum(states.paper_bytes(numels[n], setup.shard_ranks, r, policy) for n, r in by_paper.items()),
        kinds,
        tiers,
        sum(traffic.paper_elements(numels[n], r) for n, r in by_paper.items()),
        elements,
        nbytes,
        operations,
        link,
        flops,
        {name: amount / rate for name, amount, rate in rates if amount is not None and rate},
        tuple(problems(setup, sum(kinds.values()), {**tiers, "host": tiers["host"] + buffers})),
        buffers,
    )


def step_flops(model: Model, setup: Setup) -> float | None:
    """Of one device in a step, traced; else 2 per active parameter and token forward, 4 backward, 2 more where all is recomputed."""
    trace = model.traces.get(setup.checkpointing == "full")
    if trace is not None:
        return float(trace.flops * setup.accumulate)
    sequence = setup.sequence or (model.shape.sequence if model.shape else None)
    if sequence is None:
        return None
    per_token = 8 if setup.checkpointing == "full" else 6
    return per_token * model.active / setup.tensor_parallel * setup.batch * sequence * setup.accumulate


def problems(setup: Setup, device_bytes: float, tiers: Mapping[str, float]) -> Iterator[str]:
    for name, nbytes, room in (
        ("device", device_bytes, setup.usable_bytes),
        ("host", tiers["host"], setup.host_memory),
        ("disk", tiers["disk"], setup.disk_memory),
    ):
        if room is not None and nbytes > room:
            yield f"{name}: {amount(nbytes)} needed, {amount(room)} there"


def amount(nbytes: float) -> str:
    """Bytes in words, by thousands: 1.88 GB, 31.4 GB, 120 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(nbytes) < 1000 or unit == "TB":
            break
        nbytes /= 1000
    digits = 0 if abs(nbytes) >= 100 or unit == "B" else 1 if abs(nbytes) >= 10 else 2
    return f"{nbytes:,.{digits}f} {unit}"
