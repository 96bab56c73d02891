"""The random state of this process: torch's on the host and the accelerator, Python's, and numpy's where it is in use."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def state() -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.accelerator.is_available():
        found["accelerator"] = _accelerator().get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = (str(kind), [int(key) for key in keys], *rest)
    return found


def restore(found: dict[str, Any]) -> None:
    torch.set_rng_state(found["torch"])
    version, values, gauss = found["python"]
    random.setstate((version, tuple(values), gauss))
    if "accelerator" in found and torch.accelerator.is_available():
        _accelerator().set_rng_state(found["accelerator"])
    if "numpy" in found and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(found["numpy"]))


def _accelerator() -> Any:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.get_device_module(accelerator.type)
