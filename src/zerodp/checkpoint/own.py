"""A checkpoint of this library as a source: by its manifest, without pickle, every block that is touched checked."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..host_memory import raw
from . import contents, folders, manifest, memory
from .manifest import Manifest, StoredBox, StoredObject, StoredTensor
from .source import Piece, Source, Stored
from .sums import BLOCK_BYTES


def open_own(path: Path) -> Source:
    """
    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    folder = folders.resolve(path)
    found = manifest.load(folder)
    source = Source(str(folder), world_size=int(found.facts["world_size"]), config=found.config)
    files = _Files(folder, found, source)
    source.opened.callback(files.close)
    source.tensors = {key: files.stored(key, tensor) for key, tensor in found.tensors.items()}
    source.tensors |= {other: source.tensors[key] for other, key in found.aliases.items()}
    for key, stored in found.objects.items():
        source.objects[key] = lambda key=key, stored=stored: files.value(key, stored)  # type: ignore[misc]
    return source


class _Files:
    """The files of one checkpoint, opened when first read."""

    def __init__(self, folder: Path, found: Manifest, source: Source) -> None:
        self.folder, self.found, self.source = folder, found, source
        self.descriptors: dict[str, int] = {}

    def stored(self, key: str, tensor: StoredTensor) -> Stored:
        def reader(box: StoredBox) -> Callable[[int, int, Tensor | None], Tensor]:
            return lambda low, high, out: self.elements(key, tensor.dtype, box, low, high, out)

        pieces = [Piece(tuple(box.offsets), tuple(box.sizes), reader(box)) for box in tensor.boxes]
        return Stored(tensor.dtype, tuple(tensor.shape), pieces, tensor.original)

    def elements(self, key: str, dtype: torch.dtype, box: StoredBox, low: int, high: int, out: Tensor | None) -> Tensor:
        """Read the blocks that hold these elements, straight to `out` where that is all of them, and check them."""
        size = dtype.itemsize
        first, last = low * size // BLOCK_BYTES, -(-high * size // BLOCK_BYTES)
        begin, end = first * BLOCK_BYTES, min(last * BLOCK_BYTES, box.num_bytes)
        whole_blocks = (begin, end) == (low * size, high * size)
        values = (
            out if out is not None and whole_blocks else torch.empty((end - begin) // size, dtype=dtype, device="cpu")
        )
        view = raw(values)
        self._read(box.file, box.offset + begin, view)
        for number in range(first, last):
            at = (number - first) * BLOCK_BYTES
            if zlib.crc32(view[at : at + BLOCK_BYTES]) != box.sums[number]:
                raise self._damaged(box.file, box.offset + begin + at, key)
        return values if whole_blocks else values[low - begin // size : high - begin // size]

    def value(self, key: str, stored: StoredObject) -> Any:
        data = bytearray(stored.num_bytes)
        self._read(stored.file, stored.offset, memoryview(data))
        if zlib.crc32(data) != stored.sum:
            raise self._damaged(stored.file, stored.offset, key)
        return contents.unpacked(bytes(data))

    def _damaged(self, file: str, at: int, key: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder / file} is damaged: the bytes from {at} on, of {key}, do not fit their checksum. Take an earlier checkpoint"
        )

    def _read(self, file: str, offset: int, out: memoryview) -> None:
        self.source.bytes_read += len(out)
        memory.read(self._open(file), offset, out, str(self.folder / file))

    def _open(self, file: str) -> int:
        if file not in self.descriptors:
            path = self.folder / file
            try:
                self.descriptors[file] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}. Take an earlier checkpoint") from None
            expected, got = self.found.files[file].num_bytes, os.fstat(self.descriptors[file]).st_size
            if got != expected:
                raise CheckpointError(
                    f"{path} has {got} bytes, expected {expected}: it was cut short or changed. Take an earlier checkpoint"
                )
        return self.descriptors[file]

    def close(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors.clear()
