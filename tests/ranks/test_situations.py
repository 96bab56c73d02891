"""The situations that demand paging must survive, at every stage, equal to plain torch to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.ranks.oracle import Task, parity, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net


class UsesWeight(torch.autograd.Function):
    """Keeps the Parameter object itself and reads it again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x * weight.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.weight.sum(), None


def checkpointed(net: Net, index: int, x: Tensor) -> Tensor:
    return checkpoint(net.blocks[index], x, use_reentrant=False)


def checkpointed_reentrant(net: Net, index: int, x: Tensor) -> Tensor:
    return checkpoint(net.blocks[index], x, use_reentrant=True)


def checkpointed_twice(net: Net, index: int, x: Tensor) -> Tensor:
    return checkpoint(lambda y: net.blocks[index](net.blocks[index](y)), x, use_reentrant=False)


def called_twice(net: Net, index: int, x: Tensor) -> Tensor:
    return net.blocks[index](net.blocks[index](x))


def read_elsewhere(net: Net, index: int, x: Tensor) -> Tensor:
    first: Any = net.blocks[0]
    return net.blocks[index](x) + first.a.weight[0].sum()


def other_method(net: Net, index: int, x: Tensor) -> Tensor:
    block: Any = net.blocks[index]
    x = block(x)
    return x + block.encode(x).mean() if index == 0 else x


def custom_function(net: Net, index: int, x: Tensor) -> Tensor:
    return UsesWeight.apply(net.blocks[index](x), net.head.weight)


def frozen() -> nn.Module:
    net = Net()
    net.blocks[1].requires_grad_(False)
    return net


class TiedNet(Net):
    """The head reads the embedding's weight, transposed."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.emb.weight.t(), self.head.bias)


def shared_object() -> nn.Module:
    net = Net(width=3)
    net.head.weight = net.emb.weight
    return net


def compiled() -> nn.Module:
    net = Net()
    for block in net.blocks:
        block.compile(backend="aot_eager")
    return net


def two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model, x) + squares(model, x.flip(0) * 2)


def gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = model(x).pow(2).sum()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    return gradient.pow(2).mean() + out


def net(apply_block: Callable[[Net, int, Tensor], Tensor]) -> Task:
    return Task(lambda: Net(apply_block=apply_block), rows(3))


SITUATIONS = {
    "plain": Task(Net, rows(3)),
    "checkpoint": net(checkpointed),
    "reentrant checkpoint": net(checkpointed_reentrant),
    "checkpoint around two calls": net(checkpointed_twice),
    "called twice": net(called_twice),
    "read elsewhere": net(read_elsewhere),
    "other method": net(other_method),
    "frozen": Task(frozen, rows(3)),
    "tied": Task(shared_object, rows(3)),
    "tied by use": Task(TiedNet, rows(3)),
    "two forwards": Task(Net, rows(3), two_forwards),
    "custom function": net(custom_function),
    "gradient penalty": Task(Net, rows(3), gradient_penalty),
    "compiled": Task(compiled, rows(3)),
}


@on_ranks(2)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_situation(situation: str, stage: int) -> None:
    parity(replace(SITUATIONS[situation], brief=False), stage=stage, units=[Block])
