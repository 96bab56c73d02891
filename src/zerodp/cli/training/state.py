"""The resumable state of a run: full values in one file, written by rank 0 and read by every rank."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerodp

from .settings import replace_file

FILE = "state.pt"


def save(folder: Path, model: nn.Module, optimizer: zerodp.ShardedOptimizer, progress: dict[str, Any]) -> None:
    """Write weights, optimizer state and `progress` (a collective)."""
    content = {
        "model": zerodp.full_state_dict(model),
        "optimizer": optimizer.state_dict(),
        "progress": progress,
    }
    if content["model"]:
        buffer = io.BytesIO()
        torch.save(content, buffer)
        replace_file(folder / FILE, buffer.getvalue())


def load(folder: Path, model: nn.Module, optimizer: zerodp.ShardedOptimizer) -> dict[str, Any]:
    """Take weights and optimizer state, and return the progress (a collective)."""
    content = torch.load(folder / FILE, map_location="cpu")
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    progress: dict[str, Any] = content["progress"]
    return progress
