"""Memory of the arena: nothing overlaps, idle neighbours join, and what is held stays near the most that was in use."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch

from zerodp.core.arena import Arena
from zerodp.planning.fakes import FakeArena, new_mode
from zerodp.planning.recorder import Recorder
from zerodp.regions import ALIGN, CUTS, Region, Space

CPU = torch.device("cpu")


def empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype)


def spans(region: Region) -> list[tuple[int, int, bool]]:
    """(start, stop, idle) of every space, by address; each block is covered without gaps."""
    found = []
    for first in region.firsts:
        space: Space | None = first
        at = 0
        while space is not None:
            assert space.start == at
            assert space.after is None or space.after.before is space
            found.append(
                (
                    space.block.data_ptr() + space.start,
                    space.block.data_ptr() + space.start + space.size,
                    space.idle,
                )
            )
            at, space = at + space.size, space.after
        assert at == first.block.numel()
    assert sum(stop - start for start, stop, _ in found) == region.reserved
    return found


@pytest.mark.parametrize("seed", range(4))
def test_random_use_never_overlaps(seed: int) -> None:
    chance, arena, held = random.Random(seed), Arena(CPU), []
    for number in range(600):
        if held and chance.random() < 0.5:
            slot, mark, numel = held.pop(chance.randrange(len(held)))
            assert bool((slot.tensor == mark).all())
            assert slot.tensor.numel() == numel
            arena.give(slot)
        else:
            numel = chance.choice([0, 1, 100, 128, 500, 1000, chance.randrange(3000)])
            slot = arena.take(numel, torch.float32, chance.choice(["unsharded", "buckets", "activations", "gradients"]))
            slot.tensor.fill_(number)
            held.append((slot, number, numel))
    for region in arena.both:
        idle = sorted(space.size for spaces in region.idle.values() for space in spaces)
        assert idle == sorted(stop - start for start, stop, free in spans(region) if free)
    for slot, _, _ in held:
        arena.give(slot)
    assert arena.total == 0
    arena.drop_idle()
    assert (arena.reserved, [region.firsts for region in arena.both]) == (0, [[], []])


def test_blocks_become_one_of_the_size_that_was_needed() -> None:
    region = Region(empty)
    first = [region.take(4 * ALIGN, top=False) for _ in range(3)]
    assert (region.reserved, region.allocations) == (12 * ALIGN, 3)
    region.give(first[0])
    small = region.take(1, top=False)  # not out of a block that is four times as large
    assert (region.reserved, region.peak) == (9 * ALIGN, 12 * ALIGN)
    for space in (*first[1:], small):
        region.give(space)
    low, high = region.take(2 * ALIGN, top=False), region.take(2 * ALIGN, top=True)
    assert (region.reserved, region.allocations) == (12 * ALIGN, 5)
    assert (low.start, high.start) == (0, 10 * ALIGN)
    large, little = region.take(ALIGN), region.take(ALIGN // 2)
    assert (large.start, little.start) == (9 * ALIGN, 8 * ALIGN)  # a quarter of the largest goes to the upper end
    for space in (low, large, little):
        region.give(space)
    assert region.take(10 * ALIGN, top=False).start == 0  # idle neighbours join
    assert region.allocations == 5


def test_the_one_block_grows_to_what_is_needed() -> None:
    region = Region(empty)
    for count in (2, 2, 3, 3):
        spaces = [region.take(4 * ALIGN, top=False) for _ in range(count)]
        for space in spaces:
            region.give(space)
    assert (region.reserved, region.peak, len(region.firsts)) == (12 * ALIGN, 12 * ALIGN, 1)
    grown = region.allocations
    large = region.take(20 * ALIGN, top=True)
    assert (region.reserved, region.allocations) == (20 * ALIGN, grown + 1)
    region.give(large)
    region.clear()
    assert (region.reserved, region.peak, region.firsts) == (0, 0, [])


def test_passes_that_take_turns_find_the_block_cut_for_them() -> None:
    arena = Arena(CPU)

    def a_pass(numels: list[int]) -> set[object]:
        held = [arena.take(numel, torch.float32, "unsharded") for numel in numels]
        for slot in held:
            arena.give(slot)
        return set(held)

    forward, backward = [256, 1024, 4096], [4096, 1024, 1024]
    for numels in (forward, backward) * 2:
        a_pass(numels)  # the block has its size from here on, and is cut for both
    before = [a_pass(forward), a_pass(backward)]
    for _ in range(3):
        assert [a_pass(forward), a_pass(backward)] == before
    assert {len(first) for first in (spans(region) for region in arena.both) if first} == {3}


def test_only_some_ways_to_cut_a_block_are_kept() -> None:
    arena, whole = Arena(CPU), 64 * ALIGN
    for size in [whole, *range(ALIGN, 40 * ALIGN, ALIGN)] * 2:
        arena.give(arena.take(size, torch.uint8, "unsharded"))
    region = arena.regions["unsharded"]
    assert 1 < len(region.cuts) <= CUTS
    first = weakref.ref(region.firsts[0].block)
    arena.drop_idle()
    gc.disable()  # nothing may wait for it
    try:
        assert not region.cuts
        assert region.reserved == 0
        assert first() is None
    finally:
        gc.enable()


def test_holes_make_it_larger_until_there_is_room() -> None:
    """Requests find no hole though enough is free: the next block has what lay beside this one too, and soon room beside the holes."""
    region = Region(empty)

    def step() -> None:
        small = [region.take(4 * ALIGN, top=False) for _ in range(10)]
        for space in small[::2]:
            region.give(space)
        wide = [region.take(6 * ALIGN, top=False) for _ in range(3)]
        for space in (*small[1::2], *wide):
            region.give(space)

    for _ in range(6):
        step()
    seen = region.reserved, region.allocations
    assert (region.peak, region.reserved) == (40 * ALIGN, 58 * ALIGN)  # three of six beside ten of four, and no more
    for _ in range(10):
        step()
    assert (region.reserved, region.allocations) == seen


def test_what_is_seen_outside_is_not_lent_again() -> None:
    arena = Arena(CPU)
    slot = arena.take(300, torch.float32, "gradients", "unit")
    slot.tensor.fill_(1)
    view = slot.tensor[10:20]
    arena.give(slot)
    assert arena.pinned() == [("unit", 1200)]
    arena.take(300, torch.float32, "gradients").tensor.fill_(2)
    assert bool((view == 1).all())
    del view
    assert arena.pinned() == []
    assert arena.now["gradients"] == 1200


def test_what_a_thread_lets_go_of_late_does_not_hide_who_sees_it_next() -> None:
    arena = Arena(CPU)
    for _ in range(2):  # now the block has its size
        arena.give(arena.take(128, torch.float32, "buckets"))
    slot = arena.take(128, torch.float32, "buckets")
    late = slot.cut("halves", lambda tensor: list(tensor.view(2, -1).unbind()))[0]
    assert not slot.in_use
    arena.give(slot)
    again = arena.take(64, torch.int64, "buckets")
    assert again is slot
    del late
    seen = again.tensor.detach()
    assert again.in_use
    del seen
    assert not again.in_use


def test_memory_outlives_the_arena_while_it_is_seen() -> None:
    arena = Arena(CPU)
    slot = arena.take(1000, torch.float32, "unsharded")
    seen = slot.tensor.fill_(3).view(10, 100)
    del arena, slot
    gc.collect()
    torch.empty(1000).fill_(4)
    assert bool((seen == 3).all())


def test_taken_in_inference_mode_it_serves_training_too() -> None:
    arena = Arena(CPU)
    with torch.inference_mode():
        slot = arena.take(8, torch.float32, "unsharded")
    weight = torch.ones(8, requires_grad=True)
    (weight * slot.tensor.zero_()).sum().backward()
    assert weight.grad is not None


def test_without_memory_nothing_is_counted_and_what_is_idle_goes() -> None:
    room = 16 * ALIGN

    def scarce(numel: int, dtype: torch.dtype) -> torch.Tensor:
        if region.reserved + numel > room:
            raise torch.OutOfMemoryError(f"{numel} bytes")
        return empty(numel, dtype)

    region = Region(scarce)
    for number in (5, 5):  # blocks of their own become one of ten, which a request beside it does not fit
        held = [region.take(number * ALIGN, False) for _ in range(2)]
        for space in held:
            region.give(space)
    small = region.take(ALIGN, False)
    with pytest.raises(torch.OutOfMemoryError):
        region.take(20 * ALIGN, False)
    assert (region.lent, region.reserved) == (ALIGN, sum(stop - start for start, stop, _ in spans(region)))
    region.give(small)
    assert region.lent == 0
    with pytest.raises(torch.OutOfMemoryError):
        region.take(20 * ALIGN, False)
    assert (region.lent, region.reserved) == (0, 0)
    idle = [region.take(7 * ALIGN, False), region.take(8 * ALIGN, False)]
    region.give(idle[0])
    large = region.take(8 * ALIGN, False)  # there is room for it once the idle block has gone
    assert (region.lent, region.reserved) == (16 * ALIGN, 16 * ALIGN)
    for space in (idle[1], large):
        region.give(space)
    spans(region)


def test_a_recorder_does_not_count_slots_again() -> None:
    recorder = Recorder({}, [])
    arena = FakeArena(new_mode(), recorder.sample)
    recorder.outside = lambda: arena.total
    with recorder:
        slot = arena.take(1000, torch.float32, "buckets")
    assert slot.nbytes == 4000
    assert (recorder.live_bytes, recorder.peak.nbytes) == (0, 4000)
