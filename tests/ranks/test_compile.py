"""torch.compile around and inside sharded models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerodp
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net

case = pytest.mark.case
STEPS = 3


def data(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 3, generator=generator) for _ in range(STEPS)]


def oracle() -> dict[str, Tensor]:
    """Both ranks' batches through one plain model, uncompiled."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batches in zip(data(0), data(1), strict=True):
        for batch in batches:
            (model(batch).pow(2).mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(model: Any, optimizer: Any, forward: Any) -> dict[str, Tensor]:
    for batch in data(torch.distributed.get_rank()):
        forward(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()  # type: ignore[no-any-return]


def sharded(model: nn.Module, stage: int) -> tuple[Any, Any]:
    return zerodp.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, units=[Block])


def check(got: dict[str, Tensor]) -> None:
    wanted = oracle()
    assert list(got) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


@on_ranks(2)
@case("B108")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_compiled_blocks(before: bool, backend: str, stage: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Net()
    if before:
        for block in model.blocks:
            block.compile(backend=backend)
    model, optimizer = sharded(model, stage)
    if not before:
        for block in model.blocks:
            block.compile(backend=backend)
    check(train(model, optimizer, model))


@on_ranks(2)
@case("B108")
def test_compiled_model(stage: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, optimizer = sharded(Net(), stage)
    check(train(model, optimizer, torch.compile(model, backend="aot_eager")))


@on_ranks(2)
@case("B109")
def test_keys_are_plain_under_compile_and_checkpoint(stage: int) -> None:
    """Whatever wraps it, a state dict goes strictly into the plain model and back."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, optimizer = sharded(Net(), stage)
    for block in model.blocks:
        block.compile(backend="eager")
    compiled = torch.compile(model, backend="eager")
    state = train(model, optimizer, lambda x: checkpoint(compiled, x, use_reentrant=False))
    check(state)
    plain = Net()
    plain.load_state_dict(state, strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)
