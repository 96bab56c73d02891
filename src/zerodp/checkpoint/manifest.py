"""`zerodp.json`: what a checkpoint holds and where, so that it is read without pickle, and whether it is whole.

It is written last. Its first line is the checksum of the rest, and it is plain JSON all the same.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from . import sums

NAME = "zerodp.json"
FORMAT = 1


@dataclass
class StoredBox:
    """A box of a tensor: row-major bytes [offset, offset + num_bytes) of a file, within an item that torch.load reads."""

    offsets: list[int]
    sizes: list[int]
    file: str
    offset: int
    num_bytes: int
    sums: list[int]  # CRC-32 per block of sums.BLOCK_BYTES
    item: tuple[int, int]  # the item's own (offset, length)


@dataclass
class StoredTensor:
    """original: the parameter's dtype before `shard()`, which differs where a master is stored."""

    dtype: torch.dtype
    shape: list[int]
    original: torch.dtype
    boxes: list[StoredBox] = field(default_factory=list)


@dataclass
class StoredObject:
    """What torch.save made of a value."""

    file: str
    offset: int
    num_bytes: int
    sum: int


@dataclass
class StoredFile:
    num_bytes: int
    sum: int


@dataclass
class Manifest:
    """facts: world size, stages, time and versions; aliases: a tied parameter's further keys; config: of the model, if it has one."""

    facts: dict[str, Any]
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredObject]
    aliases: dict[str, str]
    config: dict[str, Any] | None

    @property
    def time_ns(self) -> int:
        return int(self.facts["time_ns"])


def dumped(manifest: Manifest) -> bytes:
    files = list(manifest.files)
    places = {name: number for number, name in enumerate(files)}
    contents = {
        "format": FORMAT,
        "block_bytes": sums.BLOCK_BYTES,
        "facts": manifest.facts,
        "config": manifest.config,
        "files": [[name, f.num_bytes, f"{f.sum:08x}"] for name, f in manifest.files.items()],
        "aliases": manifest.aliases,
        "objects": {k: [places[o.file], o.offset, o.num_bytes, f"{o.sum:08x}"] for k, o in manifest.objects.items()},
        "tensors": {
            key: {
                "dtype": _name(t.dtype),
                "shape": t.shape,
                "original_dtype": _name(t.original),
                "boxes": [
                    [b.offsets, b.sizes, places[b.file], b.offset, b.num_bytes, sums.as_text(b.sums), *b.item]
                    for b in t.boxes
                ],
            }
            for key, t in manifest.tensors.items()
        },
    }
    rest = json.dumps(contents, separators=(",", ":"))[1:].encode() + b"\n"
    return f'{{"crc32":"{zlib.crc32(rest):08x}",\n'.encode() + rest


def load(folder: Path) -> Manifest:
    """
    Raises:
        CheckpointError: there is none, or it is damaged or of a later format.
    """
    path = folder / NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}: no checkpoint of zerodp that was written to its end"
        ) from None
    first, _, rest = data.partition(b"\n")
    if first != f'{{"crc32":"{zlib.crc32(rest):08x}",'.encode():
        raise CheckpointError(f"{path} is damaged: its contents do not fit its checksum. Take an earlier checkpoint")
    contents = json.loads(data)
    if contents["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {contents['format']}, and this version of zerodp reads format {FORMAT}: use a later version"
        )
    if contents["block_bytes"] != sums.BLOCK_BYTES:
        raise CheckpointError(f"{path}: checksums of {contents['block_bytes']} bytes, expected {sums.BLOCK_BYTES}")
    return _parsed(contents)


def _parsed(contents: dict[str, Any]) -> Manifest:
    names = [name for name, *_ in contents["files"]]
    files = {name: StoredFile(num_bytes, int(text, 16)) for name, num_bytes, text in contents["files"]}
    tensors = {}
    for key, t in contents["tensors"].items():
        boxes = [
            StoredBox(offsets, sizes, names[file], offset, num_bytes, sums.from_text(text), (item, length))
            for offsets, sizes, file, offset, num_bytes, text, item, length in t["boxes"]
        ]
        tensors[key] = StoredTensor(_dtype(t["dtype"]), t["shape"], _dtype(t["original_dtype"]), boxes)
    objects = {k: StoredObject(names[f], at, n, int(text, 16)) for k, (f, at, n, text) in contents["objects"].items()}
    return Manifest(contents["facts"], files, tensors, objects, contents["aliases"], contents["config"])


def check_files(folder: Path, manifest: Manifest) -> None:
    """
    Raises:
        CheckpointError: a file is missing, or has another size than when it was written.
    """
    for name, file in manifest.files.items():
        path = folder / name
        try:
            num_bytes = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}. Take an earlier checkpoint") from None
        if num_bytes != file.num_bytes:
            raise CheckpointError(
                f"{path} has {num_bytes} bytes, expected {file.num_bytes}: it was cut short or changed. Take an earlier checkpoint"
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
