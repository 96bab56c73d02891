"""What autograd saves: views of pages of every kind, whoever asks for them, and values that are no longer those of forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import zerodp
from tests.ranks.oracle import Task, adamw, parity, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net

WIDTH = 8


def stack(block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(3, WIDTH), *(block() for _ in range(3)))


# ---- views of other kinds


class Filter(nn.Module):
    """In the frequency domain, with its weights as pairs of real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.weight).conj(), n=WIDTH)


class Negative(Filter):
    """torch negates the imaginary part of a conjugate by a mark on the view."""

    def forward(self, x: Tensor) -> Tensor:
        factors = torch.view_as_complex(self.weight).conj().imag
        assert factors.is_neg()
        return x * factors.repeat(2)[:WIDTH] + x[:, :5].mul(factors).sum()


class Bits(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(weight.view(torch.int32))
        return x * weight

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (bits,) = context.saved_tensors
        return grad * bits.view(torch.float32), grad.sum(0)


class Bitwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + Bits.apply(torch.tanh(x), self.weight)  # type: ignore[no-any-return, no-untyped-call]


@on_ranks(2)
@pytest.mark.parametrize("kind", [Filter, Negative, Bitwise])
def test_views_that_are_seen_as_something_else(kind: type[nn.Module], stage: int) -> None:
    parity(Task(stack(kind), rows(3)), stage=stage, units=[kind])


# ---- who keeps a parameter itself


class Scaled(nn.Module):
    """Its weight is saved as it is, and `way` says how the result leaves the block."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Linear(WIDTH, WIDTH)
        self.way = way

    def compute(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return x + self.layer(torch.tanh(x * self.weight))

    def forward(self, x: Tensor) -> Any:
        if self.way == "generator":
            return (self.compute(x) for _ in range(1))
        out = self.compute(x)
        if self.way == "attribute":
            self.out = out
            return None
        return Slots(out) if self.way == "slots" else out


class Slots:
    __slots__ = ("out",)

    def __init__(self, out: Tensor) -> None:
        self.out = out


class Ways(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.head = way, nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Scaled(way) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        for block in self.blocks:
            result = block.compute(x) if self.way == "method" else block(x)  # type: ignore[operator]
            x = {
                "generator": lambda made: next(made),
                "attribute": lambda _, block=block: block.out,
                "slots": lambda made: made.out,
            }.get(self.way, lambda made: made)(result)
        return x


@on_ranks(2)
@pytest.mark.parametrize("way", ["generator", "attribute", "slots", "method"])
def test_hooks_of_a_units_own_however_its_result_leaves(way: str, stage: int) -> None:
    parity(Task(lambda: Ways(way), rows(3)), stage=stage, units=[Scaled])


class Kept(torch.autograd.Function):
    """Keeps the weight beside what autograd saves."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        context.weight = weight
        context.save_for_backward(x)
        return x * weight

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = context.saved_tensors
        return grad * context.weight, (grad * x).sum(0)


class Aside(Bitwise):
    """Its loss is no output of the forward."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Kept.apply(torch.tanh(x), self.weight)  # type: ignore[no-untyped-call]
        self.loss = out.square().mean()
        return x + out


@on_ranks(2)
def test_a_weight_that_a_function_keeps_is_the_first_that_backward_wants(stage: int) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        model(x)
        return model[-1].loss  # type: ignore[no-any-return]

    parity(Task(stack(Aside), rows(3), loss), stage=stage, units=[Aside])


class Remembering(Scaled):
    def forward(self, x: Tensor) -> Any:
        if dist.get_rank() == 0:
            self.watched = [self.weight]
        return x + self.layer(torch.tanh(x * self.weight))


@on_ranks(2)
def test_a_reference_to_a_weight_on_one_rank_is_nothing(stage: int) -> None:
    parity(Task(stack(lambda: Remembering("")), rows(3)), stage=stage, units=[Remembering, nn.Linear])


# ---- values of another era


class Auxiliary(Net):
    """Keeps a loss of the trunk."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for block in self.blocks:
            x = block(x)
        self.loss = x.square().mean()
        out: Tensor = self.head(x)
        return out


def step(model: Any, optimizer: Any) -> None:
    optimizer.step()


def edit(model: Any, optimizer: Any) -> None:
    with zerodp.full_params(model, write=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def load(model: Any, optimizer: Any) -> None:
    model.load_state_dict(model.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("change", [step, edit, load])
def test_backward_through_old_values_is_refused_wherever_it_begins(change: Any, stage: int) -> None:
    """By torch where parameters stay whole, as in one process. Training goes on."""
    torch.manual_seed(0)
    model: Any = Auxiliary()
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[Block])
    for _ in range(2):
        squares(model, rows(3)(0, 0, 0)).backward(retain_graph=True)
        change(model, optimizer)
        with pytest.raises(RuntimeError, match=r"from before the parameters changed|modified by an inplace operation"):
            model.loss.backward()
        optimizer.zero_grad()
        squares(model, rows(3)(1, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_values_that_did_not_change_are_not_old(stage: int) -> None:
    """A skipped or empty step, and reading."""
    torch.manual_seed(0)
    model: Any = Auxiliary()
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[Block])
    squares(model, rows(3)(0, 0, 0)).backward(retain_graph=True)
    optimizer.zero_grad()
    with zerodp.full_params(model):
        pass
    optimizer.step()
    model.loss.backward()
    assert zerodp.full_grads(model)
