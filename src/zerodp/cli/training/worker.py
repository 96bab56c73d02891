"""One rank of a training run, from joining the process group to the report."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerodp

from ..parser import UsageError
from . import forecast, ledger, report
from .panel import display
from .settings import Settings
from .stopping import StopRequest
from .text import open_corpus
from .trainer import Record, Stop, Trainer

PROMPT = b"def "
FINAL_WINDOWS = 128
CHECKPOINTS = "checkpoints"  # of a run, in its folder
KEPT = 2


def command(folder: Path, resumes: bool) -> list[str]:
    """How the launcher starts a rank of the run in `folder`."""
    return [sys.executable, "-m", __package__, str(folder), *(["--resume"] if resumes else [])]


def run(settings: Settings, folder: Path, resumes: bool) -> int:
    """Train as the rank that the environment says. The result is the exit status, the same on every rank."""
    request = StopRequest()
    request.listen()
    torch.set_num_threads(settings.threads)
    device = choose_device(settings.device)
    with process_group(device):
        return _Run(settings, folder, resumes, device, request).run()


def choose_device(name: str) -> torch.device:
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if name == "cuda" or (name == "auto" and 0 < local_ranks <= torch.cuda.device_count()):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """The world of the ranks that the launcher has started; NCCL for GPUs, gloo beside it."""
    store, rank, size = next(dist.rendezvous("env://"))
    # torchrun may use one store for all its attempts, where the addresses of ranks that are gone still stand.
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    if device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size, device_id=device)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Run:
    """A run of this process; all ranks go through the same methods, and rank 0 shows and writes."""

    def __init__(
        self, settings: Settings, folder: Path, resumes: bool, device: torch.device, request: StopRequest
    ) -> None:
        self.settings, self.folder, self.request = settings, folder, request
        self.shows = dist.get_rank() == 0
        self.deadline = time.monotonic() + settings.minutes * 60 if settings.minutes else math.inf
        self.corpus = open_corpus(settings.data, settings.context)
        self.trainer = Trainer(settings, self.corpus, device, dist.get_rank())
        self._check_text()
        self.progress: dict[str, Any] = {"step": 0, "seconds": 0.0}
        if resumes:
            self._load()

    def run(self) -> int:
        first = self.progress["step"]
        room = int(self.trainer.exchange([ledger.room(self.trainer.device)]).min())
        rows = ledger.measure(self.settings, self.trainer.device, room)
        measured = rows[self.settings.stage].measured_bytes is not None
        found = forecast.forecast(self.settings, self.corpus, self.trainer.device, dist.get_rank(), measured)
        self.trainer.begin(**self.progress)
        if self.shows:
            report.write_stages(self.folder, rows, self.settings)
            log = report.Log(self.folder, first)
            with display(self.settings, first, self._title()) as show:
                stop = self._train([log.add, show])
        else:
            stop = self._train([])
        memory = self.trainer.stats.memory  # before text is made, which gathers all there is
        if self.trainer.step > first:
            self._save()
        loss = self.trainer.validate(FINAL_WINDOWS) if stop <= Stop.TIME else None
        sample = self._sample()
        if self.shows:
            tokens = self.settings.windows * self.settings.context
            lines = forecast.compare(found, log.records, memory, tokens, first)
            pages = forecast.write(self.folder, found, lines, log.records)
            said = [forecast.text(lines)]
            print(report.write(self.folder, log.records, rows, self.settings, loss, sample, said, pages), flush=True)
        return 0 if stop <= Stop.TIME else 128 + stop

    def _train(self, observers: list[Callable[[Record], None]]) -> int:
        """Up to the last step, or to one where any rank wants to stop. The result says why."""
        settings, trainer = self.settings, self.trainer
        while trainer.step < settings.steps:
            record, stop = trainer.train_step(self._wish())
            if trainer.step % settings.validate_every == 0:
                record.validation_loss = trainer.validate()
            for observe in observers:
                observe(record)
            if stop != Stop.NO:
                return stop
            if trainer.step % settings.save_every == 0:
                self._save(asynchronous=True)
        return Stop.NO

    def _wish(self) -> int:
        return self.request.signal or (Stop.TIME if time.monotonic() > self.deadline else Stop.NO)

    def _save(self, asynchronous: bool = False) -> None:
        step = self.trainer.step
        progress = {"step": step, "seconds": self.trainer.seconds}
        path = self.folder / CHECKPOINTS / f"step-{step:06d}"
        model, optimizer = self.trainer.model, self.trainer.optimizer
        zerodp.save(path, model, optimizer, extra=progress, asynchronous=asynchronous, keep=KEPT)

    def _load(self) -> None:
        """Go on from the newest checkpoint; a run that was ended before its first one begins anew."""
        path = zerodp.latest(self.folder / CHECKPOINTS)
        if path is not None:
            self.progress = zerodp.load(path, self.trainer.model, self.trainer.optimizer)

    def _sample(self) -> bytes:
        """Rank 0's text; the others lend their parameters."""
        with zerodp.full_params(self.trainer.model):
            if not self.shows:
                return b""
            generator = torch.Generator().manual_seed(self.settings.seed)
            text: bytes = self.trainer.model.generate(PROMPT, self.settings.sample, generator)
            return text

    def _check_text(self) -> None:
        """Ranks on other machines may have another standard library."""
        digests = self.trainer.exchange([float(int(self.corpus.digest[:12], 16))])
        if bool((digests != digests[0]).any()):
            raise UsageError("--data: the ranks read different texts; give all of them the same file or folder")

    def _title(self) -> str:
        model, settings = self.trainer.model, self.settings
        numel = sum(p.numel() for p in model.parameters())
        ranks = f"{settings.ranks} rank{'s' if settings.ranks > 1 else ''} on {self.trainer.device.type}"
        return f"GPT of {numel:,} parameters, {ranks}, stage {settings.stage}, {settings.precision}"
