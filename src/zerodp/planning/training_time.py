"""How long a whole training takes, from one step's time."""

from __future__ import annotations

from .estimate import Estimate
from .models import Model
from .setup import Setup
from .timeline.predict import tokens_per_backward
from .timeline.simulate import Timeline


def training_seconds(model: Model, setup: Setup, one: Estimate, step: Timeline | None) -> float | None:
    """Seconds for `setup.tokens`, by a simulated step, or else by `setup.device_flops` alone; None where neither is known.

    By FLOPs alone nothing is ever waited for, so it is the least that the training can take.
    """
    here = tokens_per_backward(model, setup)
    if setup.tokens is None or here is None:
        return None
    if step is not None:
        seconds = step.seconds
    elif setup.device_flops is not None and one.flops is not None:
        seconds = one.flops / setup.device_flops
    else:
        return None
    return setup.tokens / (here * setup.accumulate * setup.shard_ranks * setup.replicate) * seconds
