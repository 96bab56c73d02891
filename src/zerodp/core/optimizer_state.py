"""An optimizer's state between its three forms: plain torch's per parameter, this rank's segments, and full by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..agreement import require_same, values_of
from ..errors import CheckpointError, ConfigError, ZeroError
from ..offload.home import STATES, is_elementwise, walk
from ..offload.lazy_states import replace_states
from .control import Kind

if TYPE_CHECKING:
    from .comm import Comm
    from .local import Local
    from .optimizer import SegmentParameter, ShardedOptimizer
    from .unit import Cut, Flat

PLAIN = (bool, int, float, str, type(None))
SCALARS = (
    "step",
    "mu_product",
    "eta",
    "mu",
)  # torch's per-parameter scalars, which look elementwise beside a 0-dim parameter


def placed(key: str, value: Tensor, settings: Mapping[str, Any], device: torch.device) -> Tensor:
    """A copy of a one-element entry where torch's optimizers expect it: the host counts their steps, but for fused and capturable ones."""
    on_host = key == "step" and not (settings.get("fused") or settings.get("capturable"))
    return value.to("cpu" if on_host else device, copy=True)


def settings_by_name(optimizer: ShardedOptimizer, given: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each parameter in the optimizer's groups, what its group will say with the `given` settings, group by group."""
    groups = zip(optimizer.param_groups, given, optimizer._zerodp.members, strict=True)
    return {flat.names[index]: {**own, **new} for own, new, members in groups for flat, index in members}


def cut(
    key: str,
    value: Any,
    segment: SegmentParameter,
    settings: Mapping[str, Any],
    error: type[ZeroError] = CheckpointError,
) -> Any:
    """One entry of a parameter's state as its segment's: elementwise tensors are cut, the rest is copied. `settings`: its group's."""
    flat, index = segment.flat, segment.segment.index
    size, stride, _ = flat.shapes[index]
    local = flat.locals[index]
    if not isinstance(value, Tensor):
        return value
    if value.shape == local.shape and (value.dim() > 0 or key not in SCALARS):
        value = local.part(value, segment.engine.runtime.comm, flat.unit.name)
        laid = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device).copy_(value)
        return laid.as_strided((laid.numel(),), (1,))[segment.segment.start : segment.segment.stop].to(
            segment.device, copy=True
        )
    if value.numel() == 1:
        return placed(key, value, settings, segment.device)
    raise error(
        f"optimizer state of parameter {segment.full_name!r} has shape {tuple(value.shape)}, expected {tuple(local.shape)} or one element: "
        "this optimizer is not elementwise and cannot be sharded"
    )


def from_plain(optimizer: ShardedOptimizer, states: dict[Any, dict[str, Any]]) -> None:
    """State made before `shard()` (by the optimizer's constructor or earlier steps), keyed by the parameters."""
    engine = optimizer._zerodp
    made = {}
    settings = settings_by_name(optimizer, optimizer.param_groups)
    for parameter, state in states.items():
        where = parameter._zerodp
        for segment in engine.segments_of(where.flat, where.index):
            own = settings.get(segment.full_name, {})
            made[segment] = {key: cut(key, value, segment, own, ConfigError) for key, value in state.items()}
    replace_states(optimizer.state, made, engine)


def to_plain(
    states: dict[str, Any], local: Local, comm: Comm, settings: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """One parameter's full state as the parameter itself is, on its device: of a DTensor, DTensors. `settings`: its group's."""

    def plain(key: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.shape == local.shape and (value.dim() > 0 or key not in SCALARS):
            return local.dressed(local.part(value, comm, key))
        return placed(key, value, settings, device)

    return {key: plain(key, value) for key, value in states.items()}


def full_state(optimizer: ShardedOptimizer) -> dict[str, Any]:
    """{"state": {name: {key: full tensor}}, "param_groups": settings with names, "zerodp": scaler and counts}."""
    engine = optimizer._zerodp
    engine.runtime.look()
    engine.runtime.control.require(Kind.STATE)
    mine: dict[str, dict[str, Any]] = {}
    for segment in engine:
        for key, value in optimizer.state.get(segment, {}).items():
            mine.setdefault(segment.full_name, {})[key] = _describe(value, segment)
    everyone = engine.runtime.comm.exchange_objects(mine, "the keys of the optimizer state")
    keys: dict[str, dict[str, Any]] = {}
    for theirs in everyone:
        for name, described in theirs.items():
            keys.setdefault(name, {}).update({k: v for k, v in described.items() if k not in keys.get(name, {})})
    state: dict[str, dict[str, Any]] = {
        name: {key: _plain(what) for key, what in described.items() if what[0] != "elementwise"}
        for name, described in keys.items()
    }
    for flat in engine.runtime.flats():
        wanted = {
            (key, what[1])
            for name in flat.names
            for key, what in keys.get(name, {}).items()
            if what[0] == "elementwise"
        }
        for key, dtype in sorted(wanted):
            whole = _gather(optimizer, flat, key, getattr(torch, dtype))
            for index, name in enumerate(flat.names):
                if keys.get(name, {}).get(key, [None])[0] == "elementwise":
                    view = whole.views[index]
                    state[name][key] = flat.locals[index].full(view, engine.runtime.comm, flat.unit.name).clone()
    groups = []
    for group, members in zip(optimizer.param_groups, engine.members, strict=True):
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({**settings, "params": [flat.names[index] for flat, index in members]})
    extra = {"loss_scaler": engine.scaler.state_dict(), "skipped_steps": engine.skipped_steps}
    order = {name: position for position, name in enumerate(n for g in groups for n in g["params"])}
    state = dict(sorted(state.items(), key=lambda item: order.get(item[0], 0)))
    return {"state": state, "param_groups": groups, "zerodp": extra}


def _describe(value: Any, segment: SegmentParameter) -> list[Any]:
    if is_elementwise(value, segment):
        return ["elementwise", str(value.dtype).removeprefix("torch.")]
    if isinstance(value, Tensor) and value.numel() == 1:
        return ["scalar", str(value.dtype).removeprefix("torch."), value.item(), list(value.shape)]
    if isinstance(value, PLAIN):
        return ["value", value]
    raise CheckpointError(
        f"optimizer state of parameter {segment.full_name!r} holds a {type(value).__name__}; only tensors and plain values can be gathered"
    )


def _plain(described: list[Any]) -> Any:
    if described[0] == "value":
        return described[1]
    return torch.tensor(described[2], dtype=getattr(torch, described[1])).reshape(described[3])


def _gather(optimizer: ShardedOptimizer, flat: Flat, key: str, dtype: torch.dtype) -> Cut:
    """The flat's elementwise state `key`, whole, on every rank."""
    engine = optimizer._zerodp
    whole = flat.cut(torch.zeros(flat.layout.padded_numel, dtype=dtype, device=engine.runtime.arena.device))
    for home in walk(flat.homes, (STATES,)):
        for segment in home.segments:
            value = optimizer.state.get(segment, {}).get(key)
            if is_elementwise(value, segment):
                start = segment.segment.offset
                whole.parts[home.piece][flat.group.rank][start : start + segment.numel()].copy_(value)
    for piece, parts in zip(whole.pieces, whole.parts, strict=True):
        engine.runtime.comm.all_gather(piece, flat.group, flat.unit.name, parts).wait()
    return whole


@torch.inference_mode(False)  # what is made here must be trainable
def load_full_state(optimizer: ShardedOptimizer, given: dict[str, Any]) -> None:
    """Check everything, agree with the other ranks, then take it."""
    engine = optimizer._zerodp
    engine.runtime.look()
    engine.runtime.control.require(Kind.STATE)
    error, taken = None, {}
    try:
        groups, states = _named(optimizer, given)
        settings = settings_by_name(optimizer, groups)
        for segment in engine:
            name = segment.full_name
            if name in states:
                taken[segment] = {
                    k: _cast(k, cut(k, v, segment, settings.get(name, {})), segment) for k, v in states[name].items()
                }
    except CheckpointError as found:
        error = found
    engine.runtime.control.share(error)
    values = values_of({f"{name}.{key}": value for name, state in states.items() for key, value in state.items()})
    require_same(engine.runtime.comm.exchange_objects(values, "the same load"), "optimizer.load_state_dict()")
    replace_states(optimizer.state, taken, engine)
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        group.update({k: v for k, v in settings.items() if k not in ("params", "param_names")})
    extra = given.get("zerodp")
    if extra is not None:
        if engine.scaler.dynamic:  # others keep the scale that their precision says
            engine.scaler.load_state_dict(extra["loss_scaler"])
        engine.skipped_steps = int(extra["skipped_steps"])


def _cast(key: str, value: Any, segment: SegmentParameter) -> Any:
    return value.to(segment.dtype) if is_elementwise(value, segment) and value.is_floating_point() else value


def _named(optimizer: ShardedOptimizer, given: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Groups and states by parameter name, whether `given` names parameters or numbers them as plain torch does."""
    members = optimizer._zerodp.members
    groups, state = (given.get("param_groups"), given.get("state")) if isinstance(given, dict) else (None, None)
    if not isinstance(groups, list) or not isinstance(state, dict):
        raise CheckpointError("load_state_dict of an optimizer: expected a dict with 'state' and 'param_groups'")
    if len(groups) != len(members):
        raise CheckpointError(f"the optimizer has {len(members)} parameter groups, the state dict {len(groups)}")
    names: dict[Any, str] = {}
    for number, (group, own) in enumerate(zip(groups, members, strict=True)):
        expected = [flat.names[index] for flat, index in own]
        theirs = group["params"]
        if theirs and isinstance(theirs[0], str):
            if set(theirs) != set(expected):
                odd = sorted(set(theirs) ^ set(expected))
                raise CheckpointError(f"parameter group {number} differs: {', '.join(odd[:5])} only on one side")
            names.update({name: name for name in theirs})
        else:
            if len(theirs) != len(expected):
                raise CheckpointError(
                    f"parameter group {number} has {len(expected)} parameters, in the state dict {len(theirs)}"
                )
            names.update(zip(theirs, expected, strict=True))
    return groups, {names[key]: value for key, value in state.items() if key in names}
