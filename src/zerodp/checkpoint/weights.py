"""Weights from safetensors files, read unit by unit as a source of a model's first values.

Only rank 0 opens the files; what it reads of a unit travels with the broadcast that every source's values take. It reads
names, shapes and values; it knows nothing of shards, and writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..core.unit import Flat
from ..core.wrap import Plan, clean
from ..errors import CheckpointError, ConfigError
from ..materialise import Initialised, ground, host_space, listed
from ..residual.tiling import TiledLinear

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Weights:
    """Values of parameters and persistent buffers from `path`: a safetensors file, or a Hugging Face folder.

    What no such file holds, non-persistent buffers on the meta device, is initialised.

    Args:
        gives: whether this rank reads the files.

    Raises:
        ConfigError: safetensors is not installed, or a non-persistent buffer on the meta device that nothing initialises.
        CheckpointError: no such files, or tensors that are missing, not expected or of another shape; all are listed.
    """

    def __init__(self, path: str, model: nn.Module, plans: Sequence[Plan], gives: bool) -> None:
        self.names: dict[int, list[str]] = {}  # tensor -> its names; tied ones have several
        held, derived = {}, set()
        for name, tensor, persistent in _named(model):
            self.names.setdefault(id(tensor), []).append(name)
            held[id(tensor)] = tensor
            if not persistent:
                derived.add(id(tensor))
        self.derived = derived
        self.initialised = Initialised(model, plans, gives, {i for i in derived if held[i].is_meta})
        self.files = Files(path) if gives else None
        self.keys: dict[int, str] = {}  # tensor -> its name in the files
        self.parts: dict[int, tuple[slice, ...]] = {}  # of tensors that are a part of what the files have
        if self.files is not None:
            self._match(self.files, held, getattr(model, "base_model_prefix", ""), dict(_tiles(model)))

    def values(self, flat: Flat) -> list[Tensor]:
        for parameter in flat.parameters:
            ground(parameter)
        return self._read(flat.parameters)

    def buffer(self, buffer: Tensor) -> Tensor:
        if id(buffer) in self.derived:
            return self.initialised.buffer(buffer)
        (value,) = self._read([buffer])
        return host_space(value) if value.is_meta else value

    def _read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Values in the tensors' own dtypes; on ranks that do not read, the tensors as they are."""
        if self.files is None:
            return [tensor.detach() for tensor in tensors]
        whole = {id(t): self.keys[id(t)] for t in tensors if id(t) not in self.parts}
        found = self.files.read(whole.values())
        return [
            (found[whole[id(t)]] if id(t) in whole else self.files.part(self.keys[id(t)], self.parts[id(t)])).to(
                t.dtype
            )
            for t in tensors
        ]

    def _match(self, files: Files, held: dict[int, Tensor], prefix: str, tiles: dict[int, Dense]) -> None:
        """Find every tensor of the model in the files, or say all that does not fit."""
        known, missing, other = set(), [], []
        for number, tensor in held.items():
            names = [spelling for name in self.names[number] for spelling in _spellings(name, prefix)]
            known.update(names)
            present = [name for name in names if name in files.shapes]
            if not present and number in tiles:
                dense = tiles[number]
                names = [spelling for name in dense.names for spelling in _spellings(name, prefix)]
                known.update(names)
                present = [name for name in names if name in files.shapes]
                if present and files.shapes[present[0]] == dense.shape:
                    self.keys[number], self.parts[number] = present[0], dense.part
                    continue
            if number in self.derived:
                continue
            if not present:
                missing.append(self.names[number][0])
                continue
            self.keys[number] = present[0]
            if files.shapes[present[0]] != tuple(tensor.shape):
                other.append(f"{present[0]!r} is {files.shapes[present[0]]}, the model's {tuple(tensor.shape)}")
        unexpected = [name for name in files.shapes if name not in known]
        said = []
        if missing:
            said.append(f"missing: {listed(missing)}")
        if unexpected:
            said.append(f"not in the model: {listed(unexpected)}")
        if other:
            said.append(f"of another shape: {'; '.join(other)}")
        if said:
            raise CheckpointError(f"weights: {files.path} does not fit the model. {'. '.join(said)}")


class Files:
    """The tensors of one safetensors file or of a folder of them, by name. Nothing stays open between reads."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.file_of: dict[str, Path] = {}
        for file in self._files():
            with opened(file) as tensors:
                for name in tensors.keys():
                    self.shapes[name] = tuple(tensors.get_slice(name).get_shape())
                    self.file_of[name] = file

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.file_of[name], []).append(name)
        found = {}
        for file, its in by_file.items():
            with opened(file) as tensors:
                found.update({name: tensors.get_tensor(name) for name in its})
        return found

    def part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        with opened(self.file_of[name]) as tensors:
            found: Tensor = tensors.get_slice(name)[part]
            return found

    def _files(self) -> list[Path]:
        if not self.path.exists():
            raise CheckpointError(f"weights: there is no {self.path} on rank 0, which reads it for all")
        if not self.path.is_dir():
            return [self.path]
        if (self.path / INDEX).exists():
            try:
                named = json.loads((self.path / INDEX).read_text())["weight_map"].values()
            except (ValueError, KeyError, AttributeError) as error:
                raise CheckpointError(
                    f"weights: {self.path / INDEX} is no index of safetensors files: {error!r}"
                ) from None
            return [self.path / name for name in dict.fromkeys(named)]
        if (self.path / SINGLE).exists():
            return [self.path / SINGLE]
        raise CheckpointError(f"weights: {self.path} has neither {SINGLE} nor {INDEX}; name a safetensors file")


class Dense(NamedTuple):
    """What a tile's parameter is a part of: the dense parameter's names and shape, and where in it."""

    names: list[str]
    shape: tuple[int, ...]
    part: tuple[slice, ...]


def _tiles(model: nn.Module) -> Iterator[tuple[int, Dense]]:
    """The parameters of tiled layers, which files may hold whole."""
    for name, layer in model.named_modules():
        if isinstance(layer, TiledLinear):
            prefix = clean(f"{name}." if name else "")
            for tile in layer._tiles:
                for key, parameter in tile.named_parameters():
                    yield id(parameter), Dense([prefix + key], layer.dense_shape(key), tile.part(key))


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """safetensors' view of a file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ConfigError(
            "weights: reading safetensors needs a package of that name: pip install 'zerodp[hf]'"
        ) from None
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"weights: {file} cannot be read as a safetensors file: {error}") from error


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Every name of every parameter and buffer, and whether state dicts hold it."""
    for module_name, module in model.named_modules(remove_duplicate=False):
        for tensors, passing in ((module._parameters, ()), (module._buffers, module._non_persistent_buffers_set)):
            for key, tensor in tensors.items():
                if tensor is not None:
                    yield clean(f"{module_name}.{key}" if module_name else key), tensor, key not in passing


def _spellings(name: str, prefix: str) -> list[str]:
    """Transformers' files may be of the model without its head, or with one."""
    return [name, name.removeprefix(prefix + "."), f"{prefix}.{name}"] if prefix else [name]
