"""Checks of single settings, whose errors say what was expected and what was got; and other libraries' names for ours."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from .errors import ConfigError

BYTE_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}

# Names that people bring from other libraries, and what to write here.
RENAMED = {
    "zero_stage": "stage", "reshard_after_forward": "stage", "sharding_strategy": "stage", "zero_optimization": "stage",
    "mp_policy": "precision", "mixed_precision": "precision", "auto_wrap_policy": "units", "ignored_modules": "ignore",
    "ignored_params": "ignore", "process_group": "mesh", "device_mesh": "mesh", "device_id": "device",
    "reduce_bucket_size": "bucket_bytes", "allgather_bucket_size": "bucket_bytes", "bucket_cap_mb": "bucket_bytes",
    "stage3_max_live_parameters": "unsharded_bytes", "stage3_prefetch_bucket_size": "prefetch",
    "stage3_param_persistence_threshold": "ignore_below", "forward_prefetch": "prefetch", "offload_policy": "offload",
    "cpu_offload": "offload", "offload_optimizer": "offload", "offload_optimizer_device": "offload", "offload_param": "offload",
    "offload_params": "offload", "offload_param_device": "offload", "nvme_path": "offload", "cpu_offload_params": "offload",
    "fp16": "precision", "bf16": "precision", "param_init_fn": "weights",
    "activation_checkpointing": "checkpoint_activations", "partitioned_activations": "partition_activations",
    "cpu_checkpointing": 'offload=zerodp.Offload(activations="host")',
    "gradient_clipping": "optimizer.clip_grad_norm_(max_norm)", "gradient_cliping": "optimizer.clip_grad_norm_(max_norm)",
    "gradient_accumulation_steps": "several backward passes before optimizer.step()",
    "train_batch_size": "the loader's own batch size", "train_micro_batch_size_per_gpu": "the loader's own batch size",
}  # fmt: skip


def unknown(what: str, name: str, names: Iterable[str]) -> str:
    names = list(names)
    if name in RENAMED:
        return f"unknown {what} {name!r}; in zerodp this is {RENAMED[name]!r}"
    near = difflib.get_close_matches(name, names, 1, 0.5)
    return f"unknown {what} {name!r}" + (f"; did you mean {near[0]!r}?" if near else "") + f" Valid: {', '.join(names)}"


def number(name: str, value: Any, above: float | None = None, below: float | None = None, also: str = "") -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or (above is not None and not value > above) or (below is not None and not value < below):
        span = " ".join(
            t
            for t in (f"above {above}" if above is not None else "", f"below {below}" if below is not None else "")
            if t
        )
        raise ConfigError(f"{name}: expected a number {span}{f' or {also}' if also else ''}, got {value!r}")


def whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}: expected a whole number of at least {least}, got {value!r}")


def bytes_of(name: str, value: Any) -> int:
    """An int, or text such as ``"4GB"`` (10^9) or ``"4GiB"`` (2^30), in bytes."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if found and found[2].upper() in BYTE_UNITS and len(found[1]) <= 30:
            return int(float(found[1]) * BYTE_UNITS[found[2].upper()])
        raise ConfigError(f'{name}: expected a number of bytes such as 1000000, "500MB" or "4GiB", got {value!r}')
    whole(name, value, least=0)
    return int(value)
