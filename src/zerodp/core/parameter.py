"""Use is the fault: while a parameter is sharded, its class traps every use of its values.

A parameter keeps its identity for life. Only its `.data` and its `__class__` change: gathered, it is what the user made;
hidden, its data is one NaN viewed at the full shape and its class is a twin that lets metadata through and turns any other
use into a page fault, which the runtime answers by gathering the unit or by raising `ShardedError`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import ShardedError
from .local import get_inner

if TYPE_CHECKING:
    from .local import Local
    from .unit import Flat

_getters = ("shape", "dtype", "device", "requires_grad", "is_leaf", "ndim", "layout", "is_cuda", "is_cpu", "is_sparse", "is_meta", "is_quantized",
            "grad_fn", "names", "retains_grad", "_version", "output_nr", "is_mkldnn", "is_nested", "is_xpu", "is_mps", "itemsize", "nbytes", "_post_accumulate_grad_hooks", "_backward_hooks", "grad_dtype")  # fmt: skip
_methods = ("size", "dim", "numel", "nelement", "element_size", "get_device", "is_floating_point", "is_complex", "is_signed", "requires_grad_",
            "register_hook", "register_post_accumulate_grad_hook", "__hash__", "__len__", "ndimension", "_is_view", "type")  # fmt: skip
SAFE: set[Any] = {torch.is_floating_point, torch.is_complex, torch.numel}
for _name in _getters:
    _descriptor = getattr(Tensor, _name, None)
    for _access in ("__get__", "__set__"):
        if hasattr(_descriptor, _access):
            SAFE.add(getattr(_descriptor, _access))
SAFE.update(getattr(Tensor, name) for name in _methods)

data_of = Tensor.data.__get__  # type: ignore[attr-defined]
grad_of = Tensor.grad.__get__  # type: ignore[union-attr]
set_grad = Tensor.grad.__set__  # type: ignore[union-attr]


class Where:
    """A parameter's place: `index` in `flat`. Its only attribute of ours, so the parameter itself holds no state."""

    __slots__ = ("_flat", "index")

    def __init__(self, flat: Flat, index: int) -> None:
        # Weak: autograd's C++ nodes hold parameters, and a strong way from there to the engine would never be collected.
        self._flat = weakref.ref(flat)
        self.index = index

    @property
    def flat(self) -> Flat:
        flat = self._flat()
        if flat is None:
            raise ShardedError("the sharded model that this parameter belongs to no longer exists")
        return flat

    @property
    def name(self) -> str:
        return self.flat.names[self.index]

    @property
    def local(self) -> Local:
        return self.flat.locals[self.index]

    def __reduce__(self) -> Any:
        return type(None), ()  # a parameter that is pickled while it is whole becomes an ordinary one


class Trap:
    """Mixin of classes of tensors whose values are not here: what is `_safe` can be asked, any other use is `_used` first."""

    _safe = SAFE

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in cls._safe:
            for one in _trapped_in(args, kwargs):
                one._used(_use(func, one, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def _used(self, use: str) -> None:
        """Bring the values here, or raise `ShardedError`."""
        raise NotImplementedError


class Sharded(Trap):
    """Mixin of every twin class."""

    _zerodp: Where

    def _used(self, use: str) -> None:
        self._zerodp.flat.unit.runtime.fault(self._zerodp, use)

    def stride(self, dim: int | None = None) -> Any:
        strides = self._zerodp.local.whole_strides
        return strides if dim is None else strides[dim]

    def is_contiguous(self, memory_format: Any = torch.contiguous_format) -> bool:
        local = self._zerodp.local
        whole = torch.empty_strided(local.shape, local.whole_strides, device="meta")
        return whole.is_contiguous(memory_format=memory_format)

    @property
    def data(self) -> Tensor:
        self._used("data")
        return _plainly(data_of, self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        raise ShardedError(
            f"assigning .data of parameter {self._zerodp.name!r} would bypass the shards of its unit {self._zerodp.flat.unit.name!r}; "
            "edit it inside 'with zerodp.full_params(model, write=True):'"
        )

    @property
    def grad(self) -> Tensor | None:
        grad = _plainly(grad_of, self)
        if grad is None and self._zerodp.index in self._zerodp.flat.has_grad:
            raise ShardedError(
                f"the gradient of parameter {self._zerodp.name!r} has been reduced into the ranks' shards; use zerodp.full_grads(model) or "
                "zerodp.local_shards(model, kind='gradients') to read it, and optimizer.clip_grad_norm_(max_norm) to clip. An optimizer "
                "must be passed to zerodp.shard(model, optimizer) to see the gradients"
            )
        return grad  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if (
            _plainly(grad_of, self) is not None
        ):  # one that has just come: the user's hook may change it before we take it
            with torch._C.DisableTorchFunctionSubclass():
                return set_grad(self, value)  # type: ignore[no-any-return]
        if value is not None:
            raise ShardedError(
                f"the gradient of parameter {self._zerodp.name!r} lives in shards; write it through zerodp.local_shards(model, kind='gradients')"
            )
        self._zerodp.flat.unit.runtime.reducer.forget(self._zerodp.flat, self._zerodp.index)

    def __deepcopy__(self, memo: Any) -> Any:
        raise ShardedError(
            f"deepcopy of sharded parameter {self._zerodp.name!r}: copy the model before shard(), or load zerodp.full_state_dict(model) into a fresh one"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardedError(f"pickling of sharded parameter {self._zerodp.name!r}: save model.state_dict() instead")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        where = self._zerodp
        return f"ShardedParameter({where.name!r}, shape={tuple(where.local.shape)}, dtype={where.flat.param_dtype}, unit={where.flat.unit.name!r})"


class ShardedInside(Sharded):
    """Mixin of the twins of DTensors, whose own methods reach inside without a torch function."""

    @property
    def _local_tensor(self) -> Tensor:
        self._used("to_local")
        return get_inner(self)  # type: ignore[no-any-return]


@functools.cache
def trapped(cls: type, trap: type[Trap]) -> type:
    """The class of `cls` objects while their values are not here."""
    return type(trap.__name__ + cls.__name__, (trap, cls), {})


def twin(cls: type) -> type:
    """The sharded twin of a parameter class."""
    return trapped(cls, ShardedInside if issubclass(cls, DTensor) else Sharded)


ShardedParameter = twin(nn.Parameter)


def is_hidden(parameter: Any) -> bool:
    return isinstance(parameter, Sharded)


def placeholder(one: Tensor) -> Tensor:
    """`one` element as it is never seen: NaN where its dtype has that."""
    return one.fill_(float("nan") if one.is_floating_point() else 0)


def _plainly(access: Any, parameter: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return access(parameter)


def _trapped_in(*values: Any) -> Iterator[Trap]:
    for value in values:
        if isinstance(value, Trap):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _trapped_in(*value)
        elif isinstance(value, dict):
            yield from _trapped_in(*value.values())


def _use(func: Any, one: Any, kwargs: Any) -> str:
    """The function's name; with an underscore where it is an argument that says that `one` is changed."""
    name: str = getattr(func, "__name__", str(func))
    changes = kwargs.get("inplace") is True or any(one is given for given in _trapped_in(kwargs.get("out")))
    return name + "_" if changes and not writes(name) else name


def writes(use: str) -> bool:
    """Whether a torch function's name says that it changes its first argument."""
    if use.startswith("__"):
        return use == "__setitem__" or (
            use.startswith("__i") and use not in ("__index__", "__int__", "__invert__", "__iter__")
        )
    return use.endswith("_")
