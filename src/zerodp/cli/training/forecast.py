"""What a run will hold, send and take per step, said before it begins and compared with what came: the planner, on this machine."""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...config import PRECISIONS
from ...inspect import Memory
from ...planning.page import html
from ...planning.picture import curves, duration, table
from ...planning.plan import Plan, plan
from ...planning.timeline.calibrate import calibrate
from ...planning.timeline.machine import Machine
from ...planning.timeline.recording import record, replay
from ...planning.timeline.simulate import Timeline
from .gpt import GPT, shape_for
from .panel import decimal
from .settings import Settings, replace_file
from .text import Corpus
from .trainer import Trainer

FORECAST, PAGE = "forecast.json", "report.html"
SECONDS = 0.02  # for each measurement of the machine
STEPS = 3  # of the twin that is recorded
FIRST = 2  # steps of the run that are not compared: memory is new to them
MEASURED = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("master", "first_moment", "second_moment"),
    "unsharded": ("unsharded",),
    "buckets": ("buckets",),
}  # kinds of the planner, and those of the ledger


@dataclass(frozen=True)
class Line:
    """One figure of a run. unit: "B" or "s"; None: not known, as without room to measure, or without steps."""

    what: str
    unit: str
    predicted: float | None
    measured: float | None


def forecast(settings: Settings, corpus: Corpus, device: torch.device, rank: int, room: bool) -> Plan:
    """The plan of a run, with its step simulated: a twin's recorded step on a wire measured here (a collective).

    room: whether the machine has room for a twin; without, the plan has no times.
    """
    with torch.device("meta"):
        model = GPT(*shape_for(settings.params), settings.context)
    options: dict[str, Any] = {"batch": settings.batch, "sequence": settings.context, "accumulate": settings.accumulate}
    options["offload_optimizer"] = settings.places().optimizer
    exact = device.type == "cpu"
    found = plan(
        model, world_size=settings.ranks, optimizer="adamw", precision=settings.precision, stage=settings.stage, exact=exact, **options
    )  # fmt: skip
    if not room:
        return found
    machine = calibrate(device, PRECISIONS[settings.precision].param_dtype, SECONDS)
    step = _twins_step(settings, corpus, device, rank, machine)
    gc.collect()
    setup = dataclasses.replace(found.setup, links=machine)
    return dataclasses.replace(found, setup=setup, timelines={found.chosen: step})


def _twins_step(settings: Settings, corpus: Corpus, device: torch.device, rank: int, machine: Machine) -> Timeline:
    """A recorded step trains its model, so it is not the run's own; it is gone when this ends."""
    twin = Trainer(settings, corpus, device, rank)
    moments = record(twin.model, lambda: twin.train_step(0), STEPS)
    return replay(twin.model, moments, machine)


def compare(found: Plan, records: list[dict[str, Any]], memory: Memory, tokens: int, first: int = 0) -> list[Line]:
    """What was said and what came, on this rank: bytes by kind at their peak, bytes sent per step, the median step.

    first: steps that earlier parts of a resumed run made, perhaps otherwise; they are not compared.
    """
    one = found.estimates[found.chosen]
    records = [record for record in records if record["step"] > first]
    lines = [
        Line(kind, "B", one.kinds[kind], sum(memory.peak[part] for part in parts) if records else None)
        for kind, parts in MEASURED.items()
    ]
    for place, predicted, peak in (
        ("host", one.tiers["host"] + one.disk_buffer_bytes, memory.host_peak),
        ("disk", one.tiers["disk"], memory.disk_peak),
    ):
        if predicted or peak:
            lines.append(Line(f"on the {place}", "B", predicted, sum(peak.values()) if records else None))
    settled = records[FIRST:] or records
    sent = statistics.median(record["wire_bytes"] for record in settled) if settled else None
    seconds = statistics.median(tokens / record["tokens_per_second"] for record in settled) if settled else None
    step = found.timelines.get(found.chosen)
    lines.append(Line("sent per step", "B", one.sent_bytes, sent))
    lines.append(Line("seconds per step", "s", None if step is None else step.seconds, seconds))
    return lines


def rows(lines: list[Line]) -> list[tuple[str, str, str, str]]:
    """(what, predicted, measured, how far off) in words."""

    def cell(value: float | None, unit: str) -> str:
        return "-" if value is None else duration(value) if unit == "s" else decimal(value, unit)

    return [
        (
            line.what,
            cell(line.predicted, line.unit),
            cell(line.measured, line.unit),
            f"{line.predicted / line.measured - 1:+.0%}" if line.predicted is not None and line.measured else "",
        )
        for line in lines
    ]


HEAD = ("on this rank", "predicted", "measured", "off by")


def text(lines: list[Line]) -> str:
    cells = [HEAD, *rows(lines)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEAD))]
    return "\n".join(
        ["Predicted and measured"]
        + ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    )


def write(folder: Path, found: Plan, lines: list[Line], records: list[dict[str, Any]]) -> list[Path]:
    """The figures as JSON, and the planner's page with the run in it."""
    step = found.timelines.get(found.chosen)
    content = {
        "machine": found.setup.links.as_json() if found.setup.links is not None else None,
        "step": step.as_json() if step is not None else None,
        "lines": [dataclasses.asdict(line) for line in lines],
    }
    replace_file(folder / FORECAST, json.dumps(content, indent=2).encode())
    replace_file(folder / PAGE, html(found, sections(lines, records)).encode())
    return [folder / FORECAST, folder / PAGE]


def sections(lines: list[Line], records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What the page has of the run: (heading, HTML)."""
    made = [("Predicted and measured", table(HEAD, rows(lines)))]
    losses = {
        "training": [(record["step"], record["loss"]) for record in records if record["loss"] is not None],
        "validation": [(r["step"], r["validation_loss"]) for r in records if r["validation_loss"] is not None],
    }
    if any(losses.values()):
        made.append(("Loss (nats per byte)", curves({name: line for name, line in losses.items() if line})))
    if records:
        kinds = [kind for kind in records[-1]["memory"] if any(record["memory"][kind] for record in records)]
        held = {kind.replace("_", " "): [(r["step"], r["memory"][kind] / 1e6) for r in records] for kind in kinds}
        peak = {"peak so far": [(r["step"], r["peak_bytes"] / 1e6) for r in records]}
        made.append(("Memory of this rank at the end of each step", curves({**held, **peak}, "MB", 0)))
    return made
