"""Several forwards, several backwards, several models."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import Task, adamw, all_close, close, momentum, parity, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net, ToyA, X, toy_b

case = pytest.mark.case
layouts = pytest.mark.parametrize("units", [None, [Block]], ids=["automatic", "blocks"])


def two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model, x) + squares(model, x.flip(0) + 1)


def two_backwards(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [squares(model, x), squares(model, x.flip(0) + 1)]


@case("B111")
@on_ranks(2)
@layouts
def test_two_forwards_one_backward(units: Any, stage: int) -> None:
    parity(Task(Net, rows(3), two_forwards), stage=stage, units=units)


@case("B112")
@on_ranks(2)
@layouts
@pytest.mark.parametrize("micro", [(True,), (True, True), (False, True)], ids=["one", "synced", "no_sync"])
def test_two_forwards_then_two_backwards(micro: tuple[bool, ...], units: Any, stage: int) -> None:
    parity(Task(Net, rows(3), two_backwards, micro=micro), stage=stage, units=units)


@on_ranks(2)
@layouts
def test_backwards_in_the_other_order(units: Any, stage: int) -> None:
    parity(Task(Net, rows(3), lambda model, x: two_backwards(model, x)[::-1]), stage=stage, units=units)


@case("B113")
@on_ranks(2)
@layouts
def test_retained_graph(units: Any, stage: int) -> None:
    """Twice the oracle's gradient, which doubling gives exactly."""
    model, optimizer = Task(Net, rows(3)).build(0)
    model, optimizer = zerodp.shard(model, optimizer, stage=stage, units=units)
    loss = squares(model, rows(3)(0, 0, dist.get_rank()))
    loss.backward(retain_graph=True)
    once = {name: gradient.clone() for name, gradient in zerodp.full_grads(model).items()}
    loss.backward()
    all_close("twice", zerodp.full_grads(model), {name: 2 * gradient for name, gradient in once.items()})


@case("B114")
@on_ranks(2)
@layouts
def test_gradient_of_a_gradient(units: Any, stage: int) -> None:
    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x)
        (gradient,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
        return (gradient.norm(dim=1) - 1).pow(2).mean() + out.pow(2).mean()

    parity(Task(Net, rows(3), penalty), stage=stage, units=units)


@on_ranks(2)
def test_gradients_with_respect_to_inputs_only(stage: int) -> None:
    model, optimizer = Task(Net, rows(3)).build(0)
    plain = copy.deepcopy(model)
    model, optimizer = zerodp.shard(model, optimizer, stage=stage, units=[Block])
    x = rows(3)(0, 0, dist.get_rank()).requires_grad_()
    (mine,) = torch.autograd.grad(squares(model, x), x)
    (theirs,) = torch.autograd.grad(squares(plain, x), x)
    close("input gradient", mine, theirs)
    assert zerodp.full_grads(model) == {}


class Stores(nn.Module):
    """Keeps an inner activation on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.rest = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.h = torch.tanh(self.lin(x))
        return self.rest(self.h)


@case("B116")
@on_ranks(2)
@pytest.mark.parametrize("units", [None, [nn.Linear]], ids=["automatic", "layers"])
def test_loss_from_a_tensor_kept_inside(units: Any, stage: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        net: Any = model
        return net.h.pow(2).sum()

    parity(Task(Stores, rows(3), loss), stage=stage, units=units)


class Recomputes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        return torch.tanh(h @ weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        h, weight = ctx.saved_tensors
        inner = gradients[0] * (1 - torch.tanh(h @ weight).pow(2))
        return inner @ weight.t(), h.t() @ inner


class CustomNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(3, 3)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = Recomputes.apply(x, weight)
        return x


@case("B117")
@on_ranks(2)
def test_custom_function_that_recomputes_with_the_weight(stage: int) -> None:
    parity(Task(CustomNet, rows(3)), stage=stage)


class TrainsItself(nn.Module):
    """Computes its loss and calls backward inside its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = toy_b()

    def forward(self, x: Tensor) -> Tensor:
        loss = self.net(x).pow(2).mean()
        loss.backward()
        return loss.detach()


@case("B118")
@on_ranks(2)
def test_backward_inside_forward(stage: int) -> None:
    model = TrainsItself()
    plain = copy.deepcopy(model)
    expected: dict[str, Tensor] = {}
    for rank in range(2):
        plain.zero_grad()
        plain(rows(3)(0, 0, rank))
        for name, p in plain.named_parameters():
            expected[name] = expected.get(name, 0) + p.grad / 2
    model, optimizer = zerodp.shard(model, momentum(model), stage=stage)
    model(rows(3)(0, 0, dist.get_rank()))
    all_close("gradient", zerodp.full_grads(model), expected)
    optimizer.step()


@case("B122")
@on_ranks(2)
@pytest.mark.parametrize("stage", [3], ids="zero{}".format)
def test_deepcopy_of_a_sharded_model_is_an_error(stage: int) -> None:
    model, _ = zerodp.shard(Net(), stage=stage, units=[Block])
    for part in (model, model.blocks[0], model.head.weight):
        with pytest.raises(zerodp.ShardedError, match=r"(deepcopy|copy).*"):
            copy.deepcopy(part)
    assert model(torch.ones(1, 3)).isfinite().all()


@case("B123")
@on_ranks(2)
def test_moving_average_on_shards_and_on_full_values(stage: int) -> None:
    model = ToyA()
    model, optimizer = zerodp.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parts = {(name, at.start): piece.clone() for name, at, piece in zerodp.local_shards(model)}
    model((dist.get_rank() + 1) * X).backward()
    optimizer.step()
    expected = torch.tensor([0.985, 0.97, 0.955, 0.94])
    for name, tensor in model.state_dict().items():
        close("full", whole[name].lerp_(tensor, 0.1), expected, 1e-6)
    for name, at, piece in zerodp.local_shards(model):
        close("shard", parts[name, at.start].lerp_(piece, 0.1), expected[at], 1e-6)


class Visits(nn.Module):
    """Blocks in an order that depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        order = (0, 1, 2, 3) if self.training else (2, 0, 3)
        for index in order:
            x = self.blocks[index](x)
        return x


@case("B124")
@on_ranks(2)
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_evaluation_in_another_order_between_training_steps(prefetch: int, stage: int) -> None:
    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        if step in (2, 4):
            model.eval()
            with torch.no_grad():
                for batch in range(2):
                    assert model(rows(3)(batch, 0, 0)).isfinite().all()
            model.train()

    task = Task(Visits, rows(3), optimizer=adamw, steps=6, between=between)
    parity(task, stage=stage, units=[Block], prefetch=prefetch)


class SharedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.blocks = nn.ModuleList(Block(3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(self.norm(x))
        return x


@case("B125")
@on_ranks(2)
def test_gathered_context_between_steps(stage: int) -> None:
    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        if isinstance(model, zerodp.ShardedModule):
            state = model.state_dict()
            with zerodp.full_params(model), torch.no_grad():
                for name, parameter in model.named_parameters():
                    close(name, parameter.detach().clone(), state[name])
                for _ in range(1 + dist.get_rank()):  # generation of unequal lengths
                    model(torch.ones(1, 3))

    parity(Task(SharedNorm, rows(3), steps=4, between=between), stage=stage, units=[Block, nn.LayerNorm])


@dataclass
class Output:
    hidden: Tensor
    name: str


class OddOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.a(x)
        out = self.b(h)
        return {
            "loss": out.pow(2).mean(),
            "device": x.device,
            "none": None,
            "data": Output(h, "h"),
            "nested": (1, ((out,),)),
        }


@case("B126")
@on_ranks(2)
@pytest.mark.parametrize("part", ["loss", "data", "nested"])
def test_outputs_of_any_type(part: str, stage: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        assert (out["none"], out["device"], out["data"].name) == (None, x.device, "h")
        choice = {"loss": out["loss"], "data": out["data"].hidden.pow(2).mean(), "nested": out["nested"][1][0][0].sum()}
        return choice[part]

    parity(Task(OddOutputs, rows(3), loss), stage=stage, units=[nn.Linear])


class ReturnsLeaves(nn.Module):
    """A parameter and its input come out as they are; neither may keep what one pass hangs on its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.b(self.a(x)), self.a.weight, x


@on_ranks(2)
def test_leaves_among_the_outputs(stage: int) -> None:
    given: dict[int, Tensor] = {}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        mine = given.setdefault(isinstance(model, zerodp.ShardedModule), torch.ones(4, 3, requires_grad=True))
        out, weight, _ = model(x + mine)
        assert weight is model.a.weight
        out = out.pow(2).mean() + model(mine)[2].mean()
        return out + weight.pow(2).mean() if stage < 3 else out

    parity(Task(ReturnsLeaves, rows(3), loss), stage=stage)


@on_ranks(2)
def test_inputs_of_any_type(stage: int) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 2)

        def forward(self, batch: dict[str, Any], *, scale: float, data: Output | None = None) -> Tensor:
            assert data is not None
            return self.lin(batch["x"][0]) * scale + self.lin(data.hidden)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model({"x": [x]}, scale=2.0, data=Output(x, "x")).pow(2).mean()

    parity(Task(Takes, rows(3), loss), stage=stage, units=[nn.Linear])


@on_ranks(2)
@layouts
def test_exception_in_forward_leaves_no_trace(units: Any, stage: int) -> None:
    """The error passes through; the next steps are right."""

    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 1:
                self.blocks[0](self.emb(x))
                raise ValueError("bad batch")
            return super().forward(x)

    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        if step == 1:
            with pytest.raises(ValueError, match="bad batch"):
                model(torch.ones(1, 3))

    parity(Task(Fails, rows(3), between=between, steps=3), stage=stage, units=units)


@on_ranks(2)
@layouts
def test_forward_whose_graph_is_dropped(units: Any, stage: int) -> None:
    """A loss that is only looked at, in grad mode, between training steps."""

    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        assert squares(model, torch.ones(2, 3)).isfinite()

    parity(Task(Net, rows(3), between=between, steps=3), stage=stage, units=units)


# ---- a backward inside a forward


class Force(nn.Module):
    """The gradient of an inner network with respect to its input is a feature."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.energy = Block(width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(inner).square().sum(), inner)
        return x + self.energy(x) + torch.tanh(force)


class Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.force, self.last = nn.Linear(3, 6), Force(), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(Block(6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.force(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


@on_ranks(2)
@pytest.mark.parametrize("units", [None, [Block], [Force], [nn.Linear]], ids=["automatic", "blocks", "force", "layers"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_backward_inside_forward(prefetch: int, units: Any) -> None:
    """What the forward has on its way already is still there when its turn comes."""
    parity(Task(Forces, rows(3)), stage=3, units=units, prefetch=prefetch)


class Returning(Net):
    """Gives its input back, or a part of it, in a container that holds itself."""

    def forward(self, x: Tensor) -> Any:
        given: dict[str, Any] = {"input": x, "part": x[:1]}
        given["given"] = given
        return super().forward(x), given


@on_ranks(2)
def test_an_input_that_comes_out_is_none_of_the_models(stage: int) -> None:
    """It was made before the first step, and lives on."""
    torch.manual_seed(0)
    model: Any = Returning()
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[Block])
    latent = torch.ones(3, requires_grad=True)
    made = latent.expand(4, -1)
    for _ in range(3):
        out, given = model(made)
        (out.square().mean() + given["input"].mean()).backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    assert not made._backward_hooks
