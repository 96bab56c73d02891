"""One training step of a real module on fake tensors: what autograd keeps, the most bytes and where, FLOPs, per unit.

The module itself is not touched: a copy without memory runs. What the engine does to memory is left out here, so one trace
serves every stage; `simulated` runs the engine as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Config, Precision
from ..core import wrap
from ..core.module import ShardedModule, cast
from ..core.precision import by_dtypes
from ..errors import ConfigError
from ..residual.activations import apply_activation_checkpointing
from .fakes import fake, fake_inputs, make_fake, new_mode, without_memory
from .models import Trace, UnitTrace
from .recorder import Place, Recorder


@dataclass(frozen=True)
class Step:
    """What one rank does in a step: `model` called with `inputs` (as of :func:`zerodp.plan`), and the loss of its output.

    loss: None: see `loss_of`; config: precision, units and what is ignored, as `shard()` takes them.
    """

    model: nn.Module
    inputs: Any
    loss: Callable[[Any], Tensor] | None
    config: Config

    @property
    def has_blocks(self) -> bool:
        """Whether there are repeated blocks that could be checkpointed."""
        return any(any(True for _ in block.children()) for block in wrap.automatic(self.model).values())


def trace(step: Step, checkpointed: bool = False) -> Trace:
    """One forward and backward pass of a copy of the model on fake tensors.

    Args:
        checkpointed: whether the blocks are put under activation checkpointing first.

    Raises:
        ConfigError: a step that cannot be run without values, or a loss that is none.
    """
    twin, precision = copied(step.model, checkpointed), step.config.precision
    plans = wrap.plan_units(twin, step.config)
    mode = new_mode()
    for plan in plans:
        for (dtypes, _), named in by_dtypes(plan.parameters, precision).items():
            for _, parameter in named:
                make_fake(parameter, mode, dtypes[0])
    prepare_buffers(twin, precision, lambda buffer: fake(buffer, mode))
    for parameter in twin.parameters():
        # The engine takes each gradient as soon as it is there; see `core.reducer`.
        parameter.register_post_accumulate_grad_hook(_drop)
    args, kwargs = arguments(fake_inputs(step.inputs, mode))
    if precision is not None and precision.cast_inputs:
        args, kwargs = cast(args, precision.param_dtype), cast(kwargs, precision.param_dtype)
    recorder = Recorder(modules_of(plans, twin), list(twin.parameters()))
    with recorder.watching(twin):
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda saved: saved):
            value = attempt(recorder, lambda: loss_of(twin(*args, **kwargs), step.loss))
        saved = recorder.saved_by_unit()
        attempt(recorder, lambda: value.backward())
    return Trace(
        tuple(
            UnitTrace(
                plan.name,
                saved[plan.name],
                recorder.flops[Place(plan.name, "forward")],
                recorder.flops[Place(plan.name, "backward")],
            )
            for plan in plans
        ),
        sum(saved.values()),
        recorder.peak.nbytes,
        *recorder.peak.place,
        sum(recorder.flops.values()),
    )


def copied(model: nn.Module, checkpointed: bool) -> nn.Module:
    """A copy on the meta device."""
    if isinstance(model, ShardedModule):
        raise ConfigError("inputs: the model is sharded already; plan with the module as it was before shard()")
    twin = without_memory(model)
    return apply_activation_checkpointing(twin) if checkpointed else twin


def modules_of(plans: list[wrap.Plan], model: nn.Module) -> dict[nn.Module, str]:
    """Unit modules with the names of their units. Parameters that are ignored are used in the modules that hold them."""
    return {model: wrap.ROOT, **{plan.module: plan.name for plan in plans if plan.module is not None}}


def prepare_buffers(model: nn.Module, precision: Precision | None, made: Callable[[Tensor], Tensor]) -> None:
    wanted = precision.buffer_dtype if precision is not None else None
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                buffer = made(buffer) if buffer.is_meta else buffer
                module._buffers[key] = buffer.to(wanted) if wanted and buffer.is_floating_point() else buffer


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, by name): a mapping is by name, a tuple or list positional, anything else the one argument."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def loss_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    """The scalar to go back from. Without `loss`: the output's own `loss`, the output if it is a scalar, else its mean."""
    if loss is not None:
        value: Any = loss(output)
    else:
        value = getattr(output, "loss", None)
        value = output if value is None else value
        if not isinstance(value, Tensor):
            value = next((t for t in _tensors(output) if t.requires_grad), value)
        if isinstance(value, Tensor) and value.dim():
            value = value.mean()
    if not isinstance(value, Tensor) or value.dim() or not value.requires_grad:
        raise ConfigError(
            f"loss: expected a scalar tensor that depends on the parameters, got {_said(value)}; give loss=, a function of the model's output"
        )
    return value


def _tensors(output: Any) -> list[Tensor]:
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return [value for value in values if isinstance(value, Tensor)]


def _said(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def attempt(recorder: Recorder, part: Callable[[], Any]) -> Any:
    """Run a part of the step, and say where it failed."""
    try:
        return part()
    except ConfigError:
        raise
    except Exception as error:
        unit, phase = recorder.place()
        text = next(iter(str(error).splitlines()), "")
        raise ConfigError(
            f"inputs: the step without values failed in {phase}, in or near unit {unit!r}: {type(error).__name__}: {text}. Inputs must fit the "
            "model, and what it computes must not depend on the values of its activations"
        ) from error
