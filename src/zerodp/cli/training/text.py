"""Text as one memory-mapped file of bytes, a held-out part, and the same batches for every run with the same seed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..parser import UsageError

HELD_OUT = 20  # every 20th block is validation text
BLOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class Corpus:
    """Training text first, validation text after it, in one memory-mapped tensor of bytes."""

    bytes: Tensor  # uint8 [training + validation]
    training: int
    digest: str  # of the text, so that a resumed run and every rank can tell whether they read the same

    def windows(self, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and next-byte targets [len(starts), length], from those places."""
        rows = self.bytes[starts[:, None] + torch.arange(length + 1)].long()
        return rows[:, :-1], rows[:, 1:]

    def training_starts(self, count: int, length: int, seed: int, step: int) -> Tensor:
        """Where the `count` windows of a step begin: a function of the seed and the step alone, so that a run can resume."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        return torch.randint(self.training - length, (count,), generator=generator)

    def validation_starts(self, count: int, length: int) -> Tensor:
        """`count` windows spread evenly over the held-out text, always the same."""
        last = len(self.bytes) - length - 1
        return torch.linspace(self.training, last, count, dtype=torch.float64).long()


def standard_library() -> list[Path]:
    """Text that every machine with Python has: the top-level source files of its standard library."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def files_of(source: Path | None) -> list[Path]:
    """The files of `source` (a file or a folder, hidden ones left out), in a fixed order; of the standard library without one."""
    if source is None:
        return standard_library()
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise UsageError(f"--data: there is no file or folder {str(source)!r}")
    visible = (p for p in source.rglob("*") if not any(part.startswith(".") for part in p.relative_to(source).parts))
    return sorted(p for p in visible if p.is_file())


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "zerodp"


def open_corpus(source: str | None, context: int) -> Corpus:
    """The text of `source` through its cache file, which is made at the first use and shared by all processes of a machine.

    Raises:
        UsageError: no such file or folder, or too little text for one window of training and of validation.
    """
    files = files_of(None if source is None else Path(source))
    stamp = hashlib.sha256()
    for path in files:
        status = path.stat()
        stamp.update(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        found = sorted(folder.glob(f"{stamp.hexdigest()[:16]}-*.bytes"))
        path = found[0] if found else _write(files, folder, stamp.hexdigest()[:16])
    _, training, digest = path.stem.split("-")
    size = path.stat().st_size
    corpus = Corpus(
        torch.from_file(str(path), size=size, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8),
        int(training),
        digest,
    )
    if min(corpus.training, size - corpus.training) < context + 2:
        what = source or "the standard library"
        raise UsageError(
            f"--data: {what} has {size:,} bytes of text, too few for --context {context}: it needs about {HELD_OUT * (context + 2):,}"
        )
    return corpus


def _write(files: list[Path], folder: Path, stamp: str) -> Path:
    """The cache file, `STAMP-TRAINING-DIGEST.bytes`: whole or not there."""
    text = b"".join(path.read_bytes() for path in files)
    block = min(BLOCK_BYTES, max(1, len(text) // HELD_OUT))
    blocks = [text[at : at + block] for at in range(0, len(text), block)]
    held_out = blocks[HELD_OUT - 1 :: HELD_OUT]
    training = b"".join(b for i, b in enumerate(blocks) if i % HELD_OUT != HELD_OUT - 1)
    whole = training + b"".join(held_out)
    path = folder / f"{stamp}-{len(training)}-{hashlib.sha256(whole).hexdigest()[:16]}.bytes"
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(whole)
    unfinished.replace(path)
    return path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process of the machine at a time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
