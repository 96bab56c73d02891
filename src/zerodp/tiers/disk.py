"""Disk as a tier: one file per rank, with room in host memory first. Reads and writes run in threads, several at a time.

What came first is needed last (a backward pass goes the other way), so the oldest goes to disk when the room is used up. What
is in the file comes into host memory to be used, and leaves it again when it has been; a bounded set of buffers holds what is
on its way. Values that could not be written stay in memory.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from ..core.arena import Slot
from ..errors import StorageError
from ..host_memory import raw
from . import Ledger, Transfer
from .file import ALIGN, File, aligned
from .host import HostTier

REQUEST_BYTES = 4 * 2**20  # one read or write, and what has one checksum
IN_FLIGHT = 4  # requests of each kind, reads and writes
BUFFER_BYTES = 64 * 2**20  # host memory for what is on its way, or four of the largest tensors if that is more


@dataclass(eq=False)
class Page:
    """A ticket: where one tensor is. In host memory (`slot`), in the file (`offset`), or for a while in both."""

    numel: int
    dtype: torch.dtype
    kind: str
    label: str
    slot: Slot | None = None
    offset: int = -1
    checksums: list[int] | None = None  # of what the file has; None: it was never written, or is being
    dirty: bool = False  # the file does not have what is in memory
    reading: bool = False
    failed: BaseException | None = None  # why a read has not filled the slot; everybody who waits for it hears of that
    work: list[Future[Any]] = field(default_factory=list)  # requests that fill or drain the slot
    users: int = 0  # fetches, openings and a hint
    freed: bool = False

    @property
    def size(self) -> int:
        """Bytes in whole blocks, at least one."""
        return aligned(max(self.numel * self.dtype.itemsize, 1))

    @property
    def values(self) -> Tensor:
        assert self.slot is not None
        return self.slot.tensor[: self.numel * self.dtype.itemsize].view(self.dtype)


class DiskTier:
    """Tensors of `device` in host memory up to `host_bytes`, and beyond that in a file in the folder `path`.

    buffer_bytes: host memory for what is on its way, beside `host_bytes`; never less than four of the largest tensors.
    request_bytes: one read or write, and what has one checksum; a multiple of the block size.

    Raises:
        StorageError: the folder cannot be written to.
    """

    latent = True

    def __init__(
        self,
        path: str | None,
        device: torch.device,
        host_bytes: int = 0,
        buffer_bytes: int = BUFFER_BYTES,
        request_bytes: int = REQUEST_BYTES,
    ) -> None:
        self.host, self.host_bytes = HostTier(device, ALIGN), host_bytes
        self.buffer_bytes, self.request_bytes = buffer_bytes, request_bytes
        self.file = File(path or tempfile.gettempdir())
        self.readers = ThreadPoolExecutor(IN_FLIGHT, "zerodp-disk-read")
        self.writers = ThreadPoolExecutor(IN_FLIGHT, "zerodp-disk-write")
        self.resident: dict[Page, None] = {}  # in host memory only, oldest first
        self.resident_bytes = self.largest = 0
        self.busy: dict[Page, None] = {}  # with requests under way, oldest first
        self.hints: deque[Page] = deque()  # to be read when there is room
        self.here: dict[Page, None] = {}  # read, or being read, because of a hint
        self.in_file: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.fetched_bytes = self.written_bytes = 0
        self._end = weakref.finalize(self, _stop, self.readers, self.writers)

    def claim(self, nbytes: int) -> None:
        """Make the file so large that tensors of so many bytes, in whole blocks, find room in it later.

        Raises:
            StorageError: the file system has no room for them.
        """
        self.file.release(self.file.reserve(aligned(nbytes)), aligned(nbytes))

    def put(self, tensor: Tensor, kind: str, label: str = "") -> Page:
        self._settle()
        page = self._page(tensor.numel(), tensor.dtype, kind, label)
        page.slot = self._memory(page)
        self.host.write(page.values, tensor)
        self._stay(page)
        try:
            while self.resident_bytes > self.host_bytes:
                self._spill(next(one for one in self.resident if not one.users))
        except StorageError:
            self.free(page)
            raise
        return page

    def reserve(self, numel: int, dtype: torch.dtype, kind: str, label: str = "") -> Page:
        self._settle()
        page = self._page(numel, dtype, kind, label)
        if self.resident_bytes + page.size <= self.host_bytes:
            page.slot = self._memory(page)
            self._stay(page)
        else:
            self._take_place(page)
        return page

    def write_back(self, ticket: Page, tensor: Tensor) -> None:
        ticket.failed = None  # its values are not needed
        self._finish(ticket)
        if ticket.slot is None:
            ticket.slot = self._memory(ticket)
        self.host.write(ticket.values, tensor)
        self._changed(ticket)

    def fetch(self, ticket: Page, out: Tensor) -> Transfer:
        self._use(ticket)
        if not (ticket.reading or ticket.failed):
            transfer = self.host.read(ticket.values, out)
            self._leave(ticket)
            return transfer
        return Read(self, ticket, out)

    def open(self, ticket: Page) -> Opening:
        self._use(ticket)
        return Opening(self, ticket)

    def ahead(self, ticket: Page) -> None:
        if ticket.offset >= 0 and ticket not in self.here and ticket not in self.hints:
            self.hints.append(ticket)
        self._settle()

    def free(self, ticket: Page) -> None:
        ticket.freed = True
        self._forget_hint(ticket)
        if ticket in self.resident:
            del self.resident[ticket]
            self.resident_bytes -= ticket.size
        ticket.work = [work for work in ticket.work if not work.cancel()]
        self._rest(ticket)

    def close(self) -> None:
        self._end()
        for threads in (self.readers, self.writers):
            threads.shutdown(wait=True)
        self.file.close()
        for page in [page for page in self.busy if page.freed]:
            self._finish(page)
        self.host.close()

    def ledgers(self) -> list[Ledger]:
        self._settle()
        for page in [page for page in self.busy if page.freed]:
            self._finish(page)  # what nobody wants is not counted
        moved = self.fetched_bytes, self.written_bytes
        return [Ledger("disk", self.in_file, self.peak, *moved, self.file.note), *self.host.ledgers()]

    def reset_peaks(self) -> None:
        self.peak = dict(self.in_file)
        self.fetched_bytes = self.written_bytes = 0
        self.host.reset_peaks()

    def _page(self, numel: int, dtype: torch.dtype, kind: str, label: str) -> Page:
        page = Page(numel, dtype, kind, label)
        self.largest = max(self.largest, page.size)
        return page

    # ---- a page in memory, for a while

    def _use(self, page: Page) -> None:
        """Start bringing a page into memory for somebody."""
        self._settle()
        if page.slot is None:
            self._load(page)
        page.users += 1
        self._forget_hint(page)

    def _load(self, page: Page) -> None:
        page.slot, page.failed = self._memory(page), None
        if page.checksums is not None:
            page.reading = True
            self.fetched_bytes += page.size
            self._ask(page, self.readers, self.file.read, page.checksums)

    def _leave(self, page: Page, changed: bool = False) -> None:
        """Somebody needs the page in memory no longer."""
        page.users -= 1
        if changed:
            self._changed(page)
        self._rest(page)

    def _changed(self, page: Page) -> None:
        """Memory has new values; start writing them where the page has a place in the file."""
        if page.offset >= 0:
            page.dirty, page.checksums = True, None
            self.written_bytes += page.size
            writes = functools.partial(_write_after, self.file)
            self._ask(page, self.writers, writes, repeat(self.host.mark()))

    def _ask(self, page: Page, threads: ThreadPoolExecutor, do: Callable[..., Any], arguments: Iterable[Any]) -> None:
        assert page.slot is not None
        # Which keeps it: a model may be dropped, and this tier with it, while its last writes are under way. The buffer itself, since
        # another view of it would count as a use of the slot.
        memory = raw(page.slot.buffer)[: page.size]
        page.work = [
            threads.submit(do, memory[start : start + self.request_bytes], page.offset + start, argument)
            for start, argument in zip(range(0, page.size, self.request_bytes), arguments, strict=False)
        ]
        self.busy[page] = None

    def _finish(self, page: Page) -> None:
        """Wait for the page's requests, and let go of memory that is needed no longer."""
        if page not in self.busy:
            if page.failed:
                raise page.failed
            return
        del self.busy[page]
        work, page.work, reading, page.reading = page.work, [], page.reading, False
        errors = [error for error in (one.exception() for one in work) if error is not None]
        if not errors and not reading:
            page.dirty, page.checksums = False, [one.result() for one in work]
        if errors and reading:
            page.failed = errors[0]
            self._forget_hint(page)
        self._rest(page)
        if errors and not page.freed:
            raise errors[0]

    def _rest(self, page: Page) -> None:
        """Memory and place go when nobody needs them."""
        if page.work or page.users:
            return
        if page.freed:
            self.busy.pop(page, None)
        if page.slot is not None and (page.freed or (page.offset >= 0 and not page.dirty)):
            self.host.free(page.slot)
            page.slot = None
        if page.freed and page.offset >= 0:
            self.file.release(page.offset, page.size)
            self.in_file[page.kind] -= page.size
            page.offset = -1

    # ---- room

    def _settle(self) -> None:
        """See what has ended, and start what was hinted at."""
        for page in [page for page in self.busy if all(one.done() for one in page.work)]:
            if page in self.here:
                with contextlib.suppress(StorageError):  # whoever needs it reads it again, and hears of it then
                    self._finish(page)
            elif not (page.reading and page.users):  # its user will ask, and hear of errors
                self._finish(page)
        while self.hints and (self.hints[0].slot is not None or self._fits(self.hints[0].size)):
            page = self.hints.popleft()
            if page.slot is None:
                self._load(page)
            page.users += 1
            self.here[page] = None

    def _forget_hint(self, page: Page) -> None:
        if page in self.hints:
            self.hints.remove(page)
        if page in self.here:
            del self.here[page]
            page.users -= 1

    def _fits(self, nbytes: int) -> bool:
        used = self.host.arena.lent - self.resident_bytes
        return used + nbytes <= max(self.buffer_bytes, 4 * self.largest)

    def _memory(self, page: Page) -> Slot:
        """A buffer for the page, when there is room for it: after writes under way, and instead of what was read on a hint."""
        while not self._fits(page.size):
            writing = next((one for one in self.busy if not one.reading), None)
            if writing is not None:
                self._finish(writing)
            elif self.here:
                hinted = next(reversed(self.here))
                self._forget_hint(hinted)
                with contextlib.suppress(StorageError):  # whoever needs it reads it again, and hears of it then
                    self._finish(hinted)
                self._rest(hinted)
            elif not self.host.reclaim():  # what copies to the device have read comes back when they end
                break  # all of it is in use
        return self.host.reserve(page.size, torch.uint8, page.kind, page.label)

    def _stay(self, page: Page) -> None:
        self.resident[page] = None
        self.resident_bytes += page.size

    def _spill(self, page: Page) -> None:
        """Start moving the values of a page from host memory to the file."""
        self._take_place(page)
        del self.resident[page]
        self.resident_bytes -= page.size
        self._changed(page)

    def _take_place(self, page: Page) -> None:
        page.offset = self.file.reserve(page.size)
        self.in_file[page.kind] = self.in_file.get(page.kind, 0) + page.size
        self.peak[page.kind] = max(self.peak.get(page.kind, 0), self.in_file[page.kind])


class Read:
    """A read under way: file to host memory in threads, then to the device."""

    def __init__(self, tier: DiskTier, page: Page, out: Tensor) -> None:
        self.tier, self.page, self.out = tier, page, out

    def wait(self) -> None:
        self.launched().wait()

    def launched(self) -> Transfer:
        try:
            self.tier._finish(self.page)
            return self.tier.host.read(self.page.values, self.out)
        finally:
            self.tier._leave(self.page)

    def behind(self) -> Any:
        return self.launched().behind()


class Opening:
    """A page held in host memory."""

    def __init__(self, tier: DiskTier, page: Page) -> None:
        self.tier, self.page, self.closed = tier, page, False

    def wait(self) -> Tensor:
        try:
            self.tier._finish(self.page)
        except StorageError:
            self.close(changed=False)
            raise
        ready = self.tier.host.mark()
        if ready is not None:
            ready.synchronize()
        return self.page.values

    def close(self, changed: bool) -> None:
        if not self.closed:
            self.closed = True
            self.tier._leave(self.page, changed)


def _write_after(file: File, memory: memoryview, offset: int, ready: Any) -> int:
    """In a thread, which must not keep the tier alive."""
    if ready is not None:
        ready.synchronize()
    return file.write(memory, offset)


def _stop(*pools: ThreadPoolExecutor) -> None:
    """Begin no more requests. It waits for none: the collector of garbage may run this in a thread that is just starting, where
    waiting for another thread can last for ever. The file ends with the last request that uses it."""
    for threads in pools:
        threads.shutdown(wait=False, cancel_futures=True)
