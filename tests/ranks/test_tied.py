"""One parameter under several names: trained once, and there under every name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import Task, adamw, all_close, parity, rows
from tests.ranks.pool import on_ranks

case = pytest.mark.case
units = pytest.mark.parametrize("units", [None, [nn.Linear]], ids=["whole", "layers"])


class Three(nn.Module):
    """Three weights of one shape; the second and the third are one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(5, 5) for _ in range(3))
        self.third.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.third):
            x = torch.tanh(layer(x))
        return x


@case("B70", "B71")
@on_ranks(2)
@units
def test_state_dict_has_both_names_and_loads_strictly(units: Any, stage: int) -> None:
    records = parity(Task(Three, rows(5)), stage=stage, units=units)
    task = Task(Three, rows(5))
    model, _ = zerodp.shard(task.build(0)[0], stage=stage, units=units)
    state = model.state_dict()
    torch.testing.assert_close(state["third.weight"], state["second.weight"], rtol=0, atol=0)
    assert not torch.equal(state["third.weight"], state["first.weight"])
    plain = Three()
    plain.load_state_dict(state, strict=True)
    assert plain.third.weight is plain.second.weight
    model.load_state_dict(records[-1].parameters, strict=True)
    all_close("loaded", dict(model.state_dict()), records[-1].parameters)


@case("B70")
@on_ranks(2)
def test_full_state_dict_has_both_names(stage: int) -> None:
    model, _ = zerodp.shard(Three(), stage=stage)
    state = zerodp.full_state_dict(model, rank0_only=False)
    assert list(state) == list(Three().state_dict())
    torch.testing.assert_close(state["third.weight"], state["second.weight"], rtol=0, atol=0)


class Odd(nn.Module):
    """A parameter of 7 elements, then one that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.seven = nn.Parameter(torch.linspace(0.5, 1.5, 7))
        self.wide = nn.Linear(7, 7)
        self.tied = nn.Linear(7, 7)
        self.tied.weight = self.wide.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(torch.tanh(self.wide(x * self.seven)))


@case("B72")
@on_ranks(2)
@pytest.mark.parametrize("bucket_bytes", [4, 512, None])
@units
def test_shared_weight_beside_an_odd_one(bucket_bytes: int | None, units: Any, stage: int) -> None:
    task = Task(Odd, rows(7), optimizer=adamw, micro=(True, True))
    records = parity(task, stage=stage, bucket_bytes=bucket_bytes, units=units)
    model, _ = zerodp.shard(Odd(), stage=stage, bucket_bytes=bucket_bytes, units=units)
    model.load_state_dict(records[-1].parameters)
    all_close("loaded", dict(model.state_dict()), records[-1].parameters)


@case("B73")
@on_ranks(2)
def test_two_values_for_one_weight_name_both(stage: int) -> None:
    model, _ = zerodp.shard(Three(), stage=stage)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    crooked = {name: tensor.clone() for name, tensor in before.items()}
    crooked["third.weight"] += 1
    with pytest.raises(zerodp.ZeroError, match=r"second\.weight.*third\.weight"):
        model.load_state_dict(crooked)
    all_close("unchanged", dict(model.state_dict()), before)


class Readout(nn.Module):
    """A language model's tie: the head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(11, 6)
        self.body = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for layer in self.body:
            x = torch.tanh(layer(x))
        return self.head(x)


@on_ranks(2, 3)
@pytest.mark.parametrize(
    "units", [None, [nn.Linear], ["tok", "body.*", "head"]], ids=["automatic", "layers", "all apart"]
)
def test_embedding_and_head(units: Any, stage: int, world_size: int) -> None:
    def batch(step: int, micro: int, rank: int) -> Tensor:
        return torch.randint(11, (2, 4), generator=torch.Generator().manual_seed(step * 9 + micro * 3 + rank))

    task = Task(Readout, batch, optimizer=adamw, micro=(False, True))
    parity(task, stage=stage, units=units, tolerance=0.0 if world_size == 2 else 1e-6)


@on_ranks(2)
def test_tied_weight_is_one_parameter_afterwards(stage: int) -> None:
    model, optimizer = zerodp.shard(Three(), stage=stage)
    assert optimizer is None
    assert model.third.weight is model.second.weight
    names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in Three().named_parameters()]
    model, _ = zerodp.unshard(model)
    assert model.third.weight is model.second.weight
