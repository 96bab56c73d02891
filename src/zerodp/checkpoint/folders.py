"""Names and moves that make a save visible whole or not at all, and find what a crash left.

`x` is written as `.x.saving-<token>` beside it and renamed at the end. A checkpoint that stands at `x` already is moved to `.x.previous` just
before, and deleted just after. One process (rank 0) makes all moves.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError, ConfigError
from . import manifest
from .manifest import Manifest


def check_target(target: Path) -> None:
    """
    Raises:
        ConfigError: something stands there that is no checkpoint, and would be deleted.
    """
    if not target.name:
        raise ConfigError(f"save: {target} names no folder")
    if target.is_file() or (target.is_dir() and any(target.iterdir()) and not (target / manifest.NAME).exists()):
        raise ConfigError(f"save: {target} exists and is no checkpoint of zerodp; choose another path, or remove it")


def temporary(target: Path, token: str) -> Path:
    return target.with_name(f".{target.name}.saving-{token}")


def previous(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def prepare(target: Path, token: str) -> None:
    """Make the temporary folder, and remove those of saves of the same path that died."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for stale in target.parent.glob(f"{_escaped(f'.{target.name}.saving-')}*"):
        shutil.rmtree(stale, ignore_errors=True)
    temporary(target, token).mkdir()


def commit(target: Path, token: str) -> None:
    """The temporary folder, complete and on the disk, becomes the checkpoint."""
    made, old = temporary(target, token), previous(target)
    sync(made)
    if (target / manifest.NAME).exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    try:
        made.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def discard(target: Path, token: str) -> None:
    shutil.rmtree(temporary(target, token), ignore_errors=True)


def sync(path: Path) -> None:
    """Bring a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def resolve(path: Path) -> Path:
    """`path`, or where a crash between two moves has left what stood there."""
    return previous(path) if not path.exists() and previous(path).exists() else path


def whole_ones(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    """The checkpoints in a folder that are complete by their manifests and the sizes of their files."""
    for path in folder.iterdir():
        if path.name.startswith(".") and (not path.name.endswith(".previous") or resolve(_owner(path)) != path):
            continue
        try:
            found = manifest.load(path)
            manifest.check_files(path, found)
        except CheckpointError:
            continue
        yield path, found


def newest(folder: Path) -> Path | None:
    found = list(whole_ones(folder)) if folder.is_dir() else []
    return max(found, key=lambda one: one[1].time_ns)[0] if found else None


def keep_newest(target: Path, count: int) -> None:
    """Delete complete checkpoints beside `target` until `count` are left, the oldest first and never `target` itself."""
    others = [(found.time_ns, path) for path, found in whole_ones(target.parent) if path != target]
    for _, path in sorted(others, reverse=True)[count - 1 :]:
        gone = temporary(path, "deleted")  # half a checkpoint never stands under its name
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _owner(path: Path) -> Path:
    return path.with_name(path.name[1:].removesuffix(".previous"))


def _escaped(text: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)
