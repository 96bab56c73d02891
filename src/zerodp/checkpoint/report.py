"""What a checkpoint holds, and whether every byte of it is as it was written; for one process, without a model."""

from __future__ import annotations

import math
import os
import zlib
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from . import folders, manifest
from .contents import ENGINE, EXTRA, STATE
from .own import open_own
from .source import Source

READ_BYTES = 8 * 2**20


def report(path: str | os.PathLike[str], check: bool = True) -> dict[str, Any]:
    """What `zerodp inspect` shows: plain values, ready for JSON.

    Args:
        check: read all files, a few megabytes at a time, and compare their checksums.

    Returns:
        path, facts (world_size, mesh, stages, time_ns, versions), step, skipped_steps, extra (its names), tensors (name, shape, dtype, bytes),
        total_bytes, damaged (what is wrong with which file; only if `check`).

    Raises:
        CheckpointError: no checkpoint of zerodp is there, or its manifest is damaged.
    """
    folder = folders.resolve(Path(os.path.abspath(path)))
    found = manifest.load(folder)
    damaged = _damage(folder, found) if check else None
    tensors = [
        {
            "name": key,
            "shape": tensor.shape,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "bytes": math.prod(tensor.shape) * tensor.dtype.itemsize,
        }
        for key, tensor in found.tensors.items()
    ]
    with open_own(folder) as source:
        engine = _if_readable(source, ENGINE)
        return {
            "path": str(folder),
            "facts": found.facts,
            "step": _step(source),
            "skipped_steps": engine["skipped_steps"] if engine else None,
            "extra": sorted(key.removeprefix(EXTRA) for key in found.objects if key.startswith(EXTRA)),
            "tied": found.aliases,
            "tensors": tensors,
            "total_bytes": sum(file.num_bytes for file in found.files.values()),
            "damaged": damaged,
        }


def _step(source: Source) -> int | None:
    """The optimizer's highest count of steps."""
    keys = [key for key in [*source.tensors, *source.objects] if key.startswith(STATE) and key.endswith(".step")]
    counts = [count for key in keys if (count := _if_readable(source, key)) is not None]
    return max((int(count) for count in counts), default=None)


def _if_readable(source: Source, key: str) -> Any:
    """None where it is missing, or damaged, which is reported by itself."""
    try:
        return source.value(key)
    except (CheckpointError, KeyError):
        return None


def _damage(folder: Path, found: manifest.Manifest) -> list[str]:
    said = []
    for name, file in found.files.items():
        try:
            num_bytes, total = 0, 0
            with (folder / name).open("rb") as opened:
                while data := opened.read(READ_BYTES):
                    num_bytes, total = num_bytes + len(data), zlib.crc32(data, total)
        except OSError as error:
            said.append(f"{name}: {error.strerror}")
            continue
        if num_bytes != file.num_bytes:
            said.append(f"{name}: {num_bytes} bytes, expected {file.num_bytes}")
        elif total != file.sum:
            said.append(f"{name}: its bytes do not fit its checksum")
    return said
