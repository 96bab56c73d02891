"""A `torch.save` file of one tensor, made by hand, so that the values go from memory to the disk once.

`torch.save` computes a slow checksum and writes in small pieces, at half the speed of the disk. The file is a zip: a pickle that says
how to rebuild the tensor, and its bytes, stored as they are. `torch.load(weights_only=True)` reads it.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from .boxes import contiguous_strides

ALIGN_BYTES = 64  # as torch does, so that values can be mapped
MAX32 = 2**32 - 1


def wrap(sizes: Sequence[int], dtype: torch.dtype, num_bytes: int, crc: int, at: int) -> tuple[bytes, bytes]:
    """What stands before and after the bytes of a contiguous tensor in its own file, which begins at byte `at` of a larger one."""
    head, directory, count = b"", b"", 0
    for name, content in (
        (b"archive/data.pkl", _pickled(sizes, dtype, num_bytes)),
        (b"archive/byteorder", sys.byteorder.encode()),
        (b"archive/version", b"3\n"),
    ):
        directory += _entry(name, zlib.crc32(content), len(content), len(head))
        head += _header(name, zlib.crc32(content), len(content), 0) + content
        count += 1
    name = b"archive/data/0"
    directory += _entry(name, crc, num_bytes, len(head))
    without_padding = at + len(head) + len(_header(name, crc, num_bytes, 4))
    head += _header(name, crc, num_bytes, 4 + -without_padding % ALIGN_BYTES)
    return head, directory + _end(count + 1, len(directory), len(head) + num_bytes)


class _Values:
    """Stands for the storage."""


class _Rebuilt:
    """Pickles as the call that makes the tensor of its storage."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self.sizes, self.dtype = tuple(sizes), dtype

    def __reduce__(self) -> Any:
        strides = contiguous_strides(self.sizes)
        return torch._utils._rebuild_tensor_v3, (
            _Values(), 0, self.sizes, strides, False, OrderedDict(), self.dtype
        )  # fmt: skip


class _Pickler(pickle.Pickler):
    num_bytes = 0

    def persistent_id(self, value: Any) -> Any:
        return ("storage", torch.UntypedStorage, "0", "cpu", self.num_bytes) if isinstance(value, _Values) else None


def _pickled(sizes: Sequence[int], dtype: torch.dtype, num_bytes: int) -> bytes:
    out = io.BytesIO()
    pickler = _Pickler(out, protocol=2)
    pickler.num_bytes = num_bytes
    pickler.dump(_Rebuilt(sizes, dtype))
    return out.getvalue()


# ---- the zip format; sizes that do not fit 32 bits stand in an extra field


def _extra(size: int) -> bytes:
    return struct.pack("<2H2Q", 1, 16, size, size) if size >= MAX32 else b""


def _fields(crc: int, size: int) -> tuple[int, ...]:
    short = min(size, MAX32)
    return (45 if size >= MAX32 else 20, 0, 0, 0, 0x21, crc, short, short)


def _header(name: bytes, crc: int, size: int, padding: int) -> bytes:
    """padding: bytes of an extra field that only takes room; 0 or at least 4."""
    extra = _extra(size) + (struct.pack("<2H", 0x4246, padding - 4) + bytes(padding - 4) if padding else b"")
    return struct.pack("<4s5H3I2H", b"PK\3\4", *_fields(crc, size), len(name), len(extra)) + name + extra


def _entry(name: bytes, crc: int, size: int, offset: int) -> bytes:
    extra = _extra(size)
    fixed = struct.pack("<4s6H3I5H2I", b"PK\1\2", 45, *_fields(crc, size), len(name), len(extra), 0, 0, 0, 0, offset)
    return fixed + name + extra


def _end(count: int, size: int, offset: int) -> bytes:
    large = b""
    if offset >= MAX32:
        record = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, offset)
        large = record + struct.pack("<4sIQI", b"PK\6\7", 0, offset + size, 1)
    return large + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, size, min(offset, MAX32), 0)
