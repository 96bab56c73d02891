"""Parameters used or read in other places than their own module's forward, and the public ways to their values."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import Task, adamw, all_close, close, parity, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net, ToyA, X, toy_b

case = pytest.mark.case


class ReadsWeight(nn.Module):
    """Uses a layer's weight and never calls the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.out = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) + x + self.lin.weight[:1] * self.lin.bias


@case("B83")
@on_ranks(2)
@pytest.mark.parametrize("units", [None, [nn.Linear]], ids=["whole", "layers"])
def test_weight_used_outside_its_module(units: Any, stage: int) -> None:
    parity(Task(ReadsWeight, rows(3)), stage=stage, units=units)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x)) + torch.nn.functional.linear(x, self.lin.weight)


class CallsMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder.encode(x))


@case("B84")
@on_ranks(2)
@pytest.mark.parametrize("units", [None, [Encoder]], ids=["automatic", "encoder"])
def test_method_other_than_forward(units: Any, stage: int) -> None:
    parity(Task(CallsMethod, rows(3)), stage=stage, units=units)


class Chain(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = torch.tanh(layer(x))
        return x


class Choice(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        return self["a"](x) + self["b"](x)


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain(nn.Linear(3, 3) for _ in range(2))
        self.choice = Choice({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})

    def forward(self, x: Tensor) -> Tensor:
        return self.choice(self.chain(x))


@case("B85")
@on_ranks(2)
def test_containers_with_a_forward_are_units_as_any(stage: int) -> None:
    parity(Task(Containers, rows(3)), stage=stage, units=[Chain, Choice])
    model, _ = zerodp.shard(Containers(), stage=stage, units=[Chain, Choice])
    assert "chain" in zerodp.describe(model)
    assert "choice" in zerodp.describe(model)


class Bare(nn.Module):
    """Parameters that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.items = nn.ParameterList(nn.Parameter(torch.randn(3, 3)) for _ in range(2))
        self.table = nn.ParameterDict({"x": nn.Parameter(torch.randn(3, 2)), "y": nn.Parameter(torch.randn(2))})

    def forward(self, x: Tensor) -> Tensor:
        for item in self.items:
            x = torch.tanh(x @ item) * self.scale
        return x @ self.table["x"] + self.table["y"]


@case("B86")
@on_ranks(2)
def test_bare_parameters_keep_their_shapes_and_train(stage: int) -> None:
    parity(Task(Bare, rows(3)), stage=stage)
    plain = Bare()
    model, _ = zerodp.shard(Bare(), stage=stage)
    for (name, mine), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride()), name
    assert (len(model.items), len(model.table), model.scale.dim(), len(model.scale)) == (2, 2, 1, 3)


@case("B87")
@on_ranks(2)
@pytest.mark.parametrize("units", [None, [nn.Linear]], ids=["whole", "layers"])
def test_weight_norm(units: Any, stage: int) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 5)), nn.Tanh(), nn.Linear(5, 1))

    records = parity(Task(model, rows(3)), stage=stage, units=units)
    assert "0.parametrizations.weight.original0" in records[-1].parameters


@on_ranks(2)
def test_spectral_norm(stage: int) -> None:
    """A parametrisation with buffers that forward updates from the weight."""

    def model() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 5)), nn.Tanh(), nn.Linear(5, 1))

    parity(Task(model, rows(3)), stage=stage)


@case("B88")
@on_ranks(2)
def test_embedding_tells_its_size(stage: int) -> None:
    model, _ = zerodp.shard(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3)), stage=stage)
    weight = model[0].weight
    assert tuple(weight.shape) == (10, 4) == tuple(weight.size())
    assert (weight.numel(), weight.nelement(), weight.size(0), weight.dim()) == (40, 40, 10, 2)
    assert sum(p.numel() for p in model.parameters()) == 40 + 15
    assert weight.dtype == torch.float32
    assert weight.device == torch.device("cpu")
    assert weight.requires_grad
    assert weight.is_leaf
    assert isinstance(weight, nn.Parameter)


@case("B89")
@on_ranks(2)
def test_gradients_are_read_by_the_public_accessor(stage: int) -> None:
    model = ToyA()
    model, _ = zerodp.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    model((dist.get_rank() + 1) * X).backward()
    close("gradient", zerodp.full_grads(model)["w"], 1.5 * X)
    with pytest.raises(zerodp.ShardedError, match=r"'w'.*full_grads"):
        _ = model.w.grad


@case("B90")
@on_ranks(2)
def test_edit_without_asking_is_an_error(stage: int) -> None:
    model, _ = zerodp.shard(toy_b(), stage=stage)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(zerodp.ShardedError, match=r"0\.weight.*write=True"):
        with zerodp.full_params(model), torch.no_grad():
            model[0].weight[0, 0] += 1
    all_close("unchanged", dict(model.state_dict()), before)
    with zerodp.full_params(model, write=True), torch.no_grad():
        model[0].weight[0, 0] += 1
    before["0.weight"][0, 0] += 1
    all_close("changed", dict(model.state_dict()), before)


@case("B91")
@on_ranks(2)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_edit_reaches_model_master_and_state_dict(precision: str | None, stage: int) -> None:
    model = toy_b()
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, precision=precision)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    with zerodp.full_params(model, write=True), torch.no_grad():
        model[0].weight.fill_(0)
    (model(torch.ones(2, 3)) * 0).sum().backward()
    optimizer.step()
    assert model.state_dict()["0.weight"].abs().sum() == 0
    for name, _, tensor in zerodp.local_shards(model):
        assert name != "0.weight" or tensor.abs().sum() == 0
    with zerodp.full_params(model):
        assert model[0].weight.abs().sum() == 0


@case("B92")
@on_ranks(2)
def test_loaded_weights_reach_the_master(stage: int) -> None:
    model = toy_b()
    model, optimizer = zerodp.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, precision="bf16")
    torch.manual_seed(7)
    loaded = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(loaded)
    (model(torch.ones(2, 3)) * 0).sum().backward()
    optimizer.step()
    all_close("loaded", dict(model.state_dict()), loaded)


USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "sum": lambda p: p.sum(),
    "item": lambda p: p[0, 0].item(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy(),
    "data": lambda p: p.data,
    "assign data": lambda p: setattr(p, "data", torch.zeros(5, 3)),
    "in place": lambda p: p.mul_(2),
    "copy_": lambda p: p.copy_(torch.zeros(5, 3)),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda p: torch.save(p, io.BytesIO()),
    "clone": lambda p: p.clone(),
    "matmul": lambda p: p @ torch.ones(3, 1),
    "in a list": lambda p: torch.cat([p, p]),
    "to": lambda p: p.to(torch.float64),
    "equal": lambda p: torch.equal(p, p),
    "func": lambda p: torch.func.functional_call(nn.Linear(3, 5), {"weight": p}, (torch.ones(1, 3),)),
    "out": lambda p: torch.zeros(5, 3).copy_(p),
}


@on_ranks(2)
@pytest.mark.parametrize("use", USES)
def test_use_where_it_is_sharded_names_parameter_and_remedy(use: str) -> None:
    model, _ = zerodp.shard(toy_b(), stage=3)
    with pytest.raises(zerodp.ShardedError, match=r"0\.weight"), torch.no_grad():
        USES[use](model[0].weight)


@on_ranks(2)
def test_printing_never_shows_placeholders(stage: int) -> None:
    model, _ = zerodp.shard(toy_b(), stage=stage)
    assert "nan" not in repr(model[0].weight).lower()
    assert "Linear(in_features=3" in repr(model)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2], ids="zero{}".format)
def test_values_rest_here_in_stages_0_to_2(stage: int) -> None:
    """Where parameters are whole between uses, reading is a local act, on one rank alone as well."""
    torch.manual_seed(0)
    expected = toy_b()
    torch.manual_seed(0)
    model = toy_b()
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage)
    if dist.get_rank() == 1:
        close("read", model[0].weight.detach().clone(), expected[0].weight.detach())
    squares(model, rows(3)(0, 0, dist.get_rank())).backward()
    optimizer.step()
    if dist.get_rank() == 0:
        assert model[0].weight.sum().isfinite()  # under way since the step: the read waits for it
    dist.barrier()


@on_ranks(2)
def test_initialisation_functions_inside_the_writing_context(stage: int) -> None:
    """Rank 0's random numbers win."""
    model, _ = zerodp.shard(Net(), stage=stage, units=[Block])
    torch.manual_seed(dist.get_rank())
    with zerodp.full_params(model, write=True):
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight)
                nn.init.zeros_(module.bias)
    torch.manual_seed(0)
    expected = Net()
    torch.manual_seed(0)
    for module in expected.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
            nn.init.zeros_(module.bias)
    all_close("initialised", dict(model.state_dict()), dict(expected.state_dict()))
