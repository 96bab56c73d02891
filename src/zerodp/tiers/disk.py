"""Disk as a tier: one file per rank, with room in host memory first. Reads and writes run in threads, several at a time.

What came first is needed last (a backward pass goes the other way), so the oldest goes to disk when the room is used up. The
file has no name once it is open: nothing of it is left, however the process ends. Its space is reserved before anything
is written, so that a full disk is found where the data still is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.arena import Slot
from ..errors import StorageError
from . import Ledger, Transfer
from .host import HostTier

ALIGN = 4096  # bytes: extents of the file begin and end on blocks
IN_FLIGHT = 4  # writes that may hold host memory beyond the room, and threads


@dataclass(eq=False)
class Page:
    """A ticket: where one tensor is. In host memory (`slot`), in the file (`offset`), or for a moment in both."""

    numel: int
    dtype: torch.dtype
    kind: str
    label: str
    slot: Slot | None
    offset: int = -1
    writing: Future[None] | None = None
    freed: bool = False

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class DiskTier:
    """Tensors of `device` in host memory up to `host_bytes`, and beyond that in a file in the folder `path`.

    Raises:
        StorageError: the folder cannot be written to.
    """

    latent = True

    def __init__(self, path: str | None, device: torch.device, host_bytes: int = 0) -> None:
        self.host, self.host_bytes = HostTier(device), host_bytes
        self.file = File(path or tempfile.gettempdir())
        self.threads = ThreadPoolExecutor(IN_FLIGHT, "zerodp-disk")
        self.resident: dict[Page, None] = {}  # in host memory only, oldest first
        self.resident_bytes = 0
        self.writing: deque[Page] = deque()
        self.in_file: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self._end = weakref.finalize(self, _close, self.threads, self.file)

    def put(self, tensor: Tensor, kind: str, label: str = "") -> Page:
        self._settle()
        page = Page(tensor.numel(), tensor.dtype, kind, label, self.host.put(tensor, kind, label))
        self.resident[page] = None
        self.resident_bytes += page.nbytes
        try:
            while self.resident_bytes > self.host_bytes:
                self._spill(next(iter(self.resident)))
        except StorageError:
            self.free(page)
            raise
        return page

    def write_back(self, ticket: Page, tensor: Tensor) -> None:
        slot = ticket.slot
        if slot is None or ticket.offset >= 0:
            self._finish(ticket)
            slot = ticket.slot = self.host.space(ticket.numel, ticket.dtype, ticket.kind, ticket.label)
        self.host.write_back(slot, tensor)
        if ticket.offset >= 0:
            self._write(ticket)

    def fetch(self, ticket: Page, out: Tensor) -> Transfer:
        self._settle()
        if ticket.slot is not None:
            return self.host.fetch(ticket.slot, out)
        slot = self.host.space(ticket.numel, ticket.dtype, ticket.kind, ticket.label)
        reading = self.threads.submit(self.file.read, _memory(slot.tensor), ticket.offset)
        return Read(self.host, slot, reading, out)

    def free(self, ticket: Page) -> None:
        ticket.freed = True
        if ticket in self.resident:
            self._leave(ticket)
        elif ticket.writing is not None and not ticket.writing.cancel():
            return  # its memory and its place in the file go when the write has ended
        elif ticket.writing is not None:
            self.writing.remove(ticket)
        if ticket.slot is not None:
            self.host.free(ticket.slot)
            ticket.slot = None
        if ticket.offset >= 0:
            self._give_back(ticket)

    def close(self) -> None:
        self._end()
        self.host.close()

    def ledgers(self) -> list[Ledger]:
        self._settle()
        for page in [page for page in self.writing if page.freed]:
            self._finish(page)  # what nobody wants is not counted
        return [Ledger("disk", self.in_file, self.peak), *self.host.ledgers()]

    def reset_peaks(self) -> None:
        self.peak = dict(self.in_file)
        self.host.reset_peaks()

    # ---- host to file

    def _spill(self, page: Page) -> None:
        """Start moving the values of a page from host memory to the file."""
        page.offset = self.file.reserve(_aligned(page.nbytes))
        self._leave(page)
        self.in_file[page.kind] = self.in_file.get(page.kind, 0) + _aligned(page.nbytes)
        self.peak[page.kind] = max(self.peak.get(page.kind, 0), self.in_file[page.kind])
        self._write(page)

    def _write(self, page: Page) -> None:
        assert page.slot is not None
        page.writing = self.threads.submit(_written, self.host, self.file, _memory(page.slot.tensor), page.offset)
        self.writing.append(page)
        while len(self.writing) > IN_FLIGHT:
            self._finish(self.writing[0])

    def _finish(self, page: Page) -> None:
        """Wait for the page's write, and let go of its host memory; if it failed, the values stay there."""
        if page.writing is None:
            return
        self.writing.remove(page)
        writing, page.writing = page.writing, None
        try:
            writing.result()
        except StorageError:
            if not page.freed:
                raise
        if page.slot is not None:
            self.host.free(page.slot)
            page.slot = None
        if page.freed:
            self._give_back(page)

    def _settle(self) -> None:
        for page in [page for page in self.writing if page.writing is not None and page.writing.done()]:
            self._finish(page)

    def _leave(self, page: Page) -> None:
        del self.resident[page]
        self.resident_bytes -= page.nbytes

    def _give_back(self, page: Page) -> None:
        self.file.release(page.offset, _aligned(page.nbytes))
        self.in_file[page.kind] -= _aligned(page.nbytes)
        page.offset = -1


class Read:
    """A read under way: file to host memory in a thread, then to the device."""

    def __init__(self, host: HostTier, slot: Slot, reading: Future[None], out: Tensor) -> None:
        self.host, self.slot, self.reading, self.out = host, slot, reading, out

    def wait(self) -> None:
        try:
            self.reading.result()
            self.host.fetch(self.slot, self.out).wait()
        finally:
            self.host.free(self.slot)


class File:
    """A file without a name, and which parts of it are free. Sizes and offsets are multiples of `ALIGN`."""

    def __init__(self, folder: str) -> None:
        self.folder, self.end = folder, 0
        self.holes: list[tuple[int, int]] = []  # (offset, size), in order, never adjoining
        try:
            self.handle, self.name = tempfile.mkstemp(prefix=f"zerodp-{os.getpid()}-", dir=folder)
            os.unlink(self.name)
        except OSError as error:
            raise StorageError(
                f"offload: no file can be made in {folder!r} ({error.strerror}); pass a folder that can be written to as zerodp.Offload(path=...)"
            ) from error

    def reserve(self, size: int) -> int:
        """Where `size` bytes may be written."""
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
        holes: list[tuple[int, int]] = []
        for start, length in sorted([*self.holes, (offset, size)]):
            if holes and sum(holes[-1]) == start:
                holes[-1] = (holes[-1][0], holes[-1][1] + length)
            elif length:
                holes.append((start, length))
        self.holes = holes

    def write(self, memory: memoryview, offset: int) -> None:
        try:
            while memory:
                done = os.pwrite(self.handle, memory, offset)
                memory, offset = memory[done:], offset + done
        except OSError as error:
            raise self._failed("written", error.strerror, len(memory)) from error

    def read(self, memory: memoryview, offset: int) -> None:
        try:
            while memory:
                done = os.preadv(self.handle, [memory], offset)
                if done == 0:
                    raise OSError(0, "it ends before")
                memory, offset = memory[done:], offset + done
        except OSError as error:
            raise self._failed("read", error.strerror, len(memory)) from error

    def _failed(self, what: str, why: Any, nbytes: int) -> StorageError:
        free = os.statvfs(self.folder)
        return StorageError(
            f"offload: {nbytes:,} bytes more could not be {what} in {self.name!r}, which has {self.end:,} ({why}); the file system has "
            f"{free.f_bavail * free.f_frsize:,} bytes free. Make room, choose another folder by zerodp.Offload(path=...), or allow more host memory by host_bytes="
        )


def _written(host: HostTier, file: File, memory: memoryview, offset: int) -> None:
    """In a thread, which must not be the last to hold the tier: it would have to wait for itself."""
    host.synchronize()
    file.write(memory, offset)


def _close(threads: ThreadPoolExecutor, file: File) -> None:
    threads.shutdown(wait=True, cancel_futures=True)
    with contextlib.suppress(OSError):
        os.close(file.handle)


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, which must outlive the view."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
