"""A plan as one HTML file: the closed forms as JavaScript, so that its sliders compute what Python computes. No network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from ..config import PIECE_BYTES, Config
from ..core.stages import STAGES
from ..core.wrap import ROOT
from .closed.device import INPUTS, device
from .closed.symbols import javascript
from .estimate import KINDS, gathers_of, place
from .models import Model
from .picture import duration, of_timeline
from .plan import Plan
from .setup import CHECKPOINTING, Setup


def formulas() -> str:
    """The function `device(p)` in JavaScript, and the table of stages."""
    stages = {stage: {name: int(flag) for name, flag in vars(row).items()} for stage, row in STAGES.items()}
    return f"{javascript('device', device, INPUTS)}\nconst STAGES = {json.dumps(stages)};\nconst KINDS = {json.dumps(KINDS)};\n"


def inputs(model: Model, setup: Setup) -> dict[str, Any]:
    """What `device` asks for, without the stage's flags. A model without a shape or sequence has the activations that were traced."""
    shape, flats = (
        None if model.traces else model.shape,
        [flat for unit in model.units for flat in unit.flats if flat.trains],
    )
    sequence = setup.sequence or (shape.sequence if shape else None) or 0
    plain, checkpointed = model.traces.get(False), model.traces.get(True)
    typical = max(flats, key=lambda flat: sum(flat.numels)) if flats else model.units[0].flats[0]
    return {
        "numel": model.numel,
        "largest": max(unit.numel for unit in model.units),
        "root": sum(unit.numel for unit in model.units if unit.name == ROOT),
        "layers": shape.layers if shape else len(model.units),
        "hidden": shape.hidden if shape else 1,
        "heads": shape.heads if shape else 1,
        "vocabulary": shape.vocabulary if shape else 0,
        "ranks": setup.shard_ranks,
        "replicas": setup.replicate,
        "tensor_parallel": setup.tensor_parallel,
        "sequence_parallel": int(setup.sequence_parallel),
        "compute": typical.compute,
        "rest": typical.rest,
        "gradient": typical.gradient,
        "moments": setup.moments,
        "policy_parameters": setup.policy.parameters,
        "policy_gradients": setup.policy.gradients,
        "policy_optimizer": setup.policy.optimizer,
        "batch": setup.batch,
        "sequence": sequence if shape else 0,
        "accumulate": setup.accumulate,
        "accumulates": int(setup.accumulate > 1),
        "keeps_scores": int(setup.checkpointing == "none"),
        "checkpoints": int(setup.checkpointing == "full"),
        "partitions": setup.tensor_parallel if setup.partition_activations else 1,
        "optimizer_away": int(setup.offload_optimizer != "device"),
        "parameters_away": int(setup.offload_params != "device"),
        "together": int(setup.offload_params == setup.offload_optimizer),
        "activations_away": int(setup.offload_activations != "device"),
        "plain_kept": plain.saved_bytes if plain else 0,
        "plain_working": plain.peak_bytes - plain.saved_bytes if plain else 0,
        "checkpointed_kept": checkpointed.saved_bytes if checkpointed else 0,
        "checkpointed_working": checkpointed.peak_bytes - checkpointed.saved_bytes if checkpointed else 0,
        "pages": 1 + setup.prefetch,
        "unsharded_bytes": setup.unsharded_bytes,
        "exact": int(setup.exact),
        "buffers": model.buffer_bytes,
        "gathers": _mean_gathers(model, setup),
        "bucket": Config(bucket_bytes=setup.bucket_bytes).bucket_bytes_on(setup.backend, 1),
        "bucket_per_rank": PIECE_BYTES if setup.bucket_bytes is None else setup.bucket_bytes,
        "copies_sums": int(setup.offload_optimizer == "disk" or not setup.exact),
    }


def counted(model: Model, setup: Setup) -> list[str]:
    """The kinds of checkpointing for which activations are known."""
    if model.traces:
        return [kind for kind in CHECKPOINTING if (kind == "full") in model.traces]
    known = model.shape is not None and (setup.sequence or model.shape.sequence)
    return list(CHECKPOINTING) if known else []


def _mean_gathers(model: Model, setup: Setup) -> float:
    """Of an element in stage 3, in a step."""
    units = {unit.name: list(place(model, unit, setup, max(STAGES))) for unit in model.units}
    gathers = gathers_of(units, setup)
    numels = {name: sum(f.whole for f in units[name] if f.residency.shards_parameters) for name in gathers}
    return sum(gathers[name] * numel for name, numel in numels.items()) / (sum(numels.values()) or 1)


def html(plan: Plan, sections: Sequence[tuple[str, str]] = ()) -> str:
    """The whole page; `sections` are (heading, HTML) that stand below the verdict, before what the sliders change."""
    if plan.chosen in plan.timelines:
        step = plan.timelines[plan.chosen]
        told = (
            f"Stage {plan.chosen}: {duration(step.seconds)}, of it {duration(step.exposed)} waiting for the wire (red)."
        )
        sections = [*sections, ("One step, simulated", f'<p class="soft">{told}</p>{of_timeline(step)}')]
    facts = {
        "name": plan.model.name,
        "chosen": plan.chosen,
        "usable": plan.setup.usable_bytes,
        "counted": counted(plan.model, plan.setup),
        "units": [unit.name for unit in plan.model.units],
        "reason": plan.reason,
        "assumptions": list(plan.assumptions),
    }
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    extra = "".join(f"<section><h2>{escape(heading)}</h2>{body}</section>\n" for heading, body in sections)
    text = template.replace("/* FORMULAS */", formulas()).replace("<!-- SECTIONS -->", extra)
    for mark, value in (("/* INPUTS */", inputs(plan.model, plan.setup)), ("/* FACTS */", facts)):
        text = text.replace(mark, json.dumps(value).replace("<", "\\u003c"))
    return text
