"""What autograd saves for backward: notes in place of views of pages, so that the pages can go."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from .unit import Flat

Hook = Callable[[Any], Any]
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


class Note:
    """What autograd saves in place of a view of a page: where to find it again, and the DTensor that it was in, if it was."""

    __slots__ = ("flat", "offset", "size", "spec", "stride")

    def __init__(self, flat: Flat, view: Tensor, saved: Tensor) -> None:
        self.flat, self.offset, self.size, self.stride = flat, view.storage_offset(), view.size(), view.stride()
        self.spec = None if view is saved else saved._spec  # type: ignore[attr-defined]

    def read(self, page: Tensor) -> Tensor:
        view = page.as_strided(self.size, self.stride, self.offset)
        return view if self.spec is None else DTensor(view, self.spec, requires_grad=False)


class Chain:
    """Notes for views of pages, and somebody else's hooks, a checkpoint's or the user's, for the rest."""

    def __init__(self, engine: Any, pack: Hook, unpack: Hook) -> None:
        self.engine, self.theirs = engine, (pack, unpack)

    def pack(self, tensor: Tensor) -> Any:
        saved = self.engine.pack(tensor)
        return saved if type(saved) is Note else self.theirs[0](tensor)

    def unpack(self, saved: Any) -> Tensor:
        return self.engine.unpack(saved) if type(saved) is Note else self.theirs[1](saved)  # type: ignore[no-any-return]


def push_hooks(engine: Any) -> bool:
    """Have the engine's `pack` and `unpack` called for what autograd saves from here on. True if that is to be undone by `pop_hooks`.

    In forward, and when a checkpoint computes again: whoever kept a parameter itself would find it without values in backward.
    """
    theirs = _top_hooks(False)
    if theirs is None:
        _push_hooks(engine.pack, engine.unpack)
        return True
    owner = getattr(theirs[0], "__self__", None)
    if owner is engine or getattr(owner, "engine", None) is engine:
        return False
    chain = Chain(engine, *theirs)
    _push_hooks(chain.pack, chain.unpack)
    return True
