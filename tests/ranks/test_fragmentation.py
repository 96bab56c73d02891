"""M_D: memory that comes and goes takes no more after the first steps, and why long-lived and short-lived lie apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import adamw, squares
from tests.ranks.pool import Pool, on_ranks
from tests.ranks.test_activation_bytes import Wide
from tests.ranks.test_activations import WORLD, over
from tests.ranks.toys import Block
from zerodp.core.arena import Arena
from zerodp.residual.store import store_of

LONGEST = 256
WARM_UP = 6  # steps of the longest: blocks become one, which may have to grow by parts of itself


def arenas(model: nn.Module) -> list[Arena]:
    tiers: list[Any] = list(store_of(model._zerodp).tiers.values())
    return [model._zerodp.arena, *(getattr(tier, "host", tier).arena for tier in tiers if hasattr(tier, "latent"))]


def lengths(steps: int) -> list[int]:
    return torch.randint(1, LONGEST + 1, (steps,), generator=torch.Generator().manual_seed(1)).tolist()


@on_ranks(2)
@pytest.mark.parametrize(("offload", "steps"), [(None, 100), ("host", 40)], ids=["split", "split host"])
def test_nothing_is_allocated_after_the_longest(offload: Any, steps: int) -> None:
    """Steps of varying lengths: not a byte more, and not one allocation."""
    model = Wide(16, 2)
    model, optimizer = zerodp.shard(model, adamw(model), stage=3, units=[Block])
    zerodp.apply_activation_checkpointing(model, units=[Block], partition=over(WORLD), offload=offload)
    seen: list[Any] = []
    for length in [LONGEST] * WARM_UP + lengths(steps):
        squares(model, torch.ones(length, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append([(arena.reserved, arena.allocations) for arena in arenas(model)])
    assert len(set(map(tuple, seen[WARM_UP - 1 :]))) == 1, sorted(set(map(tuple, seen[WARM_UP - 1 :])))
    assert all(region.reserved <= 1.25 * region.peak for arena in arenas(model) for region in arena.both)
    memory = zerodp.stats(model).memory
    assert (memory.reserved, memory.allocations) == seen[-1][0]


@on_ranks(2)
def test_gradients_take_the_same_memory_in_every_step() -> None:
    model, _ = zerodp.shard(Wide(16, 2), stage=3, units=[Block])
    zerodp.apply_activation_checkpointing(model, units=[Block], partition=over(WORLD))
    squares(model, torch.ones(4, 3)).backward()
    model.zero_grad()
    places = []
    for _ in range(3):
        squares(model, torch.ones(4, 3)).backward()
        zerodp.full_grads(model)
        places.append(sorted(grad.data_ptr() for _, _, grad in zerodp.local_shards(model, "gradients")))
        model.zero_grad()
    assert places[1] == places[2]
    kept = [grad for _, _, grad in step_of(model)]
    before = [grad.clone() for grad in kept]
    model.zero_grad()
    step_of(model)
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True)), "a gradient that the user keeps"


@on_ranks(2)
def test_gradients_leave_their_memory_to_the_activations_of_torch() -> None:
    """Where no checkpoints are kept in the arena, what gradients took is gone with zero_grad; the other regions stay as they are."""
    model, _ = zerodp.shard(Wide(16, 2), stage=3, units=[Block])
    arena, seen = model._zerodp.arena, []
    for _ in range(6):
        squares(model, torch.ones(4, 3)).backward()
        zerodp.full_grads(model)
        full = arena.reserved
        model.zero_grad()
        seen.append((full, arena.reserved))
    full, without = seen[-1]
    assert seen[-2] == seen[-1]
    assert full - without >= arena.peak["gradients"] > 0


@on_ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_units_of_one_size_need_no_cutting(precision: Any) -> None:
    """Pages and buckets take each other's spaces as they are, so that the views of them can be kept."""

    def cuts(depth: int) -> int:
        model, _ = zerodp.shard(Wide(16, depth), stage=3, units=[Block], precision=precision)
        counted = 0

        def counting(region: Any) -> None:
            cut = region._cut

            def count(*args: Any) -> Any:
                nonlocal counted
                counted += 1
                return cut(*args)

            region._cut = count

        for step in range(8):
            if step == 7:  # by now one block serves all
                for region in model._zerodp.arena.both:
                    counting(region)
            squares(model, torch.ones(4, 3)).backward()
            model.zero_grad()
        return counted

    assert cuts(12) == cuts(6)


@on_ranks(2)
@pytest.mark.parametrize("kept", [0, 1.5, 2, 3.25, 4, 8])
def test_kept_units_leave_no_holes(kept: float) -> None:
    """`unsharded_bytes`: small things do not lie where there would be room for a unit, however much is kept."""
    model = nn.Sequential(nn.Linear(3, 64), *(Block(64) for _ in range(8)), nn.Linear(64, 8))
    unit = 4 * sum(p.numel() for p in model[1].parameters())
    model, optimizer = zerodp.shard(model, adamw(model), stage=3, units=[Block], unsharded_bytes=int(kept * unit))
    short, seen = model._zerodp.arena.both[0], []
    for _ in range(WARM_UP):
        squares(model, torch.ones(4, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((short.reserved, short.allocations))
    assert seen[-3] == seen[-2] == seen[-1]
    assert short.reserved == short.peak


def step_of(model: nn.Module) -> list[Any]:
    squares(model, torch.randn(4, 3)).backward()
    return list(zerodp.local_shards(model, "gradients"))


# ---- a recorded trace through a plain allocator


@dataclass
class Event:
    """`size` bytes taken under a number, or (0) given back; of a long-lived kind or not."""

    number: int
    size: int
    long: bool


class Recorder:
    """Stands between an arena and its regions, and writes down what is asked for."""

    def __init__(self, arena: Arena) -> None:
        self.events: list[Event] = []
        self.numbers: dict[int, int] = {}
        for region, long in zip(arena.both, (False, True), strict=True):
            self.listen(region, long)

    def listen(self, region: Any, long: bool) -> None:
        take, give = region.take, region.give

        def taken(nbytes: int, top: bool) -> Any:
            space = take(nbytes, top)
            self.numbers[id(space)] = len(self.events)
            self.events.append(Event(len(self.events), space.size, long))
            return space

        def given(space: Any) -> None:
            number = self.numbers.pop(id(space), None)
            if number is not None:  # else taken before
                self.events.append(Event(number, 0, long))
            give(space)

        region.take, region.give = taken, given


@dataclass
class Heap:
    """A plain allocator of one stretch of memory: the first hole that fits, joined with its neighbours when it is freed."""

    capacity: int
    holes: list[tuple[int, int]] = field(default_factory=list)  # (start, size)
    held: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.holes = [(0, self.capacity)]

    @property
    def free(self) -> int:
        return sum(size for _, size in self.holes)

    def take(self, event: Event) -> bool:
        fitting = [hole for hole in self.holes if hole[1] >= event.size]
        if not fitting:
            return False
        start, space = fitting[0]
        place, rest = self.holes.index((start, space)), space - event.size
        self.holes[place : place + 1] = [(start + event.size, rest)] if rest else []
        self.held[event.number] = (start, event.size)
        return True

    def give(self, number: int) -> None:
        joined: list[tuple[int, int]] = []
        for start, size in sorted([*self.holes, self.held.pop(number)]):
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((start, size))
        self.holes = joined


def replay(events: list[Event], heap: Heap) -> tuple[int, int] | None:
    """(bytes wanted, bytes free) at the first request that finds no hole; None if all do."""
    for event in events:
        if event.size and not heap.take(event):
            return event.size, heap.free
        if not event.size:
            heap.give(event.number)
    return None


class Lookup(nn.Module):
    """Few layers and a large vocabulary."""

    def __init__(self, vocabulary: int = 4096, width: int = 32, depth: int = 8) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def recorded(steps: int = 24) -> tuple[list[Event], int]:
    """On a rank: what steps of varying lengths ask for, and the bytes that serve them without another allocation."""
    torch.manual_seed(0)
    model, _ = zerodp.shard(Lookup(), stage=3, units=[Block, nn.Embedding, "head"])
    zerodp.apply_activation_checkpointing(model, units=[Block], partition=dist.group.WORLD)
    arena: Arena = model._zerodp.arena

    def train() -> None:
        for length in lengths(steps):
            model(torch.arange(length)).pow(2).mean().backward()
            model.zero_grad()

    train()
    before = arena.reserved, arena.allocations
    recorder = Recorder(arena)
    train()
    assert (arena.reserved, arena.allocations) == before
    return recorder.events, arena.reserved


def test_a_plain_allocator_fails_with_a_third_free(ranks: Pool) -> None:
    """The same requests in as much memory as the arena has: from one heap they fail, from the arena's two regions they do not."""
    events, capacity = ranks.run(2, recorded)[0]
    assert any(event.long for event in events)
    failure = replay(events, Heap(capacity))
    assert failure is not None
    wanted, free = failure
    assert wanted <= free
    assert free >= 0.3 * capacity
    assert replay(events, Heap(2 * capacity)) is None
