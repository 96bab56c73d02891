"""What a tensor is while its model sleeps: its shape and dtype can be asked, any other use is an error that says what to do.

Knows tensors; it does not know where the values are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.parameter import SAFE
from ..errors import ShardedError


class Trap:
    """Mixin of the classes of such tensors."""

    message: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in SAFE:
            raise ShardedError(cls.message)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @property
    def data(self) -> Tensor:
        raise ShardedError(self.message)

    @property
    def grad(self) -> Tensor:
        raise ShardedError(self.message)


_traps: dict[tuple[type, str], type] = {}


def trapped(cls: type, message: str) -> type:
    """The class of `cls` objects while their values are away, made once."""
    if (cls, message) not in _traps:
        _traps[cls, message] = type("Asleep" + cls.__name__, (Trap, cls), {"message": message})
    return _traps[cls, message]


def is_emptied(value: Tensor) -> bool:
    """Whether its values have been put away, and take no memory where they were."""
    if not isinstance(value, Trap):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return value.untyped_storage().nbytes() == 0
