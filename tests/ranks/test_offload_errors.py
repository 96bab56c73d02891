"""A disk that fails on one rank while model states are read from it: the same error on all ranks, soon."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerodp
from tests.ranks.oracle import adamw, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net
from zerodp import Offload

SOON = 20.0  # seconds
FAILS = 1  # the rank that has the trouble
UNREADABLE = (
    "(could not be read|are not what was written there)"  # there may be new, empty blocks in the old one's place
)
STATES, PARAMETERS = Offload(optimizer="disk"), Offload(params="disk")


def forward(model: Any, optimizer: Any) -> None:
    model(rows(3)(0, 0, 0))


def backward(model: Any, optimizer: Any) -> None:
    squares(model, rows(3)(0, 0, 0)).backward()


READERS: dict[str, tuple[Offload, Callable[[Any, Any], Any]]] = {
    "forward": (PARAMETERS, forward),
    "backward on top": (STATES, backward),
    "clipping": (STATES, lambda model, optimizer: optimizer.clip_grad_norm_(1.0)),
    "gradients": (STATES, lambda model, optimizer: zerodp.full_grads(model)),
    "state dict": (STATES, lambda model, optimizer: model.state_dict()),
    "optimizer's state dict": (STATES, lambda model, optimizer: optimizer.state_dict()),
}


def damaged(offload: Offload) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = Net()
    model, optimizer = zerodp.shard(model, adamw(model), units=[Block], offload=offload)
    backward(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, optimizer)
    zerodp.stats(model)
    if dist.get_rank() == FAILS:
        tier = model._zerodp.places.tiers["disk"]
        while tier.busy:  # until what is being written has arrived
            tier.ledgers()
        os.ftruncate(tier.file.handle, 0)
    return model, optimizer


@on_ranks(2)
@pytest.mark.parametrize("reader", READERS)
def test_what_cannot_be_read_is_an_error_on_every_rank(reader: str) -> None:
    offload, read = READERS[reader]
    model, optimizer = damaged(offload)
    began = time.monotonic()
    with pytest.raises(zerodp.StorageError, match=rf"^(rank {FAILS}: )?offload: .*{UNREADABLE}"):
        read(model, optimizer)
    assert time.monotonic() - began < SOON
    with pytest.raises(zerodp.ZeroError, match="can no longer communicate"):
        model.state_dict()


@on_ranks(2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_cannot_read_leaves_the_model_in_use(asynchronous: bool) -> None:
    model, optimizer = damaged(STATES)
    with tempfile.TemporaryDirectory() as folder:
        names: list[Any] = [folder]
        dist.broadcast_object_list(names)
        error = zerodp.CheckpointError if asynchronous else zerodp.StorageError
        with pytest.raises(error, match=rf"rank {FAILS}: offload: .*{UNREADABLE}"):
            save(f"{names[0]}/one", model, optimizer, asynchronous)
        dist.barrier()
    forward(model, optimizer)


def save(path: str, model: Any, optimizer: Any, asynchronous: bool) -> None:
    saving = zerodp.save(path, model, optimizer, asynchronous=asynchronous)
    if saving is not None:
        saving.wait()
