"""What others wrote as sources: DCP folders (FSDP2 and any other user of it), `torch.save` files, safetensors files and folders."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ..errors import CheckpointError
from ..host_memory import raw
from . import contents, memory
from .contents import ENGINE, GROUPS, MODEL, STATE
from .source import Expected, Piece, Source, Stored, renamed

# As safetensors names them.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip


class _Reader:
    """Ranges of files, opened when first read, and counted."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.descriptors: dict[Path, int] = {}

    def read(self, path: Path, offset: int, num_bytes: int) -> Tensor:
        if path not in self.descriptors:
            self.descriptors[path] = os.open(path, os.O_RDONLY)
            self.source.opened.callback(os.close, self.descriptors[path])
        self.source.bytes_read += num_bytes
        found = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        memory.read(self.descriptors[path], offset, raw(found), str(path))
        return found


# ---- torch.distributed.checkpoint


def open_dcp(folder: Path, expected: Expected) -> Source:
    """Any DCP folder. Its `.metadata` is a pickle that DCP itself reads: load only what you trust."""
    metadata = FileSystemReader(folder).read_metadata()
    described = metadata.state_dict_metadata
    if ENGINE in described:
        raise CheckpointError(
            f"{folder} was written by zerodp, and its manifest zerodp.json is missing: no file of it can be checked. Take an earlier checkpoint"
        )
    source = Source(str(folder))
    items = _Items(folder, metadata.storage_data, source)
    for name, ours in renamed(described, expected).items():
        what = described[name]
        if isinstance(what, TensorStorageMetadata):
            pieces = [
                Piece(tuple(chunk.offsets), tuple(chunk.sizes), items.elements(MetadataIndex(name, chunk.offsets)))
                for chunk in what.chunks
            ]
            dtype = what.properties.dtype
            source.tensors[ours] = Stored(dtype, tuple(what.size), pieces, dtype)
        else:
            source.objects[ours] = items.value(MetadataIndex(name))
    return source


class _Items:
    """The items of a DCP folder; the last tensor read stays, as several ranges of it are often asked for."""

    def __init__(self, folder: Path, places: dict[Any, Any], source: Source) -> None:
        self.folder, self.places, self.reader = folder, places, _Reader(source)
        self.last: tuple[MetadataIndex | None, Any] = (None, None)

    def load(self, index: MetadataIndex) -> Any:
        place = self.places[index]
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(
                f"{self.folder}: {index.fqn} is stored compressed or encrypted; load and save it by DCP first"
            )
        data = self.reader.read(self.folder / place.relative_path, place.offset, place.length)
        return contents.unpacked(bytes(raw(data)))

    def elements(self, index: MetadataIndex) -> Callable[[int, int, Tensor | None], Tensor]:
        def read(low: int, high: int, out: Tensor | None) -> Tensor:
            if self.last[0] != index:
                self.last = (index, self.load(index).contiguous().view(-1))
            flat: Tensor = self.last[1]
            return flat[low:high]

        return read

    def value(self, index: MetadataIndex) -> Callable[[], Any]:
        return lambda: self.load(index)


# ---- torch.save


def open_torch_file(path: Path, expected: Expected) -> Source:
    """A state dict, or a dict of those of model and optimizer, as a run in DDP saves it."""
    with path.open("rb") as file:
        mappable = file.read(2) == b"PK"  # older files are no zips
    found = torch.load(path, weights_only=True, mmap=mappable, map_location="cpu")
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, expected a state dict, or a dict of state dicts")
    source = Source(str(path), bytes_read=0)
    parts = [found, *(part for part in found.values() if isinstance(part, dict))]
    model = max(parts, key=lambda part: _common(part, expected))
    tensors = {key: value for key, value in model.items() if isinstance(value, Tensor)}
    source.tensors = {ours: Stored.of(tensors[name]) for name, ours in renamed(tensors, expected).items()}
    optimizer = next((part for part in parts if {"state", "param_groups"} <= part.keys()), None)
    if optimizer is not None and expected.groups:
        _plain_optimizer(source, optimizer, expected)
    return source


def _common(part: dict[Any, Any], expected: Expected) -> int:
    names = [key for key, value in part.items() if isinstance(key, str) and isinstance(value, Tensor)]
    return sum(ours.removeprefix(MODEL) in expected.keys for ours in renamed(names, expected).values())


def _plain_optimizer(source: Source, optimizer: dict[str, Any], expected: Expected) -> None:
    """torch numbers the parameters in the order of the groups."""
    groups = optimizer["param_groups"]
    if len(groups) != len(expected.groups):
        raise CheckpointError(
            f"{source.where}: the optimizer has {len(expected.groups)} parameter groups, the checkpoint {len(groups)}"
        )
    names: dict[Any, str] = {}
    for number, (group, own) in enumerate(zip(groups, expected.groups, strict=True)):
        params = group["params"]
        named = group.get("param_names", params if params and isinstance(params[0], str) else own)
        if len(params) != len(own):
            raise CheckpointError(
                f"{source.where}: parameter group {number} has {len(own)} parameters, in the checkpoint {len(params)}"
            )
        clean = [name.replace("_orig_mod.", "").removeprefix("module.") for name in named]
        names.update(zip(params, clean, strict=True))
        for key, value in {**group, "params": clean}.items():
            _put(source, f"{GROUPS}{number}.{key}", value)
    for index, state in optimizer["state"].items():
        for key, value in state.items():
            _put(source, f"{STATE}{names[index]}.{key}", value)


def _put(source: Source, key: str, value: Any) -> None:
    if isinstance(value, Tensor):
        source.tensors[key] = Stored.of(value)
    else:
        source.objects[key] = lambda: value


# ---- safetensors


def open_safetensors(path: Path, expected: Expected) -> Source:
    """A file, or all of a Hugging Face folder: weights only."""
    source = Source(str(path))
    reader = _Reader(source)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    found = {name: stored for file in files for name, stored in _safetensors(file, reader)}
    source.tensors = {ours: found[name] for name, ours in renamed(found, expected).items()}
    return source


def _safetensors(path: Path, reader: _Reader) -> Iterator[tuple[str, Stored]]:
    """Eight bytes of length, a JSON header of that length, then the values."""
    length = int.from_bytes(bytes(raw(reader.read(path, 0, 8))), "little")
    if length > path.stat().st_size:
        raise CheckpointError(f"{path} is no safetensors file, or was cut short")
    header = json.loads(bytes(raw(reader.read(path, 8, length))))
    for name, told in header.items():
        if name != "__metadata__":
            dtype, shape = DTYPES[told["dtype"]], tuple(told["shape"])
            begin = 8 + length + told["data_offsets"][0]
            yield (
                name,
                Stored(dtype, shape, [Piece((0,) * len(shape), shape, _range(path, reader, begin, dtype))], dtype),
            )


def _range(path: Path, reader: _Reader, begin: int, dtype: torch.dtype) -> Callable[[int, int, Tensor | None], Tensor]:
    def read(low: int, high: int, out: Tensor | None) -> Tensor:
        data = reader.read(path, begin + low * dtype.itemsize, (high - low) * dtype.itemsize)
        return data.view(dtype)

    return read
