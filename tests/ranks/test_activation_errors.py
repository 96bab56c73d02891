"""A disk that fails on one rank while activations go there: the same error on all ranks, soon."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerodp
from tests.limits import largest_file
from tests.ranks.oracle import Task, parity, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.test_activation_bytes import Wide
from tests.ranks.toys import Block, Net
from zerodp.residual.store import store_of

SOON = 20.0  # seconds
FAILS = 1  # the rank that has the trouble


def on_disk(stage: int, partition: Any) -> nn.Module:
    model, _ = zerodp.shard(Wide(depth=3), stage=stage, units=[Block])
    zerodp.apply_activation_checkpointing(model, units=[Block], partition=partition, offload="disk")
    squares(model, torch.ones(512, 3)).backward()
    model.zero_grad()
    return model


def refused(step: Any, words: str) -> None:
    began = time.monotonic()
    with pytest.raises(zerodp.StorageError, match=rf"^(rank {FAILS}: )?offload: .*{words}.*bytes free"):
        step()
    assert time.monotonic() - began < SOON
    parity(Task(Net, rows(3), steps=1), units=[Block], tolerance=1e-6)  # another model can be trained


splits = pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])


@on_ranks(2)
@splits
@pytest.mark.parametrize("stage", [0, 3], ids="zero{}".format)
def test_full_disk_on_one_rank(split: bool, stage: int) -> None:
    model = on_disk(stage, dist.group.WORLD if split else None)

    def step() -> None:
        limit = 2**17 if dist.get_rank() == FAILS else 2**30
        with largest_file(limit):
            for _ in range(3):
                squares(model, torch.ones(1024, 3)).backward()

    refused(step, "could not be written in")
    with pytest.raises(zerodp.ZeroError, match=r"can no longer communicate"):
        model.state_dict()


@on_ranks(3)
@splits
@pytest.mark.parametrize("stage", [2], ids="zero{}".format)
def test_file_cut_on_one_rank_before_backward(split: bool, stage: int) -> None:
    model = on_disk(stage, dist.group.WORLD if split else None)

    def step() -> None:
        loss = squares(model, torch.ones(1024, 3))
        if dist.get_rank() == FAILS:
            for tier in store_of(model._zerodp).tiers.values():
                zerodp.stats(model).memory  # noqa: B018  (waits for the writes)
                for page in list(tier.busy):
                    tier._finish(page)
                os.ftruncate(tier.file.handle, 0)
        loss.backward()
        zerodp.full_grads(model)

    refused(step, "could not be read in")
