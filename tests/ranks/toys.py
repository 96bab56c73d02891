"""Small models that the tests share. Sizes are chosen so that shards need padding and matrices straddle ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class ToyA(nn.Module):
    """One parameter w = ones(4); the loss is (w·x).sum(). With x = (rank + 1)·[1, 2, 3, 4] the mean gradient of two ranks
    is 1.5·[1, 2, 3, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


class ToyA2(nn.Module):
    """Toy A cut in two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(2))
        self.second = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.cat([self.first, self.second]) * x).sum()


X = torch.tensor([1.0, 2.0, 3.0, 4.0])


def toy_a_batch(step: int, micro: int, rank: int) -> Tensor:
    return (rank + 1) * X


def own_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """For models whose output is the loss."""
    loss: Tensor = model(batch)
    return loss


def toy_b() -> nn.Sequential:
    """26 elements, not divisible by 3 or 4."""
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


class Block(nn.Module):
    def __init__(self, width: int, hidden: int | None = None):
        super().__init__()
        self.a = nn.Linear(width, hidden or 2 * width)
        self.b = nn.Linear(hidden or 2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.b(torch.tanh(self.a(x)))
        return out

    def encode(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x)
        return out


class Net(nn.Module):
    """Embedding layer, blocks and a head: a small model with the structure of a large one.

    ``apply_block`` says how a block is applied; by default it is called.
    """

    def __init__(
        self, width: int = 6, depth: int = 3, apply_block: Callable[[Net, int, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.emb = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)
        self.apply_block = apply_block

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for index, block in enumerate(self.blocks):
            x = block(x) if self.apply_block is None else self.apply_block(self, index, x)
        out: Tensor = self.head(x)
        return out


class CheckpointedNet(Net):
    """Every block, with dropout in front, under one of torch's two kinds of activation checkpointing."""

    def __init__(self, reentrant: bool, dropout: float = 0.0):
        super().__init__()
        self.reentrant, self.dropout = reentrant, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for block in self.blocks:
            x = checkpoint(lambda y, block=block: block(self.dropout(y)), x, use_reentrant=self.reentrant)
        out: Tensor = self.head(x)
        return out


class Lion(torch.optim.Optimizer):
    """A user's own elementwise optimizer."""

    def __init__(
        self, params: object, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.1
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(average * first + p.grad * (1 - first)), alpha=-group["lr"])
                average.mul_(second).add_(p.grad, alpha=1 - second)
