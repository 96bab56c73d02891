"""Where a unit's first values come from: the parameters themselves, or, where they are on the meta device, initialisation.

A model on the meta device has shapes and no memory. Its modules' own initialisers are *rehearsed* once, in the order in
which an ordinary construction runs them, each on stand-ins that live for that call only: this tells what each of them writes,
from which random state, and what nobody writes. A unit is then made by running again only the calls that write it. See
docs/design/big-models.md. Knows modules, calls and random states; nothing of shards or ranks beyond whose values count.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .core.parameter import placeholder
from .core.unit import Flat
from .core.wrap import Plan, clean
from .errors import ConfigError

RESETS = ("reset_parameters", "_reset_parameters")  # what torch's own modules call at the end of their construction
# Constructors that draw without a method for it: only the draw matters, so that what comes after gets its own numbers.
INLINE: dict[str, Callable[[Any], Any]] = {
    "transformers.pytorch_utils.Conv1D": lambda module: (
        nn.init.normal_(module.weight, std=0.02),
        nn.init.zeros_(module.bias),
    ),
}
LISTED = 20  # names in one message


class Source(Protocol):
    """Where values come from."""

    def values(self, flat: Flat) -> Sequence[Tensor]:
        """Of each parameter of `flat`, in its shape. Those of rank 0 count; elsewhere they may be placeholders."""

    def buffer(self, buffer: Tensor) -> Tensor:
        """What the model's `buffer` holds from here on; again, rank 0's values count."""


@dataclass(eq=False)
class Call:
    """One initialiser as an ordinary construction calls it.

    shares: it runs after parameters were tied. Otherwise each module still has its own then, and the first one's stays.
    """

    module: nn.Module
    function: Callable[[], Any]
    what: str
    shares: bool
    state: Tensor = field(init=False)  # of the random numbers before it
    writes: set[int] = field(default_factory=set)  # ids of parameters


class Initialised:
    """Values by initialisation for what is on the meta device; what is not keeps its own.

    Args:
        plans: the units to be.
        gives: whether this rank's values count, so that it must make them.
        wanted: ids of the tensors on the meta device that need values; all of them if None.

    Raises:
        ConfigError: a tensor that no initialiser writes, with its name, or an initialiser that fails or reaches into other
            units. The model is as it was; the random state has moved on as by an ordinary construction.
    """

    def __init__(self, model: nn.Module, plans: Sequence[Plan], gives: bool, wanted: set[int] | None = None) -> None:
        self.gives = gives
        self.names = {id(tensor): name for name, tensor in _tensors(model)}
        found = {id(tensor) for _, tensor in _tensors(model) if tensor.is_meta}
        self.wanted = found if wanted is None else wanted
        _refuse_attributes(model)
        self.home = _homes(model, {plan.module for plan in plans if plan.module is not None} | {model})
        self.owner: dict[int, nn.Module] = {}  # parameter -> the first module that holds it
        for module in _parts_first(model):
            for parameter in module._parameters.values():
                self.owner.setdefault(id(parameter), module)
        self.watch = Writes({t.untyped_storage()._cdata: name for name, t in _tensors(model)})
        self.buffers: dict[int, Tensor] = {}
        self.calls = self._rehearse(model) if self.wanted else []

    def values(self, flat: Flat) -> list[Tensor]:
        missing = {id(p) for p in flat.parameters if p.is_meta}
        made: dict[int, Tensor] = {}
        if missing and self.gives:
            resume = torch.get_rng_state()
            for call in self.calls:
                if call.writes & missing:
                    torch.set_rng_state(call.state.clone())  # it takes whole storages only
                    self._run(call, made, missing)
            torch.set_rng_state(resume)
        for parameter in flat.parameters:
            ground(parameter)
        return [made.get(id(p), p).detach() for p in flat.parameters]

    def buffer(self, buffer: Tensor) -> Tensor:
        return self.buffers.get(id(buffer), buffer)

    # ---- running initialisers

    def _rehearse(self, model: nn.Module) -> list[Call]:
        """Run every call that may write what is wanted. Parameters are let go of at once, buffers stay."""
        done, before = [], torch.get_rng_state()
        try:
            calls = [c for c in _calls(model) if any(id(t) in self.wanted for _, t in self._reach(c))]
            # In one block: small ones that stay, each where a stand-in was before, would keep those of the next call out of there.
            states = torch.empty(len(calls), len(before), dtype=before.dtype)
            for call, state in zip(calls, states, strict=True):
                call.state = state.copy_(torch.get_rng_state())
                call.writes = self._run(call, {}, self.wanted)
                if call.writes:
                    done.append(call)
            without = self.wanted - set().union(self.buffers, *(call.writes for call in done))
            if without:
                raise ConfigError(
                    f"{listed(self.names[i] for i in self.names if i in without)}: on the meta device, and no module's reset_parameters() or "
                    "_init_weights() writes it. Give its module a reset_parameters() that does, build that part with values, or load the model "
                    "by weights="
                )
        except BaseException:
            torch.set_rng_state(before)
            raise
        self.watch.model.clear()  # seen to be left alone; as units are made, others get these addresses
        return done

    def _run(self, call: Call, made: dict[int, Tensor], wanted: set[int]) -> set[int]:
        """One call on stand-ins: `made` has those of the parameters that are wanted. The result is which ones it wrote."""
        self.watch.written.clear()
        with self._standing(call, made, wanted) as written, torch.no_grad(), torch.device("cpu"), self.watch:
            try:
                call.function()
            except ConfigError as error:
                raise ConfigError(f"{call.what}: {error}") from None
            except Exception as error:
                raise ConfigError(
                    f"{call.what} failed on a model from the meta device: {type(error).__name__}: {error}. Mend it, or load the model by weights="
                ) from error
        return written

    def _reach(self, call: Call) -> Iterator[tuple[nn.Module, Tensor]]:
        """What a call can write: tensors of its module and of those in it that are not in other units."""
        for module in call.module.modules():
            if self.home[module] is self.home[call.module]:
                for tensor in (*module._parameters.values(), *module._buffers.values()):
                    if tensor is not None:
                        yield module, tensor

    @contextmanager
    def _standing(self, call: Call, made: dict[int, Tensor], wanted: set[int]) -> Iterator[set[int]]:
        """Inside, all that the call can write is on the host, and nothing of it is the model's own."""
        modules = list(dict.fromkeys(module for module, _ in self._reach(call)))
        before = [(module, dict(module._parameters), dict(module._buffers)) for module in modules]
        written: set[int] = set()
        placed: list[tuple[dict[str, Any], str, int, Any, dict[int, Tensor]]] = []
        for module, parameters, buffers in before:
            for key, parameter in parameters.items():
                if parameter is not None:
                    first = call.shares or self.owner[id(parameter)] is module
                    keeps = made if id(parameter) in wanted and first else {}
                    if id(parameter) not in keeps:
                        keeps[id(parameter)] = _stand_in(parameter)
                    stand = module._parameters[key] = keeps[id(parameter)]  # type: ignore[assignment]
                    placed.append((module._parameters, key, id(parameter), stand, keeps))
            for key, buffer in buffers.items():
                if buffer is not None:
                    keeps = self.buffers if id(buffer) in wanted else {}
                    stand = module._buffers[key] = keeps.get(id(buffer), _stand_in(self.buffer(buffer)))
                    placed.append((module._buffers, key, id(buffer), stand, keeps))
        try:
            yield written
            for tensors, key, number, stand, keeps in placed:
                now = tensors.get(key)  # another one perhaps
                if now is not None and (now is not stand or now.untyped_storage()._cdata in self.watch.written):
                    keeps[number] = now
                    if keeps is made:
                        written.add(number)
        finally:
            for module, parameters, buffers in before:
                module._parameters.clear()
                module._parameters.update(parameters)
                module._buffers.clear()
                module._buffers.update(buffers)


class Writes(TorchDispatchMode):
    """Notes which storages are written, and refuses writes to those of the model itself."""

    def __init__(self, model: dict[int, str]) -> None:
        super().__init__()
        self.model, self.written = model, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in given if isinstance(given, (list, tuple)) else [given]:
                    if isinstance(tensor, Tensor):
                        self._note(tensor.untyped_storage()._cdata)
        return func(*args, **kwargs)

    def _note(self, storage: int) -> None:
        if storage in self.model:
            raise ConfigError(
                f"it writes {self.model[storage]!r}, which is in another unit and is not here when this one is initialised. Put both into one unit "
                "by units=, or write each from its own module's reset_parameters()"
            )
        self.written.add(storage)


# ---- which initialisers there are, and in which order


def _calls(model: nn.Module) -> Iterator[Call]:
    """The initialisers of a model in the order of an ordinary construction: parts first, then the whole."""
    names = {module: clean(name) or "the model" for name, module in model.named_modules()}
    initialised: set[nn.Module] = set()
    for module in _parts_first(model):
        kind = type(module)
        reset = next((name for name in RESETS if hasattr(kind, name)), None)
        inline = INLINE.get(f"{kind.__module__}.{kind.__qualname__}")
        if reset is not None:
            yield Call(module, getattr(module, reset), f"{reset}() of {names[module]!r}", False)
        elif inline is not None:
            yield Call(module, functools.partial(inline, module), f"the constructor of {names[module]!r}", False)
        each = getattr(module, "_init_weights", None) if hasattr(kind, "_init_weights") else None
        if each is None or not _takes_one(each):
            continue
        # Transformers initialises each module once, by the innermost model around it, and ties parameters after that.
        once = hasattr(kind, "_initialize_weights")
        for part in _parts_first(module):
            if not (once and part in initialised):
                initialised.add(part)
                what = f"_init_weights() of {names[module]!r} for {names[part]!r}"
                yield Call(part, functools.partial(each, part), what, not once)


def _takes_one(function: Callable[..., Any]) -> bool:
    """Whether it is called with a module, as by `model.apply`."""
    needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    return len(needed) == 1


def _parts_first(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    """All modules, each once and after those in it."""
    seen = set() if seen is None else seen
    for child in module.children():
        if child not in seen:
            yield from _parts_first(child, seen)
    seen.add(module)
    yield module


def _homes(model: nn.Module, units: set[nn.Module]) -> dict[nn.Module, nn.Module]:
    """Module -> the nearest one around it that is a unit."""
    home: dict[nn.Module, nn.Module] = {}

    def walk(module: nn.Module, current: nn.Module) -> None:
        current = module if module in units else current
        if module not in home:
            home[module] = current
            for child in module.children():
                walk(child, current)

    walk(model, model)
    return home


# ---- tensors


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, each once, by name."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield clean(name), tensor


def _refuse_attributes(model: nn.Module) -> None:
    stray = [
        f"{clean(name)}.{key}" if name else key
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_meta
    ]
    if stray:
        raise ConfigError(
            f"{listed(stray)}: a plain attribute on the meta device, which nothing gives values to; make it a buffer (register_buffer) that "
            "reset_parameters() writes, or give the attribute values before shard()"
        )


def _stand_in(tensor: Tensor) -> Tensor:
    """Space for values on the host; with values where there are some."""
    made = host_space(tensor) if tensor.is_meta else tensor.detach().clone()
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def host_space(tensor: Tensor) -> Tensor:
    """Room on the host for a tensor of this form; its contents are arbitrary."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")


def ground(parameter: nn.Parameter) -> None:
    """A parameter on the meta device becomes one on the host, the same object, that still has no memory.

    Assigning `.data` cannot do that, so the tensor inside the object is exchanged, as torch.utils.swap_tensors does; its class,
    attributes and weak references stay with the object, its hooks are told of the new tensor.
    """
    if not parameter.is_meta:
        return
    size = parameter.size()
    one = torch.empty(1, dtype=parameter.dtype, device="cpu")
    hole = placeholder(one).as_strided(size, (0,) * len(size))
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(parameter, nn.Parameter(hole, parameter.requires_grad))
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks


def listed(names: Iterator[str] | Sequence[str]) -> str:
    """Names for a message, the first few of many."""
    shown = [repr(name) for name in names]
    return ", ".join(shown[:LISTED]) + (f" and {len(shown) - LISTED} more" if len(shown) > LISTED else "")
