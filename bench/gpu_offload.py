"""The part of gpu_check.py that offloads the optimizer: speed at one size, the largest model, and what of the copies is hidden.

Methods: plain torch, zerodp with the optimizer on the host, FSDP2 with CPUOffloadPolicy, DeepSpeed with its optimizer offload where
that is installed and can build its own. Without CUDA everything is tiny and nothing is hidden, as there is no link.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from model import loss_of
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import zerodp

Row = dict[str, Any]
Shape = dict[str, int]
Step = Callable[[torch.Tensor], torch.Tensor]  # tokens -> loss
GROWTH = 1.25  # from one tried size to the next
MOST = 24  # sizes tried


def steppers(build: Callable[[Shape], Any], adam: Callable[[Any], Any]) -> dict[str, Callable[[Shape], Step]]:
    """Each method's way to one training step of a model of some shape."""

    def ordinary(model: Any, optimizer: Any, device: str, autocast: bool) -> Step:
        def step(tokens: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device, torch.bfloat16) if autocast else contextlib.nullcontext():
                loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    def plain(shape: Shape) -> Step:
        model = build(shape)
        device = next(model.parameters()).device.type
        return ordinary(model, adam(model), device, True)

    def ours(shape: Shape) -> Step:
        model = build(shape)
        pair = zerodp.shard(model, adam(model), stage=3, precision="bf16", offload="host")
        return ordinary(*pair, "cpu", False)

    def fsdp2(shape: Shape) -> Step:
        model = build(shape)
        for module in (*model.blocks, model):
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
            fully_shard(module, mp_policy=policy, offload_policy=CPUOffloadPolicy())
        return ordinary(model, adam(model), "cpu", False)

    def deepspeed(shape: Shape) -> Step:
        import deepspeed as ds

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
        }
        model = build(shape)
        engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            loss = loss_of(engine(tokens[:, :-1]), tokens[:, 1:])
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    found = {"plain torch, autocast": plain, "zerodp, host": ours}
    if torch.cuda.is_available():
        found["FSDP2, CPUOffloadPolicy"] = fsdp2
        if importlib.util.find_spec("deepspeed"):
            found["DeepSpeed, offload"] = deepspeed
    return found


def tokens_of(shape: Shape, rows: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(shape.get("vocab", 256), (rows, shape["ctx"] + 1), generator=generator).to(device)


def speed(
    methods: dict[str, Callable[[Shape], Step]], shape: Shape, rows: int, steps: int, clean: Callable[[], None]
) -> list[Row]:
    """Tokens per second of each method in turn, and the GPU's peak."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens, found = tokens_of(shape, rows, device), []
    for name, make in methods.items():
        clean()
        row: Row = {"what": name, "tokens_s": None, "peak": None, "loss": None, "why": None}
        try:
            step = make(shape)
            step(tokens), step(tokens)
            _synchronize()
            start = time.perf_counter()
            losses = [step(tokens) for _ in range(steps)]
            _synchronize()
            row["tokens_s"] = steps * rows * shape["ctx"] / (time.perf_counter() - start)
            row["loss"] = float(losses[-1])
            row["peak"] = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
            del losses
        except torch.OutOfMemoryError:
            row["why"] = "out of memory"
        except Exception as error:  # of another library, which must not end the run: it is named in the table
            if name.startswith("zerodp"):
                raise
            row["why"] = (
                f"{type(error).__name__}: {str(error).splitlines()[0][:80]}" if str(error) else type(error).__name__
            )
        step = None  # type: ignore[assignment]
        found.append(row)
    return found


def largest(
    methods: dict[str, Callable[[Shape], Step]], shape: Shape, rows: int, clean: Callable[[], None], seconds: float
) -> list[Row]:
    """The most layers with which a step works, for plain torch and for ours; without CUDA one size, as nothing there says no."""
    cuda = torch.cuda.is_available()
    device, found = torch.device("cuda" if cuda else "cpu"), []
    for name in ("plain torch, autocast", "zerodp, host"):
        layers, best, end = shape["layers"], 0, time.perf_counter() + seconds
        for _ in range(MOST if cuda else 1):
            clean()
            try:
                step = methods[name]({**shape, "layers": layers})
                step(tokens_of(shape, rows, device))
                best = layers
            except torch.OutOfMemoryError:
                break
            finally:
                step = None  # type: ignore[assignment]
            if time.perf_counter() > end or (cuda and _host_bytes(shape, layers) > 0.4 * _host_memory()):
                break
            layers = max(int(layers * GROWTH), layers + 1)
        parameters = 12 * shape["dim"] ** 2 * best + 2 * shape.get("vocab", 256) * shape["dim"]
        found.append({"what": name, "layers": best, "parameters": parameters})
    return found


def hidden(make: Callable[[Shape], Step], shape: Shape, rows: int) -> Row:
    """By torch's profiler: how long copies between host and GPU take in a step, and how much of it beside kernels."""
    cuda = torch.cuda.is_available()
    step, tokens = make(shape), tokens_of(shape, rows, torch.device("cuda" if cuda else "cpu"))
    step(tokens), step(tokens)
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=kinds) as profile:
        step(tokens)
        _synchronize()
    copies, kernels = [], []
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            span = (event.time_range.start, event.time_range.end)
            (copies if "Memcpy HtoD" in event.name or "Memcpy DtoH" in event.name else kernels).append(span)
    beside = sum(max(0.0, min(b, d) - max(a, c)) for a, b in union(copies) for c, d in union(kernels))
    return {
        "copies_us": sum(b - a for a, b in union(copies)),
        "beside_kernels_us": beside,
        "events": len(list(profile.events())),
    }


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time without overlaps, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def rows_of(found: dict[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Tables: (title, columns, rows)."""
    mib = 2**20
    yield (
        "Optimizer on the host, bf16",
        ["method", "tokens/s", "peak MiB", "loss"],
        [
            [
                row["what"],
                row["why"] or f"{row['tokens_s']:,.0f}",
                "" if row["peak"] is None else f"{row['peak'] / mib:,.0f}",
                "" if row["loss"] is None else f"{row['loss']:.3f}",
            ]
            for row in found["speed"]
        ],
    )
    sizes = [[row["what"], str(row["layers"]), f"{row['parameters'] / 1e6:,.1f}"] for row in found["largest"]]
    yield "Largest model tried that trains", ["method", "layers", "million parameters"], sizes
    copies, beside = found["hidden"]["copies_us"], found["hidden"]["beside_kernels_us"]
    share = f"{beside / copies:.0%}" if copies else "no copies"
    yield (
        "Copies of a step with the optimizer on the host",
        ["", "ms", "beside kernels"],
        [["host link", f"{copies / 1e3:.1f}", share]],
    )


def check_offload(
    build: Callable[[Shape], Any],
    adam: Callable[[Any], Any],
    shape: Shape,
    rows: int,
    steps: int,
    clean: Callable[[], None],
) -> dict[str, Any]:
    """All of it: {"speed", "largest", "hidden"}."""
    methods = steppers(build, adam)
    found = {
        "speed": speed(methods, shape, rows, steps, clean),
        "largest": largest(methods, shape, rows, clean, 60.0),
        "hidden": hidden(methods["zerodp, host"], shape, rows),
    }
    clean()
    return found


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _host_bytes(shape: Shape, layers: int) -> int:
    """Master, two moments and gradient of each parameter."""
    return 16 * 12 * shape["dim"] ** 2 * layers
