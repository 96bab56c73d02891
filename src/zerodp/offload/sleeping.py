"""What a tensor is while its model sleeps: its shape and dtype can be asked, any other use is an error that says what to do.

Knows tensors; it does not know where the values are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..core import parameter
from ..core.parameter import SAFE, Trap
from ..errors import ShardedError


class Asleep(Trap):
    """Mixin of the classes of such tensors. message: what a use is told."""

    _safe = SAFE
    message: str

    def _used(self, use: str) -> None:
        raise ShardedError(self.message)


@functools.cache
def _trap(message: str) -> Any:
    return type("Asleep", (Asleep,), {"message": message})


def trapped(cls: type, message: str) -> type:
    """The class of `cls` objects while their values are away."""
    return parameter.trapped(cls, _trap(message))


def is_emptied(value: Tensor) -> bool:
    """Whether its values have been put away, and take no memory where they were."""
    if not isinstance(value, Asleep):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return value.untyped_storage().nbytes() == 0
