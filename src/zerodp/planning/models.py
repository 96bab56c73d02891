"""What is planned for, in one form: units of flats, and a transformer's shape where there is one.

Made from a parameter count, a shape, a Hugging Face config (`huggingface.py`) or a real module, which may be on the meta device.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..config import Config, Precision
from ..core import wrap
from ..core.local import local_of
from ..core.precision import by_dtypes
from ..core.stages import Residency
from ..core.wrap import ROOT
from ..errors import ConfigError

MOST = {"layers": 5_000, "hidden": 10**7, "heads": 10**7, "parameters": 10**15}  # a plan is made layer by layer
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
            if value > MOST[name]:
                raise ConfigError(f"{name}: at most {MOST[name]:,} can be planned for, got {value:,}")
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
    idle: float = 0  # of its parameters, those that a token does not meet: the experts that it is not sent to

    @property
    def numel(self) -> float:
        return sum(sum(flat.numels) for flat in self.flats)

    @property
    def active(self) -> float:
        """Parameters that compute for each token."""
        return self.numel - self.idle


@dataclass(frozen=True)
class UnitTrace:
    """What one unit's part of a step keeps for backward, in bytes, and computes, in FLOPs; recomputation is in backward."""

    name: str
    saved_bytes: int
    forward_flops: int
    backward_flops: int


@dataclass(frozen=True)
class Trace:
    """One forward and backward pass, seen on fake tensors; parameters and their gradients are not in the bytes.

    saved_bytes: what autograd keeps between the two, each storage once; peak_bytes: the most that is alive at one time, in
    `peak_phase` ("forward" or "backward") of `peak_unit`; flops: of both passes.
    """

    units: tuple[UnitTrace, ...]
    saved_bytes: int
    peak_bytes: int
    peak_unit: str
    peak_phase: str
    flops: int


@dataclass(frozen=True)
class Model:
    """What the planner knows of a model.

    exact: the units are those that `shard()` would make, so padding can be counted; buffer_bytes: of its buffers;
    assumptions: what was guessed, in words; traces: a step as the model is (False), and with its blocks checkpointed (True);
    finer: smaller units that it could have, the largest first, each with words for them; cut: how the units of a count or a shape
    are cut (`CUTS`).
    """

    name: str
    units: tuple[UnitSpec, ...]
    shape: Shape | None = None
    exact: bool = False
    buffer_bytes: int = 0
    assumptions: tuple[str, ...] = field(default=())
    traces: Mapping[bool, Trace] = field(default_factory=dict)
    finer: tuple[tuple[str, tuple[UnitSpec, ...]], ...] = ()
    cut: str = "block"

    @property
    def numel(self) -> float:
        """Parameters, trainable or not."""
        return sum(unit.numel for unit in self.units)

    @property
    def active(self) -> float:
        """Parameters that compute for each token."""
        return sum(unit.active for unit in self.units)

    @property
    def trainable(self) -> float:
        return sum(sum(flat.numels) for unit in self.units for flat in unit.flats if flat.trains)


# How a transformer can be cut, and what of a block of 12h² each piece has; the small parameters go with the linears.
CUTS: dict[str, dict[str, int]] = {
    "block": {"": 12},
    "branch": {".attention": 4, ".mlp": 8},
    "linear": {".attention.qkv": 3, ".attention.out": 1, ".mlp.up": 4, ".mlp.down": 4},
}
CUT_WORDS = {"branch": "attention and MLP apart", "linear": "each linear layer"}


def gpt_units(shape: Shape, cut: str = "block") -> list[tuple[str, int]]:
    """(unit, parameters) of a GPT with biases, tied embeddings and learned positions: 12Lh² + 13Lh and the embeddings."""
    h = shape.hidden
    # A norm (2h) goes with the first linear of its branch, and each linear has as many biases as outputs.
    small = {".attention.qkv": 5, ".attention.out": 1, ".mlp.up": 6, ".mlp.down": 1, ".attention": 6, ".mlp": 7, "": 13}
    outside = (shape.vocabulary + (shape.sequence or 0)) * h + 2 * h
    parts = [(name, twelfths * h * h + small[name] * h) for name, twelfths in CUTS[cut].items()]
    return [(ROOT, outside), *((f"blocks.{i}{name}", numel) for i in range(shape.layers) for name, numel in parts)]


def of_units(name: str, units: Iterable[tuple[str, float]], precision: Precision, **rest: Any) -> Model:
    """A model whose units are known by their sizes only."""
    return Model(name, unit_specs(units, precision), **rest)


def unit_specs(units: Iterable[tuple[str, float]], precision: Precision) -> tuple[UnitSpec, ...]:
    low = precision.param_dtype.itemsize < precision.master_dtype.itemsize
    compute = precision.param_dtype.itemsize
    master = precision.master_dtype.itemsize if low else compute
    gradient = precision.grad_dtype.itemsize if precision.grad_dtype is not None else (4 if low else compute)
    return tuple(UnitSpec(unit, (FlatSpec((numel,), compute, master, gradient),)) for unit, numel in units if numel)


def finer_than(cut: str) -> list[str]:
    return list(CUTS)[list(CUTS).index(cut) + 1 :]


def of_shape(shape: Shape, precision: Precision, cut: str = "block") -> Model:
    name = f"GPT of {shape.layers} layers, width {shape.hidden}, {shape.heads} heads"
    finer = tuple((CUT_WORDS[one], unit_specs(gpt_units(shape, one), precision)) for one in finer_than(cut))
    return of_units(name, gpt_units(shape, cut), precision, shape=shape, finer=finer, cut=cut)


def of_count(numel: float, precision: Precision, sequence: int | None = None, cut: str = "block") -> Model:
    """A model of which only the number of parameters is known; its units and activations are those of a GPT like GPT-3."""
    layers = max(round((numel / (12 * GPT3_ASPECT**2)) ** (1 / 3)), 1)
    heads = max(round((numel / (12 * layers)) ** 0.5 / GPT3_ASPECT), 1)
    shape = Shape(layers, heads * GPT3_ASPECT, heads, sequence=sequence)
    guess = f"units and activations as of a GPT with the proportions of GPT-3: {layers} layers, width {shape.hidden}"

    def units(cut: str) -> list[tuple[str, float]]:
        parts = CUTS[cut].items()
        return [(f"blocks.{i}{name}", numel / layers * share / 12) for i in range(layers) for name, share in parts]

    finer = tuple((CUT_WORDS[one], unit_specs(units(one), precision)) for one in finer_than(cut))
    name = f"{short(numel)} parameters"
    return of_units(name, units(cut), precision, shape=shape, assumptions=(guess,), finer=finer, cut=cut)


def of_module(model: nn.Module, config: Config, traces: Mapping[bool, Trace] | None = None) -> Model:
    """The units that `shard()` would make of a real module; nothing of it is read but shapes and dtypes."""
    plans = wrap.plan_units(model, config)
    finer = parts_of_units(model, [plan.module for plan in plans if plan.module not in (None, model)])

    def cut_by(patterns: list[str]) -> tuple[UnitSpec, ...]:
        return of_plans(wrap.plan_units(model, dataclasses.replace(config, units=patterns)), config.precision)

    return Model(
        type(model).__name__,
        of_plans(plans, config.precision),
        exact=True,
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        traces=traces or {},
        finer=tuple((f"units={cut!r}", cut_by(cut)) for cut in [finer] if cut),
    )


def parts_of_units(model: nn.Module, units: Collection[nn.Module | None]) -> list[str]:
    """Patterns over names for the parts of which units that have some are made: "blocks.*.attention", and leaves as they are."""
    found: dict[str, None] = {}
    split = False
    for name, module in model.named_modules():
        if module in units:
            parts = [key for key, child in module.named_children() if _numel(child) >= wrap.SMALL_BLOCK]
            split = split or len(parts) > 1
            names = [f"{name}.{key}" for key in parts] if len(parts) > 1 else [name]
            found.update(dict.fromkeys(re.sub(r"\b\d+\b", "*", one) for one in names))
    return list(found) if split else []


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


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
