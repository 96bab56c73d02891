"""What a user may set: `Config` and `Precision`, frozen and checked field by field.

Knows nothing of models or process groups; what depends on them is checked by `zerodp.shard`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .checks import bytes_of, number, unknown, whole
from .core.stages import STAGES
from .errors import ConfigError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Precision:
    """Dtypes of compute, wire, gradients and master weights, and the loss scaling that fp16 needs.

    Args:
        param_dtype: dtype in which parameters are gathered and the model computes.
        reduce_dtype: dtype of gradients on the wire; ``None`` = the dtype the gradient has then.
        grad_dtype: dtype in which gradients are kept between backward passes; ``None`` = fp32 where they are sharded
            (stages 2, 3), ``param_dtype`` where they are not, promoted to fp32 by a second backward.
        master_dtype: dtype of the sharded copy that the optimizer updates.
        buffer_dtype: dtype for floating-point buffers; ``None`` leaves them. Checkpoints keep the original dtype.
        cast_inputs: cast floating-point tensor inputs of the called module to ``param_dtype``.
        output_dtype: cast floating-point outputs of the called module; ``None`` leaves them.
        loss_scale: ``"dynamic"`` or a fixed factor; used with fp16 parameters only.
        init_scale, growth_interval, backoff, growth, hysteresis, min_scale: of the dynamic scale. An overflow uses up one
            of ``hysteresis`` before the scale is multiplied by ``backoff``; ``growth_interval`` good steps multiply it by
            ``growth`` and refill the hysteresis; an overflow at ``min_scale`` is an error.

    Raises:
        ConfigError: for a dtype or number outside its range.
    """

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    master_dtype: torch.dtype = torch.float32
    buffer_dtype: torch.dtype | None = None
    cast_inputs: bool = True
    output_dtype: torch.dtype | None = None
    loss_scale: float | str = "dynamic"
    init_scale: float = 2.0**16
    growth_interval: int = 2000
    backoff: float = 0.5
    growth: float = 2.0
    hysteresis: int = 1
    min_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "grad_dtype", "master_dtype", "buffer_dtype", "output_dtype"):
            value, needed = getattr(self, name), name in ("param_dtype", "master_dtype")
            if not (value in FLOATS or (value is None and not needed)):
                raise ConfigError(f"Precision.{name}: expected one of {', '.join(map(str, FLOATS))}, got {value!r}")
        if self.loss_scale != "dynamic":
            number("Precision.loss_scale", self.loss_scale, above=0, also='"dynamic"')
        for name, above, below in (
            ("init_scale", 0, None),
            ("growth", 1, None),
            ("backoff", 0, 1),
            ("min_scale", 0, None),
        ):
            number(f"Precision.{name}", getattr(self, name), above=above, below=below)
        for name in ("growth_interval", "hysteresis"):
            whole(f"Precision.{name}", getattr(self, name), least=1)

    @property
    def scales_loss(self) -> bool:
        return self.param_dtype == torch.float16


PLACES = ("device", "host", "disk")
DELAYED_AFTER = 40  # steps, as in the ZeRO-Offload paper
PIECE_BYTES = (
    4 * 2**20
)  # of one rank's part of a collective, where states move piece by piece through buffers of that size
PRECISIONS = {
    "fp32": Precision(torch.float32),
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16),
}


@dataclass(frozen=True, kw_only=True)
class Offload:
    """What rests off the device, and where: each ``"device"``, ``"host"`` or ``"disk"``.

    Args:
        optimizer: masters, optimizer states and, where they are sharded, reduced gradients; the optimizer steps in host memory then.
        params: what gathers copy this rank's part of the parameters from, in the dtype of compute; in stage 3.
        activations: where the inputs of checkpointed blocks rest: ``"device"``, ``"host"`` or ``"disk"``.
        path: folder for the file of ``"disk"``; ``None`` = the system's folder for temporary files.
        delayed_update: what rests off the device is updated beside the next forward and backward pass, which still compute with the parameters
            before it. ``True`` = after 40 ordinary steps; a number = after so many.
        fraction: the share of the elements whose optimizer states leave the device, above 0 and at most 1.
        host_bytes: host memory that may be filled, in bytes (int or text such as ``"4GB"``); the rest goes to disk. ``None`` = of model
            states all that ``"host"`` asks for, of activations on disk only what is on its way.

    Raises:
        ConfigError: a place or number outside its range.
    """

    optimizer: str = "device"
    params: str = "device"
    activations: str = "device"
    path: str | None = None
    delayed_update: bool | int = False
    fraction: float = 1.0
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("optimizer", "params", "activations"):
            place = getattr(self, name)
            if place not in PLACES:
                near = difflib.get_close_matches(str(place), PLACES, 1)
                raise ConfigError(
                    f"offload: {name}: expected one of {', '.join(map(repr, PLACES))}, got {place!r}"
                    + (f"; did you mean {near[0]!r}?" if near else "")
                )
        number("Offload.fraction", self.fraction, above=0)
        if self.fraction > 1:
            raise ConfigError(f"Offload.fraction: a share is at most 1.0, got {self.fraction!r}")
        if self.fraction < 1 and self.optimizer == "device":
            raise ConfigError(
                'Offload.fraction: the share of the optimizer states that leaves the device; say where to by optimizer="host" or "disk"'
            )
        if not isinstance(self.delayed_update, bool):
            whole("Offload.delayed_update", self.delayed_update, least=1)
        if self.delayed_update and self.optimizer == "device":
            raise ConfigError(
                "Offload.delayed_update: the update runs beside the next pass where the optimizer rests off the device: "
                'optimizer="host" or "disk"'
            )
        if self.path is not None:
            if not isinstance(self.path, (str, os.PathLike)) or not os.fspath(self.path):
                raise ConfigError(f"Offload.path: expected the path of a folder, got {self.path!r}")
            object.__setattr__(self, "path", os.fspath(self.path))
        if self.host_bytes is not None:
            object.__setattr__(self, "host_bytes", bytes_of("Offload.host_bytes", self.host_bytes))
            if {self.optimizer, self.params, self.activations} == {"device"}:
                raise ConfigError(
                    "Offload.host_bytes: nothing leaves the device; say what does by optimizer=, params= or activations="
                )

    @property
    def moves_states(self) -> bool:
        """Whether model states rest anywhere but on the device."""
        return self.optimizer != "device" or self.params != "device"

    @property
    def warm_up_steps(self) -> int | None:
        """Ordinary steps before updates are delayed; None = they never are."""
        if self.delayed_update is False:
            return None
        return DELAYED_AFTER if self.delayed_update is True else self.delayed_update


# ZeRO's configurations C1 to C5. The constant buffers (C_B) and the memory without fragments (M_D) of all five are always on.
_CHECKPOINTED = {"checkpoint_activations": True}
_PARTITIONED = {**_CHECKPOINTED, "partition_activations": True}
PRESETS: dict[str, dict[str, Any]] = {
    "C1": {"stage": 1, **_CHECKPOINTED},
    "C2": {"stage": 1, **_PARTITIONED},
    "C3": {"stage": 2, **_CHECKPOINTED},
    "C4": {"stage": 2, **_PARTITIONED},
    "C5": {"stage": 2, **_PARTITIONED, "offload": Offload(activations="host")},
}
ZERO_100B = "C4"


@dataclass(frozen=True)
class Config:
    """All options of :func:`zerodp.shard`; every field can be overridden there by name. See `docs/options.md`."""

    stage: int | str | Mapping[str, int] = 3
    mesh: Any = None
    units: Any = None
    ignore: tuple[str, ...] = ()
    ignore_below: int = 0
    precision: Precision | None = None
    device: torch.device | None = None
    offload: Offload = Offload()
    reduction: str = "mean"
    exact: bool | None = None
    unsharded_bytes: int = 0
    prefetch: int = 1
    bucket_bytes: int | None = None
    weights: str | None = None
    check: bool = True
    checkpoint_activations: Any = False
    partition_activations: Any = False

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  (frozen: normal forms are set once, here)
        put("stage", _stage(self.stage))
        put("precision", _precision(self.precision))
        put("offload", _offload(self.offload))
        put("ignore", _patterns("ignore", self.ignore))
        put("unsharded_bytes", bytes_of("unsharded_bytes", self.unsharded_bytes))
        if self.bucket_bytes is not None:
            put("bucket_bytes", bytes_of("bucket_bytes", self.bucket_bytes))
            whole("bucket_bytes", self.bucket_bytes, least=1)
        if self.device is not None:
            put("device", _device(self.device))
        if self.weights is not None:
            put("weights", _path("weights", self.weights))
        if self.units is not None:
            put("units", _units(self.units))
        if not isinstance(self.checkpoint_activations, bool):
            put("checkpoint_activations", _units(self.checkpoint_activations, "checkpoint_activations"))
        self._check_activations()
        if self.reduction not in ("mean", "sum"):
            raise ConfigError(f'reduction: expected "mean" or "sum", got {self.reduction!r}')
        for name in ("ignore_below", "prefetch"):
            whole(name, getattr(self, name), least=0)
        for name in ("exact", "check"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "exact" and value is None):
                raise ConfigError(f"{name}: expected True or False, got {value!r}")

    def _check_activations(self) -> None:
        """What would do nothing is refused."""
        moves = self.offload.activations != "device"
        splits = self.partition_activations is not False and self.partition_activations is not None
        idle = "partition_activations" if splits else "offload" if moves else None
        if idle and self.checkpoint_activations is False:
            raise ConfigError(
                f"{idle}: what is split or moved are the inputs of checkpointed blocks, and none are; pass checkpoint_activations=True"
            )

    @classmethod
    def preset(cls, name: str, **options: Any) -> Config:
        """A configuration of the ZeRO paper by its name there, ``"C1"`` to ``"C5"``, with `options` put over it.

        All checkpoint the repeated blocks. C1: stage 1. C2: stage 1 and P_a. C3: stage 2. C4: stage 2 and P_a. C5: stage 2 and
        P_a+cpu. P_a splits what is kept over the model's tensor-parallel ranks; for others give `partition_activations`.

        Raises:
            ConfigError: no such preset, or an option that cannot work.
        """
        if name not in PRESETS:
            raise ConfigError(unknown("preset", name, PRESETS))
        return cls.of(cls(**PRESETS[name]), options)

    @classmethod
    def zero_100b(cls, **options: Any) -> Config:
        """ZeRO-100B, the configuration of the paper's largest runs: stage 2 and ZeRO-R, which is `preset("C4")`.

        Raises:
            ConfigError: an option that cannot work.
        """
        return cls.preset(ZERO_100B, **options)

    def bucket_bytes_on(self, backend: str, ranks: int) -> int:
        """Most bytes in one collective over so many ranks."""
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        most = 64 * 2**20 if backend == "gloo" else 512 * 2**20
        return min(most, ranks * PIECE_BYTES) if self.offload.moves_states else most

    @classmethod
    def of(cls, config: Config | None, options: Mapping[str, Any]) -> Config:
        """`config` with `options` put over it; unknown names are refused with the nearest valid one."""
        if config is not None and not isinstance(config, Config):
            raise ConfigError(
                f"config: expected a zerodp.Config, got {type(config).__name__}; pass options by name: shard(model, optimizer, stage=3)"
            )
        names = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in names:
                raise ConfigError(unknown("option", name, names))
        return dataclasses.replace(config or cls(), **options)


AUTO = "auto"  # the stage that the planner chooses


def _stage(value: Any) -> Any:
    if value == AUTO:
        return value
    if isinstance(value, Mapping):
        for key, one in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"stage: the keys of a mapping are patterns over unit names, got {key!r}")
            if isinstance(one, bool) or one not in STAGES:
                raise ConfigError(f"stage[{key!r}]: expected one of {sorted(STAGES)}, got {one!r}")
        if "*" not in value:
            raise ConfigError(
                f'stage: a mapping needs "*" for the units that no other pattern names, got only {list(value)}'
            )
        return dict(value)
    if isinstance(value, bool) or not isinstance(value, int) or value not in STAGES:
        raise ConfigError(
            f"stage: expected one of {sorted(STAGES)}, 'auto' or a mapping from unit patterns to them, got {value!r}"
        )
    return value


def _precision(value: Any) -> Precision | None:
    if value is None or isinstance(value, Precision):
        return value
    if isinstance(value, str) and value in PRECISIONS:
        return PRECISIONS[value]
    near = difflib.get_close_matches(str(value), PRECISIONS, 1)
    raise ConfigError(
        f"precision: expected one of {list(PRECISIONS)} or zerodp.Precision(...), got {value!r}"
        + (f"; did you mean {near[0]!r}?" if near else "")
    )


def _offload(value: Any) -> Offload:
    if value is None or isinstance(value, Offload):
        return value or Offload()
    if isinstance(value, str):
        return Offload(optimizer=value)
    raise ConfigError(f"offload: expected 'host' or zerodp.Offload(...), got {value!r}")


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    patterns = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    if not all(isinstance(p, str) for p in patterns):
        raise ConfigError(f"{name}: expected glob patterns over names, such as 'head.*', got {value!r}")
    return patterns


def _path(name: str, value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{name}: expected the path of a safetensors file or a Hugging Face folder, got {value!r}")
    return os.fspath(value)


def _device(value: Any) -> torch.device:
    try:
        return torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: expected a torch.device or its name, got {value!r} ({error})") from None


def _units(value: Any, name: str = "units") -> Callable[..., Any] | tuple[Any, ...]:
    if isinstance(value, type) or isinstance(value, str):
        return (value,)
    if callable(value):
        return value  # type: ignore[no-any-return]
    items = tuple(value) if isinstance(value, Iterable) else (value,)
    for item in items:
        if not (isinstance(item, str) or (isinstance(item, type) and issubclass(item, torch.nn.Module))):
            raise ConfigError(
                f"{name}: expected module classes, glob patterns over module names, or a function (name, module) -> bool; got {item!r}"
            )
    return items
