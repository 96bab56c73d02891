"""DeepSpeed's universal checkpoints as something to load: weights, moments and step. DeepSpeed itself is not needed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.contents import MODEL, STATE
from ..checkpoint.source import Expected, Source, Stored
from ..errors import CheckpointError


@dataclass(frozen=True)
class universal:
    """What `zerodp.load` takes in place of a path: `zerodp.load(universal(folder), model, optimizer)`.

    `path` is a folder that `ds_to_universal.py` wrote, with `zero/<parameter>/fp32.pt`, `exp_avg.pt`, `exp_avg_sq.pt` and `step.pt`. Buffers and the
    settings of parameter groups are not in it: the model's own stay. Files are read by `torch.load(weights_only=True)`. Loading
    raises `CheckpointError` where there is no such folder.
    """

    path: str | os.PathLike[str]

    def __call__(self, expected: Expected) -> Source:
        return _open(Path(os.path.abspath(self.path)))


def _open(folder: Path) -> Source:
    zero = folder / "zero"
    if not zero.is_dir():
        raise CheckpointError(
            f"{folder} is no DeepSpeed universal checkpoint: it has no folder 'zero'; make one by ds_to_universal.py"
        )
    source = Source(str(folder), partial=True)
    for place in sorted(path for path in zero.iterdir() if path.is_dir()):
        name = place.name.removeprefix("module.")
        for file in sorted(place.glob("*.pt")):
            value = _value(file)
            key = MODEL + name if file.stem == "fp32" else f"{STATE}{name}.{file.stem}"
            source.bytes_read += file.stat().st_size
            source.tensors[key] = Stored.of(value)
    return source


def _value(file: Path) -> Tensor:
    found: Any = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
    if isinstance(found, dict):
        found = found["param"]
    return found if isinstance(found, Tensor) else torch.tensor(float(found))
