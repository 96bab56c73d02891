"""`export`: a model or a checkpoint as a Hugging Face folder, written tensor by tensor.

The safetensors format is eight bytes of length, a JSON header and the values, so it is written here directly: its package would want
a whole file's tensors in memory at once.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import bytes_of
from ..core.access import full_values, runtime_of
from ..core.buffers import original_buffers
from ..core.control import Kind
from ..core.runtime import Runtime
from ..errors import CheckpointError, ConfigError, ZeroError
from ..host_memory import raw
from . import background, folders, inventory, memory
from .contents import MODEL
from .foreign import DTYPES
from .own import open_own
from .save import explained, hugging_face_config, same_on_all
from .source import Source

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Tensors:
    """What an output file will hold of one tensor."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def export(source: Any, path: str | os.PathLike[str], max_shard_bytes: int | str = "5GB") -> None:
    """Write a Hugging Face folder: `model-0000i-of-0000n.safetensors`, their index, and `config.json` where the model has a `config`.

    Parameters are in the dtypes from before `shard()`, tied ones once. `transformers` reads it by `from_pretrained(path)`.

    Args:
        source: a model that `shard` returned (a collective; rank 0 writes), or a checkpoint folder (one process; no model is needed, and
            no more memory than the largest tensor takes).
        path: the folder to make; it must not exist, or be empty.
        max_shard_bytes: most bytes in one file, if no single tensor is larger; an int, or text such as "5GB".

    Raises:
        ConfigError: a path that is taken, or a dtype that safetensors does not have; CheckpointError: the source cannot be read, or the folder
        not written. Nothing is left at `path` then.
    """
    target = Path(os.path.abspath(path))
    limit = bytes_of("max_shard_bytes", max_shard_bytes)
    background.wait()
    if isinstance(source, nn.Module):
        _export_model(source, target, limit)
        return
    _check_target(target)
    with open_own(Path(os.path.abspath(source))) as opened:
        keys = _distinct(opened)
        wanted = [
            Tensors(key.removeprefix(MODEL), opened.tensors[key].shape, opened.tensors[key].original) for key in keys
        ]
        folder = Folder(target, wanted, limit, opened.config)
        try:
            for key in keys:
                folder.put(key.removeprefix(MODEL), opened.whole(key))
            folder.finish()
        except OSError as error:
            raise CheckpointError(f"export to {target}: {explained(error)}") from error
        finally:
            folder.close()


def _distinct(source: Source) -> list[str]:
    """The model's tensors, each once, though several names may be tied to it."""
    found: dict[int, str] = {}
    for key, stored in source.tensors.items():
        if key.startswith(MODEL):
            found.setdefault(id(stored), key)
    if not found:
        raise CheckpointError(f"{source.where} holds no model that zerodp saved")
    return list(found.values())


def _export_model(model: nn.Module, target: Path, limit: int) -> None:
    runtime = runtime_of(model)
    runtime.require_idle("export()")
    runtime.lending.take_back()
    runtime.control.require(Kind.STATE)
    same_on_all(runtime, "export", [[str(target), limit], None])
    first = runtime.comm.mesh.world.rank == 0
    folder, problem = None, None
    own = inventory.copy_taken(runtime)
    try:
        if first:
            _check_target(target)
            wanted = [Tensors(p.keys[0], tuple(p.shape), p.flat.original_dtypes[p.index]) for p in own.parameters]
            wanted += [Tensors(key, tuple(buffer.shape), buffer.dtype) for key, buffer in own.buffers.items()]
            folder = Folder(target, wanted, limit, hugging_face_config(model))
    except (ZeroError, OSError) as error:
        problem = _as_ours(error, target)
    runtime.control.share(problem)
    try:
        for key, value in _gathered(runtime, own):
            if folder is not None and problem is None:
                try:
                    folder.put(key, value)
                except OSError as error:  # the other ranks still gather: this one goes on taking part
                    problem = _as_ours(error, target)
        if folder is not None and problem is None:
            try:
                folder.finish()
            except OSError as error:
                problem = _as_ours(error, target)
    finally:
        if folder is not None:
            folder.close()
    runtime.control.share(problem)


def _gathered(runtime: Runtime, own: inventory.Inventory) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters, one flat buffer at a time (a collective), then the buffers."""
    keys = {(p.flat, p.index): p.keys[0] for p in own.parameters}
    for flat in runtime.flats():
        for index, value in enumerate(full_values(runtime, flat)):
            if (flat, index) in keys:
                yield keys[flat, index], value
    with original_buffers(runtime):
        yield from own.buffers.items()


def _as_ours(error: Exception, target: Path) -> ZeroError:
    return error if isinstance(error, ZeroError) else CheckpointError(f"export to {target}: {explained(error)}")


def _check_target(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"export: {target} exists already; choose another path, or remove it")


class Folder:
    """A Hugging Face folder in the making; tensors may come in any order."""

    def __init__(self, target: Path, wanted: Sequence[Tensors], limit: int, config: dict[str, Any] | None) -> None:
        for one in wanted:
            if one.dtype not in NAMES:
                raise ConfigError(f"export: {one.key} is {one.dtype}, which safetensors does not have; cast it first")
        target.parent.mkdir(parents=True, exist_ok=True)
        self.target, self.made = target, target.with_name(f".{target.name}.exporting-{uuid.uuid4().hex[:8]}")
        self.made.mkdir()
        self.places: dict[str, tuple[int, int, torch.dtype]] = {}  # key -> descriptor, offset, dtype
        self.descriptors: list[int] = []
        self._plan(wanted, limit)
        if config is not None:
            (self.made / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def _plan(self, wanted: Sequence[Tensors], limit: int) -> None:
        shards: list[list[Tensors]] = [[]]
        for one in wanted:
            if shards[-1] and sum(other.num_bytes for other in shards[-1]) + one.num_bytes > limit:
                shards.append([])
            shards[-1].append(one)
        names = [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
        names = ["model.safetensors"] if len(shards) == 1 else names
        for name, shard in zip(names, shards, strict=True):
            self._begin(self.made / name, sorted(shard, key=lambda one: -one.dtype.itemsize))  # so that all are aligned
        if len(shards) > 1:
            weight_map = {one.key: name for name, shard in zip(names, shards, strict=True) for one in shard}
            index = {"metadata": {"total_size": sum(one.num_bytes for one in wanted)}, "weight_map": weight_map}
            (self.made / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _begin(self, path: Path, shard: Sequence[Tensors]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for one in shard:
            header[one.key] = {
                "dtype": NAMES[one.dtype],
                "shape": one.shape,
                "data_offsets": [end, end + one.num_bytes],
            }
            end += one.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self.descriptors.append(descriptor)
        memory.write(descriptor, len(text).to_bytes(8, "little"), text)
        for one in shard:
            self.places[one.key] = (descriptor, 8 + len(text) + header[one.key]["data_offsets"][0], one.dtype)

    def put(self, key: str, value: Tensor) -> None:
        descriptor, offset, dtype = self.places[key]
        os.lseek(descriptor, offset, os.SEEK_SET)
        memory.write(descriptor, raw(value.detach().to("cpu", dtype).contiguous()))

    def finish(self) -> None:
        """Everything is in: bring it to the disk and make it visible."""
        for descriptor in self.descriptors:
            os.fsync(descriptor)
        folders.sync(self.made)
        self.made.rename(self.target)
        folders.sync(self.target.parent)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        shutil.rmtree(self.made, ignore_errors=True)  # gone already if all went well
