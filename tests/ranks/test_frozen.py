"""Frozen parameters, adapters, and which parameters the optimizer has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerodp
from tests.ranks.oracle import Task, adamw, all_close, close, momentum, parity, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net, ToyA, X, toy_b

case = pytest.mark.case


def trainable(model: nn.Module) -> torch.optim.Optimizer:
    """As adapter runs do it: frozen parameters are not in the optimizer at all."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)


def half_frozen() -> nn.Module:
    model = toy_b()
    model[0].weight.requires_grad_(False)
    return model


@case("B74")
@on_ranks(2)
@pytest.mark.parametrize("optimizer", [momentum, trainable], ids=["all in the optimizer", "trainable only"])
def test_unit_with_both_kinds(optimizer: Any, stage: int) -> None:
    task = Task(half_frozen, rows(3), optimizer=optimizer)
    records = parity(task, stage=stage)
    close("frozen weight", records[-1].parameters["0.weight"], task.build(0)[0][0].weight.detach())


class Adapted(nn.Module):
    """A frozen layer and a trainable low-rank correction."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, width) * 0.1)
        self.up = nn.Parameter(torch.randn(width, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + x @ self.down.t() @ self.up.t())


@case("B75", "B78")
@on_ranks(2)
@pytest.mark.parametrize("micro", [(True,), (False, True)], ids=["one", "no_sync"])
def test_adapters_in_every_layer_train(micro: tuple[bool, ...], stage: int) -> None:
    task = Task(lambda: nn.Sequential(*(Adapted() for _ in range(4))), rows(6), optimizer=trainable, micro=micro)
    records = parity(task, stage=stage, units=[Adapted])
    assert len(records[-1].gradients) == 8
    model, _ = zerodp.shard(task.build(0)[0], stage=stage, units=[Adapted])
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    exported = {name: tensor for name, tensor in model.state_dict().items() if name in names}
    assert {tuple(tensor.shape) for tensor in exported.values()} == {(2, 6), (6, 2)}
    all_close("adapters", exported, {n: p.detach() for n, p in task.build(0)[0].named_parameters() if n in names})


class NormedAdapted(nn.Module):
    """The frozen norm comes last in backward, when the adapter has all its gradients."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.adapted = Adapted(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.adapted(self.norm(x))


class Tower(nn.Module):
    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]):
        super().__init__()
        self.blocks = nn.ModuleList(NormedAdapted() for _ in range(3))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = self.call(block, x)
        return x


def called(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)  # type: ignore[no-any-return]


def with_saved_as_they_are(block: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return block(x)  # type: ignore[no-any-return]


@on_ranks(2)
@pytest.mark.parametrize("units", [[NormedAdapted], None], ids=["blocks", "whole"])
@pytest.mark.parametrize(
    "call",
    [
        called,
        functools.partial(checkpoint, use_reentrant=False),
        functools.partial(checkpoint, use_reentrant=True),
        with_saved_as_they_are,
    ],
    ids=["plain", "checkpoint", "re-entrant", "hooks"],
)
def test_adapters_below_frozen_norms(call: Any, units: Any, stage: int) -> None:
    """What is computed again in backward keeps no parameter itself, whose values go when the adapter's gradients are there."""
    parity(Task(lambda: Tower(call), rows(6), optimizer=trainable), stage=stage, units=units)


@case("B76")
@on_ranks(2)
@pytest.mark.parametrize("units", [None, [Block]], ids=["automatic", "blocks"])
def test_unfreezing_and_freezing_during_training(units: Any, stage: int) -> None:
    """Block 1 is frozen for two steps; the head is frozen after three."""

    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        net: Any = model
        net.blocks[1].requires_grad_(step >= 2)
        net.head.requires_grad_(step < 3)

    def decayed(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)

    task = Task(Net, rows(3), optimizer=decayed, steps=5, between=between, brief=False)
    records = parity(task, stage=stage, units=units)
    start = dict(task.build(0)[0].named_parameters())
    close("while frozen", records[1].parameters["blocks.1.a.weight"], start["blocks.1.a.weight"].detach())
    close("frozen later", records[4].parameters["head.weight"], records[2].parameters["head.weight"])


@on_ranks(2)
def test_frozen_when_wrapped_and_unfrozen_later(stage: int) -> None:
    def model() -> nn.Module:
        net = Net()
        net.blocks[1].requires_grad_(False)
        return net

    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        net: Any = model
        net.blocks[1].requires_grad_(step >= 2)

    parity(Task(model, rows(3), optimizer=adamw, steps=4, between=between), stage=stage, units=[Block])


@case("B79")
@on_ranks(2)
def test_empty_parameter_groups_stay(stage: int) -> None:
    """The scheduler was made before, for two groups."""
    model = nn.Linear(3, 1)
    groups = [{"params": list(model.parameters())}, {"params": [], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 0.1**step])
    model, optimizer = zerodp.shard(model, optimizer, stage=stage)
    for _ in range(2):
        squares(model, rows(3)(0, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.025, 0.005])


@case("B82")
@on_ranks(2)
def test_optimizer_made_after_wrapping_is_an_error_not_silence(stage: int) -> None:
    """Nothing is reduced for an optimizer that zerodp does not know; its step must not pass over that."""
    model, _ = zerodp.shard(ToyA(), stage=stage)
    x = (dist.get_rank() + 1) * X
    model(x)
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).backward()
    with pytest.raises(zerodp.ShardedError, match=r"zerodp\.shard"):
        late.step()


@case("B82")
@on_ranks(2)
def test_forward_before_wrapping_does_no_harm(stage: int) -> None:
    model = ToyA()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = (dist.get_rank() + 1) * X
    model(x).backward()
    optimizer.zero_grad()
    model, optimizer = zerodp.shard(model, optimizer, stage=stage)
    model(x)
    model(x).backward()
    optimizer.step()
    close("w", model.state_dict()["w"], torch.tensor([0.85, 0.7, 0.55, 0.4]), 1e-6)


@on_ranks(2)
def test_trainable_parameters_that_the_optimizer_does_not_have(stage: int) -> None:
    """As in plain torch: they get a gradient, and stay."""

    def some(model: nn.Module) -> torch.optim.Optimizer:
        net: Any = model
        return torch.optim.SGD([*net.blocks.parameters(), net.head.bias], lr=0.1)

    task = Task(Net, rows(3), optimizer=some)
    records = parity(task, stage=stage, units=[Block])
    close("not given", records[-1].parameters["emb.weight"], task.build(0)[0].emb.weight.detach())


@on_ranks(2)
def test_everything_frozen(stage: int) -> None:
    """A model for inference only, in a model that trains: gradients pass through it."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1))

    parity(Task(model, rows(3)), stage=stage, units=[nn.Linear])
    frozen, _ = zerodp.shard(toy_b().requires_grad_(False), stage=stage)
    x = torch.ones(2, 3, requires_grad=True)
    frozen(x).sum().backward()
    assert x.grad is not None
    assert zerodp.full_grads(frozen) == {}
