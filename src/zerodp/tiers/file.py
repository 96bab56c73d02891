"""One file without a name: which parts of it are free, and requests that read and write it, past the page cache if possible.

It has no name once it is open, so nothing of it is left however the process ends, and two jobs never meet in one folder. (Where
open files are listed, as by `lsof`, it shows as zerodp-<process>-... (deleted).) Its space is reserved before anything is written,
so that a full disk is found where the data still is. Every request has a checksum, kept in memory by the caller.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from typing import Any

import torch

from ..errors import StorageError

ALIGN = 4096  # bytes: extents and requests begin and end on blocks, as does the memory that they are read to and written from
DIRECT = getattr(os, "O_DIRECT", 0)


def checksum_of(memory: memoryview) -> int:
    """Of whole blocks: their sums, each times its place. Five times as fast as CRC-32 here, so that a core can keep up with a disk."""
    blocks = torch.frombuffer(memory, dtype=torch.int64).view(-1, ALIGN // 8).sum(1)
    return int((blocks * torch.arange(1, len(blocks) + 1)).sum()) & 0xFFFFFFFFFFFFFFFF


class File:
    """Sizes and offsets are multiples of `ALIGN`.

    direct: whether reads and writes go past the page cache; asked for, they still do not where the file system cannot.

    Raises:
        StorageError: the folder cannot be written to.
    """

    def __init__(self, folder: str, direct: bool = True) -> None:
        self.folder, self.end = folder, 0
        self.holes: list[tuple[int, int]] = []  # (offset, size), in order, never adjoining
        try:
            self.handle, self.name = tempfile.mkstemp(prefix=f"zerodp-{os.getpid()}-", dir=folder)
            os.unlink(self.name)
        except OSError as error:
            raise StorageError(
                f"offload: no file can be made in {folder!r} ({error.strerror}); pass a folder that can be written to as zerodp.Offload(path=...)"
            ) from error
        self._end = weakref.finalize(
            self, os.close, self.handle
        )  # with its last user, which may be a request in a thread
        self.direct = direct and self._go_direct()

    def _go_direct(self) -> bool:
        """Ask the file system, and see that it works: some take the flag and then refuse every request."""
        if not DIRECT:
            return False
        flags = fcntl.fcntl(self.handle, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.handle, fcntl.F_SETFL, flags | DIRECT)
            with mmap.mmap(-1, ALIGN) as block:
                os.pwrite(self.handle, block, 0)
                os.preadv(self.handle, [block], 0)
        except OSError as error:
            fcntl.fcntl(self.handle, fcntl.F_SETFL, flags)
            if error.errno != errno.EINVAL:
                self.close()
                raise self._failed("written", error.strerror, ALIGN) from error
            return False
        os.ftruncate(self.handle, 0)
        return True

    @property
    def note(self) -> str:
        return f"in {self.folder!r}, " + ("past the page cache" if self.direct else "through the page cache")

    # ---- space

    def reserve(self, size: int) -> int:
        """Where `size` bytes may be written.

        Raises:
            StorageError: the file system has no room for them.
        """
        for place, (offset, free) in enumerate(self.holes):
            if free >= size:
                self.holes[place : place + 1] = [(offset + size, free - size)] if free > size else []
                return offset
        last = self.holes[-1] if self.holes and sum(self.holes[-1]) == self.end else None
        offset = last[0] if last else self.end
        try:
            if size:
                os.posix_fallocate(self.handle, self.end, offset + size - self.end)
        except OSError as error:
            raise self._failed("written", error.strerror, size) from error
        if last:
            self.holes.pop()
        self.end = max(self.end, offset + size)
        return offset

    def release(self, offset: int, size: int) -> None:
        """The bytes may be given to others."""
        holes: list[tuple[int, int]] = []
        for start, length in sorted([*self.holes, (offset, size)]):
            if holes and sum(holes[-1]) == start:
                holes[-1] = (holes[-1][0], holes[-1][1] + length)
            elif length:
                holes.append((start, length))
        self.holes = holes

    # ---- requests

    def write(self, memory: memoryview, offset: int) -> int:
        """Write all of `memory`; the result is its checksum.

        Raises:
            StorageError: the system refuses.
        """
        checksum = checksum_of(memory)
        try:
            while memory:
                done = os.pwrite(self.handle, memory, offset)
                memory, offset = memory[done:], offset + done
        except OSError as error:
            raise self._failed("written", error.strerror, len(memory)) from error
        return checksum

    def read(self, memory: memoryview, offset: int, checksum: int) -> None:
        """Fill `memory` with what was written there.

        Raises:
            StorageError: the system refuses, the file has become shorter, or its bytes are others.
        """
        rest, at = memory, offset
        try:
            while rest:
                done = os.preadv(self.handle, [rest], at)
                if done == 0 or done % ALIGN:
                    rest = rest[done:]
                    raise OSError(0, "it ends before")
                rest, at = rest[done:], at + done
        except OSError as error:
            raise self._failed("read", error.strerror, len(rest)) from error
        found = checksum_of(memory)
        if found != checksum:
            raise StorageError(
                f"offload: {len(memory):,} bytes at {offset:,} of {self.name!r} are not what was written there (checksum {found:08x}, expected "
                f"{checksum:08x}): the disk, or somebody who writes to its files, has changed them. Go on from the last checkpoint, with another "
                "folder by zerodp.Offload(path=...)"
            )

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._end()

    def _failed(self, what: str, why: Any, nbytes: int) -> StorageError:
        free = os.statvfs(self.folder)
        return StorageError(
            f"offload: {nbytes:,} bytes more could not be {what} in {self.name!r}, which has {self.end:,} ({why}); the file system has "
            f"{free.f_bavail * free.f_frsize:,} bytes free. Make room, choose another folder by zerodp.Offload(path=...), or allow more host memory by host_bytes="
        )


def aligned(nbytes: int) -> int:
    """Rounded up to whole blocks."""
    return -(-nbytes // ALIGN) * ALIGN
