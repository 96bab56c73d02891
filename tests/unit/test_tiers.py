"""The tiers: what is put comes back, bytes are counted, space is used again, and a disk's failures are named."""

from __future__ import annotations

import gc
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zerodp
from tests.late import LateTier, Queue
from tests.limits import largest_file
from zerodp.core.arena import Arena
from zerodp.residual.replicated import fingerprint
from zerodp.tiers import Tier
from zerodp.tiers.device import DeviceTier
from zerodp.tiers.disk import DiskTier
from zerodp.tiers.file import ALIGN, File
from zerodp.tiers.host import HostTier

CPU = torch.device("cpu")
TIERS: dict[str, Callable[[Path], Tier]] = {
    "device": lambda folder: DeviceTier(Arena(CPU)),
    "host": lambda folder: HostTier(CPU),
    "disk": lambda folder: DiskTier(str(folder), CPU),
    "disk after some room": lambda folder: DiskTier(str(folder), CPU, host_bytes=3000),
}
places = pytest.mark.parametrize("place", TIERS)


def there(tier: Tier) -> int:
    """Bytes of the test's kind, wherever they rest."""
    return sum(ledger.now.get("activations", 0) for ledger in tier.ledgers())


def back(tier: Tier, ticket: Any, like: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(like)
    tier.fetch(ticket, out).wait()
    return out


@places
def test_what_is_put_comes_back(place: str, tmp_path: Path) -> None:
    tier = TIERS[place](tmp_path)
    tensors = [torch.randn(300), torch.arange(77), torch.rand(900) > 0.5, torch.randn(1).bfloat16(), torch.empty(0)]
    tickets = [tier.put(tensor, "activations") for tensor in tensors * 3]
    for ticket, tensor in reversed(list(zip(tickets, tensors * 3, strict=True))):
        assert torch.equal(back(tier, ticket, tensor), tensor)
    for ticket in tickets:
        tier.free(ticket)
    assert there(tier) == 0
    tier.close()


@places
def test_the_tensor_may_change_after_put(place: str, tmp_path: Path) -> None:
    tier = TIERS[place](tmp_path)
    tensor = torch.ones(2000)
    ticket = tier.put(tensor, "activations")
    tensor.zero_()
    assert bool((back(tier, ticket, tensor) == 1).all())
    tier.close()


def test_a_slot_is_not_used_again_while_it_is_copied() -> None:
    """Given back at once, it is another borrower's only when its copy to the host has ended."""
    tier, device = LateTier(CPU), Arena(CPU)
    tickets = [tier.reserve(700, torch.float32, "gradients") for _ in range(3)]
    for number, ticket in enumerate(tickets):
        slot = device.take(700, torch.float32, "buckets")
        tier.write_back(ticket, slot.tensor.fill_(number))
        device.give(slot)
    assert device.now["buckets"] == 3 * 2800  # of which each is counted until then
    slot = device.take(700, torch.float32, "buckets")
    slot.tensor.fill_(-1)
    device.give(slot)
    assert [tier.open(ticket).wait().unique().tolist() for ticket in tickets] == [[0], [1], [2]]
    device.settle()
    assert (device.now["buckets"], tier.kept_bytes) == (0, 0)


def test_copies_under_way_keep_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """However far the caller is ahead of the device."""
    monkeypatch.setattr("zerodp.tiers.host.KEPT_BYTES", 10_000)
    tier, device = LateTier(CPU), Arena(CPU)
    for _ in range(30):
        slot = device.take(700, torch.float32, "buckets")
        tier.write_back(tier.reserve(700, torch.float32, "gradients"), slot.tensor)
        device.give(slot)
    assert device.peak["buckets"] <= 10_000 + 2800
    assert tier.reclaim()


def test_a_tier_that_is_dropped_ends_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Stream", lambda device: Queue())
    tier, done = HostTier(torch.device("meta")), list[int]()
    tier.stream.waiting.append(lambda: done.append(1))
    del tier
    gc.collect()
    assert done == [1]


def test_opening_waits_for_the_copies_of_its_own_ticket() -> None:
    tier = LateTier(CPU)
    first, second, third = (tier.reserve(9, torch.float32, "master") for _ in range(3))
    tier.write_back(first, torch.ones(9))
    tier.write_back(second, torch.ones(9))
    assert bool((tier.open(first).wait() == 1).all())
    tier.open(third).wait()
    assert len(tier.stream.waiting) == 1
    tier.fetch(second, torch.empty(9))
    tier.open(second).wait().zero_()  # when the fetch has read it
    assert not tier.stream.waiting


@places
def test_new_values_in_the_same_place(place: str, tmp_path: Path) -> None:
    tier = TIERS[place](tmp_path)
    tickets = [tier.put(torch.full((500,), float(i)), "activations") for i in range(6)]
    for round_ in range(3):
        before = there(tier)
        for i, ticket in enumerate(tickets):
            tier.write_back(ticket, torch.full((500,), 10.0 * round_ + i))
        for i, ticket in enumerate(tickets):
            assert bool((back(tier, ticket, torch.empty(500)) == 10.0 * round_ + i).all())
        assert there(tier) <= max(before, 2 * 6 * ALIGN)  # in the file, and on their way there
    tier.close()


@places
def test_reserved_pieces_are_opened_changed_and_given_back(place: str, tmp_path: Path) -> None:
    """As an optimizer does: room first, then window after window, the next one hinted at."""
    tier = TIERS[place](tmp_path)
    sizes = [0, 1, 300, 5000, 2_500_000]  # the last one takes several requests
    tickets = [tier.reserve(numel, torch.float32, "activations") for numel in sizes]
    for ticket in tickets:
        opened = tier.open(ticket)
        opened.wait().zero_()
        opened.close(changed=True)
    for round_ in range(3):
        for ticket, after, numel in zip(tickets, [*tickets[1:], tickets[0]], sizes, strict=True):
            tier.ahead(after)
            opened = tier.open(ticket)
            values = opened.wait()
            assert (values.numel(), values.dtype) == (numel, torch.float32)
            assert bool((values == round_).all())
            values += 1
            del values
            opened.close(changed=True)
    for ticket, numel in zip(tickets, sizes, strict=True):
        opened = tier.open(ticket)
        assert bool((opened.wait() == 3).all())
        opened.close(changed=False)
        assert bool((back(tier, ticket, torch.empty(numel)) == 3).all())
        tier.free(ticket)
    assert there(tier) == 0
    tier.close()


@places
def test_random_use(place: str, tmp_path: Path) -> None:
    """Tickets of all sizes that live for all times; none ever shows another's values."""
    tier, draw = TIERS[place](tmp_path), random.Random(1)
    alive: list[tuple[Any, torch.Tensor]] = []
    for number in range(400):
        if alive and draw.random() < 0.5:
            ticket, tensor = alive.pop(draw.randrange(len(alive)))
            assert torch.equal(back(tier, ticket, tensor), tensor)
            tier.free(ticket)
        else:
            tensor = torch.full((draw.randrange(1, 4000),), float(number))
            alive.append((tier.put(tensor, "activations"), tensor))
    for ticket, _ in alive:
        tier.free(ticket)
    assert there(tier) == 0
    if isinstance(tier, DiskTier):
        assert tier.file.holes == [(0, tier.file.end)]  # all free, and one piece again
    tier.close()


def test_room_in_host_memory_is_for_the_newest(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path), CPU, host_bytes=3 * 4096)
    tickets = [tier.put(torch.full((1024,), float(i)), "activations") for i in range(5)]
    assert [ticket.offset >= 0 for ticket in tickets] == [True, True, False, False, False]
    disk, host = tier.ledgers()
    assert (disk.place, disk.now["activations"]) == ("disk", 2 * 4096)
    assert host.now["activations"] >= 3 * 4096
    tier.close()


def test_no_file_is_left(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path), CPU)
    tier.put(torch.ones(9999), "activations")
    assert os.listdir(tmp_path) == []  # not even while it is used
    handle = tier.file.handle
    assert os.fstat(handle).st_size >= 9999 * 4
    threads = list(tier.writers._threads)
    del tier
    for thread in threads:
        thread.join(20)  # its file ends with the last request
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def test_extents_are_aligned_and_used_again(tmp_path: Path) -> None:
    file = File(str(tmp_path))
    a, b, c = (file.reserve(size * ALIGN) for size in (1, 2, 1))
    assert (a, b, c, file.end) == (0, ALIGN, 3 * ALIGN, 4 * ALIGN)
    file.release(b, 2 * ALIGN)
    assert file.reserve(ALIGN) == ALIGN
    file.release(c, ALIGN)
    assert file.reserve(5 * ALIGN) == 2 * ALIGN  # the free end grows by what it lacks
    assert file.end == 7 * ALIGN
    file.close()


def test_a_full_disk_keeps_what_was_there(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path), CPU)
    first = tier.put(torch.ones(1024), "activations")
    with largest_file(2 * 4096):
        second = tier.put(torch.full((1024,), 2.0), "activations")
        before = there(tier)
        with pytest.raises(zerodp.StorageError) as caught:
            tier.put(torch.full((1024,), 3.0), "activations")
        assert isinstance(caught.value, OSError)
        text = re.compile(
            r"offload: 4,096 bytes more could not be written in '.*zerodp-.*', which has 8,192 .* has [\d,]+ bytes free"
        )
        assert text.search(str(caught.value))
    assert there(tier) <= before
    for ticket, value in ((first, 1.0), (second, 2.0)):
        assert bool((back(tier, ticket, torch.empty(1024)) == value).all())
    tier.free(first)
    again = tier.put(torch.full((1024,), 4.0), "activations")
    assert bool((back(tier, again, torch.empty(1024)) == 4).all())
    tier.close()


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path), CPU)
    ticket = tier.put(torch.ones(1024), "activations")
    while ticket.slot is not None:
        tier.ledgers()
    os.ftruncate(tier.file.handle, 100)
    with pytest.raises(zerodp.StorageError, match=r"3,996 bytes more could not be read in .* \(it ends before\)"):
        back(tier, ticket, torch.empty(1024))
    tier.close()


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    with pytest.raises(zerodp.StorageError, match=r"no file can be made in .*Offload\(path=\.\.\.\)"):
        DiskTier(str(tmp_path / "nowhere"), CPU)


# ---- fingerprints


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex128]
)
def test_fingerprints_depend_on_every_bit_and_place(dtype: torch.dtype) -> None:
    values = torch.arange(1, 3001).to(dtype)
    seen = {int(fingerprint(values.clone()))}
    assert seen == {int(fingerprint(values))}
    others = [values.flip(0), values.roll(1), values[:-1].clone(), torch.zeros(3000, dtype=dtype)]
    for place in (0, 1, 2999):
        for bit in range(0, 8 * dtype.itemsize, 5):
            changed = values.clone()
            changed.view(torch.uint8)[place * dtype.itemsize + bit // 8] ^= 1 << bit % 8
            others.append(changed)
    for other in others:
        seen.add(int(fingerprint(other)))
    assert len(seen) >= len(others) - (2 if dtype == torch.bool else 0)


def test_fingerprints_of_opposite_signs_differ() -> None:
    """They differ in the highest bit of each word only, which a plain sum of products could lose."""
    values = torch.randn(2, 4096).sign()
    assert len({int(fingerprint(row)) for row in [*values, *-values]}) == 4
