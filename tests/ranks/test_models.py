"""Models of transformers, with random weights, equal to plain torch at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import zerodp
from tests.ranks.pool import on_ranks

STEPS, VOCAB = 3, 32


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )  # fmt: skip


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    )  # fmt: skip


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            num_local_experts=4, num_experts_per_tok=1,
        )
    )  # fmt: skip


def loss_of(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))


@on_ranks(2)
@pytest.mark.parametrize("make", [gpt2, llama, mixtral], ids=["gpt2", "llama", "mixtral"])
def test_equal_to_plain_torch(make: Any, stage: int) -> None:
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    model = make()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model, optimizer = zerodp.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage)
    assert len(zerodp.describe(model).splitlines()) > 3
    for step in range(STEPS):
        losses = [loss_of(plain, batch(step, r)) for r in range(2)]
        for loss in losses:
            (loss / 2).backward()
        reference.step()
        reference.zero_grad()
        mine = loss_of(model, batch(step, rank))
        assert torch.equal(mine.detach(), losses[rank].detach())
        mine.backward()
        optimizer.step()
        optimizer.zero_grad()
    got = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(got[name], value), name
