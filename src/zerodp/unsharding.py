"""`unshard()`: the way back to plain torch objects, after which nothing is left of the sharded ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .core import optimizer_state
from .core.access import full_grads, require_closed, runtime_of, whole_values
from .core.buffers import original_buffers
from .core.control import Kind
from .core.optimizer import Engine
from .core.runtime import Runtime
from .errors import ConfigError
from .residual.store import store_of


def unshard(model: nn.Module, optimizer: Any = None) -> tuple[Any, Any]:
    """Back to plain torch objects: full parameters in their original dtypes, their reduced gradients, full optimizer states (a collective).

    What the sharded model held in memory and on disk is given back at once.
    """
    runtime = runtime_of(model)
    sharded = runtime.optimizer
    if optimizer is not None and optimizer is not sharded:
        raise ConfigError("unshard: this optimizer was not sharded with this model")
    require_closed(runtime, "unshard()")
    runtime.lending.take_back()
    runtime.control.require(Kind.STATE)
    state = sharded.state_dict() if sharded is not None else None
    values = {flat: whole_values(runtime, flat) for flat in runtime.flats()}
    gradients = full_grads(model)
    runtime.lending.before_change()  # a save may still read what goes
    _rest(runtime)
    with original_buffers(runtime):
        buffers = [(holder, key, holder._buffers[key]) for holder, key, _ in runtime.buffers]
    for hook in runtime.hooks:
        hook.remove()
    for flat, fulls in values.items():
        for _, hook in flat.nodes:
            hook.remove()
        flat.replace(fulls)
        for parameter in flat.parameters:
            del parameter._zerodp  # type: ignore[attr-defined]
        for name, parameter in zip(flat.names, flat.parameters, strict=True):
            if name in gradients:
                parameter.grad = _like(gradients[name], parameter)
    for holder, key, buffer in buffers:
        holder._buffers[key] = buffer
    model.__class__ = type(model).__mro__[2]
    del model._zerodp
    if sharded is not None and state is not None:
        _give_optimizer_back(sharded, state)
    _let_go(runtime)
    return model, sharded


def _like(gradient: Tensor, parameter: nn.Parameter) -> Tensor:
    """As autograd would have left it."""
    gradient = gradient.to(parameter.dtype)
    if isinstance(parameter, DTensor):
        return distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return gradient


def _rest(runtime: Runtime) -> None:
    """Nothing is under way, and no page is here but those that always are."""
    runtime.reducer.drain()
    for unit in runtime.pager.cache.clear():
        runtime.pager.let_go(unit)
    for unit in runtime.units:
        unit.free()
    for flat in runtime.flats():
        flat.wait()


def _let_go(runtime: Runtime) -> None:
    """Of all that was sharded: these objects refer to each other in circles, which Python may leave alone for long."""
    for flat in runtime.flats():
        flat.close(runtime.arena)
    store_of(runtime).close()
    runtime.places.close()
    runtime.arena.settle()
    runtime.arena.drop_idle()


def _give_optimizer_back(optimizer: Any, state: dict[str, Any]) -> None:
    engine: Engine = optimizer._zerodp
    engine.segments.clear()
    optimizer.__dict__.pop("step", None)
    optimizer.__class__ = type(optimizer).__mro__[2]
    del optimizer._zerodp
    optimizer.state.clear()
    for group, members in zip(optimizer.param_groups, engine.members, strict=True):
        group["params"] = [flat.parameters[index] for flat, index in members]
        if "param_names" in group:
            group["param_names"] = [flat.names[index] for flat, index in members]
        for flat, index in members:
            if flat.names[index] in state["state"]:
                full = state["state"][flat.names[index]]
                optimizer.state[flat.parameters[index]] = optimizer_state.to_plain(
                    full, flat.locals[index], engine.runtime.comm, group, engine.runtime.arena.device
                )
