"""Contiguous memory cut into spaces: what an arena's slots lie in. It knows bytes, not what they are for.

A space that was given back stays as it is, and serves the next request of its size at once. Only when none fits exactly are idle
neighbours put together and cut anew. At first every request that finds no room has a block of its own, and idle blocks go
before more is held than was in use at one time. When nothing is in use any more, the blocks become a single one of the size that
was needed: the most that was in use, and what holes took. It is filled from both ends, so that two kinds of things with lives of
their own do not lie mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.dlpack import from_dlpack, to_dlpack

ALIGN = 512  # bytes; of CUDA's own allocations, and a multiple of a cache line; some users of memory want more
CUTS = 8  # ways to cut a block that are kept
LARGE = 4  # what takes this part of the largest goes to the upper end, so that small things do not cut its place up


class Lasting:
    """The storages of tensors that were made to stay, each under its kind, for as long as anybody has them."""

    def __init__(self) -> None:
        self.refs: list[tuple[StorageWeakRef, str]] = []
        self.limit = 64  # entries before those that are gone are dropped

    def add(self, tensor: Tensor, kind: str) -> None:
        if len(self.refs) >= self.limit:
            self.refs = [(ref, its) for ref, its in self.refs if not ref.expired()]
            self.limit = 2 * len(self.refs) + 64
        self.refs.append((StorageWeakRef(tensor.untyped_storage()), kind))

    def __iter__(self) -> Iterator[tuple[torch.UntypedStorage, str]]:
        for ref, kind in self.refs:
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is not None:
                yield storage, kind


class Space:
    """[start, start + size) of a block; `before` and `after` are its neighbours there. top: taken from the block's upper end."""

    __slots__ = ("after", "before", "block", "idle", "size", "slot", "start", "top")

    def __init__(self, block: Tensor, start: int, size: int, top: bool) -> None:
        self.block, self.start, self.size, self.top = block, start, size, top
        self.before: Space | None = None
        self.after: Space | None = None
        self.idle = True
        self.slot: Any = None  # what its user keeps with it from one use to the next

    def memory(self) -> Tensor:
        """Its bytes, as a tensor with a storage of its own: who still sees it can be counted, and keeps the block alive."""
        with torch.inference_mode(False):  # or training could not use it later
            part = self.block[self.start : self.start + self.size]
            if type(part) is not Tensor or part.is_meta:  # tensors without memory, when a plan is simulated
                with _disable_current_modes():  # who counts what operations make must not count this: the ledger does
                    return torch.empty_like(part)
            return from_dlpack(to_dlpack(part))


class Region:
    """Memory of one device for things that live about equally long."""

    def __init__(self, empty: Callable[[int, torch.dtype], Tensor], align: int = ALIGN) -> None:
        self.empty, self.align = empty, align  # makes its blocks; bytes, of starts and sizes in them
        self.firsts: list[Space] = []  # of each block
        self.idle: dict[tuple[int, bool], list[Space]] = {}  # by size and end
        self.whole = False  # one block serves all, or did until it was too small
        self.needed = (
            0  # bytes with which it would not have been: all in use at one time, and the holes that were too small
        )
        self.begins: tuple[int, bool] | None = None  # the request for which it is cut as it is
        # by first request: how the one block is cut for what follows, as a pass through the model does what it did before
        self.cuts: dict[tuple[int, bool], tuple[Space, dict[tuple[int, bool], list[Space]]]] = {}
        self.lent = self.peak = self.reserved = self.allocations = 0
        self.largest = 0  # of the requests

    def take(self, nbytes: int, top: bool | None = None) -> Space:
        """At least so many bytes; their contents are arbitrary. Where there is no memory for them, nothing is counted as lent.

        top: from which end, where the user's kinds tell; else large things come from the upper one.
        """
        size = max(-(-nbytes // self.align), 1) * self.align
        self.largest = max(self.largest, size)
        if top is None:
            top = size * LARGE >= self.largest
        if not self.lent and self.begins != (size, top):
            self._begin(size, top)
        same = self.idle.get((size, top)) or self.idle.get((size, not top))
        space = same.pop() if same else self._cut(self._room(size, top), size, top)
        space.idle, space.top = False, top
        self.lent += size
        self.peak = max(self.peak, self.lent)
        return space

    def give(self, space: Space) -> None:
        self.lent -= space.size
        self._rest(space)

    def clear(self) -> None:
        """Let go of the blocks of which nothing is in use, and forget what was needed."""
        self._drop(self.reserved)
        self.peak, self.whole, self.needed = self.lent, False, 0

    def _rest(self, space: Space) -> None:
        space.idle = True
        self.idle.setdefault((space.size, space.top), []).append(space)

    # ---- blocks

    def _begin(self, size: int, top: bool) -> None:
        """Nothing is in use. How the block is cut is kept for when the same comes again; it would be in the way of other sizes."""
        if self.firsts and (len(self.firsts) > 1 or not self.whole or size > self.reserved):
            self._unite(size)
        elif self.firsts:
            block = self.firsts[0].block
            if self.begins is not None:
                self.cuts[self.begins] = self.firsts[0], self.idle
                self._forget_cuts(CUTS)
            else:
                self._dissolve(next(self._runs()))
            if (size, top) in self.cuts:
                self.firsts[0], self.idle = self.cuts.pop((size, top))
            else:
                self.firsts[0], self.idle = Space(block, 0, self.reserved, False), {}
                self._rest(self.firsts[0])
        self.begins = size, top

    def _unite(self, size: int) -> None:
        """Nothing is in use: one block in place of all."""
        self._drop(self.reserved)
        self.whole = False  # until it is there
        self._allocate(max(self.peak, self.needed, size))
        self.whole = True

    def _room(self, size: int, top: bool) -> list[Space]:
        """Adjoining idle spaces with room for so many bytes, at the right end of the one block, or a block of their own."""
        runs = list(self._runs())
        main = [run for run in runs if self.whole and run[0].block is self.firsts[0].block]
        if places := [run for run in main if _bytes(run) >= size]:
            return places[-1] if top else places[0]
        holes = [0, *map(_bytes, main)]  # of which the largest would be a part of what is missing
        needed = self.lent + size + sum(holes) - max(holes) if self.whole else 0
        # a small thing must not hold on to a large block
        found = min((run for run in runs if size <= _bytes(run) <= 2 * size), key=_bytes, default=None)
        if found is None:
            self._drop(self.reserved + size - max(self.peak, self.lent + size))
            found = [self._allocate(size)]
        self.needed = max(self.needed, needed)
        return found

    def _allocate(self, size: int) -> Space:
        try:
            block = self.empty(size, torch.uint8)
        except RuntimeError:  # no memory: what lies idle here may be in the way
            before, self.whole = self.reserved, False
            self._drop(before)
            if self.reserved == before:
                raise
            block = self.empty(size, torch.uint8)
        self.reserved += size
        self.allocations += 1
        self.begins = None
        self.firsts.append(Space(block, 0, size, False))
        self._rest(self.firsts[-1])
        return self.firsts[-1]

    def _drop(self, nbytes: int) -> None:
        """Let go of idle blocks until they are so many bytes, if there are as many; the largest first."""
        runs = sorted(self._runs(), key=_bytes, reverse=True)
        for run in runs:
            if nbytes > 0 and run[0].before is None and run[-1].after is None and not self._kept(run):
                size = _bytes(run)
                if run[0] is self.firsts[0]:
                    self._forget_cuts(0)
                self.firsts.remove(run[0])
                self._dissolve(run)
                self.reserved -= size
                nbytes -= size

    def _kept(self, run: list[Space]) -> bool:
        """The one block stays while anything is in use."""
        return self.whole and self.lent > 0 and run[0] is self.firsts[0]

    def _forget_cuts(self, most: int) -> None:
        """Keep so many, the latest."""
        for begins in list(self.cuts)[: max(len(self.cuts) - most, 0)]:
            space: Space | None = self.cuts.pop(begins)[0]
            while space is not None:
                after, space.before, space.after, space.slot = space.after, None, None, None
                space = after

    # ---- spaces of blocks

    def _cut(self, run: list[Space], size: int, top: bool) -> Space:
        """The run's spaces become one of this size, and an idle one of the rest."""
        block, start, rest = run[0].block, run[0].start, _bytes(run) - size
        before, after = run[0].before, run[-1].after
        new = Space(block, start + rest if top else start, size, top)
        parts = [new]
        if rest:
            other = Space(block, start if top else start + size, rest, run[0].top)
            parts = [other, new] if top else [new, other]
        if before is None:
            self.firsts[self.firsts.index(run[0])] = parts[0]
        self._dissolve(run)
        for space in parts:
            if space is not new:
                self._rest(space)
            _join(before, space)
            before = space
        _join(before, after)
        return new

    def _dissolve(self, run: list[Space]) -> None:
        """They refer to nothing any more, so that a block's memory goes with its last user."""
        for space in run:
            self.idle[space.size, space.top].remove(space)
            space.before = space.after = space.slot = None

    def _runs(self) -> Iterator[list[Space]]:
        """Idle spaces that adjoin, by block and address."""
        for first in list(self.firsts):
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


class Block(Space):
    """A block of its own, which has nothing beside it and is never cut."""

    __slots__ = ()

    def memory(self) -> Tensor:
        return self.block


class Passing(Region):
    """Of a device whose memory others need as well, at other times: what is given back is gone."""

    def take(self, nbytes: int, top: bool | None = None) -> Space:
        size = max(-(-nbytes // self.align), 1) * self.align
        space = Block(self.empty(size, torch.uint8), 0, size, False)
        space.idle = False
        self.reserved += size
        self.allocations += 1
        self.lent += size
        self.peak = max(self.peak, self.lent)
        return space

    def give(self, space: Space) -> None:
        self.lent -= space.size
        self.reserved -= space.size
        space.slot = None  # the memory goes with its last user


def _bytes(run: list[Space]) -> int:
    return sum(space.size for space in run)


def _join(before: Space | None, after: Space | None) -> None:
    if before is not None:
        before.after = after
    if after is not None:
        after.before = before
