"""The model of the quick start: a plain GPT in ordinary torch modules. It knows nothing of sharding."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # bytes
HEAD_WIDTH = 64


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of `logits` [batch, length, vocabulary], in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def counting(batch: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets [batch, length] that need no text: one byte after the other."""
    tokens = torch.arange(batch * (length + 1), device=device).remainder(VOCABULARY).view(batch, length + 1)
    return tokens[:, :-1], tokens[:, 1:]


class Rotary(nn.Module):
    """Positions as rotations of queries and keys."""

    cos: Tensor  # [context, HEAD_WIDTH / 2]
    sin: Tensor

    def __init__(self, context: int) -> None:
        super().__init__()
        half = HEAD_WIDTH // 2
        angles = torch.outer(torch.arange(context).float(), 10_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Block(nn.Module):
    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.rotary = Rotary(context)
        self.heads = width // HEAD_WIDTH
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, HEAD_WIDTH)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, HEAD_WIDTH]
        y = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        x = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x


class GPT(nn.Module):
    """Bytes in, the next byte's logits out."""

    def __init__(self, depth: int, width: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, context) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self._initialise(depth)

    def _initialise(self, depth: int) -> None:
        """GPT-2's: normal(0.02), and what adds to the residual stream smaller by the number of additions."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, generator: torch.Generator, temperature: float = 0.7) -> bytes:
        """`prompt` and `count` bytes more, drawn one after another."""
        device = self.tokens.weight.device
        tokens = list(prompt)
        for _ in range(count):
            window = torch.tensor([tokens[-self.context :]], device=device)
            chances = torch.softmax(self(window)[0, -1].float().cpu() / temperature, dim=0)
            tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
        return bytes(tokens)


def parameter_count(depth: int, width: int) -> int:
    """Parameters of a `GPT` of this shape, counted without making one."""
    block = 12 * width * width + 13 * width
    return depth * block + 2 * VOCABULARY * width + 2 * width


def shape_for(parameters: int) -> tuple[int, int]:
    """(depth, width) of the GPT nearest to `parameters`: width a multiple of 64, 32 to 128 times the depth."""

    def shapes() -> Iterator[tuple[int, int]]:
        width = HEAD_WIDTH
        while parameter_count(max(1, width // 128), width) < 4 * parameters or width == HEAD_WIDTH:
            yield from ((depth, width) for depth in range(max(1, width // 128), width // 32 + 1))
            width += HEAD_WIDTH

    return min(shapes(), key=lambda shape: (abs(parameter_count(*shape) - parameters), shape))
