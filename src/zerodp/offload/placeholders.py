"""What stands where a tensor is that rests on disk: its shape and dtype can be asked, any other use is an error that says what to do.

Knows tensors; it does not know where the values are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.parameter import SAFE, Trap, placeholder, trapped
from ..errors import ShardedError


class DiskPlaceholder(Trap):
    """Mixin of tensors that rest on disk. what: a tensor's name in errors."""

    _safe = SAFE | {Tensor.grad.__get__, Tensor.grad.__set__}  # type: ignore[union-attr]
    what: str

    def _used(self, use: str) -> None:
        raise ShardedError(
            f"{self.what} rests on disk and was used by {use!r}. It is in memory inside optimizer.step() and while "
            "zerodp.local_shards(model) hands it out; optimizer.state_dict() and zerodp.full_grads(model) give whole copies"
        )


def disk_placeholder(what: str, numel: int, dtype: torch.dtype) -> Tensor:
    """[numel] of `dtype` without memory; `what` is its name in errors."""
    made: Any = Tensor._make_subclass(trapped(Tensor, DiskPlaceholder), hole(numel, dtype))
    made.what = what
    return made  # type: ignore[no-any-return]


def hole(numel: int, dtype: torch.dtype) -> Tensor:
    """[numel] without memory; NaN where anything could see it."""
    return placeholder(torch.empty(1, dtype=dtype, device="cpu")).expand(numel)


def is_placeholder(value: Any) -> bool:
    return isinstance(value, DiskPlaceholder)
