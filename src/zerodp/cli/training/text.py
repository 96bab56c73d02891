"""Text as one memory-mapped file of bytes, a held-out part, and the same batches for every run with the same seed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sysconfig
import tempfile
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
        UsageError: no such file or folder, one that cannot be read, or too little text for windows of training and validation.
    """
    try:
        path = _cached(files_of(None if source is None else Path(source)))
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"--data: the text cannot be read, or not be kept in {cache_folder()}: {error}") from None
    _, training, digest = path.stem.split("-")
    if min(int(training), size - int(training)) < context + 2:
        what = source or "the standard library"
        needed = HELD_OUT * (context + 2)
        raise UsageError(
            f"--data: {what} has {size:,} bytes of text, too few for --context {context}: it takes about {needed:,}"
        )
    return Corpus(torch.from_file(str(path), size=size, dtype=torch.uint8), int(training), digest)


def _cached(files: list[Path]) -> Path:
    """The cache file for these files as they are now, `STAMP-TRAINING-DIGEST.bytes`."""
    stamp = hashlib.sha256()
    for path in files:
        status = path.stat()
        stamp.update(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    folder, name = cache_folder(), stamp.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        found = sorted(folder.glob(f"{name}-*.bytes"))
        return found[0] if found else _write(files, folder, name)


def _write(files: list[Path], folder: Path, name: str) -> Path:
    """Training text, then validation text: whole or not there."""
    block = min(BLOCK_BYTES, max(1, sum(path.stat().st_size for path in files) // HELD_OUT))
    digest, training = hashlib.sha256(), 0
    unfinished = folder / f"{name}.unfinished"
    with unfinished.open("wb") as file, tempfile.TemporaryFile() as held_out:
        for number, text in enumerate(_blocks(files, block)):
            if number % HELD_OUT == HELD_OUT - 1:
                held_out.write(text)
            else:
                training += file.write(text)
                digest.update(text)
        held_out.seek(0)
        while text := held_out.read(BLOCK_BYTES):
            file.write(text)
            digest.update(text)
    return unfinished.replace(folder / f"{name}-{training}-{digest.hexdigest()[:16]}.bytes")


def _blocks(files: list[Path], size: int) -> Iterator[bytes]:
    """The text of all files in pieces of `size` bytes; the last may be shorter."""
    piece = b""
    for path in files:
        with path.open("rb") as file:
            while text := file.read(size - len(piece)):
                piece += text
                if len(piece) == size:
                    yield piece
                    piece = b""
    if piece:
        yield piece


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process of the machine at a time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
