"""The disk tier against a model of it, against a disk that fails, and within its bounds."""

from __future__ import annotations

import fcntl
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zerodp
from tests.late import LateTier
from tests.limits import largest_file
from zerodp.tiers import file as files
from zerodp.tiers.disk import DiskTier
from zerodp.tiers.file import ALIGN

CPU = torch.device("cpu")
KIND = "first_moment"


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def direct(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Past the page cache, and as on systems that cannot do that."""
    if not request.param:
        monkeypatch.setattr(files, "DIRECT", 0)
    return bool(request.param)


def small(folder: Path, **options: Any) -> DiskTier:
    """A tier whose requests are two blocks and whose buffers are few."""
    return DiskTier(str(folder), CPU, **{"buffer_bytes": 10 * ALIGN, "request_bytes": 2 * ALIGN, **options})


def read(tier: DiskTier, ticket: Any) -> torch.Tensor:
    out = torch.empty(ticket.numel, dtype=ticket.dtype)
    tier.fetch(ticket, out).wait()
    return out


def at_rest(tier: DiskTier) -> None:
    """Until everything is in the file only."""
    while tier.busy:
        tier.ledgers()


def overwrite(tier: DiskTier, offset: int, data: bytes) -> bytes:
    """Write into the tier's file as another process could; the result is what was there."""
    with open(f"/proc/self/fd/{tier.file.handle}", "r+b", buffering=0) as other:
        before = os.pread(other.fileno(), len(data), offset)
        os.pwrite(other.fileno(), data, offset)
        os.fsync(other.fileno())
    return before


# ---- against a model


ACTIONS = ("put", "reserve", "write_back", "change", "look", "ahead", "fetch", "free")
DTYPES = (torch.float32, torch.bfloat16, torch.uint8)
steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 99), st.integers(0, 12_000)), max_size=60)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps, st.sampled_from([0, 3 * ALIGN]))
def test_any_use_gives_what_a_dictionary_gives(tmp_path: Path, steps: list[tuple[str, int, int]], room: int) -> None:
    tier, kept = small(tmp_path, host_bytes=room), dict[Any, torch.Tensor | None]()
    for number, (action, which, numel) in enumerate(steps):
        dtype = DTYPES[numel % 3]
        if action == "put":
            values = torch.full((numel,), number % 100, dtype=dtype)
            kept[tier.put(values, KIND)] = values
            continue
        if action == "reserve":
            kept[tier.reserve(numel, dtype, KIND)] = None  # arbitrary
            continue
        if not kept:
            continue
        ticket = list(kept)[which % len(kept)]
        if action == "ahead":
            tier.ahead(ticket)
        elif action == "free":
            del kept[ticket]
            tier.free(ticket)
        elif action == "write_back":
            kept[ticket] = torch.full((ticket.numel,), number % 100, dtype=ticket.dtype)
            tier.write_back(ticket, kept[ticket])
        elif action == "fetch":
            found = read(tier, ticket)
            assert kept[ticket] is None or torch.equal(found, kept[ticket])
        else:
            opened = tier.open(ticket)
            found = opened.wait()
            assert kept[ticket] is None or torch.equal(found, kept[ticket])
            if action == "change":
                kept[ticket] = found.fill_(number % 100).clone()
            del found
            opened.close(changed=action == "change")
        assert tier.host.arena.lent - tier.resident_bytes <= max(tier.buffer_bytes, 4 * tier.largest)
        assert tier.resident_bytes <= room
        assert tier.host.arena.reserved <= 2 * sum(region.peak for region in tier.host.arena.both)
    for ticket, values in kept.items():
        assert values is None or torch.equal(read(tier, ticket), values)
        tier.free(ticket)
    assert not any(sum(ledger.now.values()) for ledger in tier.ledgers())
    assert tier.file.holes == ([(0, tier.file.end)] if tier.file.end else [])
    tier.close()


# ---- what is asked of the system


def test_requests_go_past_the_page_cache_where_that_works(direct: bool, tmp_path: Path) -> None:
    tier = small(tmp_path)
    ticket = tier.put(torch.arange(30_000), KIND)
    assert bool(fcntl.fcntl(tier.file.handle, fcntl.F_GETFL) & os.O_DIRECT) == tier.file.direct == direct
    at_rest(tier)
    assert torch.equal(read(tier, ticket), torch.arange(30_000))
    note = tier.ledgers()[0].note
    assert note == f"in {str(tmp_path)!r}, {'past' if direct else 'through'} the page cache"
    tier.close()


def test_moved_bytes_are_counted_in_whole_blocks(tmp_path: Path) -> None:
    tier = small(tmp_path)
    ticket = tier.reserve(1025, torch.float32, KIND)
    opened = tier.open(ticket)
    opened.wait().fill_(1)
    opened.close(changed=True)
    at_rest(tier)
    read(tier, ticket)
    disk, host = tier.ledgers()
    assert (disk.fetched_bytes, disk.written_bytes) == (2 * ALIGN, 2 * ALIGN)  # what was never written is not read
    assert host.fetched_bytes == 4 * 1025
    tier.reset_peaks()
    assert tier.ledgers()[0].written_bytes == 0
    tier.close()


def test_a_hint_reads_ahead(tmp_path: Path) -> None:
    """Seen by what the file holds later: bytes that are here already are not read again."""
    tier = small(tmp_path)
    first, second = (tier.put(torch.full((2000,), value), KIND) for value in (1.0, 2.0))
    at_rest(tier)
    tier.ahead(first)
    assert [request.result() for request in first.work] == [None]
    for ticket in (first, second):
        overwrite(tier, ticket.offset, b"\xff" * 8)
    assert bool((read(tier, first) == 1).all())
    with pytest.raises(zerodp.StorageError, match="are not what was written there"):
        read(tier, second)
    tier.close()


def test_hints_wait_for_room_and_give_it_up(tmp_path: Path) -> None:
    tier = small(tmp_path)
    tickets = [tier.put(torch.full((4 * 1024,), float(n)), KIND) for n in range(8)]  # four blocks each; ten are allowed
    at_rest(tier)
    for ticket in tickets:
        tier.ahead(ticket)
    assert list(tier.here) == tickets[:4]  # four of the largest are always allowed
    opened = tier.open(tickets[6])
    assert list(tier.here) == tickets[:3]
    assert bool((opened.wait() == 6).all())
    opened.close(changed=False)
    for n, ticket in enumerate(tickets):
        assert bool((read(tier, ticket) == n).all())
    assert not tier.here
    assert not tier.hints
    tier.close()


# ---- a disk that fails


def test_a_flipped_bit_is_found(direct: bool, tmp_path: Path) -> None:
    tier = small(tmp_path)
    tickets = [tier.put(torch.randn(10_000), KIND) for _ in range(2)]  # five requests each
    at_rest(tier)
    place = tickets[0].offset + 17_001
    (was,) = overwrite(tier, place, b"\0")
    overwrite(tier, place, bytes([was ^ 0x10]))
    folder = re.escape(str(tmp_path))
    with pytest.raises(zerodp.StorageError, match=rf"8,192 bytes at 16,384 of '{folder}/zerodp-.*are not what was wri"):
        read(tier, tickets[0])
    opened = tier.open(tickets[0])
    with pytest.raises(zerodp.StorageError, match="are not what was written there"):
        opened.wait()
    read(tier, tickets[1])
    overwrite(tier, place, bytes([was]))  # and everything works again
    read(tier, tickets[0])
    for ticket in tickets:
        tier.free(ticket)
    assert not any(sum(ledger.now.values()) for ledger in tier.ledgers())
    tier.close()


def test_a_failed_read_fails_for_all_who_wait(tmp_path: Path) -> None:
    tier = small(tmp_path)
    ticket = tier.put(torch.ones(4 * 1024), KIND)
    at_rest(tier)
    right = overwrite(tier, ticket.offset, b"\0" * 8)
    out = torch.empty(4 * 1024)
    first, opened, second = tier.fetch(ticket, out), tier.open(ticket), tier.fetch(ticket, out)
    for wait in (first.wait, opened.wait, second.wait):
        with pytest.raises(zerodp.StorageError, match="are not what was written there"):
            wait()
    overwrite(tier, ticket.offset, right)
    assert bool((read(tier, ticket) == 1).all())
    tier.close()


def test_old_and_exchanged_blocks_are_found(tmp_path: Path) -> None:
    tier = small(tmp_path)
    ticket = tier.put(torch.randn(4 * 1024), KIND)  # two requests
    at_rest(tier)
    first = overwrite(tier, 0, b"")
    first, second = overwrite(tier, 0, bytes(2 * ALIGN)), overwrite(tier, 2 * ALIGN, bytes(2 * ALIGN))
    overwrite(tier, 0, second), overwrite(tier, 2 * ALIGN, first)
    with pytest.raises(zerodp.StorageError, match="are not what was written there"):
        read(tier, ticket)
    tier.write_back(ticket, torch.ones(4 * 1024))
    at_rest(tier)
    overwrite(tier, 0, first)  # as if a write had never arrived
    with pytest.raises(zerodp.StorageError, match="are not what was written there"):
        read(tier, ticket)
    tier.close()


def test_a_cut_file_is_named(direct: bool, tmp_path: Path) -> None:
    tier = small(tmp_path)
    ticket = tier.put(torch.ones(10_000), KIND)
    at_rest(tier)
    os.ftruncate(tier.file.handle, 2 * ALIGN + 100)
    with pytest.raises(zerodp.StorageError, match=r"8,092 bytes more could not be read in .* \(it ends before\)"):
        read(tier, ticket)
    tier.close()


def test_what_cannot_be_written_stays_in_memory(tmp_path: Path) -> None:
    tier = small(tmp_path)
    tickets = [tier.put(torch.full((2000,), float(n)), KIND) for n in range(3)]
    at_rest(tier)
    with largest_file(ALIGN):
        opened = tier.open(tickets[2])
        opened.wait().fill_(7)
        opened.close(changed=True)
        with pytest.raises(
            zerodp.StorageError, match=r"8,192 bytes more could not be written .*bytes free\. Make room"
        ):
            at_rest(tier)
        assert bool((read(tier, tickets[2]) == 7).all())
        assert bool((read(tier, tickets[1]) == 1).all())
    tier.write_back(tickets[2], torch.full((2000,), 8.0))
    at_rest(tier)
    assert tickets[2].slot is None
    assert bool((read(tier, tickets[2]) == 8).all())
    tier.close()


def test_a_full_disk_is_found_when_room_is_reserved(tmp_path: Path) -> None:
    tier = small(tmp_path)
    with largest_file(8 * ALIGN):
        ticket = tier.reserve(8 * ALIGN, torch.uint8, KIND)
        with pytest.raises(
            zerodp.StorageError, match=r"4,096 bytes more could not be written in '.*has 32,768 .* bytes free"
        ):
            tier.reserve(1, torch.uint8, KIND)
        tier.free(ticket)
        tier.reserve(1, torch.uint8, KIND)
    with largest_file(0), pytest.raises(zerodp.StorageError, match="4,096 bytes more could not be written"):
        small(tmp_path)
    tier.close()


# ---- jobs that end, and jobs side by side

JOB = """
import os, sys, torch
from zerodp.tiers.disk import DiskTier
tier = DiskTier(sys.argv[1], torch.device("cpu"))
tickets = [tier.put(torch.full((1000,), float(os.getpid())), "master") for _ in range(50)]
for ticket in tickets:
    out = torch.empty(1000)
    tier.fetch(ticket, out).wait()
    assert (out == os.getpid()).all()
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    command = [sys.executable, "-c", JOB, str(tmp_path)]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    yield started
    for job in started:
        job.kill()
        job.communicate()


def test_jobs_share_a_folder_and_leave_nothing_in_it(jobs: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    for job in jobs:
        assert job.stdout is not None
        assert job.stdout.readline() == b"there\n"
    names = [os.readlink(one) for job in jobs for one in Path(f"/proc/{job.pid}/fd").iterdir() if one.is_symlink()]
    mine = [name for name in names if name.startswith(str(tmp_path))]
    expected = [rf"{re.escape(str(tmp_path))}/zerodp-{job.pid}-\w+ \(deleted\)" for job in jobs]
    assert len(mine) == 2
    assert all(re.fullmatch(pattern, name) for pattern, name in zip(expected, mine, strict=True))
    jobs[0].send_signal(signal.SIGKILL)
    jobs[0].wait()
    assert os.listdir(tmp_path) == []
    jobs[1].communicate()  # the other one ends as ever
    assert (jobs[0].returncode, jobs[1].returncode) == (-signal.SIGKILL, 0)
    assert os.listdir(tmp_path) == []


def test_a_tier_that_is_dropped_ends_its_threads_and_its_file(tmp_path: Path) -> None:
    tier = small(tmp_path)
    handle, threads = tier.file.handle, [*tier.readers._threads, *tier.writers._threads]
    for n in range(20):
        tier.put(torch.full((5000,), float(n)), KIND)  # and some are still being written
    threads = [*tier.readers._threads, *tier.writers._threads]
    assert threads
    del tier
    gc.collect()
    for thread in threads:
        thread.join(20)  # the requests under way end, and the file with the last of them
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


@pytest.mark.parametrize("way", ["write", "read"])
def test_requests_under_way_keep_their_memory(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tier that is dropped meanwhile, as with a model at the end of a script: given back, somebody else's would be read or filled."""
    tier, running, go, whole = small(tmp_path), threading.Event(), threading.Event(), getattr(files.File, way)
    ticket = tier.put(torch.ones(1000), KIND)
    at_rest(tier)

    def late(*arguments: Any) -> Any:
        running.set()
        go.wait(20)
        return whole(*arguments)

    monkeypatch.setattr(files.File, way, late)
    if way == "write":
        tier.write_back(ticket, torch.zeros(1000))
    else:
        tier.open(ticket)
    running.wait(20)
    memory = weakref.ref(ticket.slot.buffer)
    threads = [*tier.readers._threads, *tier.writers._threads]
    del tier, ticket
    gc.collect()
    assert memory() is not None
    go.set()
    for thread in threads:
        thread.join(20)
    assert memory() is None


def test_the_collector_waits_for_no_thread(tmp_path: Path) -> None:
    """It may run in a thread that is just starting, which holds locks that the end of another one needs."""
    tier, running, go = small(tmp_path), threading.Event(), threading.Event()

    def slow() -> None:
        running.set()
        go.wait(20)

    busy = tier.writers.submit(slow)
    running.wait(20)
    del tier
    gc.collect()  # returns while a request is under way
    assert not busy.done()
    go.set()
    busy.result(20)


def test_buffers_stay_bounded_while_copies_to_the_device_are_late(tmp_path: Path) -> None:
    tier = small(tmp_path)
    tier.host = LateTier(CPU, ALIGN)
    tickets = [tier.put(torch.full((1000,), float(number)), KIND) for number in range(20)]
    out = [torch.empty(1000) for _ in tickets]
    coming = [tier.fetch(ticket, into).launched() for ticket, into in zip(tickets, out, strict=True)]
    assert tier.host.arena.peak[KIND] <= 10 * ALIGN
    for one in coming:
        one.wait()
    assert [into.unique().tolist() for into in out] == [[number] for number in range(20)]
    tier.close()
