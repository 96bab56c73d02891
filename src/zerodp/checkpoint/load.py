"""`load`: read and check everything that this rank needs, agree with the others, and only then change anything."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.access import require_closed, runtime_of
from ..core.buffers import original_buffers
from ..core.control import Kind
from ..core.layout import Segment
from ..core.optimizer import ShardedOptimizer
from ..core.optimizer_state import SCALARS, placed
from ..core.runtime import Runtime
from ..errors import CheckpointError, ZeroError
from ..offload.home import Home
from ..offload.lazy_states import parked, replace_masters, replace_states
from . import background, inventory, randomness, traffic
from .boxes import boxes, view
from .contents import ENGINE, EXTRA, MODEL, RANDOM
from .inventory import Inventory, Parameter
from .opening import Place, open_source
from .save import same_on_all
from .source import Expected, Source

MOST_LISTED = 20


@torch.inference_mode(False)  # what is made here must be trainable
def load(path: Place, model: nn.Module, optimizer: Any = None) -> dict[str, Any]:
    """Take a checkpoint into a sharded model and its optimizer, whatever stage, mesh, world size or library wrote it (a collective).

    Each rank reads its own part only. The random state is taken where as many ranks wrote it. Without `optimizer` the rest is left alone.

    Args:
        path: a folder that `save` wrote, any other folder of torch.distributed.checkpoint (FSDP2), a file of `torch.save` with the plain
            model's state dict and perhaps the optimizer's, a safetensors file, or a Hugging Face folder.

    Returns:
        What was saved as `extra`, objects as their state dicts; {} where there is nothing.

    Raises:
        CheckpointError: something is missing, damaged, or does not fit, with the file or the names and both shapes; ShardedError: inside a
        pass; RankMismatchError: other arguments on some rank. All on every rank; nothing has been changed then.
    """
    runtime = runtime_of(model)
    require_closed(runtime, "load()")
    runtime.lending.take_back()
    taken, problem = Taken(), None
    runtime.control.require(Kind.LOAD)
    shown = repr(path) if callable(path) else os.path.abspath(path)
    same_on_all(runtime, "load", [[shown, optimizer is not None], None])
    try:
        background.wait()
        taken = _read(runtime, inventory.optimizer_of(runtime, optimizer, "load"), path)
    except ZeroError as error:
        problem = error
    except Exception as error:  # whatever a damaged or strange file leads to
        problem = CheckpointError(
            f"load from {shown}: it cannot be read as a checkpoint ({type(error).__name__}: {error})"
        )
    runtime.control.share(problem)
    _apply(runtime, taken)
    return taken.extra


@dataclass
class Taken:
    """What this rank has read, on the host.

    shards: (home, segment of its master, new values); states: of the optimizer by segment; settings: per group; last: what is done at the end.
    """

    shards: list[tuple[Home, Segment, Any]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    extra_states: dict[str, Any] = field(default_factory=dict)
    optimizer: ShardedOptimizer | None = None
    states: dict[Any, dict[str, Any]] = field(default_factory=dict)
    settings: list[dict[str, Any]] = field(default_factory=list)
    last: list[Callable[[], None]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


def _read(runtime: Runtime, optimizer: ShardedOptimizer | None, path: Place) -> Taken:
    own = inventory.copy_taken(runtime)
    groups = inventory.groups_of(optimizer) if optimizer is not None else []
    taken = Taken(optimizer=optimizer)
    with open_source(path, Expected(own.keys, [p.name for p in own.parameters], groups)) as source:
        _check_model(source, own)
        for parameter in own.parameters:
            key = next(MODEL + key for key in parameter.keys if MODEL + key in source.tensors)
            for segment, home in parameter.segments():
                values = _segment(source, key, parameter, segment.start, segment.stop)
                taken.shards.append((home, segment, parked(home, values)))
        taken.buffers = {key: source.whole(MODEL + key) for key in own.buffers if MODEL + key in source.tensors}
        taken.extra_states = {
            key: source.value(MODEL + key) for key in own.extra_states if MODEL + key in source.objects
        }
        if optimizer is not None:
            _optimizer(source, optimizer, groups, taken)
        _rest(runtime, source, taken)
        traffic.of(runtime).bytes_read += source.bytes_read
    return taken


def _segment(source: Source, key: str, parameter: Parameter, start: int, stop: int) -> Tensor:
    """Elements [start, stop) in memory order, in the dtype they are stored in."""
    values = torch.empty(stop - start, dtype=source.tensors[key].dtype, device="cpu")
    local = parameter.local
    for box in boxes(local.size, local.strides, start, stop, local.origin) if stop > start else ():
        run = values[box.start - start : box.stop - start]
        source.fill(key, view(run, box, local.size, local.strides), box.offsets)
    return values


def _check_model(source: Source, own: Inventory) -> None:
    """
    Raises:
        CheckpointError: missing or unexpected names or other shapes, all of them.
    """
    there = {key.removeprefix(MODEL): key for key in [*source.tensors, *source.objects] if key.startswith(MODEL)}
    shapes = {key: tuple(p.shape) for p in own.parameters for key in p.keys}
    shapes |= {key: tuple(buffer.shape) for key, buffer in own.buffers.items()}
    tied_elsewhere = {key for p in own.parameters if any(k in there for k in p.keys) for key in p.keys}
    needed = {key for p in own.parameters for key in p.keys} if source.partial else own.keys
    missing = sorted(key for key in needed if key not in there and key not in tied_elsewhere)
    unexpected = [key for key in sorted(there) if key not in own.keys]
    wrong = [
        f"{key}: {source.tensors[there[key]].shape} in the checkpoint, {shape} in the model"
        for key, shape in sorted(shapes.items())
        if key in there and source.tensors[there[key]].shape != shape
    ]
    said = [
        f"{what}: {', '.join(names[:MOST_LISTED])}" + (f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else "")
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong))
        if names
    ]  # fmt: skip
    if said:
        raise CheckpointError(f"{source.where} does not fit the model. {'; '.join(said)}")


# ---- the optimizer


def _optimizer(source: Source, optimizer: ShardedOptimizer, groups: list[list[str]], taken: Taken) -> None:
    states, saved = source.states(), source.groups()
    if not states and not saved:
        raise CheckpointError(
            f"{source.where} holds no optimizer state; zerodp.load(path, model) without the optimizer takes the weights only"
        )
    taken.settings = _settings(source, groups, saved) if saved else [{} for _ in groups]
    unknown = sorted(set(states) - {name for group in groups for name in group})
    if unknown:
        raise CheckpointError(
            f"{source.where} has optimizer states of {', '.join(unknown[:5])}, which are in no group of the optimizer"
        )
    engine = optimizer._zerodp
    for members, own, given in zip(engine.members, optimizer.param_groups, taken.settings, strict=True):
        settings = {**own, **given}
        for flat, index in members:
            parameter = Parameter(flat, index, [])
            for one in engine.segments_of(flat, index):
                found = states.get(parameter.name, {})
                if found:
                    home = flat.homes[one.segment.piece]
                    taken.states[one] = {
                        k: parked(home, _state(source, k, key, parameter, one, settings)) for k, key in found.items()
                    }


def _state(source: Source, name: str, key: str, parameter: Parameter, one: Any, settings: dict[str, Any]) -> Any:
    """One entry of one segment's state: elementwise ones are cut, the rest is as it is."""
    if key not in source.tensors:
        return source.objects[key]()
    stored = source.tensors[key]
    if stored.shape == tuple(parameter.shape) and (stored.shape or name not in SCALARS):
        values = _segment(source, key, parameter, one.segment.start, one.segment.stop)
        weights = source.tensors.get(MODEL + parameter.name)
        follows = weights is not None and weights.dtype == stored.dtype  # as its parameter is cast, so is it
        return values.to(one.device, one.dtype if follows and values.is_floating_point() else values.dtype)
    if stored.shape not in ((), (1,)):
        raise CheckpointError(
            f"{source.where}: optimizer state {name!r} of {parameter.name!r} has shape {stored.shape}, expected {tuple(parameter.shape)} or one element"
        )
    return placed(name, source.whole(key), settings, one.device)


def _settings(source: Source, groups: list[list[str]], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each group's settings, from the saved groups that have its parameters, in whatever order these come."""
    result = []
    for number, names in enumerate(groups):
        mine = [group for group in saved if set(group["params"]) & set(names)]
        theirs = {name for group in mine for name in group["params"]}
        if theirs != set(names):
            odd = sorted(theirs ^ set(names))
            raise CheckpointError(
                f"{source.where}: parameter group {number} of the optimizer differs from the checkpoint's: {', '.join(odd[:5])} only on one side"
            )
        settings = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in mine]
        if any(str(other) != str(settings[0]) for other in settings[1:]):
            raise CheckpointError(
                f"{source.where}: parameter group {number} of the optimizer is several groups with different settings there"
            )
        result.append(settings[0] if settings else {})
    return result


# ---- what is not a tensor of the model or the optimizer


def _rest(runtime: Runtime, source: Source, taken: Taken) -> None:
    taken.extra = {key.removeprefix(EXTRA): read() for key, read in source.objects.items() if key.startswith(EXTRA)}
    if taken.optimizer is not None and ENGINE in source.objects:
        engine, saved = taken.optimizer._zerodp, source.objects[ENGINE]()

        def restore() -> None:
            if engine.scaler.dynamic and saved["loss_scaler"] is not None:
                engine.scaler.load_state_dict(saved["loss_scaler"])
            engine.skipped_steps = int(saved["skipped_steps"])

        taken.last.append(restore)
    world = runtime.comm.mesh.world
    if source.world_size == world.size and f"{RANDOM}{world.rank}" in source.objects:
        state = source.objects[f"{RANDOM}{world.rank}"]()
        taken.last.append(lambda: randomness.restore(state))


def _apply(runtime: Runtime, taken: Taken) -> None:
    """Everything is here and fits: change the model, on all ranks alike."""
    runtime.lending.before_change()
    for flat in runtime.flats():
        flat.wait()  # a gather under way still reads the shards
    with torch.no_grad():
        replace_masters(taken.shards)
        with original_buffers(runtime):
            own = inventory.take(runtime)
            for key, values in taken.buffers.items():
                own.buffers[key].copy_(values)
    modules = {name: module for module, name in runtime.module_names.items()}
    for key, state in taken.extra_states.items():
        modules[key.rpartition(".")[0]].set_extra_state(state)
    runtime.changed()
    if taken.optimizer is not None:
        replace_states(taken.optimizer.state, taken.states, taken.optimizer._zerodp)
        for group, settings in zip(taken.optimizer.param_groups, taken.settings, strict=True):
            group.update(settings)
    for action in taken.last:
        action()
