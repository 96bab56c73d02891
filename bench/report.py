"""What every benchmark shares: options, facts about the machine, a table on the screen, a dated file of results, a block of a page."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).with_name("results")


def parser_of(
    script: str, text: str | None, page: str | None = None, saves: bool = True, **sizes: int
) -> argparse.ArgumentParser:
    """With --out where results are saved, and --page where a block of a page is filled, which `page` names; `sizes` of a model are
    options with these defaults."""
    parser = argparse.ArgumentParser(prog=f"bench/{script}", description=(text or "").splitlines()[0])
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"of the model (default: {default})")
    if page:
        parser.add_argument("--page", type=Path, help=f"a page to fill too: its block {page}")
    if saves:
        parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    return parser


def facts() -> dict[str, object]:
    """Versions and machine, without anything that names the machine or its owner."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "zerodp", "deepspeed")},
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, with rich where it is installed."""
    if not rows:
        return
    if importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.table import Table

        grid = Table(title=title, title_justify="left")
        for i, column in enumerate(columns):
            grid.add_column(column, justify="right" if i else "left", no_wrap=not i)
        for row in rows:
            grid.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 120).print(grid)
        return
    widths = [max(len(line[i]) for line in (columns, *rows)) for i in range(len(columns))]
    print(f"\n{title}")
    for line in (columns, ["-" * width for width in widths], *rows):
        print(
            line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True)), sep="  "
        )


def save(name: str, content: dict[str, object], folder: Path = RESULTS) -> Path:
    """Writes `content` and the facts to `folder` as DATE-name.json."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.datetime.now():%Y-%m-%d-%H%M%S}-{name}.json"
    path.write_text(json.dumps({**facts(), **content}, indent=1) + "\n")
    print(f"written: {os.path.relpath(path)}")
    return path


def newest(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """What `save` wrote last under this name."""
    files = sorted(folder.glob(f"*-{name}.json"))
    return json.loads(files[-1].read_text()) if files else None


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table for a page: the first column to the left, the others to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fill(page: Path | None, block: str, text: str) -> None:
    """Replaces what stands between the markers of `block` in a page, if there is one."""
    if page is None:
        return
    begin, end = f"<!-- begin: {block} -->\n", f"<!-- end: {block} -->"
    before, rest = page.read_text().split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}{text}\n{end}{after}")
    print(f"written: {page}")
