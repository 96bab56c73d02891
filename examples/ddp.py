"""A script for DistributedDataParallel, and what to change for ZeRO: one line, and a second where gradients are clipped.

    torchrun --nproc-per-node 2 examples/ddp.py

The changes are the comments that begin with "ZeRO:". The losses stay the same.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import zerodp  # noqa: F401 (used once the lines are changed)


def batches(steps: int, micro_batches: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [[torch.randn(8, 6, generator=generator) for _ in range(micro_batches)] for _ in range(steps)]


def train(steps: int = 12, micro_batches: int = 2) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of this rank, and the weights."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 6))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / 4, 1.0))
    model = DistributedDataParallel(net)  # ZeRO: model, optimizer = zerodp.shard(net, optimizer, stage=3)
    losses = []
    for micros in batches(steps, micro_batches):
        for number, x in enumerate(micros, 1):
            with model.no_sync() if number < micro_batches else contextlib.nullcontext():
                loss = (model(x) - x).pow(2).mean() / micro_batches
                loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)  # ZeRO: optimizer.clip_grad_norm_(0.05)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses, net.state_dict()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses, _ = train()
    if dist.get_rank() == 0:
        print("\n".join(f"step {step}: loss {loss:.4f}" for step, loss in enumerate(losses[::2])))
    dist.destroy_process_group()
