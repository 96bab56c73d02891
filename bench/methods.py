"""What is measured: each method turns the same model into something that trains it one step at a time.

A method differs from its neighbours only in how state is kept and moved: the model, the batches, the fused AdamW and
the loss are the same, every backward is reduced at once, and nothing clips (DeepSpeed's default clips at 1.0).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from model import GPT, Batch, loss_of


@dataclass(frozen=True)
class Workload:
    """What one run trains, and for how long."""

    dim: int = 768
    layers: int = 12
    ctx: int = 256
    bsz: int = 1
    accum: int = 1
    dtype: str = "fp32"
    steps: int = 8
    warmup: int = 3

    @property
    def low(self) -> torch.dtype | None:
        return torch.bfloat16 if self.dtype == "bf16" else None

    def model(self) -> GPT:
        torch.manual_seed(0)
        return GPT(dim=self.dim, layers=self.layers, ctx=self.ctx)

    @property
    def numel(self) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in self.model().parameters())


@dataclass
class Trainer:
    """The ordinary training step. `autocast` stands in for mixed precision where the method has none of its own."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    work: Workload
    autocast: bool = False

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        low = self.autocast and self.work.low is not None
        with torch.autocast("cpu", torch.bfloat16) if low else contextlib.nullcontext():
            logits = self.model(x)
        return loss_of(logits, y)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.work.accum).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Trains on all micro-batches; the last one's loss."""
        for x, y in micro_batches:
            loss = self.forward(x, y)
            self.backward(loss)
        self.update()
        return loss.detach()


@dataclass(frozen=True)
class Method:
    label: str
    build: Callable[[GPT, Workload], Trainer]
    module: str = "torch"  # imported before memory is first read; the method is skipped where it is missing
    exact: bool = True  # False: a limit, whose weights are not those of data-parallel training


ADAM: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.1, "fused": True}


def _adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **ADAM)


def _zerodp(model: GPT, work: Workload, stage: int, kept: float = 0.0) -> Trainer:
    """kept: the part of the parameters that stays gathered from forward to backward."""
    import zerodp

    options: dict[str, Any] = {"precision": work.dtype} if work.low else {}
    if kept:
        options["unsharded_bytes"] = int(kept * work.numel * (work.low or torch.float32).itemsize)
    return Trainer(*zerodp.shard(model, _adam(model.parameters()), stage=stage, **options), work)


def _ddp(model: GPT, work: Workload) -> Trainer:
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Trainer(wrapped, _adam(wrapped.parameters()), work, autocast=True)


def _zero_redundancy(model: GPT, work: Workload) -> Trainer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, **ADAM)
    return Trainer(wrapped, optimizer, work, autocast=True)


def _fsdp2(model: GPT, work: Workload, reshard: bool) -> Trainer:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=work.low, reduce_dtype=work.low)
    for module in (*model.blocks, model):
        fully_shard(module, reshard_after_forward=reshard, mp_policy=policy)
    return Trainer(model, _adam(model.parameters()), work)


class _DeepSpeedTrainer(Trainer):
    """DeepSpeed's engine divides by the micro-batches itself, and counts them in `step`."""

    def backward(self, loss: torch.Tensor) -> None:
        engine: Any = self.model
        engine.backward(loss)
        engine.step()

    def update(self) -> None:
        """Done by the last micro-batch's `engine.step`."""


def _deepspeed(model: GPT, work: Workload, stage: int) -> Trainer:
    deepspeed: Any = importlib.import_module("deepspeed")
    config = {
        "train_micro_batch_size_per_gpu": work.bsz,
        "gradient_accumulation_steps": work.accum,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_scatter": True},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": work.low is not None},
        "steps_per_print": 10**9,
    }
    optimizer = _adam(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return _DeepSpeedTrainer(engine, optimizer, work)


def _local(model: GPT, work: Workload) -> Trainer:
    return Trainer(model, _adam(model.parameters()), work, autocast=True)


class _PartTrainer(Trainer):
    """Forward and backward as ever, but AdamW over the first 1/N of each parameter: a sharded step on a free wire."""

    def __init__(self, model: GPT, work: Workload) -> None:
        world = dist.get_world_size()
        self.full = list(model.parameters())
        self.parts = [p.detach().flatten()[: -(-p.numel() // world)].requires_grad_() for p in self.full]
        super().__init__(model, _adam(self.parts), work, autocast=True)

    def update(self) -> None:
        for part, p in zip(self.parts, self.full, strict=True):
            assert p.grad is not None
            part.grad, p.grad = p.grad.flatten()[: part.numel()], None
        super().update()


METHODS: dict[str, Method] = {
    **{f"zerodp{s}": Method(f"zerodp stage {s}", partial(_zerodp, stage=s), "zerodp") for s in range(4)},
    "zerodp3-keep": Method("zerodp stage 3, a quarter kept", partial(_zerodp, stage=3, kept=0.25), "zerodp"),
    "ddp": Method("DDP", _ddp),
    "zro": Method("ZeroRedundancyOptimizer", _zero_redundancy),
    "fsdp2": Method("FSDP2", partial(_fsdp2, reshard=True)),
    "fsdp2-keep": Method("FSDP2, resharding late", partial(_fsdp2, reshard=False)),
    **{f"deepspeed{s}": Method(f"DeepSpeed ZeRO-{s}", partial(_deepspeed, stage=s), "deepspeed") for s in (1, 2, 3)},
    "local": Method("no communication", _local, exact=False),
    "local-part": Method("no communication, 1/N of AdamW", _PartTrainer, exact=False),
}
