"""The model's side: the mixin that its class gains, and the module hooks that make paging fast."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Precision
from ..errors import ConfigError, ShardedError
from ..guard import Guard, refuse_transforms
from . import access
from .buffers import rank0_buffers
from .optimizer import zero_grad as drop_gradients
from .runtime import Runtime
from .saved import OLD
from .unit import Flat


@functools.cache
def hide_from_compiler() -> None:
    """torch.compile breaks its graph at the engine instead of tracing it.

    The package is put on dynamo's list of files to skip. `torch.compiler.disable` on each hook would do the same, but its
    wrapper costs as much as the hook.
    """
    torch._dynamo.trace_rules.add(__name__.partition(".")[0])


class ShardedModule(nn.Module):
    """Mixin of the class that `zerodp.shard` gives the model."""

    _zerodp: Runtime

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes that begin inside keep their gradients whole on this rank; the next one outside reduces them all."""
        runtime = self._zerodp
        before, runtime.synchronizes = runtime.synchronizes, False
        try:
            yield
        finally:
            runtime.synchronizes = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients (or set those that exist to zero), reduced or not."""
        drop_gradients(self._zerodp, set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Full tensors under the plain model's keys, in the dtypes from before `shard()` (a collective)."""
        with access.whole(self._zerodp), rank0_buffers(self._zerodp):
            found: dict[str, Any] = super().state_dict(*args, **kwargs)
            access.undress(self._zerodp, found)
            return found

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Take a full state dict, the same on every rank (a collective).

        Raises:
            ConfigError: `assign=True`, which would replace the parameters.
            CheckpointError: keys or shapes that do not fit, with both shapes; nothing is changed then.
        """
        if assign:
            raise ConfigError(
                "load_state_dict(assign=True) would replace sharded parameters by new ones; use assign=False"
            )
        return access.load(
            self._zerodp, state_dict, lambda given: super(ShardedModule, self).load_state_dict(given, strict=strict)
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for flat in self._zerodp.flats():
            probe = torch.empty(2, 2, 2, 2, dtype=flat.param_dtype, device=self._zerodp.arena.device)
            moved = fn(probe)
            if moved.dtype != probe.dtype or moved.device != probe.device:
                raise ShardedError(
                    f"the sharded model computes in {probe.dtype} on {probe.device} and cannot be turned into {moved.dtype} on {moved.device}: "
                    "choose precision= and device= in zerodp.shard, or zerodp.unshard(model) first"
                )
            if moved is not probe or (probe.device.type == "cpu" and probe.is_shared()):
                raise ShardedError(
                    "to_empty(), share_memory(), another memory_format and other conversions do not reach the shards of a sharded model: do that "
                    "before shard(), edit values inside zerodp.full_params(model, write=True), or zerodp.unshard(model) first"
                )
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        raise ShardedError(
            "deepcopy of a sharded model: copy it before shard(), or load zerodp.full_state_dict(model) into a fresh one"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardedError("pickling of a sharded model: save model.state_dict() instead")


def install(model: nn.Module, runtime: Runtime, precision: Precision | None) -> list[Any]:
    """Hook what may begin a pass or uses a unit: every module with parameters that is not strictly inside a unit.

    The result are handles that undo it. Modules inside a unit stay free of hooks, so that torch.compile sees whole blocks.
    """
    hide_from_compiler()
    handles: list[Any] = []
    guard = Guard(model)
    hooks = Hooks(runtime, guard, precision)
    inside: set[int] = set()
    for unit in runtime.units:
        if unit.module is not None and unit.module is not model:
            inside |= {id(m) for m in unit.module.modules()} - {id(unit.module)}
    for module in model.modules():
        is_unit = module in runtime.unit_of
        if (is_unit or id(module) not in inside) and any(True for _ in module.parameters()):
            handles.append(module.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(hooks.after, always_call=True))
        if isinstance(module, nn.TransformerEncoder) and len(module.layers):
            # its fast path looks into the first layer before calling it
            handles.append(module.register_forward_pre_hook(hooks.look_ahead(next(iter(module.layers)))))

    def rearm() -> None:
        for flat in runtime.flats():
            for _, hook in flat.nodes:
                hook.remove()  # the node lives on where the dtype did not change
            flat.nodes.clear()
            for index, parameter in enumerate(flat.parameters):
                if parameter.is_floating_point():
                    arm(runtime, flat, index)

    rearm()
    runtime.rearm = rearm
    runtime.plain_state_dict = super(ShardedModule, model).state_dict  # type: ignore[misc]
    return handles


def arm(runtime: Runtime, flat: Flat, index: int) -> None:
    """Hang the reducer on the parameter's AccumulateGrad node, which runs after all hooks of the user, however late they came."""
    parameter, hidden = flat.parameters[index], type(flat.parameters[index])
    needs = parameter.requires_grad
    with torch.inference_mode(False), torch.enable_grad():
        parameter.__class__ = flat.classes[index]
        parameter.requires_grad_(True)
        node: Any = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        parameter.requires_grad_(needs)
        parameter.__class__ = hidden

    engine, place = weakref.ref(runtime), weakref.ref(flat)  # the node holds this hook, and the parameter; see `Where`

    def accumulated(*_: Any) -> None:
        runtime, flat = engine(), place()
        if runtime is not None and flat is not None:
            runtime.arrived(flat, index, parameter)

    flat.nodes.append((node, node.register_hook(accumulated)))


class Hooks:
    """The hook functions of one model."""

    def __init__(self, runtime: Runtime, guard: Guard, precision: Precision | None) -> None:
        self.runtime, self.guard, self.precision = runtime, guard, precision
        self.autocast_cache: bool | None = None
        self.began = 0  # autograd's number of the first operation of the pass

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.runtime.passes:
            self.guard.check()
            refuse_transforms(self.runtime.paged)
        if not self.runtime.enter(module):
            return None
        self.began = torch._C._autograd._get_sequence_nr()
        if torch.is_autocast_enabled(self.runtime.arena.device.type):
            # the cache would hold a cast copy of every unit's parameters
            self.autocast_cache = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)
        if self.precision is not None and self.precision.cast_inputs:
            return cast(args, self.precision.param_dtype), cast(kwargs, self.precision.param_dtype)
        return None

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        ended = self.runtime.leave(module)
        if not ended:
            return None
        if self.autocast_cache is not None:
            torch.set_autocast_cache_enabled(self.autocast_cache)
            self.autocast_cache = None
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                # one made before, such as a parameter, would keep the hook for later passes
                if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= self.began:
                    tensor.register_hook(self._backward_of(self.runtime.era))
        if self.precision is not None and self.precision.output_dtype is not None:
            return cast(output, self.precision.output_dtype)
        return None

    def _backward_of(self, era: int) -> Any:
        """What the outputs of a forward pass call first. Their gradients need the values that forward computed with."""

        def begin(_: Tensor) -> None:
            if era != self.runtime.era:
                raise ShardedError(OLD)
            self.runtime.begin_backward()

        return begin

    def look_ahead(self, layer: nn.Module) -> Any:
        parameters = list(layer.parameters())

        def demand(module: nn.Module, args: Any) -> None:
            for parameter in parameters:
                self.runtime.demand(parameter._zerodp.flat.unit)  # type: ignore[attr-defined]

        return demand


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors of a nested value, in `dtype`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast(item, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(cast(item, dtype) for item in value)
    if isinstance(value, dict):
        done = {key: cast(item, dtype) for key, item in value.items()}
        return done if type(value) is dict else _refilled(value, done)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: cast(getattr(value, f.name), dtype) for f in dataclasses.fields(value) if f.init}
        )
    return value


def _refilled(original: dict[Any, Any], values: dict[Any, Any]) -> dict[Any, Any]:
    """Mappings of other classes (a transformers ModelOutput) keep their class."""
    try:
        return type(original)(**values)
    except TypeError:
        original.update(values)
        return original


def tensors_in(value: Any, outer: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """The tensors of a nested output: containers, dataclasses and plain objects. outer: the ids of what it lies in, which it may hold itself."""
    inside = (*outer, id(value))
    if isinstance(value, Tensor):
        yield value
    elif id(value) in outer:
        return
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item, inside)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, inside)
    elif len(outer) < 4 and not isinstance(value, (nn.Module, type)) and hasattr(value, "__dict__"):
        for item in vars(value).values():
            yield from tensors_in(item, inside)
