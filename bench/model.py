"""The one model, text and batches that every method is measured on: a plain GPT in ordinary torch modules."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """A pre-norm transformer block of 12 parameters."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.ln2(x))))
        return out


class GPT(nn.Module):
    def __init__(self, vocab: int = 256, dim: int = 512, layers: int = 8, heads: int = 8, ctx: int = 256) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(ctx, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.ln(x))
        return logits


def text(limit: int = 4_000_000) -> torch.Tensor:
    """Real text that every machine has, as bytes: the Python standard library's own source."""
    parts: list[bytes] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(path.read_bytes())
        limit -= len(parts[-1])
        if limit <= 0:
            break
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def batches(rank: int, rows: int, ctx: int) -> Iterator[Batch]:
    """This rank's batches of `rows` x `ctx` byte tokens and their successors, without end, the same in every run."""
    data, generator = text(), torch.Generator().manual_seed(1000 + rank)
    while True:
        starts = torch.randint(len(data) - ctx - 1, (rows,), generator=generator)
        tokens = torch.stack([data[i : i + ctx + 1] for i in starts]).long()
        yield tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
