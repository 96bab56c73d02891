"""A step's time from closed forms: what each unit computes, moves and sends on a machine, in the order that the engine would choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...core.wrap import ROOT
from ..closed import activations
from ..estimate import Placed, Stage, element_bytes, part, place
from ..models import Model, UnitSpec
from ..setup import Setup
from .machine import Machine, Transfer, together
from .program import Wires, program
from .rehearsal import Moment, rehearse
from .simulate import Timeline, timeline

# Of a block: its four linear layers, and the two products of attention. Half of its gradients are those of the two layers behind
# attention, which are two thirds of the computing.
OPERATIONS, HALF = 6, 2 / 3


@dataclass(frozen=True)
class UnitSeconds:
    """What the training thread works for one unit in one pass; of the root, what comes first and what comes last in the forward."""

    forward: float
    backward: float
    again: float  # the forward once more, where activations are recomputed
    head: float = 0.0


def predict(model: Model, setup: Setup, stage: Stage, machine: Machine) -> Timeline | None:
    """One step in the steady state; None where the tokens of a sample are not known, or states or activations are offloaded."""
    tokens = tokens_per_backward(model, setup)
    if tokens is None or {setup.offload_optimizer, setup.offload_params, setup.offload_activations} != {"device"}:
        return None
    placed = {unit.name: list(place(model, unit, setup, stage)) for unit in model.units}
    parts = [part(*one) for one in placed.items()]
    work = {unit.name: unit_seconds(model, unit, setup, machine) for unit in model.units}
    moments = rehearse(parts, setup.prefetch, setup.unsharded_bytes, setup.accumulate)
    timed = [one._replace(seconds=_seconds(one, work, placed, machine, setup)) for one in moments]
    wires = wires_of(model, placed, setup, machine)
    return timeline(program(timed, wires), machine.shared_rate)


def tokens_per_backward(model: Model, setup: Setup) -> int | None:
    """Of one device."""
    sequence = setup.sequence or (model.shape.sequence if model.shape else None)
    return None if sequence is None else setup.batch * sequence


# ---- the training thread


def unit_seconds(model: Model, unit: UnitSpec, setup: Setup, machine: Machine) -> UnitSeconds:
    """FLOPs of the matrices and of attention at the rate of operations of their size, and the activations through memory."""
    tokens, shape, split = tokens_per_backward(model, setup) or 0, model.shape, setup.tensor_parallel
    flops = 2 * unit.active / split * tokens
    if shape is None:
        seconds = machine.compute_seconds(flops, flops / OPERATIONS)
        return UnitSeconds(seconds, 2 * seconds, _again(setup, seconds))
    element = setup.dtypes.param_dtype.itemsize
    if unit.name == ROOT:
        embedding = machine.memory_seconds(2 * tokens * shape.hidden * element)
        logits = 2 * shape.hidden * shape.vocabulary / split * tokens
        head = machine.compute_seconds(logits, logits)
        return UnitSeconds(embedding, embedding, 0.0, head)
    sequence = tokens / setup.batch
    flops += 4 * setup.batch * sequence**2 * shape.hidden / split
    kept = activations.layer_bytes(
        sequence, setup.batch, shape.hidden, shape.heads, split, setup.sequence_parallel, setup.checkpointing == "none", element
    )  # fmt: skip
    seconds = machine.compute_seconds(flops, flops / OPERATIONS) + machine.memory_seconds(2 * kept)
    return UnitSeconds(seconds, 2 * seconds, _again(setup, seconds))


def _again(setup: Setup, seconds: float) -> float:
    return seconds if setup.checkpointing == "full" else 0.0


def _seconds(
    moment: Moment, work: Mapping[str, UnitSeconds], placed: Mapping[str, list[Placed]], machine: Machine, setup: Setup
) -> float:
    """How long the thread works after this event."""
    kind, unit, phase, _ = moment
    if kind == "update":
        return sum(optimizer_seconds(flats, machine, setup) for flats in placed.values())
    if not unit:
        return 0.0
    own, flats = work[unit], placed[unit]
    copies = machine.memory_seconds(sum(2 * f.whole * f.spec.compute for f in flats if f.spec.trains))  # to the bucket
    halves = unit != ROOT and any(f.residency.shards_parameters and f.spec.trains for f in flats)
    if kind == "gather" and any(f.residency.shards_parameters for f in flats):  # the shard into its place of the page
        return machine.memory_seconds(sum(f.shard * (f.spec.rest + f.spec.compute) for f in flats))
    if kind == "use" and phase == "forward":
        return own.forward
    if kind == "head":
        return own.head
    if kind == "backward":
        backward = 2 * own.head if unit == ROOT else own.backward + copies
        return own.again + backward * (HALF if halves else 1)
    if kind == "rest" and halves:
        return (1 - HALF) * (own.backward + copies)
    return own.backward + copies if kind == "tail" else 0.0


def optimizer_seconds(flats: list[Placed], machine: Machine, setup: Setup) -> float:
    """Master and moments read and written, the gradient read."""
    nbytes = sum(f.shard * (2 * (1 + setup.moments) * f.spec.rest + f.spec.gradient) for f in flats if f.spec.trains)
    return machine.memory_seconds(nbytes)


# ---- the wire


def wires_of(model: Model, placed: Mapping[str, list[Placed]], setup: Setup, machine: Machine) -> Wires:
    """What each unit's events send; ranks of a tensor group are neighbours, then those that share the states, then replicas."""
    gathers, reduces, sums = {}, {}, {}
    for name, flats in placed.items():
        if any(f.ranks > 1 for f in flats):
            gathers[name] = together(
                [_transfer(machine, "all_gather", f, f.spec.compute, setup) for f in flats if f.ranks > 1]
            )
        reducing = [f for f in flats if f.spec.trains and f.ranks * f.replicas > 1]
        if reducing:
            reduces[name] = together([_reduction(machine, f, setup) for f in reducing])
            added = [(f.ranks + 1) / f.ranks if setup.exact else 3 / f.ranks for f in reducing]
            sums[name] = machine.memory_seconds(
                sum(times * f.whole * f.spec.gradient for times, f in zip(added, reducing, strict=True))
            )
    return Wires(gathers, reduces, sums, _tensor(model, setup, machine), machine.message_seconds)


def _transfer(machine: Machine, op: str, flat: Placed, element: float, setup: Setup) -> Transfer:
    sent = flat.whole * element * (flat.ranks - 1) / flat.ranks
    return machine.transfer(op, flat.ranks, setup.tensor_parallel, sent, flat.pieces)


def _reduction(machine: Machine, flat: Placed, setup: Setup) -> Transfer:
    found = []
    if flat.ranks > 1:
        found.append(_transfer(machine, "reduce_scatter", flat, element_bytes("reduce_scatter", flat, setup), setup))
    if flat.replicas > 1:
        sent = 2 * flat.shard * element_bytes("all_reduce", flat, setup) * (flat.replicas - 1) / flat.replicas
        stride = setup.tensor_parallel * flat.ranks
        found.append(machine.transfer("all_reduce", flat.replicas, stride, sent, 2 * flat.pieces))
    return together(found)


def _tensor(model: Model, setup: Setup, machine: Machine) -> dict[tuple[str, str, str], Transfer]:
    """Two all-reduces of a layer's output in its forward, as many in its backward, and again where it is recomputed."""
    tokens, shape, ranks = tokens_per_backward(model, setup) or 0, model.shape, setup.tensor_parallel
    if ranks == 1 or shape is None:
        return {}
    sent = 2 * (ranks - 1) / ranks * tokens * shape.hidden * setup.dtypes.param_dtype.itemsize
    found = {}
    for unit in model.units:
        if unit.name != ROOT:
            found["use", unit.name, "forward"] = machine.transfer("all_reduce", ranks, 1, 2 * sent, 2)
            times = 4 if setup.checkpointing == "full" else 2
            found["reduce", unit.name, "backward"] = machine.transfer("all_reduce", ranks, 1, times * sent, times)
    return found
