"""Which stage and settings: the least communication that fits, and what would help where nothing does.

The rule needs no bandwidths: stages are tried in the order of what they send, which is also that of what they shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.stages import STAGES
from ..errors import ConfigError
from .estimate import Estimate, amount, estimate
from .models import Model, of_count
from .setup import Setup

MOST_DEVICES = 2**20
# What model states and pages in use may take of a device where activations are not known: ZeRO (Table 2) measured that
# 0.63 to 0.82 of what the states alone allow can be used.
STATE_SHARE = 0.63


@dataclass(frozen=True)
class Recommendation:
    """stage: the one to take, or the nearest to fitting; fits: None where no memory is known; reason: why, in words;
    remedies: what would make it fit, where nothing does."""

    stage: int
    fits: bool | None
    reason: str
    remedies: tuple[str, ...] = ()


def recommend(model: Model, setup: Setup, estimates: Mapping[int, Estimate]) -> Recommendation:
    """The least communication that fits `setup`."""
    if setup.usable_bytes is None:
        return _without_memory(estimates)
    fitting = [stage for stage, one in estimates.items() if not one.problems]
    if not fitting:
        smallest = min(estimates, key=lambda stage: estimates[stage].device_bytes)
        found = tuple(remedies(model, setup))
        why = "; ".join(estimates[smallest].problems)
        ways = (
            f"what would: {'; '.join(found)}"
            if found
            else "nothing here would make it fit: a smaller model or more memory"
        )
        return Recommendation(smallest, False, f"does not fit at any stage (stage {smallest}: {why}); {ways}", found)
    stage = min(fitting, key=lambda s: (estimates[s].wire_elements, s))
    room = f"{amount(estimates[stage].device_bytes)} of {amount(setup.usable_bytes)} that may be used"
    smaller = [s for s in estimates if s < stage]
    cheaper = (
        f"stages below it need {amount(min(estimates[s].device_bytes for s in smaller))} or more" if smaller else ""
    )
    costs = [s for s in fitting if estimates[s].wire_elements > estimates[stage].wire_elements]
    spared = f"stage {costs[0]} would save memory, but sends more" if costs else ""
    reasons = [text for text in (f"stage {stage} takes {room}", cheaper, spared) if text]
    return Recommendation(stage, True, "the least communication that fits: " + "; ".join(reasons))


def _without_memory(estimates: Mapping[int, Estimate]) -> Recommendation:
    least = min(one.wire_elements for one in estimates.values())
    cheap = [stage for stage, one in estimates.items() if one.wire_elements == least]
    stage = min(cheap, key=lambda s: estimates[s].device_bytes)
    reason = f"the least memory ({amount(estimates[stage].device_bytes)}) that costs no more communication than data parallelism"
    return Recommendation(stage, None, f"{reason}; give device_memory to know what fits")


# ---- what would fit


def fits(model: Model, setup: Setup) -> bool:
    return any(not estimate(model, setup, stage).problems for stage in STAGES)


def changes(model: Model, setup: Setup) -> Iterator[tuple[str, dict[str, Any]]]:
    """What could be changed, the cheapest first: (in words, fields of the setup; the model's units under "units")."""
    if setup.checkpointing != "full" and (model.shape is not None or True in model.traces):
        yield "activation checkpointing", {"checkpointing": "full"}
    if setup.batch > 1:
        yield "a batch of 1", {"batch": 1}
    if setup.replicate > 1:
        yield "no replicas: shard over all devices", {"replicate": 1}
    for name, units in model.finer:
        yield f"smaller units ({name})", {"units": units}
    if setup.prefetch:
        yield "no unit gathered ahead (prefetch 0)", {"prefetch": 0}
    if setup.offload_optimizer == "device":
        yield "the optimizer on the host", {"offload_optimizer": "host"}
    if setup.offload_params == "device":
        yield "parameters on the host", {"offload_params": "host"}
    if setup.checkpointing == "full" and setup.offload_activations == "device":
        yield "activation checkpoints on the host", {"offload_activations": "host"}


def changed(model: Model, setup: Setup, fields: Mapping[str, Any]) -> tuple[Model, Setup]:
    others = {name: value for name, value in fields.items() if name != "units"}
    if "units" in fields:
        model = dataclasses.replace(model, units=fields["units"])
    return model, dataclasses.replace(setup, **others)


def remedies(model: Model, setup: Setup) -> Iterator[str]:
    """Single changes that make it fit; else the first so many of them together; and how many devices would."""
    alone, together = False, (model, setup)
    names: list[str] = []
    for name, fields in changes(model, setup):
        if fits(*changed(model, setup, fields)):
            alone = True
            yield name
    for name, fields in () if alone else changes(model, setup):
        if "units" in fields:
            names = [other for other in names if not other.startswith("smaller units")]
        together, names = changed(*together, fields), [*names, name]
        if len(names) > 1 and fits(*together):
            yield " with ".join(names)
            break
    more = setup.world_size * 2
    while more <= MOST_DEVICES:
        if fits(model, dataclasses.replace(setup, world_size=more)):
            yield f"{more} devices"
            break
        more *= 2


# ---- the most that fits


def largest(good: Callable[[int], bool], limit: int) -> int:
    """The largest whole number that is good, 0 where 1 is not; what is good for n is good below n too."""
    low, high = 0, 1
    while high <= limit and good(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > max(low // 1000, 1):  # three digits are as good as the model behind them
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def most_that_fit(model: Model, setup: Setup, stage: int) -> dict[str, int]:
    """The largest `parameters` (of a GPT like GPT-3 with units cut as this model's, whatever the model), and `batch` and `sequence` of this model."""
    if setup.usable_bytes is None:
        return {}

    def holds(one: Model, **fields: Any) -> bool:
        return not estimate(one, dataclasses.replace(setup, **fields), stage).problems

    sequence = setup.sequence or (model.shape.sequence if model.shape else None)
    found = {
        "parameters": 10**6 * largest(lambda n: holds(of_count(n * 10**6, setup.dtypes, sequence, model.cut)), 10**9),
    }
    if model.shape is not None and sequence is not None:
        found["batch"] = largest(lambda n: holds(model, batch=n), 10**6)
        found["sequence"] = largest(lambda n: holds(model, sequence=n), 10**9)
    return found


# ---- stage="auto"


def choose_stages(
    model: Model, setup: Setup, held: Callable[[Estimate], float] = lambda one: one.device_bytes
) -> tuple[dict[str, int], str]:
    """A stage for each unit, and why: one for all where that fits, else the largest units stay gathered while there is room.

    held: of an estimate, the bytes that must fit the device. Where parameters are offloaded, which only the last stage can, all
    units take it.

    Raises:
        ConfigError: the states do not fit the memory even when all is sharded.
    """
    assert setup.device_memory is not None
    budget = setup.device_memory * STATE_SHARE
    names = [unit.name for unit in model.units]
    need = {stage: held(estimate(model, setup, stage)) for stage in STAGES}
    told = f"of {amount(setup.device_memory)} free on the device, states and pages in use may take {amount(budget)}"
    offloads = setup.offload_params != "device"
    whole = [stage for stage in STAGES if not STAGES[stage].shards_parameters]
    for stage in [] if offloads else whole:
        if need[stage] <= budget:
            return dict.fromkeys(names, stage), f"stage {stage} needs {amount(need[stage])}; {told}"
    most, less = max(STAGES), max(whole)
    if need[most] > setup.device_memory:
        raise ConfigError(
            f"stage: 'auto' found no stage that fits: stage {most} needs {amount(need[most])} on each of {setup.world_size} ranks, "
            f"{amount(setup.device_memory)} are free; more ranks, a smaller model, or a stage of your own choice"
        )
    chosen, kept = dict.fromkeys(names, most), 0
    for unit in [] if offloads else sorted(model.units, key=lambda unit: -unit.numel):
        tried = {**chosen, unit.name: less}
        if held(estimate(model, setup, tried)) <= budget:
            chosen, kept = tried, kept + 1
    nbytes = held(estimate(model, setup, chosen))
    which = f"stage {less} for {kept} of {len(names)} units, stage {most} for the rest" if kept else f"stage {most}"
    return chosen, f"{which} needs {amount(nbytes)}; {told}"
