"""Several backward passes before a step: they add up, in every stage alike, synchronised or not."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import Task, adamw, all_close, close, parity, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Net, ToyA, X, own_loss, toy_b

case = pytest.mark.case


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def toy_a(stage: int) -> tuple[nn.Module, zerodp.ShardedOptimizer, Tensor]:
    model = ToyA()
    model, optimizer = zerodp.shard(model, sgd(model), stage=stage)
    return model, optimizer, (dist.get_rank() + 1) * X


@case("B01")
@on_ranks(2)
def test_averaged_micro_batches(stage: int) -> None:
    model, optimizer, x = toy_a(stage)
    for micro in range(2):
        (model((micro + 1) * x) / 2).backward()
    close("gradient", zerodp.full_grads(model)["w"], 2.25 * X)
    optimizer.step()
    close("w", model.state_dict()["w"], torch.tensor([0.775, 0.55, 0.325, 0.1]), 1e-6)


@case("B02")
@on_ranks(2)
def test_a_batch_cut_in_other_ways(stage: int) -> None:
    """Eight rows per step, four on each rank: as one, two or four micro-batches."""

    def task(count: int) -> Task:
        def batch(step: int, micro: int, rank: int) -> Tensor:
            whole = torch.randn(4, 3, generator=torch.Generator().manual_seed(step * 2 + rank))
            return whole.chunk(count)[micro]

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            return squares(model, x) / count

        return Task(toy_b, batch, loss, adamw, steps=5, micro=(True,) * count)

    runs = [parity(task(count), stage=stage) for count in (1, 2, 4)]
    for run in runs[1:]:
        all_close("cut", run[-1].parameters, runs[0][-1].parameters, 1e-6)


@case("B03")
@on_ranks(2)
@pytest.mark.parametrize("synced", [True, False], ids=["synced", "no_sync"])
def test_backward_passes_add_up_without_being_announced(synced: bool, stage: int) -> None:
    model, optimizer, x = toy_a(stage)
    if synced:
        model(x).backward()
    else:
        with model.no_sync():
            model(x).backward()
    model(2 * x).backward()
    close("gradient", zerodp.full_grads(model)["w"], 4.5 * X)
    optimizer.step()
    close("w", model.state_dict()["w"], 1 - 0.45 * X, 1e-6)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)

    def forward(self, both: bool, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x) if both else x


@case("B04")
@on_ranks(2)
@pytest.mark.parametrize("micro", [(True, True), (False, True)], ids=["synced", "no_sync"])
def test_parameter_used_in_some_micro_batches_only(micro: tuple[bool, ...], stage: int) -> None:
    def batch(step: int, micro: int, rank: int) -> tuple[bool, Tensor]:
        return micro == 1, rows(3)(step, micro, rank)

    def loss(model: nn.Module, batch: tuple[bool, Tensor]) -> Tensor:
        return model(*batch).pow(2).mean()

    parity(Task(Two, batch, loss, micro=micro), stage=stage, units=[nn.Linear])


@case("B06")
@on_ranks(1, 2)
@pytest.mark.parametrize("synced", [True, False], ids=["synced", "no_sync"])
def test_low_precision_gradients_are_added_in_fp32(synced: bool, stage: int) -> None:
    """128 + 0.25 is 128 in bf16: the small one must not vanish."""
    model = nn.Linear(1, 1, bias=False)
    model, _ = zerodp.shard(model, sgd(model), stage=stage, precision="bf16")
    with contextlib.nullcontext() if synced else model.no_sync():
        model(torch.full((1, 1), 128.0)).sum().backward()
    model(torch.full((1, 1), 0.25)).sum().backward()
    assert zerodp.full_grads(model)["weight"].item() == 128.25


@case("B10")
@on_ranks(2)
def test_forward_after_an_accumulated_step() -> None:
    task = Task(toy_b, rows(3), micro=(True, True), steps=2)
    records = parity(task, stage=3)
    assert all(loss != 0 for loss in records[1].losses)


@on_ranks(2)
@pytest.mark.parametrize(
    "micro",
    [(False, True), (False, False, True), (True, False, True), (True, True, True)],
    ids=lambda m: "".join("ny"[s] for s in m),
)
def test_synced_and_postponed_passes_mix(micro: tuple[bool, ...], stage: int) -> None:
    parity(Task(Net, rows(3), micro=micro), stage=stage)


@on_ranks(2)
@pytest.mark.parametrize("which", ["optimizer", "model"])
def test_gradients_stay_until_they_are_zeroed(which: str, stage: int) -> None:
    model, optimizer, x = toy_a(stage)
    for passes in (1, 2):
        model(x).backward()
        close(f"after {passes}", zerodp.full_grads(model)["w"], passes * 1.5 * X)
        optimizer.step()
    (optimizer if which == "optimizer" else model).zero_grad()
    assert zerodp.full_grads(model) == {}
    model(x).backward()
    close("after zeroing", zerodp.full_grads(model)["w"], 1.5 * X)


@on_ranks(2)
def test_zeroing_drops_what_was_postponed(stage: int) -> None:
    model, optimizer, x = toy_a(stage)
    with model.no_sync():
        model(x).backward()
    optimizer.zero_grad()
    model(x).backward()
    close("gradient", zerodp.full_grads(model)["w"], 1.5 * X)


@on_ranks(2)
def test_a_step_without_gradients_changes_nothing(stage: int) -> None:
    model = toy_b()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model, optimizer = zerodp.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1), stage=stage)
    optimizer.step()
    squares(model, torch.ones(2, 3)).backward()
    optimizer.zero_grad()
    optimizer.step()
    all_close("parameters", dict(model.state_dict()), before)


@on_ranks(2)
def test_no_sync_sends_no_gradients(stage: int) -> None:
    model, _, x = toy_a(stage)
    own_loss(model, x).backward()
    zerodp.full_grads(model)  # nothing of that backward is under way any more
    zerodp.stats(model).reset()
    with model.no_sync():
        own_loss(model, x).backward()
    reductions = [row for row in zerodp.stats(model).comm if row.op in ("reduce_scatter", "all_reduce") and row.count]
    assert reductions == []
