"""What this rank writes into a checkpoint: tensors as segments, everything else as bytes that load without running code.

Every element is written by one rank only. Where replicas hold the same shard each writes its own share of it. What all ranks have alike
(settings, step counts, buffers) is written by rank 0, or by the rank that holds a parameter's first element.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.layout import Segment
from ..core.optimizer import ShardedOptimizer
from ..core.runtime import Runtime
from ..core.unit import Flat
from ..errors import ConfigError
from ..offload.home import is_elementwise
from ..offload.lazy_states import Reader, master_part, state_part
from . import randomness
from .inventory import Parameter, copy_taken
from .tensors import SegmentTensor

MODEL, STATE, GROUPS = "model.", "optimizer.state.", "optimizer.param_groups."
EXTRA, RANDOM, ENGINE = "zerodp.extra.", "zerodp.random.", "zerodp.engine"


@dataclass
class Contents:
    """This rank's part.

    paths: where a key stands in nested state dicts, for DCP's own tools; aliases: further keys of tied parameters; reader: of what
    is on disk, to be closed when all is read.
    """

    tensors: dict[str, SegmentTensor] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    reader: Reader = field(default_factory=Reader)

    def staged(self, copy: Callable[[Tensor], Tensor], sharded: bool) -> None:
        """Take a `copy` of all values that are sharded, or of all others, which training may change from here on."""
        for key, tensor in self.tensors.items():
            if tensor.sharded == sharded:
                self.tensors[key] = tensor.moved(copy)


def collect(runtime: Runtime, optimizer: ShardedOptimizer | None, extra: Any) -> Contents:
    """This rank's part of a checkpoint; the tensors are live.

    Raises:
        ConfigError: something that `torch.load(weights_only=True)` would refuse, by name.
    """
    first = runtime.comm.mesh.world.rank == 0
    contents = Contents()
    inventory = copy_taken(runtime)
    for parameter in inventory.parameters:
        key = MODEL + parameter.keys[0]
        contents.aliases.update({MODEL + other: key for other in parameter.keys[1:]})
        parts = [(segment, master_part(contents.reader, segment, home)) for segment, home in parameter.segments()]
        contents.tensors[key] = _shares(parameter, parameter.flat.shard_dtype, parts)
    for key in inventory.keys:
        contents.paths[MODEL + key] = ("model", key)
    if optimizer is not None:
        _optimizer_states(contents, {(p.flat, p.index): p for p in inventory.parameters}, optimizer)
    if first:
        contents.tensors |= {MODEL + key: SegmentTensor.whole(buffer) for key, buffer in inventory.buffers.items()}
        for key, value in inventory.extra_states.items():
            contents.objects[MODEL + key] = packed(value, f"the extra state {key!r} of the model")
        if optimizer is not None:
            _optimizer_settings(contents, optimizer)
        _extra(contents, extra)
    contents.objects[f"{RANDOM}{runtime.comm.mesh.world.rank}"] = packed(randomness.state(), "the random state")
    return contents


def packed(value: Any, what: str) -> bytes:
    """
    Raises:
        ConfigError: an object that `torch.load(weights_only=True)` refuses.
    """
    out = io.BytesIO()
    try:
        torch.save(value, out)
        unpacked(out.getvalue())
    except Exception as error:
        raise ConfigError(
            f"save: {what} holds objects that cannot be loaded without running code from the file: {_cause(error)}. Keep tensors, numbers, texts, "
            "lists, tuples and dicts of them, or an object with a state_dict() of these"
        ) from None
    return out.getvalue()


def unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _cause(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if "Unsupported" in line or "GLOBAL" in line or "pickle" in line), "")
    return f"{type(error).__name__}: {(told or (lines or [''])[0])[:200]}"


# ---- segments


def _shares(parameter: Parameter, dtype: torch.dtype, segments: list[tuple[Segment, Any]]) -> SegmentTensor:
    """What this replica writes of the segments that all replicas hold; of what tensor-parallel ranks have alike, the first writes all."""
    flat, local, written = parameter.flat, parameter.local, []
    for segment, values in segments if local.first else ():
        low, high = _share(flat, segment)
        if low < high or (local.shape.numel() == 0 and local.size.numel() == 0 and flat.replicas.rank == 0):
            written.append((segment.start + low, values[low:high]))
    original = flat.original_dtypes[parameter.index]
    return SegmentTensor(local.shape, local.strides, dtype, written, original, sizes=local.size, origin=local.origin)


def _share(flat: Flat, segment: Segment) -> tuple[int, int]:
    """[low, high) of a segment: its overlap with this replica's share of the piece that it lies in."""
    share = flat.layout.piece_numels[segment.piece] // flat.replicas.size
    begins = flat.replicas.rank * share - segment.offset
    return min(max(begins, 0), segment.numel), min(max(begins + share, 0), segment.numel)


# ---- the optimizer


def _optimizer_states(
    contents: Contents, parameters: dict[tuple[Flat, int], Parameter], optimizer: ShardedOptimizer
) -> None:
    for (flat, index), own in optimizer._zerodp.segments.items():
        parameter = parameters.get((flat, index)) or Parameter(flat, index, [flat.names[index]])
        elementwise: dict[str, list[tuple[Segment, Any]]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for one in own:
            for key, value in optimizer.state.get(one, {}).items():
                if is_elementwise(value, one):
                    values = state_part(contents.reader, one, key, flat.homes[one.segment.piece])
                    elementwise.setdefault(key, []).append((one.segment, values))
                    dtypes[key] = value.dtype
                elif one.segment.start == 0 and flat.replicas.rank == 0 and parameter.local.begins:
                    _add(contents, ("optimizer", "state", parameter.name, key), value)
        for key, segments in elementwise.items():
            dtype = dtypes[key]
            contents.tensors[f"{STATE}{parameter.name}.{key}"] = _shares(parameter, dtype, segments)
            contents.paths[f"{STATE}{parameter.name}.{key}"] = ("optimizer", "state", parameter.name, key)
            contents.tensors[f"{STATE}{parameter.name}.{key}"].original = dtype


def _optimizer_settings(contents: Contents, optimizer: ShardedOptimizer) -> None:
    engine = optimizer._zerodp
    for number, (group, members) in enumerate(zip(optimizer.param_groups, engine.members, strict=True)):
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for key, value in {**settings, "params": [flat.names[index] for flat, index in members]}.items():
            _add(contents, ("optimizer", "param_groups", number, key), value)
    engine_state = {
        "loss_scaler": engine.scaler.state_dict() if engine.scaler.active else None,
        "skipped_steps": engine.skipped_steps,
    }
    contents.objects[ENGINE] = packed(engine_state, "the loss scaler")


def _add(contents: Contents, path: tuple[Any, ...], value: Any) -> None:
    """A value that this rank writes whole, under the key that DCP makes of its path."""
    key = ".".join(map(str, path))
    contents.paths[key] = path
    if isinstance(value, Tensor):
        contents.tensors[key] = SegmentTensor.whole(value)
    else:
        contents.objects[key] = packed(value, f"the optimizer's {path[-1]!r} of {path[-2]!r}")


def _extra(contents: Contents, extra: Any) -> None:
    if extra is None:
        return
    if not isinstance(extra, Mapping) or not all(isinstance(key, str) for key in extra):
        raise ConfigError(
            f"save: extra must be a dict with texts as keys, got {type(extra).__name__}; for example extra={{'epoch': 3}}"
        )
    for key, value in extra.items():
        kept = value.state_dict() if callable(getattr(value, "state_dict", None)) else value
        contents.objects[EXTRA + key] = packed(kept, f"extra[{key!r}]")
