"""The oracle is held against values worked out by hand and against torch's own data parallelism."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks.oracle import Oracle, Task, Tensors, adamw, agree, all_close, momentum, rows
from tests.ranks.pool import on_ranks
from tests.ranks.toys import CheckpointedNet, Net, ToyA, own_loss, toy_a_batch, toy_b


class Replicated:
    """DistributedDataParallel as a subject."""

    def __init__(self, model: nn.Module, optimizer: Any):
        self.plain = model
        self.model = DistributedDataParallel(model, forward_sync_buffers=False)
        self.optimizer = optimizer

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return self.model.no_sync()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def gradients(self) -> Tensors:
        return {name: p.grad for name, p in self.plain.named_parameters() if p.grad is not None}

    def clip(self, max_norm: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.plain.parameters(), max_norm))

    def parameters(self) -> Tensors:
        return dict(self.plain.named_parameters(remove_duplicate=False))

    def buffers(self) -> Tensors:
        return dict(self.plain.named_buffers())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_toy_a_by_hand() -> None:
    oracle = Oracle(Task(ToyA, toy_a_batch, own_loss, sgd, steps=1, max_norm=None), world_size=2)
    (record,) = oracle.run(rank=1)
    assert record.losses[0] == 20
    torch.testing.assert_close(record.gradients["w"], torch.tensor([1.5, 3, 4.5, 6]))
    torch.testing.assert_close(record.parameters["w"], torch.tensor([0.85, 0.7, 0.55, 0.4]))


def test_clipped_toy_a_by_hand() -> None:
    (record,) = Oracle(Task(ToyA, toy_a_batch, own_loss, sgd, steps=1, max_norm=1.0), world_size=2).run(rank=0)
    assert record.norm == pytest.approx(8.2158, abs=1e-4)
    torch.testing.assert_close(
        record.parameters["w"], torch.tensor([0.98174, 0.96349, 0.94523, 0.92697]), atol=1e-5, rtol=0
    )


def test_sums_in_low_precision_are_taken_in_fp32() -> None:
    def batch(step: int, micro: int, rank: int) -> Tensor:
        return torch.tensor([128.0, 0.0, 0.0, 0.0]) if micro == 0 else torch.tensor([0.25, 0.0, 0.0, 0.0])

    (record,) = Oracle(Task(ToyA, batch, own_loss, sgd, steps=1, micro=(True, True)), 1, torch.bfloat16).run(rank=0)
    assert record.gradients["w"][0] == 128.25


def test_buffers_and_random_numbers_are_each_ranks_own() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))

    def batch(step: int, micro: int, rank: int) -> Tensor:
        return torch.full((2, 3), rank + 1.0)

    first, second = (Oracle(Task(model, batch, steps=1), 2).run(rank)[0] for rank in range(2))
    torch.testing.assert_close(first.buffers["0.running_mean"], torch.full((3,), 0.1))
    torch.testing.assert_close(second.buffers["0.running_mean"], torch.full((3,), 0.2))


TASKS = {
    "plain": Task(Net, rows(3)),
    "adamw": Task(Net, rows(3), optimizer=adamw),
    "accumulated": Task(toy_b, rows(3), micro=(True, True)),
    "no_sync": Task(toy_b, rows(3), micro=(False, False, True)),
    "dropout": Task(lambda: CheckpointedNet(reentrant=False, dropout=0.3), rows(3)),
    "batchnorm": Task(lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)), rows(3)),
}


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("name", TASKS)
def test_data_parallel_training_agrees(name: str, world_size: int) -> None:
    """To the last bit on two ranks, except that this library adds a micro-batch of one rank first, then the next rank's."""
    exact = world_size == 2 and name != "accumulated"
    agree(TASKS[name], Replicated, tolerance=0.0 if exact else 1e-6)


def test_several_losses_each_get_their_backward() -> None:
    def both(model: nn.Module, x: Tensor) -> list[Tensor]:
        return [model(x), model(2 * x)]

    (record,) = Oracle(Task(ToyA, toy_a_batch, both, sgd, steps=1), world_size=2).run(rank=0)
    torch.testing.assert_close(record.gradients["w"], 4.5 * torch.tensor([1.0, 2, 3, 4]))


@on_ranks(2)
def test_clipped_data_parallel_training_agrees() -> None:
    agree(Task(toy_b, rows(3), optimizer=momentum, max_norm=0.1), Replicated, tolerance=1e-6)


@on_ranks(2)
def test_a_difference_is_found() -> None:
    """The comparison can fail: one element of one rank's batch is changed."""

    def crooked(step: int, micro: int, rank: int) -> Tensor:
        batch = rows(3)(step, micro, rank)
        if step == 1 and rank == 1 and dist.is_initialized() and not straight:
            batch[0, 0] += 1e-3
        return batch

    straight = False
    task = Task(toy_b, crooked, brief=False)
    records = agree(task, Replicated)
    straight = True
    expected = Oracle(task, 2).run(dist.get_rank())
    all_close("first step", records[0].parameters, expected[0].parameters)
    with pytest.raises(AssertionError, match=r"second step '0\.weight': not the same bits"):
        all_close("second step", records[1].parameters, expected[1].parameters)
