"""The GPT that a `Shape` stands for, as a module on the meta device, with the inputs of one step: what is simulated for a shape."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import Config
from ..errors import ConfigError
from .models import CUTS, Shape
from .traced import Step


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, width of a head]
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(found.transpose(1, 2).reshape(batch, length, hidden))
        return result


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return result


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(hidden, heads), MLP(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        result: Tensor = x + self.mlp(x)
        return result


class GPT(nn.Module):
    """Learned positions, and an output layer tied to the embeddings."""

    def __init__(self, shape: Shape, sequence: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(shape.vocabulary, shape.hidden), nn.Embedding(sequence, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape.hidden, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def gpt_step(shape: Shape, batch: int, sequence: int | None, cut: str, precision: Any) -> Step:
    """
    Raises:
        ConfigError: a shape that lacks what a module needs.
    """
    length = sequence or shape.sequence
    if not shape.vocabulary or not length:
        raise ConfigError("simulate: a shape needs a vocabulary and a sequence to become a module")
    with torch.device("meta"):
        model = GPT(shape, shape.sequence or length)
    ids = torch.zeros(batch, length, dtype=torch.long)

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())

    units = ["blocks.*" + name for name in CUTS[cut]] if cut != "block" else [Block]
    return Step(model, ids, loss, Config(precision=precision, units=units))
