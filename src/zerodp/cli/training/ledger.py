"""Bytes per rank under every stage: by the paper's formula, and as measured on the model of the run."""

from __future__ import annotations

import dataclasses
import gc
import os
from dataclasses import dataclass
from typing import Any

import torch

import zerodp

from ...config import PRECISIONS
from ...core.arena import STATES
from ...core.stages import STAGES, Residency
from ...planning.automatic import free_bytes
from ...planning.closed.states import MOMENTS, paper_bytes, policy
from ...planning.closed.traffic import paper_elements
from .gpt import counting, loss_of, parameter_count, shape_for
from .settings import Settings
from .trainer import build

HEADROOM = 8  # bytes per parameter that a measurement may take besides: the model before it is sharded, workspace


@dataclass(frozen=True)
class Row:
    """What one rank holds and sends in one step under a stage."""

    stage: int
    formula_bytes: int
    measured_bytes: int | None  # None: this machine has no room to measure it
    workspace_bytes: int | None  # gathered parameters and gradient buckets, at their peak
    formula_wire_elements: int
    measured_wire_elements: int | None


def formula_bytes(residency: Residency, numel: int, ranks: int, precision: str) -> int:
    """Model states per rank by the paper, with Adam."""
    per = policy(PRECISIONS[precision].param_dtype.itemsize, MOMENTS["adam"])
    return round(float(paper_bytes(numel, ranks, residency, per)))


def formula_wire_elements(residency: Residency, numel: int, ranks: int) -> int:
    """Elements that a rank sends in one step: gradients out and parameters back, and parameters once more where they are sharded."""
    return round(float(paper_elements(numel, residency)) * (ranks - 1) / ranks)


def room(device: torch.device) -> int:
    """Bytes that this rank may still take."""
    sharing = 1 if device.type == "cuda" else int(os.environ["LOCAL_WORLD_SIZE"])
    return free_bytes(device) // sharing


def measure(settings: Settings, device: torch.device, room: int) -> list[Row]:
    """Shard the run's model under every stage, take one step, and read the engine's own books (a collective).

    A stage that may need more than `room` bytes, which must be the same on all ranks, is left out.
    """
    numel = parameter_count(*shape_for(settings.params))
    rows = []
    for stage, residency in STAGES.items():
        paper = formula_bytes(residency, numel, settings.ranks, settings.precision)
        wire = formula_wire_elements(residency, numel, settings.ranks)
        fits = paper + HEADROOM * numel <= room
        states, workspace, elements = _one_step(settings, stage, device) if fits else (None, None, None)
        rows.append(Row(stage, paper, states, workspace, wire, elements))
        gc.collect()
    return rows


def _one_step(settings: Settings, stage: int, device: torch.device) -> tuple[int, int, int]:
    """(bytes of model states, peak bytes of workspace, elements sent)."""
    precision = dataclasses.replace(
        PRECISIONS[settings.precision], loss_scale=1.0
    )  # so that fp16 does not skip the step
    model, optimizer = build(settings, device, stage=stage, precision=precision, offload=None)
    stats = zerodp.stats(model)
    stats.reset()
    inputs, targets = counting(1, settings.context, device)
    optimizer.backward(loss_of(model(inputs), targets))
    optimizer.step()
    memory, elements = stats.memory, stats.wire_elements
    states = sum(memory.now[kind] for kind in STATES)
    workspace = sum(memory.peak[kind] for kind in memory.peak if kind not in STATES)
    return states, workspace, elements


def as_json(rows: list[Row], settings: Settings) -> dict[str, Any]:
    return {
        "parameters": parameter_count(*shape_for(settings.params)),
        "ranks": settings.ranks,
        "precision": settings.precision,
        "stages": {
            str(row.stage): {key: value for key, value in dataclasses.asdict(row).items() if key != "stage"}
            for row in rows
        },
    }
