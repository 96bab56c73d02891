"""Is this optimizer elementwise? Found out by trying it: on a matrix whole, and on the same matrix in flat parts.

Optimizers that need whole matrices (Muon, Adafactor, LAMB, Shampoo) give something else, or an error, for the parts.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .layout import ALIGN
from .local import local_of


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        ConfigError: the optimizer's update of a part depends on the rest of its tensor.
    """
    name = type(optimizer).__name__
    advice = "Use an elementwise optimizer such as AdamW, SGD, Adagrad, RMSprop, NAdam or Lion"
    refusal = f"{name} is not elementwise: its update of a part of a matrix depends on the whole, so it cannot run on shards. {advice}"
    for group in optimizer.param_groups:
        try:
            whole, _ = _trial(optimizer, group, parts=False)
        except Exception as error:
            raise ConfigError(
                f"{name} cannot be seen to be elementwise: a step of it on a small matrix failed ({type(error).__name__}: {error}), as "
                f"where an optimizer keeps its state outside of `self.state` or needs a closure. {advice}"
            ) from None
        try:
            parts, _ = _trial(optimizer, group, parts=True)
        except Exception as error:
            raise ConfigError(f"{refusal} ({type(error).__name__}: {error})") from None
        if not torch.allclose(whole, parts, rtol=1e-5, atol=1e-7):
            raise ConfigError(refusal)


def num_moments(optimizer: torch.optim.Optimizer) -> int:
    """How many values beside each element of a parameter an elementwise optimizer keeps, at most."""
    return max((_trial(optimizer, group, parts=False)[1] for group in optimizer.param_groups), default=0)


def _trial(optimizer: torch.optim.Optimizer, group: dict[str, Any], parts: bool) -> tuple[Tensor, int]:
    """Two steps of a copy of the optimizer over a matrix of its own, whole or cut: (the matrix, states of its size)."""
    device = next((p.device for p in group["params"] if not p.is_meta), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    numel = 4 * ALIGN
    values, *gradients = (torch.randn(numel, generator=generator).to(device) for _ in range(3))
    shape = (4, ALIGN)
    cuts = [slice(0, ALIGN), slice(ALIGN, numel)] if parts else [slice(0, numel)]
    parameters = [nn.Parameter(values[c].clone() if parts else values.view(shape).clone()) for c in cuts]
    trial = copy.copy(optimizer)
    trial.__dict__ = {**optimizer.__dict__, "state": defaultdict(dict)}
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        trial.__dict__[hooks] = OrderedDict()
    trial.__dict__.pop("step", None)
    lr = group.get("lr", 0.0)
    trial.param_groups = [{**group, "params": parameters, **({"lr": 0.01} if "lr" in group and not lr else {})}]
    for state in optimizer.state.values():
        if state:  # made in the constructor: give the trial the same kind of start
            for parameter in parameters:
                trial.state[parameter] = {k: _like(v, parameter) for k, v in state.items()}
            break
    for gradient in gradients:
        for parameter, c in zip(parameters, cuts, strict=True):
            parameter.grad = gradient[c].clone() if parts else gradient.view(shape).clone()
        trial.step()
    first = parameters[0]
    kept = sum(isinstance(value, Tensor) and value.shape == first.shape for value in trial.state[first].values())
    return torch.cat([p.detach().reshape(-1) for p in parameters]), kept


def _like(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        return value.clone()
    held = local_of(value)
    return torch.full_like(parameter, float(held.float().mean()) if held.numel() else 0.0)
