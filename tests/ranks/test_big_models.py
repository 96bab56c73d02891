"""Models without values: built on the meta device and initialised, or read from safetensors files, unit by unit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from bench.model import GPT
from tests.ranks.oracle import adamw, all_close, close, copied, squares
from tests.ranks.pool import on_ranks
from tests.ranks.test_models import gpt2, language_loss, llama, resnet, tokens
from tests.ranks.toys import Block, Net


def mixed() -> nn.Module:
    """Modules of all kinds in one sequence, some too small to be units."""
    return nn.Sequential(
        nn.Embedding(40, 12, padding_idx=3),
        nn.Linear(12, 12),
        nn.LayerNorm(12),
        nn.MultiheadAttention(12, 2),
        nn.LSTM(12, 6),
        nn.Sequential(nn.Linear(12, 24, dtype=torch.float64), nn.PReLU()),
        nn.BatchNorm1d(12),
    )


class Applied(Net):
    """Initialised by a method that is applied to all its modules after construction, with tied weights."""

    def __init__(self) -> None:
        super().__init__(width=8)
        self.out = nn.Linear(3, 8, bias=False)
        self.out.weight = self.emb.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.1)


class Tied(nn.Module):
    """The second module's own weights were drawn and thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(self.emb(ids))))
        return out


def gpt() -> nn.Module:
    return GPT(vocab=50, dim=16, layers=3, heads=2, ctx=8)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixed": mixed,
    "net": Net,
    "applied": Applied,
    "tied": Tied,
    "gpt": gpt,
    "resnet": resnet,
    "gpt2": gpt2,
    "llama": llama,
}


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def everything(model: nn.Module) -> dict[str, Tensor]:
    """State dict and non-persistent buffers."""
    return {**copied(dict(model.state_dict())), **copied(dict(model.named_buffers()))}


@on_ranks(2)
@pytest.mark.parametrize("model", MODELS)
def test_values_are_those_of_an_ordinary_construction(model: str) -> None:
    """To the last bit, at every stage, the random state after it too; whatever the seeds of other ranks."""
    torch.manual_seed(5)
    expected = everything(MODELS[model]())
    torch.manual_seed(5 + dist.get_rank())
    MODELS[model]()
    state = torch.get_rng_state()
    for stage in range(4):
        torch.manual_seed(5 + dist.get_rank())
        net = on_meta(MODELS[model])
        names = {id(p): name for name, p in net.named_parameters()}
        net, _ = zerodp.shard(net, stage=stage)
        assert torch.equal(torch.get_rng_state(), state)
        assert {id(p): name for name, p in net.named_parameters()} == names
        all_close(f"stage {stage}", everything(net), expected)
