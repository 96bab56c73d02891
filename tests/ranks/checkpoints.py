"""A model with everything that is hard to keep, and runs of it that the tests of checkpoints share.

The gradients do not depend on the number of ranks: only rank 0's loss counts, and the ranks' gradients are summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerodp

Values = dict[str, Any]


class Odd(nn.Module):
    """Tied weights, a channels-last kernel, buffers, a 0-dim and an empty parameter, one that is frozen, one without a use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.norm = nn.BatchNorm1d(6)
        self.kernel = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.late = nn.Linear(6, 11)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Parameter(torch.randn(5))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        x = x + self.frozen(x) * self.scale + self.late(x).mean()
        picture = torch.linspace(-1, 1, 50).view(1, 2, 5, 5).to(x.dtype)
        out: Tensor = self.head(x).float().pow(2).mean() + self.kernel(picture).float().mean() + self.empty.sum()
        return out


@dataclass(frozen=True)
class Run:
    """How a model is sharded."""

    stage: int
    world_size: int
    hybrid: bool = False
    precision: str | None = None

    def __str__(self) -> str:
        return f"zero{self.stage}-world{self.world_size}{'-hybrid' if self.hybrid else ''}-{self.precision or 'fp32'}"

    def build(self, seed: int = 0, lr: float = 0.01) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = Odd()
        optimizer = torch.optim.AdamW(groups(model), lr=lr)
        shape = (2, self.world_size // 2) if self.hybrid else (self.world_size,)
        names = ("replicate", "shard") if self.hybrid else ("shard",)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        return zerodp.shard(
            model, optimizer, stage=self.stage, mesh=mesh, precision=self.precision, reduction="sum", bucket_bytes=2048
        )


def groups(model: Odd) -> list[dict[str, Any]]:
    """Two groups, neither in the order of the model."""
    decayed = [model.late.weight, model.embedding.weight, model.kernel.weight, model.scale]
    others = [p for p in reversed(list(model.parameters())) if all(p is not d for d in decayed)]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02, "weight_decay": 0.0}]


def step(model: Any, optimizer: Any, number: int) -> None:
    tokens = torch.randint(13, (8,), generator=torch.Generator().manual_seed(number))
    loss = model(tokens) * float(dist.get_rank() == 0)
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def values(model: Any, optimizer: Any) -> Values:
    """Everything that must survive, whole: a collective. Masters, not what computes."""
    masters: dict[str, Tensor] = {}
    for name, where, piece in zerodp.local_shards(model):
        numel = model.get_parameter(name).numel()
        masters.setdefault(name, torch.zeros(numel, dtype=piece.dtype))[where] = piece.detach()
    whole = zerodp.full_state_dict(model, rank0_only=False)
    names = {name for name, _ in model.named_parameters()}
    found: Values = {f"buffer {key}": value for key, value in whole.items() if key not in names}
    for name in sorted(names):
        mine = masters.get(name, torch.zeros(0))
        found[f"master {name}"] = joined(mine, model.get_parameter(name).numel())
    state = optimizer.state_dict()
    for name, entries in state["state"].items():
        found.update({f"{key} of {name}": value.clone() for key, value in entries.items()})
    found["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]]
    return found


def joined(mine: Tensor, numel: int) -> Tensor:
    """The ranks' parts of a parameter put together; where several hold an element they hold the same."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    parts = torch.stack([part if part.numel() else torch.zeros(numel) for part in everyone])
    return parts.gather(0, parts.abs().argmax(0, keepdim=True)).squeeze(0) if numel else torch.zeros(0)


def same(what: str, got: Values, expected: Values) -> None:
    assert got.keys() == expected.keys(), f"{what}: {sorted(got.keys() ^ expected.keys())}"
    for key, value in expected.items():
        if isinstance(value, Tensor):
            assert torch.equal(got[key], value), f"{what}: {key}"
        else:
            assert got[key] == value, f"{what}: {key}"


def saved(runs: list[Run], folder: Path) -> dict[str, tuple[Values, Values]]:
    """Train two steps, save, train a third: what was saved, and what came after it."""
    found = {}
    for run in runs:
        model, optimizer = run.build()
        step(model, optimizer, 0)
        model.late.requires_grad_(False)  # frozen from here on, with moments
        step(model, optimizer, 1)
        zerodp.save(folder / str(run), model, optimizer, extra={"epoch": 3, "run": str(run)})
        then = values(model, optimizer)
        step(model, optimizer, 2)
        found[str(run)] = (then, values(model, optimizer))
    return found if dist.get_rank() == 0 else {}


def loaded(pairs: list[tuple[Run, str]], folder: Path) -> list[tuple[Values, Values, Any]]:
    """Load into a model that began elsewhere, and train one step more."""
    found = []
    for run, name in pairs:
        model, optimizer = run.build(seed=5, lr=0.5)
        model.late.requires_grad_(False)
        extra = zerodp.load(folder / name, model, optimizer)
        then = values(model, optimizer)
        step(model, optimizer, 2)
        found.append((then, values(model, optimizer), extra))
    return found if dist.get_rank() == 0 else []
