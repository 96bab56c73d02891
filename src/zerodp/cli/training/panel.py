"""What a run shows while it trains: one live panel on a terminal (with rich), plain lines elsewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .settings import Settings
from .trainer import Record

PLAIN_EVERY = 10  # steps between plain lines
PANEL_WIDTH, PANEL_COLUMNS = 80, 4


def decimal(value: float, unit: str = "B") -> str:
    """12.3 MB, and so on by thousands."""
    for prefix in ("", "k", "M", "G"):
        if abs(value) < 1000:
            return f"{value:.0f} {prefix}{unit}" if value >= 100 or not prefix else f"{value:.1f} {prefix}{unit}"
        value /= 1000
    return f"{value:.1f} T{unit}"


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


class Progress:
    """How far a run is: smoothed loss and speed, the last validation loss, the time left."""

    SMOOTHING = 0.9

    def __init__(self, settings: Settings, first_step: int) -> None:
        self.settings, self.first_step = settings, first_step
        self.began: float | None = None  # run time when the first step of this process began, or nearly so
        self.loss = self.speed = 0.0
        self.validation: float | None = None

    def update(self, record: Record) -> None:
        if self.began is None:
            tokens = self.settings.windows * self.settings.context
            self.began = record.seconds - tokens / record.tokens_per_second
            self.loss, self.speed = record.loss, record.tokens_per_second
        keep = self.SMOOTHING
        self.loss = keep * self.loss + (1 - keep) * record.loss
        self.speed = keep * self.speed + (1 - keep) * record.tokens_per_second
        self.validation = self.validation if record.validation_loss is None else record.validation_loss

    def left(self, record: Record) -> float:
        """Seconds to the last step, or to the time limit."""
        done = record.step - self.first_step
        seconds = (record.seconds - (self.began or 0.0)) / done * (self.settings.steps - record.step)
        if self.settings.minutes is not None:
            spent = record.seconds - (self.began or 0.0)
            seconds = min(seconds, max(0.0, self.settings.minutes * 60 - spent))
        return seconds

    def facts(self, record: Record) -> dict[str, str]:
        return {
            "step": f"{record.step}/{self.settings.steps}",
            "loss": f"{self.loss:.3f}",
            "validation loss": "-" if self.validation is None else f"{self.validation:.3f}",
            "tokens/s": f"{self.speed:,.0f}",
            "memory per rank": decimal(record.memory_bytes),
            "wire per step": decimal(record.wire_bytes),
            "time left": clock(self.left(record)),
        }


class Lines:
    """A line every few steps and at every validation."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def show(self, record: Record) -> None:
        self.progress.update(record)
        if record.step % PLAIN_EVERY == 0 or record.validation_loss is not None:
            print("  ".join(f"{name} {value}" for name, value in self.progress.facts(record).items()), flush=True)


class Panel:
    """A rich panel, redrawn in place after every step."""

    def __init__(self, progress: Progress, live: Any, title: str) -> None:
        self.progress, self.live, self.title = progress, live, title

    def show(self, record: Record) -> None:
        from rich.console import Group
        from rich.panel import Panel as Box
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        self.progress.update(record)
        facts = [f"[dim]{name}[/dim]\n{value}" for name, value in self.progress.facts(record).items()]
        table = Table.grid(padding=(0, 3, 0, 0))
        for start in range(0, len(facts), PANEL_COLUMNS):
            table.add_row(*facts[start : start + PANEL_COLUMNS])
        bar = ProgressBar(total=self.progress.settings.steps, completed=record.step)
        self.live.update(Box(Group(table, bar), title=self.title, title_align="left", width=PANEL_WIDTH))


@contextlib.contextmanager
def display(settings: Settings, first_step: int, title: str) -> Iterator[Callable[[Record], None]]:
    """Shows each record it is called with: in a panel if standard output is a terminal and rich is there, else in lines."""
    progress = Progress(settings, first_step)
    if not (sys.stdout.isatty() and importlib.util.find_spec("rich")):
        print(title, flush=True)
        yield Lines(progress).show
        return
    from rich.live import Live

    with Live(refresh_per_second=4) as live:
        yield Panel(progress, live, title).show
