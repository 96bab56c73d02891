"""A GPT with data and tensor parallelism: torch splits the layers over the dim "tp", ZeRO shards what is left over the dim "dp".

    torchrun --nproc-per-node 4 examples/megatron_gpt.py --tp 2 --stage 3

Attention and MLP are split by columns and then by rows, norms and residuals by the sequence, the embedding and the loss by the
vocabulary. The text is this file.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import zerodp


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # As many heads as this rank has columns of.
        q, k, v = (part(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.mlp_norm, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Ordinary modules; nothing here knows of ranks."""

    def __init__(self, vocabulary: int, context: int, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.05)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelize(model: GPT, tp: DeviceMesh) -> GPT:
    """Megatron's way to split a GPT. Between the layers each rank has a part of the sequence, inside them a part of the columns."""
    block = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{f"attention.{part}": ColwiseParallel() for part in "qkv"},
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for part in model.blocks:
        parallelize_module(part, tp, block)
    parallelize_module(
        model,
        tp,
        {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    model.head.weight = model.tokens.weight  # parallelize_module has made two of it
    return model


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of a batch [sequences, length + 1]; backward too must run inside `loss_parallel()`, if the vocabulary is split."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="ranks that share each layer (default: %(default)s)")
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step on each data-parallel rank")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16", "fp16"))
    parser.add_argument(
        "--checkpoint", action="store_true", help="keep the blocks' inputs only, split over the tp ranks"
    )
    parser.add_argument("--save", help="a folder for the last checkpoint, which any other --tp loads")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    shape = (dist.get_world_size() // options.tp, options.tp)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "tp"))

    torch.manual_seed(0)  # the same weights everywhere before they are split
    model = parallelize(GPT(256, options.context).to(device), mesh["tp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if options.checkpoint:  # of what the tensor-parallel ranks all have the same, each keeps a part
        model = zerodp.apply_activation_checkpointing(model, units=[Block], partition=mesh["tp"])
    model, optimizer = zerodp.shard(
        model, optimizer, stage=options.stage, mesh=mesh["dp"], precision=options.precision, units=[Block]
    )
    if dist.get_rank() == 0:
        print(zerodp.describe(model))

    text = torch.tensor(list(Path(__file__).read_bytes()))
    # Ranks of one tp group see the same batches, ranks along dp see different ones.
    generator = torch.Generator().manual_seed(1 + mesh.get_local_rank("dp"))
    for step in range(options.steps):
        starts = torch.randint(len(text) - options.context - 1, (options.batch, 1), generator=generator)
        batch = text[starts + torch.arange(options.context + 1)].to(device)
        with loss_parallel():
            loss = next_token_loss(model, batch)
            optimizer.backward(loss)
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == options.steps - 1:
            value = loss.detach().full_tensor().item()
            if dist.get_rank() == 0:
                print(f"step {step:4}  loss {value:.4f}  gradient norm {norm:.4f}", flush=True)
    if options.save:
        zerodp.save(options.save, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
