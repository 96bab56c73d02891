"""The user's own optimizer over this rank's segments.

Its groups are rewritten in place, so settings, schedulers and hooks go on working; `step()` brings the gradients, agrees
with the other ranks whether to step, and sends the new parameters on their way. It knows flats, not hooks or passes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..agreement import settings_of
from ..errors import ConfigError, ShardedError
from ..offload.home import Home
from ..offload.unscaling import stand_in
from . import norms, optimizer_state
from .control import Control, Kind
from .layout import Segment
from .parameter import grad_of, set_grad
from .precision import LOW, LossScaler
from .runtime import Runtime
from .unit import Flat


class SegmentParameter(nn.Parameter):
    """A parameter's part inside this rank's shard, [numel] in memory order; what the optimizer updates."""

    flat: Flat
    segment: Segment
    engine: Engine
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def grad(self) -> Tensor | None:
        """Inside `step()` what the step was given; outside, this segment's part of the reduced gradient, live."""
        if self.engine.runtime.places.delay.running is not None:
            self.engine.runtime.look()
        given = grad_of(self)
        if given is not None:
            return given  # type: ignore[no-any-return]
        if _clips(sys._getframe(1)):
            raise ShardedError(
                "torch.nn.utils.clip_grad_norm_ over the optimizer's own parameters would clip by the norm of this rank's part; use "
                "optimizer.clip_grad_norm_(max_norm)"
            )
        self.engine.runtime.reducer.drain()
        if self.flat.grad is None:
            return None
        home = self.flat.homes[self.segment.piece]
        if not home.gradient_is_here and isinstance(sys._getframe(1).f_locals.get("self"), torch.amp.GradScaler):
            return stand_in(self)
        home.arrive()
        return norms.part(self.flat, self.segment)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        set_grad(self, value)

    @property
    def full_name(self) -> str:
        return self.flat.names[self.segment.index]


def _clips(frame: Any) -> bool:
    """Whether this is torch's function that takes a norm over whatever parameters it is given."""
    while frame.f_code.co_name == "<listcomp>":
        frame = frame.f_back
    return bool(
        frame.f_code.co_name == "clip_grad_norm_" and frame.f_globals["__name__"] == nn.utils.clip_grad.__name__
    )


# torch's optimizers take their foreach kernels by default where they know the class of all parameters.
with contextlib.suppress(AttributeError, ImportError):
    from torch.optim.optimizer import _foreach_supported_types

    _foreach_supported_types.append(SegmentParameter)


class Engine:
    """What a `ShardedOptimizer` has beside what its own class has."""

    def __init__(self, runtime: Runtime, scaler: LossScaler, state: dict[Any, dict[str, Any]]) -> None:
        self.runtime, self.scaler, self.state = runtime, scaler, state
        self.segments: dict[tuple[Flat, int], list[SegmentParameter]] = {}  # (flat, parameter) -> its segments here
        self.skipped_steps = 0
        self.last_step_skipped = False
        self.grad_scaler: Any = None  # a torch.amp.GradScaler that drives the next step
        self.members: list[
            list[tuple[Flat, int]]
        ] = []  # per group: its parameters, whether this rank has a segment or not

    def segments_of(self, flat: Flat, index: int) -> list[SegmentParameter]:
        if (flat, index) not in self.segments:
            made = []
            for segment in (s for s in flat.segments if s.index == index):
                home = flat.homes[segment.piece]
                one = SegmentParameter(home.view(segment), requires_grad=False)
                one.flat, one.segment, one.engine = flat, segment, self
                one.requires_grad_(flat.shard_dtype.is_floating_point and flat.parameters[index].requires_grad)
                home.attach(one, self.state)
                made.append(one)
            self.segments[(flat, index)] = made
            flat.optimized = True
        return self.segments[(flat, index)]

    def __iter__(self) -> Iterator[SegmentParameter]:
        return (segment for segments in self.segments.values() for segment in segments)


class ShardedOptimizer(torch.optim.Optimizer):
    """Mixin of the class that `zerodp.shard` gives the optimizer; see `docs/` and the contract for its use."""

    _zerodp: Engine

    # ---- the user's side

    @property
    def loss_scale(self) -> float:
        """The factor that `backward(loss)` puts on the loss; 1.0 where precision needs none."""
        return self._zerodp.scaler.scale

    @property
    def skipped_steps(self) -> int:
        return self._zerodp.skipped_steps

    @property
    def last_step_skipped(self) -> bool:
        return self._zerodp.last_step_skipped

    def backward(self, loss: Tensor, **options: Any) -> None:
        """`loss.backward(**options)`, with the loss scaled where the precision asks for it."""
        if not isinstance(loss, Tensor):
            raise ConfigError(f"optimizer.backward: expected the loss as a tensor, got {type(loss).__name__}")
        engine = self._zerodp
        runtime, scale = engine.runtime, engine.scaler.scale
        runtime.reducer.loss_scale, runtime.scaled_backward = (
            scale,
            True,
        )  # also of what is reduced later, before the next step
        try:
            (loss * scale if engine.scaler.active else loss).backward(**options)
        finally:
            runtime.scaled_backward = False

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale the gradients down to a global norm of at most `max_norm`, and return the norm before (a collective).

        Raises:
            ConfigError: a norm type that is not above 0, or a norm below 0.
        """
        if not (isinstance(norm_type, (int, float)) and norm_type > 0):
            raise ConfigError(f"clip_grad_norm_: norm_type must be above 0 (1, 2, 3, inf, ...), got {norm_type!r}")
        if not (isinstance(max_norm, (int, float, Tensor)) and float(max_norm) >= 0):
            raise ConfigError(f"clip_grad_norm_: max_norm must be a number of at least 0, got {max_norm!r}")
        engine = self._zerodp
        settings = engine.runtime.control.alike(f"max_norm={float(max_norm)!r}, norm_type={float(norm_type)!r}")
        engine.runtime.settle(Kind.CLIP, settings)
        total = norms.total_norm(engine, float(norm_type))
        norms.scale_gradients(engine, min(float(max_norm) / (total + 1e-6), 1.0))
        return total

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients (or set those that exist to zero)."""
        engine = self._zerodp
        own: dict[Flat, set[int]] = {}
        for flat, index in (member for group in engine.members for member in group):
            own.setdefault(flat, set()).add(index)
        zero_grad(engine.runtime, set_to_none, own)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of this rank's segments, or a skipped step that all ranks agree on (a collective)."""
        engine = self._zerodp
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # what LR schedulers look at
        runtime = engine.runtime
        if any(unit.opened for unit in runtime.units):
            raise ShardedError(
                "optimizer.step() inside full_params(): leave it first, or what it has whole would replace the new values"
            )
        if engine.scaler.active and runtime.unscaled_backwards and engine.grad_scaler is None:
            runtime.unscaled_backwards = 0
            raise ShardedError("fp16 needs a scaled loss: call optimizer.backward(loss) instead of loss.backward()")
        runtime.unscaled_backwards = 0
        runtime.end_failed()
        if runtime.passes:
            raise ShardedError(
                f"optimizer.step() inside a {runtime.phase} pass: the gradients are not all here, and the pass needs the values it began with"
            )
        rows = runtime.settle(Kind.STEP, runtime.control.alike(settings_of(self.param_groups)))
        if engine.scaler.active:  # now that every gradient has been reduced
            rows = runtime.control.require(Kind.STEP, overflow=norms.overflows(engine))
        overflow = bool(rows[:, Control.OVERFLOW].any())
        engine.last_step_skipped = overflow
        engine.skipped_steps += overflow
        runtime.lending.before_change()
        with torch.no_grad():
            changed = runtime.places.delay.publish() if overflow else self._update(rows)
        for flat in changed:
            flat.changed()
            flat.stale = True
        if changed or not overflow:
            runtime.stepped()
        if engine.grad_scaler is None:
            engine.scaler.update(overflow)
        engine.grad_scaler = None
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters; their segments go in."""
        engine: Engine | None = self.__dict__.get("_zerodp")
        if engine is None:
            super().add_param_group(param_group)
            return
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise ConfigError(f"add_param_group: expected a dict with 'params', got {type(param_group).__name__}")
        given = param_group["params"]
        given = [given] if isinstance(given, Tensor) else list(given)
        members = self._members([p[1] if isinstance(p, tuple) else p for p in given])
        taken = {member for group in engine.members for member in group}
        for flat, index in members:
            if (flat, index) in taken:
                raise ConfigError(f"parameter {flat.names[index]!r} is already in a group of the optimizer")
        super().add_param_group({**param_group, "params": [s for m in members for s in engine.segments_of(*m)]})
        engine.members.append(members)

    def state_dict(self) -> dict[str, Any]:
        """The full state by parameter name, on every rank (a collective)."""
        return optimizer_state.full_state(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a full state: this library's by name, or plain torch's by index in the order of the groups (a collective)."""
        optimizer_state.load_full_state(self, state_dict)

    def __deepcopy__(self, memo: Any) -> Any:
        raise ShardedError("deepcopy of a sharded optimizer: use optimizer.state_dict() instead")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardedError("pickling of a sharded optimizer: save optimizer.state_dict() instead")

    # ---- inside

    def _members(self, parameters: list[Any]) -> list[tuple[Flat, int]]:
        found = []
        for parameter in parameters:
            where = getattr(parameter, "_zerodp", None)
            if where is None or where.flat.unit.runtime is not self._zerodp.runtime:
                raise ConfigError(
                    f"the optimizer holds a tensor of shape {tuple(parameter.shape)} that is no parameter of the sharded model"
                )
            found.append((where.flat, where.index))
        return found

    def _update(self, rows: Tensor) -> set[Flat]:
        """Give every segment whose parameter has a gradient on any rank its part, and let the optimizer's own step run.

        The result is the flats that have new values, the same ones on all ranks.
        """
        engine = self._zerodp
        with_gradient = engine.runtime.control.with_gradient(rows)
        chosen: dict[Home, list[SegmentParameter]] = {}
        for flat in engine.runtime.flats():
            if with_gradient[flat] and flat.shard_dtype in LOW and flat.optimized:
                flat.widen_shard(torch.float32)  # it was frozen until now
            for index in with_gradient[flat] if flat.grad is not None else ():
                for segment in engine.segments.get((flat, index), ()):
                    chosen.setdefault(flat.homes[segment.segment.piece], []).append(segment)
        touched = {flat for flat in engine.runtime.flats() if with_gradient[flat] and flat.optimized}
        stepped: set[Flat] = engine.runtime.places.step(self, chosen, touched)
        return stepped

    # ---- torch.amp.GradScaler

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler asks this just before it decides alone whether to step: the moment to let all ranks decide alike.

        See docs/design/engine.md, "GradScaler".
        """
        scaler = sys._getframe(1).f_locals.get("self")
        if isinstance(scaler, torch.amp.GradScaler):
            self._zerodp.grad_scaler = scaler
            if scaler._per_optimizer_states[id(self)]["stage"].name == "READY":
                scaler.unscale_(self)
            found = scaler._per_optimizer_states[id(self)]["found_inf_per_device"]
            device = self._zerodp.runtime.arena.device
            mine = sum(float(value) for value in found.values())
            everyone = self._zerodp.runtime.comm.exchange(
                torch.tensor([mine], dtype=torch.float64), "the overflow verdict of GradScaler"
            ).wait()
            found[device] = torch.full((), float(everyone.sum() > 0), dtype=torch.float32, device=device)
            if bool(everyone.sum() > 0):
                self._zerodp.last_step_skipped = True
                self._zerodp.skipped_steps += 1
                self._zerodp.grad_scaler = None
        return False


def zero_grad(runtime: Runtime, set_to_none: bool, only: dict[Flat, set[int]] | None = None) -> None:
    """Of all parameters of the model, or of `only` these (flat -> indices), reduced or waiting."""
    runtime.end_failed()
    for flat in runtime.flats():
        chosen = set(range(len(flat.parameters))) if only is None else only.get(flat, set())
        runtime.reducer.clear(flat, chosen, keep_zeros=not set_to_none)
