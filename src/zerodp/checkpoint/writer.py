"""One rank's file of a checkpoint, and the two tables (DCP's `.metadata`, our manifest) that rank 0 makes of what all ranks wrote.

The folder is an ordinary one of torch.distributed.checkpoint, written by a subclass of its own FileSystemWriter. What differs from its own
way: values go to the disk straight from memory, with checksums, and no plan has to be agreed on, because each rank knows what is its.
"""

from __future__ import annotations

import math
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from ..errors import CheckpointError
from ..host_memory import raw
from . import archive, folders, manifest, memory, sums
from .contents import Contents
from .manifest import Manifest, StoredBox, StoredFile, StoredObject, StoredTensor

WRITEBACK_BYTES = 8 * 2**20
Rows = dict[str, Any]  # what a rank tells rank 0 of its file: plain values, which travel as JSON


class Writer(FileSystemWriter):
    """Writes into one folder, which exists already."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    # ---- every rank

    def write(self, contents: Contents, rank: int) -> Rows:
        """This rank's file, on the disk when it returns."""
        name = f"__{rank}_0.distcp"
        tensors: Rows = {}
        objects: Rows = {}
        file = _File(self.folder / name)
        try:
            for key, data in contents.objects.items():
                objects[key] = [file.at, len(data), zlib.crc32(data)]
                file.append(data)
            for key, tensor in contents.tensors.items():
                boxes = [[box.offsets, box.sizes, *file.append_tensor(values)] for box, values in tensor.boxes()]
                original = str(tensor.original).removeprefix("torch.")
                dtype = str(tensor.dtype).removeprefix("torch.")
                tensors[key] = {"dtype": dtype, "original": original, "shape": list(tensor.shape), "boxes": boxes}
            os.fsync(file.descriptor)
        finally:
            os.close(file.descriptor)
        paths = list(contents.paths.items())
        return {"file": name, "bytes": file.at, "sum": file.sum, "tensors": tensors, "objects": objects, "paths": paths}

    # ---- rank 0

    def conclude(
        self, everyone: list[Rows], aliases: dict[str, str], facts: dict[str, Any], config: dict[str, Any] | None
    ) -> Manifest:
        """Both tables, on the disk when it returns; the manifest last.

        Raises:
            CheckpointError: a file is not what its rank wrote, or the parts do not make whole tensors.
        """
        made = _merged(everyone, aliases, facts, config)
        manifest.check_files(self.folder, made)
        _check_complete(made)
        paths = {key: tuple(path) for rows in everyone for key, path in rows["paths"]}
        metadata, results = _dcp_tables(made, paths)
        self.finish(metadata, results)
        listed = (self.folder / ".metadata").read_bytes()
        made.files[".metadata"] = StoredFile(len(listed), zlib.crc32(listed))
        (self.folder / manifest.NAME).write_bytes(manifest.dumped(made))
        folders.sync(self.folder / manifest.NAME)
        return made


class _File:
    """A file that grows, with the checksum of all of it."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self.at = self.sum = self.begun = 0

    def append(self, data: bytes) -> None:
        self.at += memory.write(self.descriptor, data)
        self.sum = zlib.crc32(data, self.sum)

    def append_tensor(self, values: torch.Tensor) -> tuple[int, int, str, int, int]:
        """(offset and size of its bytes, checksums of their blocks, offset and length of the item)."""
        begin, values = self.at, values.detach().cpu().contiguous()
        data = raw(values)
        blocks = sums.block_sums(data)
        crc = sums.of_blocks(blocks, len(data))
        head, tail = archive.wrap(values.shape, values.dtype, len(data), crc, begin)
        self.at += memory.write(self.descriptor, head, data, tail)
        self.sum = zlib.crc32(tail, sums.joined(zlib.crc32(head, self.sum), crc, len(data)))
        self._begin_writeback()
        return begin + len(head), len(data), sums.as_text(blocks), begin, self.at - begin

    def _begin_writeback(self) -> None:
        """Let the disk work while the next checksums are computed, or all of it would wait for fsync."""
        if self.at - self.begun >= WRITEBACK_BYTES and hasattr(os, "posix_fadvise"):
            # This is how Linux starts to write a range without waiting. What is not on the disk yet is not dropped by it.
            os.posix_fadvise(self.descriptor, self.begun, self.at - self.begun, os.POSIX_FADV_DONTNEED)
            self.begun = self.at


def _merged(
    everyone: list[Rows], aliases: dict[str, str], facts: dict[str, Any], config: dict[str, Any] | None
) -> Manifest:
    files = {rows["file"]: StoredFile(rows["bytes"], rows["sum"]) for rows in everyone}
    made = Manifest(facts, files, {}, {}, aliases, config)
    for rows in everyone:
        for key, (offset, num_bytes, crc) in rows["objects"].items():
            made.objects[key] = StoredObject(rows["file"], offset, num_bytes, crc)
        for key, told in rows["tensors"].items():
            dtype, original = getattr(torch, told["dtype"]), getattr(torch, told["original"])
            tensor = made.tensors.setdefault(key, StoredTensor(dtype, told["shape"], original))
            for offsets, sizes, offset, num_bytes, text, item, length in told["boxes"]:
                box = StoredBox(offsets, sizes, rows["file"], offset, num_bytes, sums.from_text(text), (item, length))
                tensor.boxes.append(box)
    return made


def _check_complete(made: Manifest) -> None:
    for key, tensor in made.tensors.items():
        written, numel = sum(math.prod(box.sizes) for box in tensor.boxes), math.prod(tensor.shape)
        if written != numel:
            raise CheckpointError(f"{key}: the ranks wrote {written} elements of {numel}; please report this")


def _dcp_tables(made: Manifest, paths: dict[str, tuple[Any, ...]]) -> tuple[Metadata, list[list[WriteResult]]]:
    """DCP's own description; a tied parameter's further keys point at the same bytes."""
    described: dict[str, Any] = {}
    results = []
    keys = {**{key: key for key in made.tensors}, **made.aliases}
    for key, stored_as in keys.items():
        tensor = made.tensors[stored_as]
        chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in tensor.boxes]
        described[key] = TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), chunks)
        for chunk, box in zip(chunks, tensor.boxes, strict=True):
            info = _StorageInfo(box.file, *box.item)
            results.append(WriteResult(MetadataIndex(key, chunk.offsets), box.item[1], info))
    for key, stored in made.objects.items():
        described[key] = BytesStorageMetadata()
        info = _StorageInfo(stored.file, stored.offset, stored.num_bytes)
        results.append(WriteResult(MetadataIndex(key), stored.num_bytes, info))
    return Metadata(described, planner_data={k: p for k, p in paths.items() if k in described}), [results]
