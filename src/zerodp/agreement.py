"""What must be the same on all ranks beside the order of calls: settings of steps and values of state dicts, as small facts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .errors import RankMismatchError

PLAIN = (bool, int, float, str, tuple, list, type(None))


def settings_of(groups: list[dict[str, Any]]) -> str:
    """Of an optimizer's groups; where they differ, parts of one parameter are stepped in different ways."""
    texts = []
    for number, group in enumerate(groups):
        values = {key: value.tolist() if isinstance(value, Tensor) else value for key, value in group.items()}
        settings = [f"{k}={v!r}" for k, v in values.items() if k != "params" and isinstance(v, PLAIN)]
        texts.append(f"group {number}: {', '.join(settings)}")
    return "; ".join(texts)


def values_of(named: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], int]]:
    """Shape and a hash of the values of each plain tensor; others are not looked at."""
    plain = {name: t.detach() for name, t in named.items() if type(t) in (Tensor, nn.Parameter) and not t.is_meta}
    real = {name: torch.view_as_real(t) if t.is_complex() else t for name, t in plain.items()}
    return {name: (tuple(t.shape), int(torch.hash_tensor(t).view(torch.int64))) for name, t in real.items()}


def require_same(everyone: list[dict[str, Any]], what: str) -> None:
    """Each rank keeps its part of what it is given, so other values on other ranks would become a mixture.

    Args:
        everyone: `values_of` what each rank was given.

    Raises:
        RankMismatchError: other values on some rank. Names and shapes are each rank's to check against the model.
    """
    for rank, theirs in enumerate(everyone):
        both = [name for name in everyone[0] if name in theirs and everyone[0][name][0] == theirs[name][0]]
        if different := [name for name in both if everyone[0][name] != theirs[name]]:
            raise RankMismatchError(
                f"{what} was given another {different[0]!r} on rank {rank} than on rank 0; give every rank the same full state dict, or use "
                "zerodp.load for a checkpoint folder"
            )
