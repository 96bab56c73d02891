"""Is this optimizer elementwise? Found out by trying it: on a matrix whole, and on flat parts of it, each alone.

Optimizers that need whole matrices (Muon, Adafactor, LAMB, Shampoo), or one figure of all parameters together (Prodigy,
D-Adaptation), give something else, or an error, for the parts.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .core.layout import ALIGN
from .core.local import local_of
from .errors import ConfigError

SHAPE = (4, ALIGN)  # of the matrix
WHOLE = slice(0, 4 * ALIGN)
PARTS = (slice(0, ALIGN), slice(ALIGN, 4 * ALIGN))


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        ConfigError: the optimizer's update of a part depends on the rest of its tensor, or on other parameters.
    """
    name = type(optimizer).__name__
    advice = "Use an elementwise optimizer such as AdamW, SGD, Adagrad, RMSprop, NAdam or Lion"
    refusal = f"{name} is not elementwise: its update of a part of the parameters depends on the rest, so it cannot run on shards. {advice}"
    for group in optimizer.param_groups:
        try:
            whole = _trial(optimizer, group, WHOLE, SHAPE)
        except Exception as error:
            raise ConfigError(
                f"{name} cannot be seen to be elementwise: a step of it on a small matrix failed ({type(error).__name__}: {error}), as "
                f"where an optimizer keeps its state outside of `self.state` or needs a closure. {advice}"
            ) from None
        try:
            parts = [_trial(optimizer, group, cut, (-1,)) for cut in PARTS]
        except Exception as error:
            raise ConfigError(f"{refusal} ({type(error).__name__}: {error})") from None
        for cut, part in zip(PARTS, parts, strict=True):
            alike = torch.allclose(whole.values[cut], part.values, rtol=1e-5, atol=1e-7)
            if not alike or not _same(whole.figures, part.figures):
                raise ConfigError(refusal)


def num_moments(optimizer: torch.optim.Optimizer) -> int:
    """How many values beside each element of a parameter an elementwise optimizer keeps, at most."""
    return max((_trial(optimizer, group, WHOLE, SHAPE).num_moments for group in optimizer.param_groups), default=0)


class Trial(NamedTuple):
    """What came out: values of the parameter, 1-D; single numbers that the optimizer keeps; how many states of the parameter's size."""

    values: Tensor
    figures: dict[str, float]
    num_moments: int


def _trial(optimizer: torch.optim.Optimizer, group: dict[str, Any], cut: slice, shape: tuple[int, ...]) -> Trial:
    """Two steps of a copy of the optimizer over a parameter of its own: `cut` of the matrix, in this shape."""
    device = next((p.device for p in group["params"] if not p.is_meta), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(WHOLE.stop, generator=generator)[cut].view(shape).to(device) for _ in range(3))
    parameter = nn.Parameter(next(drawn))
    trial = copy.copy(optimizer)
    trial.__dict__ = {**optimizer.__dict__, "state": defaultdict(dict)}
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        trial.__dict__[hooks] = OrderedDict()
    trial.__dict__.pop("step", None)
    settings = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in group.items()}
    trial.param_groups = [{**settings, "params": [parameter]}]
    if "lr" in group and not group["lr"]:
        trial.param_groups[0]["lr"] = 0.01
    for state in optimizer.state.values():
        if state:  # made in the constructor: give the trial the same kind of start
            trial.state[parameter] = {k: _like(v, parameter) for k, v in state.items()}
            break
    for gradient in drawn:
        parameter.grad = gradient
        trial.step()
    kept = trial.state[parameter]
    num_moments = sum(isinstance(value, Tensor) and value.shape == parameter.shape for value in kept.values())
    # A first step may be too small to be told from rounding (Prodigy's is); the sum that it comes from is a number like any other.
    return Trial(parameter.detach().reshape(-1), _figures({**trial.param_groups[0], **kept}), num_moments)


def _figures(kept: dict[str, Any]) -> dict[str, float]:
    single = (int, float)
    return {k: float(v) for k, v in kept.items() if isinstance(v, single) or (isinstance(v, Tensor) and v.numel() == 1)}


def _same(figures: dict[str, float], others: dict[str, float]) -> bool:
    if figures.keys() != others.keys():
        return False
    return all(math.isclose(value, others[key], rel_tol=1e-5) for key, value in figures.items())


def _like(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        return value.clone()
    held = local_of(value)
    return torch.full_like(parameter, float(held.float().mean()) if held.numel() else 0.0)
