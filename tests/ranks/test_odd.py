"""Odd parameters: scalars, empty ones, transposed ones, mixed and integer dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import Task, adamw, all_close, close, parity, rows
from tests.ranks.pool import on_ranks

case = pytest.mark.case
sharded_stages = pytest.mark.parametrize("stage", [1, 2, 3], ids="zero{}".format)


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.lin = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * self.temperature


@case("B94")
@on_ranks(2)
def test_scalar_parameter(stage: int) -> None:
    records = parity(Task(Temperature, rows(3), optimizer=adamw), stage=stage)
    assert records[-1].parameters["temperature"].shape == ()
    model, _ = zerodp.shard(Temperature(), stage=stage)
    assert model.temperature.shape == ()
    model.load_state_dict(records[-1].parameters)
    all_close("loaded", dict(model.state_dict()), records[-1].parameters)


class OneBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


@case("B95")
@on_ranks(4)
def test_fewer_elements_than_ranks(stage: int) -> None:
    parity(Task(OneBias, rows(3)), stage=stage, tolerance=1e-6)

    def groups(model: nn.Module) -> torch.optim.Optimizer:
        net: Any = model
        return torch.optim.AdamW([{"params": [net[0].bias], "lr": 0.1}, {"params": [net[1].weight]}], lr=0.01)

    task = Task(lambda: nn.Sequential(OneBias(), nn.Linear(3, 2, bias=False)), rows(3), optimizer=groups)
    parity(task, stage=stage, tolerance=1e-6)


class TrailingEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.lin(x), x @ self.empty.t()], dim=1)


@case("B96")
@on_ranks(2)
def test_empty_parameter_at_the_end(stage: int) -> None:
    parity(Task(TrailingEmpty, rows(3), optimizer=adamw), stage=stage)


class ReadsEmptyShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(2, 0, 3))
        self.lin = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        count, none, width = self.empty.shape
        return self.lin(x).view(-1, count) * (1 + none) + self.empty.sum() + width


@case("B98")
@on_ranks(2)
def test_empty_parameter_keeps_its_shape(stage: int) -> None:
    parity(Task(ReadsEmptyShape, rows(3)), stage=stage)
    model, _ = zerodp.shard(ReadsEmptyShape(), stage=stage)
    assert tuple(model.empty.shape) == (2, 0, 3)
    assert tuple(model.state_dict()["empty"].shape) == (2, 0, 3)
    with zerodp.full_params(model):
        assert tuple(model.empty.shape) == (2, 0, 3)


@on_ranks(2)
def test_unit_of_nothing_but_empty_parameters(stage: int) -> None:
    task = Task(lambda: nn.Sequential(nn.Linear(3, 3), OnlyEmpty(), nn.Linear(3, 2)), rows(3))
    parity(task, stage=stage, units=[nn.Linear, OnlyEmpty])


class OnlyEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.empty.sum()


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4).t())
        self.kernel = nn.Parameter(torch.randn(2, 3, 3, 3).to(memory_format=torch.channels_last))

    def forward(self, x: Tensor) -> Tensor:
        image = (x @ self.weight.t()).view(1, 1, 4, 4).expand(1, 3, 4, 4)
        return torch.nn.functional.conv2d(image, self.kernel)


@case("B99")
@on_ranks(2)
def test_transposed_and_channels_last_parameters(stage: int) -> None:
    parity(Task(Transposed, rows(3)), stage=stage)
    model, _ = zerodp.shard(Transposed(), stage=stage)
    assert model.weight.stride() == (1, 4)
    assert model.kernel.is_contiguous(memory_format=torch.channels_last)
    state = model.state_dict()
    plain = Transposed()
    plain.load_state_dict(state)
    all_close("export", dict(plain.state_dict()), dict(state))
    with zerodp.full_params(model):
        assert model.weight.stride() == (1, 4)


class Mixed(nn.Module):
    """A bf16 layer and an fp32 norm in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 4).bfloat16()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.lin(x.bfloat16()).float())


@case("B100")
@on_ranks(2)
def test_two_dtypes_in_one_unit(stage: int) -> None:
    """SGD on an fp32 master by hand, for the bf16 layer; the norm is plain fp32."""
    torch.manual_seed(0)
    model = Mixed()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    model, optimizer = zerodp.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    x = rows(3)(0, 0, dist.get_rank())
    weights = torch.linspace(-1, 1, 4)
    (model(x) * weights).sum().backward()
    gradients = {name: gradient.float() for name, gradient in zerodp.full_grads(model).items()}
    optimizer.step()
    state = model.state_dict()
    assert {name: tensor.dtype for name, tensor in state.items()} == {name: p.dtype for name, p in start.items()}
    assert set(gradients) == set(start)
    for name, before in start.items():
        expected = (before.float() - 0.1 * gradients[name]).to(before.dtype)
        close(name, state[name], expected, 1e-6 if before.dtype == torch.float32 else 0.0)

    plain = Mixed()
    plain.load_state_dict(start)
    total = {name: torch.zeros(p.shape) for name, p in start.items()}
    for rank in range(2):
        plain.zero_grad()
        (plain(rows(3)(0, 0, rank)) * weights).sum().backward()
        for name, p in plain.named_parameters():
            total[name] += p.grad.float() / 2
    for name, gradient in total.items():
        close(f"gradient of {name}", gradients[name], gradient, 1e-6 if stage >= 2 else 0.04)


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 2)
        self.codes = nn.Parameter(torch.arange(-60, 60, 10, dtype=torch.int8).view(4, 3), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin((x * self.flags) @ self.codes.float().t() / 60)


@case("B101")
@on_ranks(2)
def test_integer_and_bool_parameters(stage: int) -> None:
    records = parity(Task(Quantised, rows(3), optimizer=adamw), stage=stage)
    plain = Quantised()
    assert torch.equal(records[-1].parameters["codes"], plain.codes)
    model = Quantised()
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage)
    state = model.state_dict()
    assert state["codes"].dtype == torch.int8
    assert torch.equal(state["codes"], plain.codes)
    assert torch.equal(state["flags"], plain.flags)
    assert not model.codes.requires_grad
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert set(optimizer.state_dict()["state"]) == {"lin.weight", "lin.bias"}


@case("B102")
@on_ranks(2)
def test_sparse_gradients_are_refused(stage: int) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(zerodp.ConfigError, match=r"'0'.*sparse"):
        zerodp.shard(model, optimizer, stage=stage)
    assert type(model) is nn.Sequential
    assert model(torch.tensor([1, 2])).shape == (2, 2)


@on_ranks(2)
def test_complex_parameters_are_refused(stage: int) -> None:
    model = nn.Linear(3, 3, dtype=torch.complex64)
    with pytest.raises(zerodp.ConfigError, match=r"'weight'.*complex"):
        zerodp.shard(model, stage=stage)


@on_ranks(2)
def test_model_without_parameters_is_refused(stage: int) -> None:
    with pytest.raises(zerodp.ConfigError, match="no parameters"):
        zerodp.shard(nn.Tanh(), stage=stage)


class Subclassed(nn.Parameter):
    """A user's own parameter class, with state of its own."""

    note = "kept"


@on_ranks(2)
@sharded_stages
def test_parameter_subclasses_and_attributes_stay(stage: int) -> None:
    model = nn.Linear(3, 3)
    model.weight = Subclassed(torch.randn(3, 3))
    model.weight.tag = "mine"
    weight = model.weight
    model, _ = zerodp.shard(model, stage=stage)
    assert model.weight is weight
    assert isinstance(weight, Subclassed)
    assert (weight.tag, weight.note) == ("mine", "kept")
    with zerodp.full_params(model):
        assert type(weight) is Subclassed
