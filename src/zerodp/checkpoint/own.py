"""A checkpoint of this library as a source: by its manifest, without pickle, every block that is touched checked."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError
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
        pieces = [
            Piece(tuple(box.offsets), tuple(box.sizes), lambda low, high, box=box: self.elements(key, tensor, box, low, high))  # type: ignore[misc]
            for box in tensor.boxes
        ]  # fmt: skip
        return Stored(tensor.dtype, tuple(tensor.shape), pieces, tensor.original)

    def elements(self, key: str, tensor: StoredTensor, box: StoredBox, low: int, high: int) -> Tensor:
        """Read the blocks that hold these elements, and check them."""
        size = tensor.dtype.itemsize
        first, last = low * size // BLOCK_BYTES, -(-high * size // BLOCK_BYTES)
        begin, end = first * BLOCK_BYTES, min(last * BLOCK_BYTES, box.num_bytes)
        data = self._read(box.file, box.offset + begin, end - begin)
        view = memory.raw(data)
        for number in range(first, last):
            at = (number - first) * BLOCK_BYTES
            if zlib.crc32(view[at : at + BLOCK_BYTES]) != box.sums[number]:
                raise self._damaged(box.file, box.offset + begin + at, key)
        return data.view(tensor.dtype)[low - begin // size : high - begin // size]

    def value(self, key: str, stored: StoredObject) -> Any:
        data = bytes(memory.raw(self._read(stored.file, stored.offset, stored.num_bytes)))
        if zlib.crc32(data) != stored.sum:
            raise self._damaged(stored.file, stored.offset, key)
        return contents.unpacked(data)

    def _damaged(self, file: str, at: int, key: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder / file} is damaged: the bytes from {at} on, of {key}, do not fit their checksum. Take an earlier checkpoint"
        )

    def _read(self, file: str, offset: int, num_bytes: int) -> Tensor:
        self.source.bytes_read += num_bytes
        return memory.read(self._open(file), offset, num_bytes, str(self.folder / file))

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
