"""What a run leaves in its folder: the log while it trains, and pictures, table and sample at the end."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .ledger import Row, as_json
from .panel import clock, decimal
from .settings import Settings, replace_file
from .trainer import Record

LOG, STAGES, REPORT, LOSS, MEMORY = "log.jsonl", "stages.json", "report.txt", "loss.png", "memory.png"


def write_stages(folder: Path, rows: list[Row], settings: Settings) -> None:
    replace_file(folder / STAGES, json.dumps(as_json(rows, settings), indent=2).encode())


def write(
    folder: Path,
    records: list[dict[str, Any]],
    rows: list[Row],
    settings: Settings,
    loss: float | None,
    sample: bytes,
    said: Sequence[str] = (),
    pages: Sequence[Path] = (),
) -> str:
    """The pictures and the report of a run that has ended, with what else is `said`. The result is the report's text, which names
    `pages` too."""
    step = records[-1]["step"] if records else 0
    outcome = (
        f"{step} of {max(step, settings.steps)} steps in {clock(records[-1]['seconds'])}" if records else "no steps"
    )
    if loss is not None:
        outcome += f", validation loss {loss:.3f} nats per byte"
    parts = [outcome, stage_table(rows, settings), *said, "Sample:\n" + sample.decode(errors="replace")]
    pictures = draw(folder, records)
    if step < settings.steps:
        parts.append(f"Go on with: zerodp train --resume {folder}")
    text = "\n\n".join(parts)
    replace_file(folder / REPORT, f"{text}\n".encode())
    names = [LOG, STAGES, REPORT, *(path.name for path in (*pages, *pictures))]
    return f"\n{text}\n\nIn {folder}: {', '.join(names)}"


class Log:
    """One line of JSON per step. A resumed run keeps the lines up to the step that it goes on from."""

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / LOG
        self.records = [record for record in read_log(folder) if record["step"] <= step]
        replace_file(self.path, "".join(json.dumps(record) + "\n" for record in self.records).encode())

    def add(self, record: Record) -> None:
        """Values that are not finite, as in a step that fp16 skips, have no form in JSON: they are null."""
        values = asdict(record).items()
        self.records.append({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values})
        with self.path.open("a") as file:
            file.write(json.dumps(self.records[-1], allow_nan=False) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The records in a run's folder; a line that a crash cut short is left out."""
    path = folder / LOG
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def stage_table(rows: list[Row], settings: Settings) -> str:
    """The table "bytes per rank", as text."""
    head = ("stage", "model states: paper", "measured", "workspace peak", "wire elements per step: paper", "measured")
    body = [
        (
            f"{row.stage}{' *' if row.stage == settings.stage else ''}",
            decimal(row.formula_bytes),
            _or_dash(row.measured_bytes),
            _or_dash(row.workspace_bytes),
            decimal(row.formula_wire_elements, ""),
            _or_dash(row.measured_wire_elements, ""),
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [head, *body]) for column in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in [head, *body]]
    title = f"Bytes per rank, {settings.ranks} ranks, {settings.precision}, the stage of this run marked *"
    notes = (
        []
        if settings.precision == "fp32"
        else ["measured: sharded gradients are kept in fp32, and stage 3 keeps no 16-bit shard"]
    )
    return "\n".join([title, *lines, *notes])


def _or_dash(value: int | None, unit: str = "B") -> str:
    return "no room" if value is None else decimal(value, unit)


def draw(folder: Path, records: list[dict[str, Any]]) -> list[Path]:
    """The loss and memory of the run as pictures; none where matplotlib is missing or there is nothing to draw."""
    if not records or not importlib.util.find_spec("matplotlib"):
        return []
    from matplotlib.figure import Figure

    steps = [record["step"] for record in records]
    loss = Figure(figsize=(8, 4.5), layout="constrained")
    axes = loss.subplots()
    axes.plot(steps, [record["loss"] for record in records], color="tab:blue", alpha=0.5, linewidth=1, label="training")
    validated = [record for record in records if record["validation_loss"] is not None]
    axes.plot(
        [record["step"] for record in validated],
        [record["validation_loss"] for record in validated],
        color="tab:orange", marker="o", markersize=3, label="validation",
    )  # fmt: skip
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    loss.savefig(folder / LOSS, dpi=120)

    memory = Figure(figsize=(8, 4.5), layout="constrained")
    axes = memory.subplots()
    kinds = [kind for kind in records[-1]["memory"] if any(record["memory"][kind] for record in records)]
    axes.stackplot(
        steps,
        *([r["memory"][kind] / 1e6 for r in records] for kind in kinds),
        labels=[k.replace("_", " ") for k in kinds],
    )
    axes.plot(steps, [r["peak_bytes"] / 1e6 for r in records], color="black", linewidth=1, label="peak so far")
    axes.set(xlabel="step", ylabel="MB on rank 0 at the end of a step", title="Memory", ylim=(0, None))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    memory.savefig(folder / MEMORY, dpi=120)
    return [folder / LOSS, folder / MEMORY]
