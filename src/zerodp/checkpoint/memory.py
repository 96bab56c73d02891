"""Files read into memory and written from it, without a copy."""

from __future__ import annotations

import os

from ..errors import CheckpointError


def read(descriptor: int, offset: int, out: memoryview, name: str) -> None:
    """Fill `out` with the bytes of an open file from `offset` on.

    Raises:
        CheckpointError: the file is shorter than that.
    """
    while out:
        count = os.preadv(descriptor, [out], offset)
        if count == 0:
            raise CheckpointError(
                f"{name} ends at byte {offset}, {len(out)} bytes too early: it was cut short. Take an earlier checkpoint"
            )
        out, offset = out[count:], offset + count


def write(descriptor: int, *parts: memoryview | bytes) -> int:
    """All of `parts`, one after another, at the end of an open file. The result is how many bytes these are."""
    left = [memoryview(part) for part in parts if len(part)]
    total = sum(len(part) for part in left)
    while left:
        count = os.writev(descriptor, left)
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]
    return total
