"""Small real models, each with the inputs of one step and the loss of its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Family(NamedTuple):
    make: Callable[[], nn.Module]
    inputs: Any
    loss: Callable[[Any], Tensor] | None = None


def checkpoint_by_torch(model: Any) -> None:
    name = "activation_checkpointing_enable"  # "gradient_" in older releases of transformers
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")({"use_reentrant": False})


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm_one, self.norm_two = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_one(self.one(x)))
        return F.relu(x + self.norm_two(self.two(y)))


class ResNet(nn.Module):
    """A stem, residual blocks of two convolutions with batch norms, and a linear head."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)
        self.checkpoints = False

    def activation_checkpointing_enable(self, options: Any) -> None:
        self.checkpoints = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


IDS = torch.arange(2 * 64).view(2, 64) % 200
IMAGES = torch.linspace(-1, 1, 8 * 3 * 32 * 32).view(8, 3, 32, 32)
LABELS = torch.arange(8)
SIZES = {"vocab_size": 200, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT = {"input_ids": IDS, "labels": IDS}


def vit() -> nn.Module:
    sizes = {**SIZES, "intermediate_size": 512, "image_size": 32, "patch_size": 4, "num_labels": 10}
    del sizes["vocab_size"]
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes))


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=200, n_positions=64, n_embd=128, n_layer=3, n_head=4, use_cache=False)
        ),
        TEXT,
    ),
    "llama": Family(
        lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(
                **SIZES, intermediate_size=256, num_key_value_heads=2, max_position_embeddings=64, use_cache=False
            )
        ),
        TEXT,
    ),
    "t5": Family(
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=200,
                d_model=128,
                d_kv=32,
                d_ff=256,
                num_layers=2,
                num_heads=4,
                use_cache=False,
                decoder_start_token_id=0,
            )
        ),
        TEXT,
    ),
    "vit": Family(vit, {"pixel_values": IMAGES, "labels": LABELS}),
    "resnet": Family(ResNet, (IMAGES,), lambda logits: F.cross_entropy(logits, LABELS)),
}
