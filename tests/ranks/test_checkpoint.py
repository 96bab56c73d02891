"""Checkpoints load anywhere: any stage, world size, mesh and precision to any other, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.checkpoints import Run, loaded, same, saved
from tests.ranks.pool import Pool

RUNS = [
    Run(3, 1),
    Run(0, 1, precision="bf16"),
    Run(0, 2),
    Run(3, 2, precision="bf16"),
    Run(2, 2, precision="fp16"),
    Run(1, 3),
    Run(3, 3),
    Run(2, 3, precision="bf16"),
    Run(3, 4, hybrid=True),
    Run(2, 4, hybrid=True, precision="bf16"),
    Run(1, 4),
]
# Each loads the checkpoints of the runs one, four and seven places further on: all world sizes and meshes meet, and most stages.
PAIRS = [(run, RUNS[(place + ahead) % len(RUNS)]) for place, run in enumerate(RUNS) for ahead in (1, 4, 7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def expected(ranks: Pool, folder: Path) -> dict[str, Any]:
    found = {}
    for world_size in range(1, 5):
        runs = [run for run in RUNS if run.world_size == world_size]
        found.update(ranks.run(world_size, saved, runs, folder)[0])
    return found


@pytest.mark.case("B137", "B138", "B140", "B141", "B142", "B143", "B147")
@pytest.mark.parametrize("world_size", range(1, 5), ids="world{}".format)
def test_anywhere_to_anywhere(ranks: Pool, folder: Path, expected: dict[str, Any], world_size: int) -> None:
    pairs = [(run, source) for run, source in PAIRS if run.world_size == world_size]
    results = ranks.run(world_size, loaded, [(run, str(source)) for run, source in pairs], folder)[0]
    for (run, source), (then, after, extra) in zip(pairs, results, strict=True):
        what = f"{source} into {run}"
        same(what, then, expected[str(source)][0])
        assert extra == {"epoch": 3, "run": str(source)}
        if run.precision == source.precision:
            same(f"the next step of {what}", after, expected[str(source)][1])
