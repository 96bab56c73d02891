"""The training itself: a model, an optimizer and text, step by step, the same for every stage."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import zerodp

from ...core.access import runtime_of
from .gpt import GPT, loss_of, shape_for
from .settings import Settings
from .text import Corpus

CLIP = 1.0
FLOOR = 0.1  # the learning rate ends at this part of its height
VALIDATION_WINDOWS = 32  # at least; spread over the ranks


class Stop(enum.IntEnum):
    """Why all ranks end before the last step; signals have their own numbers."""

    NO = 0
    TIME = 1


@dataclass
class Record:
    """One step, as it stands in the log. Bytes are this rank's, except `memory_bytes`: the most that any rank holds."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    wire_bytes: int
    memory_bytes: int
    peak_bytes: int
    memory: dict[str, int]
    seconds: float  # since the run began, earlier parts of it included
    validation_loss: float | None = None


def build(settings: Settings, device: torch.device, **options: object) -> tuple[Any, zerodp.ShardedOptimizer]:
    """The model and optimizer of a run, sharded; `options` override those of the settings."""
    torch.manual_seed(settings.seed)
    model = GPT(*shape_for(settings.params), settings.context)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    choices: dict[str, Any] = {
        "stage": settings.stage,
        "precision": settings.precision,
        "offload": settings.places(),
        "device": device,
    }
    return zerodp.shard(model, optimizer, **{**choices, **options})


def learning_rate(settings: Settings, step: int) -> float:
    """Of step 1, 2, ...: a straight rise over the first twentieth, then half a cosine down to a tenth."""
    warmup = max(1, settings.steps // 20)
    done = (step - warmup) / max(1, settings.steps - warmup)
    falling = FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * max(0.0, done)))
    return settings.lr * min(1.0, step / warmup) * falling


class Trainer:
    """Runs steps on this rank; every method is called by all ranks together."""

    def __init__(self, settings: Settings, corpus: Corpus, device: torch.device, rank: int) -> None:
        self.settings, self.corpus, self.device, self.rank = settings, corpus, device, rank
        self.model, self.optimizer = build(settings, device)
        self.stats = zerodp.stats(self.model)
        self.step = 0
        self.began = 0.0

    def begin(self, step: int, seconds: float) -> None:
        """Start the clock: so many steps are done, which took so long."""
        self.step, self.began = step, time.monotonic() - seconds

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def train_step(self, stop: int) -> tuple[Record, int]:
        """One optimizer step. `stop` says why this rank wants to end (0: it does not), the result why all do."""
        settings, began = self.settings, time.monotonic()
        wire = self.stats.wire_bytes
        self.step += 1
        rate = learning_rate(settings, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros((), device=self.device)
        for starts, weight in self._parts():
            loss = self._loss(starts) * weight
            self.optimizer.backward(loss)
            total += loss.detach()
        norm = self.optimizer.clip_grad_norm_(CLIP)
        self.optimizer.step()
        memory = self.stats.memory
        self.optimizer.zero_grad()
        rows = self.exchange([total.item(), float(stop), float(memory.total_now)])
        record = Record(
            step=self.step,
            loss=rows[:, 0].mean().item(),
            learning_rate=rate,
            gradient_norm=norm,
            tokens_per_second=settings.windows * settings.context / (time.monotonic() - began),
            wire_bytes=self.stats.wire_bytes - wire,
            memory_bytes=int(rows[:, 2].max()),
            peak_bytes=memory.total_peak,
            memory=memory.now,
            seconds=self.seconds,
        )
        return record, int(rows[:, 1].max())

    def validate(self, windows: int = VALIDATION_WINDOWS) -> float:
        """Mean loss per byte on held-out text: at least so many windows, the same every time."""
        per_rank = math.ceil(windows / (self.settings.ranks * self.settings.batch)) * self.settings.batch
        starts = self.corpus.validation_starts(per_rank * self.settings.ranks, self.settings.context)
        mine = starts[self.rank :: self.settings.ranks].split(self.settings.batch)
        with torch.no_grad():
            loss = sum(self._loss(part).item() for part in mine) / len(mine)
        return self.exchange([loss])[:, 0].mean().item()

    def exchange(self, values: list[float]) -> Tensor:
        """Every rank's `values`, [ranks, len(values)]."""
        message = torch.tensor(values, dtype=torch.float64)
        rows: Tensor = runtime_of(self.model).comm.exchange(message, "the other ranks' report of the step").wait()
        return rows

    def _parts(self) -> Iterator[tuple[Tensor, float]]:
        """Where this rank's windows begin in each backward pass, and their weight, so that the ranks' mean is that of all windows.

        All ranks' windows together do not depend on how many ranks there are.
        """
        settings = self.settings
        starts = self.corpus.training_starts(settings.windows, settings.context, settings.seed, self.step)
        for part in starts.tensor_split(settings.accumulate):
            mine = part.tensor_split(settings.ranks)[self.rank]
            yield mine, len(mine) * settings.ranks / len(starts)

    def _loss(self, starts: Tensor) -> Tensor:
        inputs, targets = self.corpus.windows(starts, self.settings.context)
        logits = self.model(inputs.to(self.device))
        return loss_of(logits, targets.to(self.device))
