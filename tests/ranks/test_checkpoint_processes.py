"""Saves in processes of their own, which end: killed with -9 at a random moment, or by themselves while a save is under way."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerodp
from tests.ranks.pool import forks
from zerodp.checkpoint import report
from zerodp.checkpoint.own import open_own

ROUNDS = int(os.environ.get("ZERODP_KILL_ROUNDS", "12"))
WORLD_SIZE = 2


def join(rank: int, store: str, log: Path) -> tuple[Any, Any]:
    """Be a rank of a process group, with a sharded model."""
    output = os.open(log.with_suffix(f".rank{rank}.log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=WORLD_SIZE, timeout=limit)
    model = nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 300))
    return zerodp.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))


def save_for_ever(rank: int, store: str, folder: Path, asynchronous: bool) -> None:
    """Save after save, each with one number in all elements, to two paths in turn."""
    model, optimizer = join(rank, store, folder)
    for number in range(1_000_000):
        with torch.no_grad():
            for _, _, piece in zerodp.local_shards(model):
                piece.fill_(number)
        zerodp.save(folder / f"save{number % 2}", model, optimizer, extra={"number": number}, asynchronous=asynchronous)


def save_and_end(rank: int, store: str, folder: Path) -> None:
    """As scripts do: the last save is still being written when the process group goes."""
    model, optimizer = join(rank, store, folder)
    zerodp.save(folder / "last", model, optimizer, extra={"number": 5}, asynchronous=True)
    dist.destroy_process_group()


def test_the_end_of_the_program_waits(tmp_path: Path) -> None:
    context = forks()
    ranks = [
        context.Process(target=save_and_end, args=(rank, f"{tmp_path}.store", tmp_path)) for rank in range(WORLD_SIZE)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0], tmp_path.with_suffix(".rank0.log").read_text()
    assert report(tmp_path / "last")["damaged"] == []


@pytest.mark.timeout(110)
def test_killed_at_any_moment(tmp_path: Path) -> None:
    context = forks()
    chance = random.Random()
    for number in range(ROUNDS):
        folder = tmp_path / f"round{number}"
        folder.mkdir()
        arguments = (f"{folder}.store", folder, number % 4 == 3)
        ranks = [context.Process(target=save_for_ever, args=(rank, *arguments)) for rank in range(WORLD_SIZE)]
        for process in ranks:
            process.start()
        wait_for(folder / "save1", ranks)
        time.sleep(chance.uniform(0, 0.2))
        ranks[number % WORLD_SIZE].kill()
        ranks[1 - number % WORLD_SIZE].join(10)  # it sees that the other one is gone
        for process in ranks:
            process.kill()
            process.join()
        check(folder)


def wait_for(path: Path, ranks: list[multiprocessing.Process]) -> None:
    limit = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < limit
        assert all(process.is_alive() for process in ranks), path.parent.with_suffix(".rank0.log").read_text()
        time.sleep(0.01)


def check(folder: Path) -> None:
    found = zerodp.latest(folder)
    assert found is not None
    told = report(found)
    assert told["damaged"] == []
    with open_own(found) as source:
        number = source.value("zerodp.extra.number")
        for key in ("model.0.weight", "model.1.bias"):
            assert (source.whole(key) == number).all()
    # The other path, if it can be read at all, is older; a folder in its place that is no checkpoint there is none.
    with contextlib.suppress(zerodp.CheckpointError), open_own(folder / f"save{(number + 1) % 2}") as source:
        assert source.value("zerodp.extra.number") == number - 1
    visible = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert visible <= {"save0", "save1"}
