"""Something to load from, whoever wrote it: tensors in pieces that are read by ranges, and objects, under this library's names.

A source knows nothing of models. What a rank needs of it is asked for box by box, so nobody reads more than that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .boxes import Sizes, contiguous_strides, overlap
from .contents import GROUPS, MODEL, STATE


@dataclass
class Piece:
    """A box of a stored tensor; `read(low, high, out)` gives its row-major elements [low, high) on the host.

    out: contiguous space for them in the stored dtype, if there is some. A reader that can use it returns it.
    """

    offsets: Sizes
    sizes: Sizes
    read: Callable[[int, int, Tensor | None], Tensor]


@dataclass
class Stored:
    """original: what an export is written in."""

    dtype: torch.dtype
    shape: Sizes
    pieces: list[Piece]
    original: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Stored:
        """An ordinary tensor, mapped or in memory."""

        def read(low: int, high: int, out: Tensor | None) -> Tensor:
            return tensor.detach().contiguous().view(-1)[low:high]

        shape = tuple(tensor.shape)
        return cls(tensor.dtype, shape, [Piece((0,) * len(shape), shape, read)], tensor.dtype)


@dataclass
class Expected:
    """What the loading model has: its keys, the names of its parameters, and those of each group of the optimizer, if it is loaded."""

    keys: set[str]
    parameters: list[str]
    groups: list[list[str]]


@dataclass
class Source:
    """Tensors and objects under this library's names (see `contents`).

    world_size: of the ranks that wrote it, where it is known; config: of a Hugging Face model; bytes_read: so far; partial: a format that
    has parameters only, so the model keeps its own buffers.
    """

    where: str
    tensors: dict[str, Stored] = field(default_factory=dict)
    objects: dict[str, Callable[[], Any]] = field(default_factory=dict)
    world_size: int | None = None
    config: dict[str, Any] | None = None
    bytes_read: int = 0
    partial: bool = False
    opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: Any) -> None:
        self.opened.close()

    def fill(self, key: str, out: Tensor, offsets: Sequence[int]) -> None:
        """The box of tensor `key` that begins at `offsets` and has the shape of `out`, into `out`, cast to its dtype.

        Raises:
            CheckpointError: bytes are missing or damaged.
        """
        filled, begin = 0, tuple(offsets)
        for piece in self.tensors[key].pieces if out.numel() else ():
            shared = overlap(begin, tuple(out.shape), piece.offsets, piece.sizes)
            if shared is None:
                continue
            low, sizes = shared
            strides = contiguous_strides(piece.sizes)
            first = sum((a - b) * s for a, b, s in zip(low, piece.offsets, strides, strict=True))
            last = first + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
            place = out[tuple(slice(a - b, a - b + n) for a, b, n in zip(low, begin, sizes, strict=True))]
            filled += place.numel()
            fits = (
                place.is_contiguous() and place.numel() == last + 1 - first and place.dtype == self.tensors[key].dtype
            )
            space = place.view(-1) if fits else None
            values = piece.read(first, last + 1, space)
            if values is not space:
                place.copy_(values.as_strided(sizes, strides))
        if filled != out.numel():
            raise CheckpointError(
                f"{self.where}: {key} lacks {out.numel() - filled} of {out.numel()} elements asked for"
            )

    def whole(self, key: str) -> Tensor:
        stored = self.tensors[key]
        out = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        self.fill(key, out, (0,) * len(stored.shape))
        return out

    def value(self, key: str) -> Any:
        """A tensor or object, whole."""
        return self.whole(key) if key in self.tensors else self.objects[key]()

    def states(self) -> dict[str, dict[str, str]]:
        """{parameter name: {state's name: key}} of the optimizer."""
        found: dict[str, dict[str, str]] = {}
        for key in [*self.tensors, *self.objects]:
            if key.startswith(STATE):
                name, _, state = key.removeprefix(STATE).rpartition(".")
                found.setdefault(name, {})[state] = key
        return found

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups: settings, and "params" by name."""
        found: dict[str, dict[str, Any]] = {}
        for key in [*self.tensors, *self.objects]:
            if key.startswith(GROUPS):
                number, _, setting = key.removeprefix(GROUPS).rpartition(".")
                found.setdefault(number, {})[setting] = self.value(key)
        for name, group in found.items():
            group.setdefault("params", [name])  # flattened by FSDP: settings per parameter
        return list(found.values())


def renamed(names: Iterable[str], expected: Expected) -> dict[str, str]:
    """{a foreign name: this library's name}, found by the parameters' names, whatever prefixes stand before them."""
    names = list(names)
    states = _optimizer_prefix(names, expected)
    model = _model_prefix(names, expected)
    result = {}
    for name in names:
        plain = _clean(name)
        if states is not None and plain.startswith(states + "state."):
            result[name] = STATE + plain.removeprefix(states + "state.")
        elif states is not None and plain.startswith(states + "param_groups."):
            result[name] = GROUPS + plain.removeprefix(states + "param_groups.")
        elif plain.startswith(model):
            result[name] = MODEL + plain.removeprefix(model)
    wrapped = {_clean(key): key for key in expected.keys}  # the loading model may be compiled itself
    for name, ours in result.items():
        if ours.startswith(MODEL):
            result[name] = MODEL + wrapped.get(ours.removeprefix(MODEL), ours.removeprefix(MODEL))
    return result


def _model_prefix(names: Sequence[str], expected: Expected) -> str:
    """What most of the model's keys have before them."""
    plain = {_clean(name) for name in names}
    keys = {_clean(key) for key in expected.keys}
    prefixes = {name.removesuffix(key) for key in sorted(keys)[:8] for name in plain if name.endswith(key)}
    prefixes = {prefix for prefix in prefixes if not prefix or prefix.endswith(".")}
    return max(sorted(prefixes), key=lambda prefix: sum(prefix + key in plain for key in keys), default="")


def _optimizer_prefix(names: Sequence[str], expected: Expected) -> str | None:
    for name in map(_clean, names):
        for parameter in expected.parameters:
            before, found, after = name.partition(f"state.{_clean(parameter)}.")
            if found and "." not in after:
                return before
    return None


def _clean(name: str) -> str:
    """Without what torch.compile puts in."""
    return name.replace("_orig_mod.", "")
