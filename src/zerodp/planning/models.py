"""What is planned for, in one form: units of flats, and a transformer's shape where there is one.

Made from a parameter count, a shape, a Hugging Face config (`huggingface.py`) or a real module, which may be on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..config import Config, Precision
from ..core import wrap
from ..core.local import local_of
from ..core.precision import by_dtypes
from ..core.stages import Residency
from ..errors import ConfigError

GPT3_ASPECT = 128  # width over depth of GPT-3, and the width of its heads


@dataclass(frozen=True)
class Shape:
    """A transformer, as far as its activations go.

    layers, hidden, heads, vocabulary: of the model; sequence: tokens of one sample, None where nothing says.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int = 0
    sequence: int | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}: expected a whole number of at least 1, got {value!r}")
        if self.hidden % self.heads:
            raise ConfigError(f"heads: {self.heads} heads do not divide a hidden width of {self.hidden}")


@dataclass(frozen=True)
class FlatSpec:
    """Parameters that lie in one buffer: their elements, and bytes per element of compute, rest and reduced gradients."""

    numels: tuple[float, ...]
    compute: int
    rest: int
    gradient: int
    trains: bool = True


@dataclass(frozen=True)
class UnitSpec:
    name: str
    flats: tuple[FlatSpec, ...]
    residency: Residency | None = None  # None: as the stage says; parameters that are ignored rest whole

    @property
    def numel(self) -> float:
        return sum(sum(flat.numels) for flat in self.flats)


@dataclass(frozen=True)
class Model:
    """What the planner knows of a model.

    exact: the units are those that `shard()` would make, so padding can be counted; buffer_bytes: of its buffers;
    assumptions: what was guessed, in words.
    """

    name: str
    units: tuple[UnitSpec, ...]
    shape: Shape | None = None
    exact: bool = False
    buffer_bytes: int = 0
    assumptions: tuple[str, ...] = field(default=())

    @property
    def numel(self) -> float:
        """Parameters, trainable or not."""
        return sum(unit.numel for unit in self.units)

    @property
    def trainable(self) -> float:
        return sum(sum(flat.numels) for unit in self.units for flat in unit.flats if flat.trains)


def gpt_units(shape: Shape) -> list[tuple[str, int]]:
    """(unit, parameters) of a GPT with biases, tied embeddings and learned positions: 12Lh² + 13Lh and the embeddings."""
    h = shape.hidden
    block = 12 * h * h + 13 * h
    outside = (shape.vocabulary + (shape.sequence or 0)) * h + 2 * h
    return [("(root)", outside), *((f"blocks.{i}", block) for i in range(shape.layers))]


def of_units(name: str, units: Iterable[tuple[str, float]], precision: Precision, **rest: Any) -> Model:
    """A model whose units are known by their sizes only."""
    low = precision.param_dtype.itemsize < precision.master_dtype.itemsize
    compute = precision.param_dtype.itemsize
    master = precision.master_dtype.itemsize if low else compute
    gradient = precision.grad_dtype.itemsize if precision.grad_dtype is not None else (4 if low else compute)
    specs = tuple(UnitSpec(unit, (FlatSpec((numel,), compute, master, gradient),)) for unit, numel in units if numel)
    return Model(name, specs, **rest)


def of_shape(shape: Shape, precision: Precision) -> Model:
    name = f"GPT of {shape.layers} layers, width {shape.hidden}, {shape.heads} heads"
    return of_units(name, gpt_units(shape), precision, shape=shape)


def of_count(numel: float, precision: Precision, sequence: int | None = None) -> Model:
    """A model of which only the number of parameters is known; its units and activations are those of a GPT like GPT-3."""
    layers = max(round((numel / (12 * GPT3_ASPECT**2)) ** (1 / 3)), 1)
    heads = max(round((numel / (12 * layers)) ** 0.5 / GPT3_ASPECT), 1)
    shape = Shape(layers, heads * GPT3_ASPECT, heads, sequence=sequence)
    guess = f"units and activations as of a GPT with the proportions of GPT-3: {layers} layers, width {shape.hidden}"
    units = [(f"blocks.{i}", numel / layers) for i in range(layers)]
    return of_units(f"{short(numel)} parameters", units, precision, shape=shape, assumptions=(guess,))


def of_module(model: nn.Module, config: Config) -> Model:
    """The units that `shard()` would make of a real module; nothing of it is read but shapes and dtypes."""
    return Model(
        type(model).__name__,
        of_plans(wrap.plan_units(model, config), config.precision),
        exact=True,
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
    )


def of_plans(plans: Iterable[wrap.Plan], precision: Precision | None) -> tuple[UnitSpec, ...]:
    units = []
    for plan in plans:
        flats = []
        for (dtypes, trains), named in by_dtypes(plan.parameters, precision).items():
            compute, rest, gradient = (dtype.itemsize for dtype in dtypes)
            flats.append(FlatSpec(tuple(local_of(p).numel() for _, p in named), compute, rest, gradient, trains))
        ignored = plan.residency if plan.name == wrap.IGNORED else None
        units.append(UnitSpec(plan.name, tuple(flats), ignored))
    return tuple(units)


def short(count: float) -> str:
    """A count in words: 350k, 7.5B, 175B, 1T."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{count / scale:.4g}{letter}"
    return f"{count:.4g}"
