"""Contiguous memory cut into spaces: what an arena's slots lie in. It knows bytes, not what they are for.

A space that was given back stays as it is, and serves the next request of its size at once. Only when no space fits exactly
are idle neighbours put together and cut anew; only when that does not do is memory asked for, and then whatever lies wholly idle
is let go first and becomes part of the new block. So a region settles on few blocks, and holds the most that was in use at one
time and what lies in holes between.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

ALIGN = 512  # bytes; of CUDA's own allocations, and a multiple of a cache line


class Space:
    """[start, start + size) of a block; `before` and `after` are its neighbours there."""

    __slots__ = ("after", "before", "block", "idle", "size", "slot", "start")

    def __init__(self, block: Tensor, start: int, size: int) -> None:
        self.block, self.start, self.size = block, start, size
        self.before: Space | None = None
        self.after: Space | None = None
        self.idle = True
        self.slot: Any = None  # what its user keeps with it from one use to the next

    def memory(self) -> Tensor:
        """Its bytes, as a tensor with a storage of its own: who still sees it can be counted, and keeps the block alive."""
        with torch.inference_mode(False):  # or training could not use it later
            part = self.block[self.start : self.start + self.size]
            if type(part) is not Tensor or part.is_meta:  # tensors without memory, when a plan is simulated
                return torch.empty_like(part)
            return from_dlpack(to_dlpack(part))

    def dissolve(self) -> None:
        """Refer to nothing any more, so that the block's memory goes with its last user."""
        self.before = self.after = self.slot = None


class Region:
    """Blocks of memory of one device, for things that live about equally long."""

    def __init__(self, device: torch.device, pinned: bool = False) -> None:
        self.device, self.pinned = device, pinned
        self.firsts: list[Space] = []  # of each block
        self.idle: dict[int, list[Space]] = {}  # by size
        self.reserved = self.allocations = 0

    def take(self, nbytes: int) -> Space:
        """At least so many bytes; their contents are arbitrary."""
        size = max(-(-nbytes // ALIGN), 1) * ALIGN
        same = self.idle.get(size)
        space = same.pop() if same else self._carved(size)
        space.idle = False
        return space

    def give(self, space: Space) -> None:
        space.idle = True
        self.idle.setdefault(space.size, []).append(space)

    def drop_idle(self) -> int:
        """Let go of the blocks of which nothing is in use; the result is their bytes."""
        dropped = 0
        for run in list(self._runs()):
            if run[0].before is None and run[-1].after is None:
                self.firsts.remove(run[0])
                dropped += _bytes(run)
                self._dissolve(run)
        self.reserved -= dropped
        return dropped

    def _carved(self, size: int) -> Space:
        """A space of exactly this size, from the smallest run of idle ones that has room, or from a new block."""
        found = min((run for run in self._runs() if _bytes(run) >= size), key=_bytes, default=None)
        if found is None:
            block_bytes = max(self.drop_idle(), size)
            with torch.inference_mode(False):  # or training could not use it later
                block = torch.empty(block_bytes, dtype=torch.uint8, device=self.device, pin_memory=self.pinned)
            self.reserved += block_bytes
            self.allocations += 1
            found = [Space(block, 0, block_bytes)]
            self.firsts.append(found[0])
            self.give(found[0])
        return self._cut(found, size)

    def _cut(self, run: list[Space], size: int) -> Space:
        """The run's spaces become one of this size, and an idle one of the rest."""
        block, start, rest = run[0].block, run[0].start, _bytes(run) - size
        before, after = run[0].before, run[-1].after
        new = Space(block, start, size)
        if before is None:
            self.firsts[self.firsts.index(run[0])] = new
        self._dissolve(run)
        _join(before, new)
        last = new
        if rest:
            last = Space(block, start + size, rest)
            _join(new, last)
            self.give(last)
        _join(last, after)
        return new

    def _dissolve(self, run: list[Space]) -> None:
        for space in run:
            self.idle[space.size].remove(space)
            space.dissolve()

    def _runs(self) -> Iterator[list[Space]]:
        """Idle spaces that adjoin."""
        for first in self.firsts:
            run: list[Space] = []
            space: Space | None = first
            while space is not None:
                if space.idle:
                    run.append(space)
                elif run:
                    yield run
                    run = []
                space = space.after
            if run:
                yield run


def _bytes(run: list[Space]) -> int:
    return sum(space.size for space in run)


def _join(before: Space | None, after: Space | None) -> None:
    if before is not None:
        before.after = after
    if after is not None:
        after.before = before
