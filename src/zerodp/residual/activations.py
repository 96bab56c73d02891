"""Activation checkpoints whose inputs are split over ranks (P_a) or rest on the host or on disk (P_a+cpu).

torch's own non-reentrant checkpoint recomputes. What it would keep alive are the inputs; it is given objects in their place
that can bring them back. Its saved-tensor hooks, early stop, random state, nesting and errors stay what they are.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from ..config import Config, Offload
from ..core import wrap
from ..core.module import hide_from_compiler, tensors_in
from ..errors import ConfigError, StorageError
from .replicated import members, named_dim
from .store import Saved, Store, current_store

M = TypeVar("M", bound=nn.Module)
PLAIN = (Tensor, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def activation_checkpoint(
    function: Callable[..., Any], *args: Any, partition: Any = None, offload: Any = None, **kwargs: Any
) -> Any:
    """Call `function(*args, **kwargs)` and keep only its inputs for backward, which computes the rest again.

    Args:
        function: any callable, called once more by each backward; what it draws at random is drawn again.
        partition: a `ProcessGroup`, a 1-D `DeviceMesh`, or the name of a mesh dim of the DTensors among the inputs and
            parameters. Inputs that are equal on all its ranks are split over them: each keeps 1/N of the bytes, padded to
            whole elements, and recomputation gathers them again. All its ranks must make the same calls.
        offload: ``"host"``, ``"disk"`` or a `zerodp.Offload`: where inputs rest, split or not.

    Returns:
        What `function` returns.

    Raises:
        ConfigError: an option that cannot work, or a call that changed an object given to it.
        StorageError: the disk is full or cannot be read, here or on another rank.
    """
    if not callable(function):
        raise ConfigError(f"activation_checkpoint: expected something to call, got {type(function).__name__}")
    hide_from_compiler()
    label = getattr(function, "__qualname__", type(function).__name__)
    return _call(function, Settings.of(partition, offload), label, args, kwargs)


def apply_activation_checkpointing(model: M, units: Any = None, partition: Any = None, offload: Any = None) -> M:
    """Checkpoint the blocks of `model` at each call, in place, before or after `zerodp.shard`.

    Args:
        model: any module; its parameter names, `state_dict` keys and `forward` signatures stay.
        units: which modules: classes, glob patterns over names, or a function `(name, module) -> bool`; None = the repeated
            blocks. Modules inside another chosen one are recomputed with it and keep nothing of their own.
        partition, offload: as in `zerodp.activation_checkpoint`.

    Returns:
        The same model.

    Raises:
        ConfigError: an option that cannot work, or no such modules.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"apply_activation_checkpointing: expected a torch.nn.Module, got {type(model).__name__}")
    Blocks.of(model, units, partition, offload, "units").apply()
    return model


def blocks_of(model: nn.Module, config: Config) -> Blocks | None:
    """What `config` wants checkpointed in a model that is to be sharded; nothing is changed yet.

    Raises:
        ConfigError: there is none, or no ranks to split its inputs over.
    """
    units, partition = config.checkpoint_activations, config.partition_activations
    if units is False:
        return None
    if partition is True:
        partition = wrap.tensor_mesh(model)
        if partition is None:
            raise ConfigError(
                "partition_activations=True splits over the tensor-parallel ranks, and no parameter of this model is a DTensor; pass the process "
                "group or 1-D mesh whose ranks see the same inputs, or leave it out"
            )
    chosen = None if units is True else units
    return Blocks.of(model, chosen, partition or None, config.offload, "checkpoint_activations")


@dataclass(frozen=True)
class Blocks:
    """Modules to checkpoint at each call, and how."""

    modules: dict[str, nn.Module]
    settings: Settings

    @classmethod
    def of(cls, model: nn.Module, units: Any, partition: Any, offload: Any, option: str) -> Blocks:
        """
        Args:
            option: what the user calls `units`.

        Raises:
            ConfigError: an option that cannot work, or no such modules.
        """
        settings = Settings.of(partition, offload)
        chosen = wrap.choose_modules(model, Config(units=units).units, option)
        if units is None:
            chosen = {name: module for name, module in chosen.items() if any(True for _ in module.children())}
        if not chosen:
            raise ConfigError(
                "activation checkpointing: this model has no repeated blocks; name what to checkpoint by units= (of "
                "apply_activation_checkpointing) or checkpoint_activations= (of shard)"
            )
        if isinstance(partition, str):
            settings = Settings(named_dim(partition, list(model.parameters())), settings.offload)
        return cls(chosen, settings)

    @property
    def facts(self) -> list[str]:
        """What must be the same on all ranks, in words."""
        ranks = 1 if self.settings.partition is None else len(members(self.settings.partition))
        place = self.settings.offload.activations
        return [f"checkpointed blocks {list(self.modules)}, inputs split over {ranks} ranks, on {place!r}"]

    def apply(self) -> None:
        hide_from_compiler()
        for name, module in self.modules.items():
            if not isinstance(module, Checkpointed):
                module.__class__ = _checkpointed(type(module))
            module.__dict__["_checkpointing"] = (self.settings, wrap.clean(name))

    def remove(self) -> None:
        for module in self.modules.values():
            if isinstance(module, Checkpointed):
                module.__class__ = type(module).__mro__[2]
                del module.__dict__["_checkpointing"]


@dataclass(frozen=True)
class Settings:
    """The options of a checkpointed call, checked."""

    partition: Any
    offload: Offload

    @classmethod
    def of(cls, partition: Any, offload: Any) -> Settings:
        if not isinstance(offload, Offload):
            offload = Offload(activations="device" if offload is None else offload)
        if partition is not None and not isinstance(partition, str):
            members(partition)
        return cls(partition, offload)

    def __deepcopy__(self, memo: Any) -> Settings:
        return self  # process groups cannot be copied


class Checkpointed(nn.Module):
    """Mixin of the class that `apply_activation_checkpointing` gives a block."""

    _checkpointing: Any  # (settings, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        settings, name = self._checkpointing
        return _call(super().__call__, settings, name, args, kwargs)


_classes: dict[type, type] = {}


def _checkpointed(cls: type) -> type:
    """Modules of one class stay modules of one class."""
    if cls not in _classes:
        _classes[cls] = type(cls.__name__, (Checkpointed, cls), {"__module__": cls.__module__})
    return _classes[cls]


def _call(function: Callable[..., Any], settings: Settings, label: str, args: Any, kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    device = _device(leaves)
    moves = settings.partition is not None or settings.offload.activations != "device"
    if device is None or not moves or _recomputed_anyway():
        return checkpoint(functools.partial(function, **kwargs), *args, use_reentrant=False)
    partition = settings.partition
    if isinstance(partition, str):
        partition = named_dim(partition, [*leaves, *_parameters(function)])
    store = current_store(device)
    with _apart(store):
        kept = store.keep(leaves, partition, settings.offload, label)
        anchor = torch.empty(0, device=device)
    whole = [leaf for leaf in kept if isinstance(leaf, Tensor)]
    del leaves
    # torch keeps what it is given: the whole tensors, and an empty one that tells it whose random state to keep
    return checkpoint(Call(store, function, label, kept, spec, (args, kwargs)), anchor, *whole, use_reentrant=False)


WHOLE = object()  # stands for the next tensor that torch keeps


class Call:
    """A function and its inputs: the first time those it was called with, later ones that are brought back."""

    def __init__(
        self, store: Store, function: Callable[..., Any], label: str, kept: list[Any], spec: Any, inputs: Any
    ) -> None:
        self.store, self.function, self.label, self.spec = store, function, label, spec
        self.kept = [WHOLE if isinstance(leaf, Tensor) else leaf for leaf in kept]
        self.inputs = inputs
        self.before = store.latest  # backward goes the other way
        store.latest = weakref.ref(self)

    def __call__(self, anchor: Tensor, *whole: Tensor) -> Any:
        if self.inputs is not None:
            (args, kwargs), self.inputs = self.inputs, None
            return self._first(args, kwargs)
        with _apart(self.store):
            leaves = self._brought_back(whole)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        del leaves
        return self.function(*args, **kwargs)

    def _first(self, args: Any, kwargs: Any) -> Any:
        objects = [leaf for leaf in self.kept if not isinstance(leaf, (*PLAIN, Saved)) and hasattr(leaf, "__dict__")]
        before = [_contents(value) for value in objects]
        result = self.function(*args, **kwargs)
        for value, contents in zip(objects, before, strict=True):
            if _contents(value) != contents:
                raise ConfigError(
                    f"activation checkpointing: {self.label!r} changed the {type(value).__name__} given to it, and recomputation would "
                    "change it once more. Leave it out; for a cache of keys and values call the model with use_cache=False"
                )
        return result

    def _brought_back(self, whole: tuple[Tensor, ...]) -> list[Any]:
        """The inputs as they were; those of the call before this one start on their way."""
        self.store.settle()
        saved = {id(leaf): leaf for leaf in self.kept if isinstance(leaf, Saved)}
        for each in saved.values():
            each.bring()
        tensors = {key: each.take() for key, each in saved.items()}
        before = self.before() if self.before is not None else None
        for each in before.kept if before is not None else ():
            if isinstance(each, Saved) and each.tier.latent:
                each.bring()
        wholes = iter(whole)
        return [next(wholes) if leaf is WHOLE else tensors.get(id(leaf), leaf) for leaf in self.kept]


def _device(leaves: list[Any]) -> torch.device | None:
    """Where the call computes: an accelerator, if any of its tensors is there."""
    devices = [leaf.device for leaf in leaves if isinstance(leaf, Tensor)]
    return next((device for device in devices if device.type != "cpu"), devices[0] if devices else None)


def _parameters(function: Any) -> list[Any]:
    module = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return list(module.parameters()) if isinstance(module, nn.Module) else []


def _contents(value: Any) -> list[int]:
    return [id(tensor) for tensor in tensors_in(value)]


def _recomputed_anyway() -> bool:
    """Whether this call is inside another checkpointed one, which keeps the inputs of both."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == checkpoint.__module__


@contextlib.contextmanager
def _apart(store: Store) -> Iterator[None]:
    """What the store does is none of the model's operations: neither autograd nor a mode that watches them sees it."""
    modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() > 0 else contextlib.nullcontext()
    with torch.no_grad(), modes:
        try:
            yield
        except StorageError as error:
            store.tell(error)
            raise
