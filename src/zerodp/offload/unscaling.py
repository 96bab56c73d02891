"""What `torch.amp.GradScaler` is given for a gradient that it cannot read as it rests: a stand-in, unscaled where the gradient is.

The scaler collects all gradients and hands them, with its scale, to one function of torch. Of stand-ins that function brings
the gradients home by home, as a step does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.norms import part
from .home import GRADIENT, Home, walk
from .placeholders import DiskPlaceholder, hole

if TYPE_CHECKING:
    from ..core.optimizer import SegmentParameter

UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_


class StandIn(DiskPlaceholder, Tensor):
    """Of the gradient of `one`; its shape and dtype, and nothing to read."""

    one: SegmentParameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return unscale(*args) if func == UNSCALE else super().__torch_function__(func, types, args, kwargs)


def stand_in(one: SegmentParameter) -> StandIn:
    made: StandIn = torch.Tensor._make_subclass(StandIn, hole(one.numel(), one.flat.grad_dtype))
    made.one, made.what = one, f"this rank's part of the gradient of parameter {one.full_name!r}"
    return made


def unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """torch's function of that purpose, of stand-ins and other tensors: the last two arguments are in host memory, too."""
    plain: list[Tensor] = []
    homes: dict[Home, list[SegmentParameter]] = {}
    for gradient in gradients:
        if isinstance(gradient, StandIn):
            homes.setdefault(gradient.one.flat.homes[gradient.one.segment.piece], []).append(gradient.one)
        else:
            plain.append(gradient)
    device = next(iter(homes)).flat.unit.runtime.arena.device
    if device.type != "cpu":
        torch.accelerator.synchronize(device)  # the scaler copies its scale to host memory, and does not wait for it
    if plain:
        UNSCALE(plain, found_inf, inverse_scale)
    for home in walk(homes, (GRADIENT,), (GRADIENT,)):
        UNSCALE([part(one.flat, one.segment) for one in homes[home]], found_inf, inverse_scale)
