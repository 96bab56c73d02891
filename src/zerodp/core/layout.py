"""Where every element lies: parameters one after another in a flat buffer, cut into equal shards.

Pure data, computed once and frozen. Everything that needs to know where something lies asks this table. It knows nothing
of devices, process groups or autograd.

A flat buffer is a row of *pieces* (each one collective); every piece is cut into `num_shards` equal parts, and a rank owns
its part of each piece. Every start and every cut is a multiple of `ALIGN` elements, because torch's fused kernels give the
same bits for a part of a tensor as for the whole only then.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

ALIGN = 64


@dataclass(frozen=True)
class Segment:
    """A parameter's part inside a shard: elements `start` to `stop` of parameter `index`, in memory order."""

    index: int
    start: int
    stop: int
    piece: int
    offset: int  # where it begins in the rank's part of that piece

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """One flat buffer.

    offsets, numels: of each parameter, in elements.
    cuts: piece p is [cuts[p], cuts[p + 1]); each piece is a multiple of num_shards * ALIGN.
    """

    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    cuts: tuple[int, ...]
    num_shards: int

    @property
    def padded_numel(self) -> int:
        return self.cuts[-1]

    @property
    def shard_numel(self) -> int:
        return self.cuts[-1] // self.num_shards

    @property
    def numel(self) -> int:
        return sum(self.numels)

    @cached_property
    def pieces(self) -> tuple[slice, ...]:
        """Of the flat buffer; one collective each."""
        return tuple(slice(a, b) for a, b in pairwise(self.cuts))

    @cached_property
    def piece_numels(self) -> tuple[int, ...]:
        """Of one rank's part of each piece."""
        return tuple((piece.stop - piece.start) // self.num_shards for piece in self.pieces)

    def part(self, piece: int, rank: int) -> tuple[int, int]:
        """[start, stop) in the flat buffer of what `rank` owns of `piece`."""
        start = self.cuts[piece] + rank * self.piece_numels[piece]
        return start, start + self.piece_numels[piece]

    def segments(self, rank: int) -> list[Segment]:
        """What `rank` owns, in flat order. Empty parameters belong to the rank at whose part they lie."""
        found = []
        for piece in range(len(self.piece_numels)):
            low, high = self.part(piece, rank)
            last_part = piece == len(self.piece_numels) - 1 and rank == self.num_shards - 1
            first = max(bisect_right(self.offsets, low) - 1, 0)
            while first > 0 and self.offsets[first - 1] == self.offsets[first]:
                first -= 1  # empty parameters share their offset with the next one
            for index in range(first, len(self.offsets)):
                offset, numel = self.offsets[index], self.numels[index]
                if offset > high or (offset == high and not last_part):
                    break
                start, stop = max(offset, low), min(offset + numel, high)
                if stop > start or (numel == 0 and offset >= low):
                    found.append(Segment(index, start - offset, stop - offset, piece, start - low))
        return found


def build(numels: Sequence[int], num_shards: int, num_replicas: int = 1, max_piece_numel: int | None = None) -> Layout:
    """Lay parameters of `numels` elements out for `num_shards` shards, each divisible over `num_replicas` as well.

    max_piece_numel: most elements of one piece, rounded up to the smallest possible piece.
    """
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += math.ceil(numel / ALIGN) * ALIGN
    step = num_shards * num_replicas * ALIGN
    total = max(math.ceil(end / step), 1) * step
    largest = total if max_piece_numel is None else max(max_piece_numel // step, 1) * step
    num_pieces = math.ceil(total / largest)
    steps, extra = divmod(total // step, num_pieces)  # pieces of nearly equal size
    cuts = [0]
    for piece in range(num_pieces):
        cuts.append(cuts[-1] + (steps + (piece < extra)) * step)
    return Layout(tuple(offsets), tuple(numels), tuple(cuts), num_shards)
