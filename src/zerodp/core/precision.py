"""Which dtype each parameter computes, rests and reduces in, and the loss scale of fp16."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn

from ..config import Precision
from ..errors import ZeroError

Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]  # compute, at rest, reduced gradients
LOW = (torch.float16, torch.bfloat16)


def dtypes_of(parameter: nn.Parameter, precision: Precision | None, keeps_dtype: bool) -> Dtypes:
    """(compute, shard, gradient) dtypes. `keeps_dtype`: this parameter computes in its own dtype whatever the precision says."""
    own = parameter.dtype
    if not own.is_floating_point or own.itemsize < 2:
        return own, own, own
    compute = own if precision is None or keeps_dtype else precision.param_dtype
    master = torch.float32 if precision is None else precision.master_dtype
    trains = parameter.requires_grad
    # A frozen parameter rests in its own dtype, so that nothing of it is lost and no master is paid for.
    rest = own if not trains else (master if own in LOW or compute in LOW else own)
    wanted = precision.grad_dtype if precision is not None else None
    grad = wanted or (torch.float32 if compute in LOW else compute)
    return compute, rest, grad


def by_dtypes(
    parameters: Iterable[tuple[str, nn.Parameter, nn.Module]], precision: Precision | None
) -> dict[tuple[Dtypes, bool], list[tuple[str, nn.Parameter]]]:
    """(name, parameter, the module that holds it) sorted into flats: one per (dtypes, trainable)."""
    kinds: dict[tuple[Dtypes, bool], list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, parameter, holder in parameters:
        dtypes = dtypes_of(parameter, precision, computes_in_fp32(holder))
        kinds[(dtypes, parameter.requires_grad)].append((name, parameter))
    return kinds


def computes_in_fp32(module: nn.Module) -> bool:
    """Batch norms keep fp32 parameters beside their fp32 statistics; torch has no kernel for 16-bit ones."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


class LossScaler:
    """The dynamic or fixed loss scale; all ranks feed it the same verdicts, so it is the same on all.

    An overflow skips the step. It uses up one of `hysteresis`; when none is left the scale is multiplied by `backoff`.
    """

    def __init__(self, precision: Precision | None) -> None:
        self.precision = precision if precision is not None and precision.scales_loss else None
        self.dynamic = self.precision is not None and self.precision.loss_scale == "dynamic"
        self.scale = 1.0
        if self.precision is not None:
            self.scale = self.precision.init_scale if self.dynamic else float(self.precision.loss_scale)
        self.good_steps = 0
        self.hysteresis_left = self.precision.hysteresis if self.precision is not None else 1

    @property
    def active(self) -> bool:
        return self.precision is not None

    def update(self, overflow: bool) -> None:
        """After a step, skipped or not.

        Raises:
            ZeroError: an overflow at the smallest scale allowed.
        """
        if not self.dynamic:
            return
        precision = self.precision
        assert precision is not None
        if not overflow:
            self.good_steps += 1
            if self.good_steps % precision.growth_interval == 0:
                self.scale *= precision.growth
                self.hysteresis_left = precision.hysteresis
            return
        self.good_steps = 0
        if self.hysteresis_left > 1:
            self.hysteresis_left -= 1
        elif self.scale <= precision.min_scale:
            raise ZeroError(
                f"gradients overflow at the smallest loss scale allowed ({precision.min_scale}): no step can be taken any more. Look for "
                "infinities in the loss or data, lower the learning rate, or use precision='bf16'"
            )
        else:
            self.scale = max(self.scale * precision.backoff, precision.min_scale)

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps, "hysteresis_left": self.hysteresis_left}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.good_steps, self.hysteresis_left = int(state["good_steps"]), int(state["hysteresis_left"])
