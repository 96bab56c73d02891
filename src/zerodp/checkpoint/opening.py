"""Which kind of source a path is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError
from . import folders, manifest
from .foreign import open_dcp, open_safetensors, open_torch_file
from .own import open_own
from .source import Expected, Source

Opener = Callable[[Expected], Source]
Place = str | os.PathLike[str] | Opener


def open_source(place: Place, expected: Expected) -> Source:
    """
    Args:
        place: a path, or a function that opens something else, such as those of `zerodp.integrations`.

    Raises:
        CheckpointError: nothing is there, or nothing known.
    """
    if callable(place):
        return place(expected)
    path = Path(os.path.abspath(place))
    if (folders.resolve(path) / manifest.NAME).exists():
        return open_own(path)
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or folder")
    if path.is_file():
        return (open_safetensors if path.suffix == ".safetensors" else open_torch_file)(path, expected)
    if (path / ".metadata").exists():
        return open_dcp(path, expected)
    if any(path.glob("*.safetensors")):
        return open_safetensors(path, expected)
    if (path / "zero").is_dir():
        raise CheckpointError(
            f"{path} looks like a DeepSpeed universal checkpoint: pass zerodp.integrations.deepspeed.universal(path) in place of the path"
        )
    newest = folders.newest(path)
    advice = f"; its newest one is {newest}, see zerodp.latest(folder)" if newest is not None else ""
    raise CheckpointError(f"{path} holds no checkpoint{advice}")
