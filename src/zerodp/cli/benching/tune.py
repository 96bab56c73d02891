"""`zerodp bench tune`: which prefetch, bucket and cache make a model's step shortest here, by short measured runs.

Each knob in turn is tried at a few values and keeps the best; the end is a match against the defaults, turn by turn, which the
defaults win unless the other is faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import zerodp

from ...checks import bytes_of
from ...config import Config
from ...core.access import runtime_of
from ...errors import ZeroError
from ..parser import Parser, UsageError, function, look_up, size, whole
from ..training.gpt import counting, loss_of
from ..training.settings import Settings
from ..training.trainer import build
from . import ranks

EPILOG = """\
The model is the GPT of zerodp train, or what a function of yours returns for the device: (model, optimizer, step), not sharded; step(model,
optimizer) makes one whole training step, zero_grad included.

  zerodp bench tune --params 20M --batch 8
  torchrun --nproc-per-node 8 -m zerodp.cli bench tune --model mine:make --spare 4GB --precision bf16
"""
WARMUP, MATCHES = 2, 3
PREFETCH = (0, 1, 2, 4)
BUCKET_FACTORS = (1 / 4, 4)  # of the default, or of the largest unit where that is smaller
CACHE_PARTS = (0.25, 0.5, 1.0)  # of what all units take when gathered
KNOBS = ("unsharded_bytes", "prefetch", "bucket_bytes")

Made = tuple[Any, Any, Callable[[Any, Any], Any]]


def add_parser(group: argparse._SubParsersAction[Parser]) -> None:
    parser = group.add_parser(
        "tune",
        help="find prefetch, bucket_bytes and unsharded_bytes for a model",
        description="Find the prefetch, bucket and cache with which a model's step is shortest here; never slower ones than the defaults.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ranks.add_options(parser)
    parser.add_argument(
        "--model",
        type=function,
        metavar="MODULE:FUNCTION",
        help="what makes the model (default: the GPT of zerodp train)",
    )
    parser.add_argument(
        "--params", type=size, default=4_000_000, metavar="COUNT", help="parameters of the GPT (default 4M)"
    )
    parser.add_argument("--context", type=whole(2), default=256, metavar="N", help="tokens of a sample (default 256)")
    parser.add_argument("--batch", type=whole(1), default=4, metavar="N", help="samples per rank (default 4)")
    parser.add_stage()
    parser.add_precision(None)
    parser.add_argument(
        "--spare", metavar="BYTES", help="most that gathered units may keep between uses (default: all they take)"
    )
    parser.add_argument(
        "--steps", type=whole(1), default=5, metavar="N", help="steps of each run that count (default 5)"
    )
    parser.add_json()
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    names = ("model", "params", "context", "batch", "stage", "precision", "steps")
    settings = {name: getattr(arguments, name) for name in names}
    try:
        settings["spare"] = None if arguments.spare is None else bytes_of("--spare", arguments.spare)
    except ZeroError as error:
        raise UsageError(str(error)) from None
    found = ranks.on_ranks("tune.measure", arguments, settings)
    if found is not None:
        print(json.dumps(found, indent=2) if arguments.json else text(found))
    return 0


def measure(device: torch.device, settings: dict[str, Any]) -> dict[str, Any]:
    """On every rank: what was tried, and the best."""
    return dataclasses.asdict(Tuner(device, settings).tune())


@dataclasses.dataclass(frozen=True)
class Tuned:
    """seconds of the best options and of the defaults, from the last match; `options` is empty where the defaults won."""

    options: dict[str, int]
    seconds: float
    default_seconds: float
    tried: list[dict[str, Any]]


class Tuner:
    """Runs candidates on this rank; all ranks make the same choices, from times that they have agreed on."""

    def __init__(self, device: torch.device, settings: dict[str, Any]) -> None:
        self.device, self.settings = device, settings
        self.tried: list[dict[str, Any]] = []
        self.gathered_bytes = self.largest_bytes = self.bucket_bytes = 0

    def tune(self) -> Tuned:
        best: dict[str, int] = {}
        fastest = self.seconds({})
        for knob in KNOBS:
            kept = best
            for value in list(self.values(knob)):
                candidate = {**kept, knob: value}
                if (seconds := self.seconds(candidate)) < fastest:
                    best, fastest = candidate, seconds
        return self.match(best, fastest)

    def values(self, knob: str) -> Iterator[int]:
        """What to try beside the default."""
        default = getattr(Config(), knob)
        if knob == "bucket_bytes":
            base = min(self.bucket_bytes, self.largest_bytes)
            yield from (round(base * factor) for factor in BUCKET_FACTORS if base * factor <= self.largest_bytes)
        elif self.gathered_bytes and knob == "prefetch":
            yield from (count for count in PREFETCH if count != default)
        elif self.gathered_bytes:
            spare = self.settings["spare"]
            most = self.gathered_bytes if spare is None else min(spare, self.gathered_bytes)
            yield from dict.fromkeys(round(most * part) for part in CACHE_PARTS if round(most * part) > 0)

    def match(self, best: dict[str, int], fastest: float) -> Tuned:
        """Best against defaults in turn, so that a machine that gets slower or faster meets both alike."""
        if not best:
            return Tuned({}, fastest, fastest, self.tried)
        rounds = [(self.seconds({}), self.seconds(best)) for _ in range(MATCHES)]
        default, tuned = (statistics.median(times) for times in zip(*rounds, strict=True))
        return Tuned(best, tuned, default, self.tried) if tuned < default else Tuned({}, default, default, self.tried)

    def seconds(self, options: dict[str, int]) -> float:
        """The median step with these options, the slowest rank's."""
        model, optimizer, step = self.build(options)
        runtime = runtime_of(model)
        self.gathered_bytes = sum(unit.gathered_bytes for unit in runtime.units)
        self.largest_bytes = max(f.layout.padded_numel * f.param_dtype.itemsize for f in runtime.flats())
        if not options:
            self.bucket_bytes = Config().bucket_bytes_on(runtime.comm.mesh.backend, runtime.comm.mesh.shard.size)
        times = []
        for _ in range(WARMUP + self.settings["steps"]):
            began = time.perf_counter()
            step(model, optimizer)
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            times.append(time.perf_counter() - began)
        message = torch.tensor([statistics.median(times[WARMUP:])], dtype=torch.float64, device="cpu")
        found: float = runtime.comm.exchange(message, "the other ranks' time").wait().max().item()
        self.tried.append({"options": options, "seconds": found})
        del model, optimizer, step, runtime
        gc.collect()
        return found

    def build(self, options: dict[str, int]) -> Made:
        settings = self.settings
        choices: dict[str, Any] = {"stage": settings["stage"], **options}
        if settings["precision"] is not None:
            choices["precision"] = settings["precision"]
        if settings["model"] is None:
            run_settings = Settings(params=settings["params"], context=settings["context"], batch=settings["batch"])
            model, optimizer = build(run_settings, self.device, **{"precision": None, **choices})
            return model, optimizer, self.gpt_step
        model, optimizer, step = look_up(settings["model"])(self.device)
        return *zerodp.shard(model, optimizer, device=self.device, **choices), step

    def gpt_step(self, model: Any, optimizer: Any) -> None:
        inputs, targets = counting(self.settings["batch"], self.settings["context"], self.device)
        optimizer.backward(loss_of(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


def text(found: dict[str, Any]) -> str:
    def words(options: dict[str, int]) -> str:
        return ", ".join(f"{name}={value}" for name, value in options.items()) or "the defaults"

    width = max(len(words(one["options"])) for one in found["tried"])
    lines = [f"{words(one['options']):{width}}  {one['seconds'] * 1e3:10.1f} ms" for one in found["tried"]]
    if found["options"]:
        gain = 1 - found["seconds"] / found["default_seconds"]
        lines.append(f"\nFaster than the defaults by {gain:.0%}: zerodp.shard(..., {words(found['options'])})")
    else:
        lines.append("\nNothing was faster than the defaults.")
    return "\n".join(lines)
