"""Runs `zerodp train` at every stage and keeps what it predicted and measured, for the table in docs/planning.md.

`python bench/predicted.py`, then `python bench/planning.py --write`, which shows the newest results.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import launch
import report

NAME = "predicted"
STATES, WORKSPACE = ("parameters", "gradients", "optimizer"), ("unsharded", "buckets")


def train(stage: int, options: Sequence[str], folder: Path) -> dict[str, Any]:
    """What the run left in forecast.json."""
    out = folder / f"stage{stage}"
    launch.train(out, "--stage", str(stage), *options)
    found: dict[str, Any] = json.loads((out / "forecast.json").read_text())
    return found


def table(content: dict[str, Any]) -> str:
    """Predicted and measured side by side, one line per stage."""
    from zerodp.planning.estimate import amount

    def pair(lines: dict[str, Any], names: Sequence[str], scale: float = 0.0) -> list[str]:
        cells = []
        for key in ("predicted", "measured"):
            value = sum(lines[name][key] for name in names)
            cells.append(f"{value * scale:.0f}" if scale else amount(value))
        return cells

    rows = []
    for stage, found in content["stages"].items():
        lines = {line["what"]: line for line in found["lines"]}
        cells = [*pair(lines, STATES), *pair(lines, WORKSPACE), *pair(lines, ["sent per step"])]
        rows.append([stage, *cells, *pair(lines, ["seconds per step"], 1e3)])
    columns = ["stage"]
    for what in ("states", "workspace", "sent per step", "step, ms"):
        columns += [what, "measured"]
    return report.markdown(columns, rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser_of("predicted.py", __doc__)
    parser.add_argument("--params", default="10M")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--stages", default="0,1,2,3")
    args = parser.parse_args(argv)
    options = ["--params", args.params, "--steps", str(args.steps), "--context", str(args.context)]
    options += ["--validate-every", "1000", "--save-every", "1000", "--ranks", "2"]
    with tempfile.TemporaryDirectory() as folder:
        stages = {stage: train(int(stage), options, Path(folder)) for stage in args.stages.split(",")}
    content = {"parameters": args.params, "ranks": 2, "options": options, "stages": stages}
    print(table(content))
    report.save(NAME, content, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
