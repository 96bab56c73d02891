"""`zerodp inspect`: what a checkpoint holds, and whether it is undamaged. One process, whatever wrote it."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from ..checkpoint import report
from ..errors import CheckpointError
from .parser import Parser, UsageError

DAMAGED = 1  # exit status


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "inspect",
        help="show and check a checkpoint",
        description="Show what a checkpoint of zerodp holds, and check its sums. Exit status 1 means that it is damaged.",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="the folder that zerodp.save wrote")
    parser.add_argument(
        "--no-check", dest="check", action="store_false", help="do not read the files to check their sums"
    )
    parser.add_json()
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        found = report(arguments.checkpoint, arguments.check)
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    print(json.dumps(found) if arguments.json else text(found))
    return DAMAGED if found["damaged"] else 0


def text(found: dict[str, Any]) -> str:
    facts = found["facts"]
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["time_ns"] / 1e9))
    stages = ", ".join(map(str, facts["stages"]))
    lines = [
        found["path"],
        f"  written {written} by {facts['world_size']} ranks, stage {stages} (zerodp {facts['zerodp']}, torch {facts['torch']})",
        f"  step {found['step']}, {found['skipped_steps'] or 0} skipped, {found['total_bytes']:,} bytes",
        f"  extra: {', '.join(found['extra']) or 'nothing'}",
    ]
    width = max((len(tensor["name"]) for tensor in found["tensors"]), default=0)
    for tensor in found["tensors"]:
        lines.append(f"  {tensor['name']:{width}}  {tensor['dtype']:9} {tensor['bytes']:>14,}  {tensor['shape']}")
    lines += [f"  {name} is tied to {key}" for name, key in found["tied"].items()]
    if found["damaged"] is not None:
        lines += [f"  DAMAGED {what}" for what in found["damaged"]] or ["  every byte is as it was written"]
    return "\n".join(lines)
