"""What stands where a tensor is that rests on disk: its shape and dtype can be asked, any other use is an error that says what to do.

Knows tensors; it does not know where the values are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..core.parameter import SAFE, placeholder
from ..errors import ShardedError

ALLOWED = SAFE | {Tensor.grad.__get__, Tensor.grad.__set__}  # type: ignore[union-attr]


class Trap:
    """Mixin of tensors whose values are elsewhere."""

    what: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in ALLOWED:
            what = next(one.what for one in _trapped_in(*args, *kwargs.values()))
            raise ShardedError(
                f"{what} rests on disk and was used by {getattr(func, '__name__', str(func))!r}. It is in memory inside optimizer.step() and while "
                "zerodp.local_shards(model) hands it out; optimizer.state_dict() and zerodp.full_grads(model) give whole copies"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


class AwayTensor(Trap, Tensor):
    """Stands for a 1-D tensor."""


def away(what: str, numel: int, dtype: torch.dtype) -> AwayTensor:
    """[numel] of `dtype` without memory; `what` is its name in errors."""
    made: AwayTensor = torch.Tensor._make_subclass(AwayTensor, hole(numel, dtype))
    made.what = what
    return made


def hole(numel: int, dtype: torch.dtype) -> Tensor:
    """[numel] without memory; NaN where anything could see it."""
    return placeholder(torch.empty(1, dtype=dtype, device="cpu")).expand(numel)


_twins: dict[type, type] = {}


def trapped(cls: type) -> type:
    """The class of `cls` objects while their values are elsewhere, made once."""
    if cls not in _twins:
        _twins[cls] = type("Away" + cls.__name__, (Trap, cls), {})
    return _twins[cls]


def is_away(value: Any) -> bool:
    return isinstance(value, Trap)


def _trapped_in(*values: Any) -> Iterator[Trap]:
    for value in values:
        if isinstance(value, Trap):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _trapped_in(*value)
        elif isinstance(value, dict):
            yield from _trapped_in(*value.values())
