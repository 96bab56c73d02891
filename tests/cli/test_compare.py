"""`zerodp compare` on local ranks: a model of the user's own, equal and not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests import warm
from tests.cli.runs import environment

SCRIPT = """\
import torch
from torch import nn
import zerodp

def make_model():
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2))

def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

def batches(rank, world_size):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(3, 4, generator=generator) for _ in range(4)]

def loss(model, batch):
    return model(batch).pow(2).mean()

def uneven(model, batch):
    return loss(model, batch) * (1.5 if isinstance(model, zerodp.ShardedModule) else 1)

def fails(model, batch):
    raise RuntimeError("no loss today")
"""


def compared(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(SCRIPT)
    command = [warm.python(), "-m", "zerodp.cli", "compare", *argv]
    variables = environment(OMP_NUM_THREADS=1)
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=100, check=False)


def test_equal(tmp_path: Path) -> None:
    done = compared(
        tmp_path,
        "mine:make_model",
        "mine:batches",
        "mine:loss",
        "--optimizer=mine:make_optimizer",
        "--stage=2",
        "--json",
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found == {"equal": True, "steps": 4, "first_difference": None, "largest": found["largest"]}
    assert 0 <= found["largest"] <= 1e-6


def test_a_difference_is_status_1(tmp_path: Path) -> None:
    done = compared(tmp_path, "mine:make_model", "mine:batches", "mine:uneven", "--steps=2")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("2 steps, first difference: loss in step 1 differs by ")


def test_an_error_in_the_users_own_function_is_told(tmp_path: Path) -> None:
    done = compared(tmp_path, "mine:make_model", "mine:batches", "mine:fails", "--ranks=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "rank 0 failed: " in done.stderr
    assert "no loss today" in done.stderr
