"""Flat segments of a tensor as axis-aligned boxes, which is the language of torch.distributed.checkpoint.

Pure functions of shapes and numbers. They know nothing of files, ranks or optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A block of a tensor: `sizes` elements from `offsets` on, which are elements [start, stop) of it in memory order."""

    offsets: Sizes
    sizes: Sizes
    start: int
    stop: int


def boxes(
    shape: Sequence[int], strides: Sequence[int], start: int, stop: int, origin: Sequence[int] | None = None
) -> list[Box]:
    """Elements [start, stop) in memory order of a dense tensor as the fewest boxes that are each one run of memory.

    origin: where the tensor, if it is a block of a larger one, begins there; the boxes are that one's.

    Those are at most 2 * dims - 1: of a matrix the rest of a row, whole rows, and part of a row. An empty tensor is one empty box.
    """
    dims = memory_order(shape, strides)
    origin = origin or (0,) * len(shape)
    if math.prod(shape) == 0:
        return [Box(tuple(origin), tuple(shape), 0, 0)]
    found, at = [], start
    for offsets, sizes in _split(tuple(shape[d] for d in dims), start, stop):
        numel = math.prod(sizes)
        placed = tuple(a + b for a, b in zip(origin, _back(dims, offsets), strict=True))
        found.append(Box(placed, _back(dims, sizes), at, at + numel))
        at += numel
    return found


def view(run: Tensor, box: Box, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """The run of memory [stop - start] of `box` in the box's sizes, without a copy."""
    dims = memory_order(shape, strides)
    return run.view([box.sizes[d] for d in dims]).permute(_back(dims, range(len(dims))))


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> Sizes:
    """The dims from the one that is outermost in memory to the innermost."""
    return tuple(sorted(range(len(shape)), key=lambda d: (-strides[d], d)))


def contiguous_strides(sizes: Sequence[int]) -> Sizes:
    return tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))


def overlap(offsets: Sizes, sizes: Sizes, other_offsets: Sizes, other_sizes: Sizes) -> tuple[Sizes, Sizes] | None:
    """(offsets, sizes) of what two boxes of one tensor share; None where they share nothing."""
    low = tuple(map(max, offsets, other_offsets))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, other_offsets, other_sizes, strict=True))
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return None
    return low, tuple(b - a for a, b in zip(low, high, strict=True))


def _split(sizes: Sizes, start: int, stop: int) -> Iterator[tuple[Sizes, Sizes]]:
    """(offsets, sizes) of the boxes of [start, stop) of a row-major tensor without empty dims, in order."""
    if start >= stop:
        return
    if not sizes:
        yield (), ()
        return
    row = math.prod(sizes[1:])
    first, skipped = divmod(start, row)
    last, taken = divmod(stop, row)
    if skipped:
        yield from _in_row(first, _split(sizes[1:], skipped, row if last > first else taken))
        if last == first:
            return
        first += 1
    if last > first:
        yield (first, *(0 for _ in sizes[1:])), (last - first, *sizes[1:])
    if taken:
        yield from _in_row(last, _split(sizes[1:], 0, taken))


def _in_row(row: int, found: Iterator[tuple[Sizes, Sizes]]) -> Iterator[tuple[Sizes, Sizes]]:
    for offsets, sizes in found:
        yield (row, *offsets), (1, *sizes)


def _back(dims: Sizes, values: Sequence[int]) -> Sizes:
    """Values given per dim in memory order, in the tensor's own order."""
    placed = dict(zip(dims, values, strict=True))
    return tuple(placed[d] for d in range(len(dims)))
