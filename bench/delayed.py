"""The loss with and without the delayed update, on the quick start's run: `python bench/delayed.py`.

Trains the same model on the same text twice, with the optimizer on the host, and with its update beside the next pass after 40 steps.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import launch
import report

RUNS = {"ordinary": [], "delayed": ["--delayed-update"]}


def train(folder: Path, options: list[str]) -> dict[int, float]:
    """Validation loss by step."""
    launch.train(folder, *options)
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {r["step"]: r["validation_loss"] for r in records if r.get("validation_loss") is not None}


def main() -> None:
    parser = report.parser_of("delayed.py", __doc__, "'delayed'")
    parser.add_argument("--params", default="300k")
    parser.add_argument("--steps", default="400")
    parser.add_argument("--every", default="40", help="steps between looks at held-out text")
    args = parser.parse_args()
    common = ["--params", args.params, "--steps", args.steps, "--validate-every", args.every, "--ranks", "1"]
    common += ["--context", "64", "--offload", "host", "--save-every", args.steps]
    with tempfile.TemporaryDirectory() as folder:
        losses = {name: train(Path(folder) / name, [*common, *options]) for name, options in RUNS.items()}
    columns = ["step", *losses]
    rows = [[str(step), *(f"{losses[name][step]:.4f}" for name in losses)] for step in losses["ordinary"]]
    content: dict[str, Any] = {"params": args.params, "losses": losses}
    report.table("Validation loss", columns, rows)
    report.save("delayed", content, args.out)
    report.fill(args.page, "delayed", report.markdown(columns, rows))


if __name__ == "__main__":
    main()
