"""What autograd saves for backward: notes in place of views of pages, so that the pages can go."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from ..errors import ShardedError
from .bits import storage_address
from .local import get_inner

if TYPE_CHECKING:
    from .runtime import Runtime
    from .unit import Flat

Hook = Callable[[Any], Any]
PLAINLY = (False, False)  # torch conjugates and negates by a mark on the view
OLD = (
    "backward() through a forward pass from before the parameters changed (optimizer.step(), full_params(write=True), a load): "
    "its gradients need the old values. Run forward again, or step after the last backward"
)
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
MODELS: weakref.WeakSet[SavedTensors] = weakref.WeakSet()


class Note:
    """What autograd saves in place of a view of a page: where to find it again and with which values, and what it was seen as."""

    __slots__ = ("dtype", "flat", "offset", "seen", "size", "spec", "stride", "version")

    def __init__(self, flat: Flat, view: Tensor, saved: Tensor) -> None:
        self.flat, self.offset, self.size, self.stride = flat, view.storage_offset(), view.size(), view.stride()
        self.dtype, self.version = view.dtype, flat.version
        self.seen = (view.is_conj(), view.is_neg())
        self.spec = None if view is saved else saved._spec  # type: ignore[attr-defined]

    def read(self, page: Tensor) -> Tensor:
        if self.version != self.flat.version:
            raise ShardedError(OLD)
        if self.dtype is not page.dtype:  # pairs of real numbers as complex ones
            page = page.view(self.dtype)
        view = page.as_strided(self.size, self.stride, self.offset)
        if self.seen != PLAINLY:
            conjugate, negative = self.seen
            view = view.conj() if conjugate else view
            view = torch._neg_view(view) if negative else view
        return view if self.spec is None else DTensor(view, self.spec, requires_grad=False)


class SavedTensors:
    """Of one model: which pages are here, so that their views are known."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.pages: dict[int, Flat] = {}  # that are here, by the addresses of their storages
        _take_part()
        MODELS.add(self)

    def came(self, flat: Flat) -> None:
        flat.slot.page = self.pages[flat.slot.address] = flat  # type: ignore[union-attr]

    def pack(self, tensor: Tensor) -> Any:
        """Autograd saves a tensor: a view of a page becomes a note, so that the page can go."""
        view = get_inner(tensor) if isinstance(tensor, DTensor) else tensor  # a call of `local_of` would cost more
        try:
            address = storage_address(view)
        except (NotImplementedError, RuntimeError):
            address = 0  # no storage: not a page of ours
        flat = self.pages.get(address)
        if flat is None and self.runtime.arena.limbo and self.runtime.recomputes:
            # selective checkpointing gives what it kept: views of the page that forward had
            flat = next((slot.page for slot in self.runtime.arena.limbo if slot.address == address), None)
        if flat is not None:
            return Note(flat, view, tensor)
        # An output that its own node saved as it is would keep the node, which keeps the output, for ever: where nobody goes back through it.
        return tensor if tensor.is_leaf else tensor.detach(), tensor._version

    def unpack(self, saved: Any) -> Tensor:
        if type(saved) is tuple:
            tensor, version = saved
            if tensor._version != version:  # torch does not look where hooks are
                raise RuntimeError(
                    f"a tensor {list(tensor.shape)} of {tensor.dtype} that backward needs has been modified by an in-place operation since forward saved it "
                    f"(version {tensor._version}, saved was {version}); torch.autograd.set_detect_anomaly(True) shows where it was saved"
                )
            return tensor  # type: ignore[no-any-return]
        unit = saved.flat.unit
        if not unit.visible:
            if torch._C._current_graph_task_id() != -1:
                self.runtime.begin_backward()
            self.runtime.demand(unit)
        return saved.read(saved.flat.slot.tensor)  # type: ignore[no-any-return]

    def push(self) -> bool:
        """Note what autograd saves from here on. True if that is to be undone by `pop_hooks`.

        In forward, and when a checkpoint computes again: whoever kept a parameter itself would find it without values in backward.
        """
        theirs = _top_hooks(False)
        if theirs is None:
            _push_hooks(self.pack, self.unpack)
            return True
        owner = getattr(theirs[0], "__self__", None)
        if owner is self or getattr(owner, "ours", None) is self:
            return False
        chain = Chain(self, *theirs)
        _push_hooks(chain.pack, chain.unpack)
        return True


class Chain:
    """Notes for views of pages, and somebody else's hooks, a checkpoint's or the user's, for the rest."""

    def __init__(self, ours: SavedTensors, pack: Hook, unpack: Hook) -> None:
        self.ours, self.theirs = ours, (pack, unpack)

    def pack(self, tensor: Tensor) -> Any:
        saved = self.ours.pack(tensor)
        return saved if type(saved) is Note else self.theirs[0](tensor)

    def unpack(self, saved: Any) -> Tensor:
        return self.ours.unpack(saved) if type(saved) is Note else self.theirs[1](saved)


@functools.cache
def _take_part() -> None:
    """From here on, hooks that somebody pushes while a model is under way get what is no view of a page of its. torch asks the innermost
    hooks alone, so those of a unit's own forward would keep a parameter itself, which in backward is without its values."""

    enter_plainly = saved_tensors_hooks.__enter__

    def enter(hooks: saved_tensors_hooks) -> None:
        if type(hooks).__module__ != "torch.utils.checkpoint":  # it counts what it gets, and again in recomputation
            for saved in MODELS:
                if saved.runtime.paged and saved.runtime.frames:
                    chain = Chain(saved, hooks.pack_hook, hooks.unpack_hook)
                    hooks = saved_tensors_hooks(chain.pack, chain.unpack)
        enter_plainly(hooks)

    saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
