"""How fast a folder's disk reads and writes, by request size and by how many are in flight. It knows files, not tiers."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..errors import StorageError
from .file import ALIGN, File, aligned

READ, WRITE, BOTH = "read", "write", "both"
RANDOM_BYTES = 2**20  # of each buffer; some disks store zeros for nothing


@dataclass(frozen=True)
class Rate:
    """One measurement. what: "read", "write", or "both" at once, whose bytes are added up; bandwidth: bytes per second."""

    what: str
    request_bytes: int
    in_flight: int  # of each kind
    direct: bool
    bandwidth: float


class Trial:
    """Requests on a file of `size` bytes in `folder`, which is gone when the trial is closed.

    Raises:
        StorageError: the folder cannot be written to, or has no room.
    """

    def __init__(self, folder: str, size: int, direct: bool = True) -> None:
        self.file, self.size = File(folder, direct), aligned(size)
        self.written = False
        try:
            self.file.reserve(self.size)
        except StorageError:
            self.file.close()
            raise

    def rate(self, what: str, request_bytes: int, in_flight: int, seconds: float) -> Rate:
        """Go on for so many seconds, with at least one request each; what is read was written before."""
        if what != WRITE and not self.written:
            self._run([(WRITE, _buffer(aligned(RANDOM_BYTES)))], None)
            self.written = True
        kinds = ([READ, WRITE] if what == BOTH else [what]) * in_flight
        work = [(kind, _buffer(request_bytes)) for kind in kinds]
        self._forget()
        start = time.perf_counter()
        moved = self._run(work, start + seconds)
        if not self.file.direct:
            os.fsync(self.file.handle)  # or it would be the page cache's speed
        return Rate(what, request_bytes, in_flight, self.file.direct, moved / (time.perf_counter() - start))

    def close(self) -> None:
        self.file.close()

    def _forget(self) -> None:
        """Nothing is in the page cache."""
        if not self.file.direct:
            os.fsync(self.file.handle)
            os.posix_fadvise(self.file.handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def _run(self, work: Sequence[tuple[str, mmap.mmap]], end: float | None) -> int:
        """A thread for each (kind, buffer), through the file again and again until `end`, or once. The result is the bytes moved."""
        places = {READ: itertools.count(), WRITE: itertools.count()}
        number = max(self.size // len(work[0][1]), 1)

        def requests(kind: str, memory: mmap.mmap) -> int:
            moved = 0
            for place in places[kind]:
                if end is None and place >= number:
                    break
                offset = place % number * len(memory)
                if kind == WRITE:
                    moved += os.pwrite(self.file.handle, memory, offset)
                else:
                    moved += os.preadv(self.file.handle, [memory], offset)
                if end is not None and time.perf_counter() >= end:
                    break
            return moved

        with ThreadPoolExecutor(len(work)) as threads:
            try:
                return sum(threads.map(requests, *zip(*work, strict=True)))
            except OSError as error:
                raise StorageError(f"{self.file.folder!r}: a request failed ({error.strerror})") from error


def _buffer(nbytes: int) -> mmap.mmap:
    """Memory that begins on a page, with bytes that cannot be compressed."""
    memory = mmap.mmap(-1, nbytes)
    memory[:] = (os.urandom(min(RANDOM_BYTES, nbytes)) * -(-nbytes // RANDOM_BYTES))[:nbytes]
    return memory


def measure(folder: str, size: int, requests: Sequence[int], in_flight: Sequence[int], seconds: float) -> list[Rate]:
    """Reads and writes for each size and number in flight, then both at once, and then all through the page cache.

    Raises:
        StorageError: the folder cannot be written to, or has no room for `size` bytes.
        ValueError: a request size that is not a multiple of the block size.
    """
    if any(nbytes % ALIGN for nbytes in requests):
        raise ValueError(f"expected requests of multiples of {ALIGN} bytes, got {list(requests)}")
    found: list[Rate] = []
    trial = Trial(folder, size)
    try:
        for what, nbytes, number in itertools.product((WRITE, READ), requests, in_flight):
            found.append(trial.rate(what, nbytes, number, seconds))
        direct, best = trial.file.direct, max(found, key=lambda rate: rate.bandwidth)
        found.append(trial.rate(BOTH, best.request_bytes, max(in_flight), seconds))
    finally:
        trial.close()
    if direct:
        trial = Trial(folder, size, direct=False)
        try:
            found += [trial.rate(what, max(requests), max(in_flight), seconds) for what in (WRITE, READ)]
        finally:
            trial.close()
    return found
