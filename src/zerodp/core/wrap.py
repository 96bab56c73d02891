"""Which parameters travel together: the rule that turns a model into units. Pure bookkeeping on modules."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..config import AUTO, Config
from ..errors import ConfigError
from .stages import STAGES, WHOLE, Residency

ROOT, IGNORED = "(root)", "(ignored)"
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
SMALL_BLOCK = 2**14  # repeated leaf modules below this many elements are not worth a collective of their own


@dataclass(frozen=True)
class Plan:
    """One unit to be: its module (None for parameters picked by name), its own parameters, and where its state rests."""

    name: str
    module: nn.Module | None
    parameters: list[tuple[str, nn.Parameter, nn.Module]]  # name, parameter, the module that holds it
    residency: Residency


def plan_units(model: nn.Module, config: Config) -> list[Plan]:
    """The units of `model`, the root first, then in registration order. Every parameter is in exactly one.

    Raises:
        ConfigError: a pattern of `units`, `ignore` or `stage` that names nothing.
    """
    chosen = choose_modules(model, config.units)
    owner: dict[str, str] = {}  # module name -> the unit it belongs to
    owned: dict[str, list[tuple[str, nn.Parameter, nn.Module]]] = {
        ROOT: [],
        **{name: [] for name in chosen},
        IGNORED: [],
    }
    seen: set[int] = set()
    matched: set[str] = set()
    for module_name, module in model.named_modules():
        parent = module_name.rpartition(".")[0]
        owner[module_name] = module_name if module_name in chosen else owner.get(parent, ROOT)
        for key, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{module_name}.{key}" if module_name else key
            hits = [pattern for pattern in config.ignore if fnmatch.fnmatchcase(name, pattern)]
            matched.update(hits)
            unit = IGNORED if hits or parameter.numel() < config.ignore_below else owner[module_name]
            owned[unit].append((clean(name), parameter, module))
    unmatched = [pattern for pattern in config.ignore if pattern not in matched]
    if unmatched:
        raise ConfigError(
            f"ignore: no parameter is named like {unmatched[0]!r}; the model has {', '.join(list(owned_names(owned))[:6])}, ..."
        )
    modules = {ROOT: model, **chosen, IGNORED: None}
    stages = residencies(config, [name for name, parameters in owned.items() if parameters and name != IGNORED])
    stages[IGNORED] = WHOLE  # replicated and averaged
    return [
        Plan(clean(name), modules[name], parameters, stages[name]) for name, parameters in owned.items() if parameters
    ]


def owned_names(owned: dict[str, list[tuple[str, nn.Parameter, nn.Module]]]) -> list[str]:
    return [name for parameters in owned.values() for name, _, _ in parameters]


def clean(name: str) -> str:
    """A module or parameter name without what torch.compile and checkpoint wrappers put into it."""
    parts = [part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module")]
    return ".".join(parts)


def residencies(config: Config, names: Sequence[str]) -> dict[str, Residency]:
    """The stage of each unit; the first pattern that fits decides, '*' comes last."""
    stage = max(STAGES) if config.stage == AUTO else config.stage  # until the ranks have agreed on one
    if not isinstance(stage, dict):
        return dict.fromkeys(names, STAGES[stage])  # type: ignore[index]
    found = {}
    used = set()
    patterns = [p for p in stage if p != "*"] + ["*"]
    for name in names:
        pattern = next(p for p in patterns if p == "*" or fnmatch.fnmatchcase(clean(name), p))
        used.add(pattern)
        found[name] = STAGES[stage[pattern]]
    unmatched = [p for p in patterns if p != "*" and p not in used]
    if unmatched:
        raise ConfigError(f"stage: no unit is named like {unmatched[0]!r}; the units are {', '.join(map(repr, names))}")
    return found


def choose_modules(model: nn.Module, units: Any, option: str = "units") -> dict[str, nn.Module]:
    """Name -> module of every unit but the root. `option` is what the user calls the choice.

    Raises:
        ConfigError: a pattern that names nothing, or a function that fails.
    """
    named = {name: module for name, module in model.named_modules() if name}
    if units is None:
        return automatic(model)
    if callable(units) and not isinstance(units, tuple):
        return {name: module for name, module in named.items() if _chooses(units, name, module, option)}
    chosen: dict[str, nn.Module] = {}
    for item in units:
        hits = {
            n: m
            for n, m in named.items()
            if (isinstance(m, item) if isinstance(item, type) else fnmatch.fnmatchcase(clean(n), item))
        }
        if not hits and not (isinstance(item, type) and isinstance(model, item)):
            what = item.__name__ if isinstance(item, type) else repr(item)
            raise ConfigError(
                f"{option}: the model has no module like {what}; it has {', '.join(sorted({type(m).__name__ for m in named.values()}))}"
            )
        chosen.update(hits)
    return {name: module for name, module in named.items() if name in chosen}


def _chooses(units: Any, name: str, module: nn.Module, option: str) -> bool:
    try:
        return bool(units(name, module))
    except Exception as error:  # the other ranks must hear of it
        raise ConfigError(
            f"{option}: the given function failed at module {name!r}: {type(error).__name__}: {error}"
        ) from error


def automatic(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks, large embeddings and heads apart, the rest together with the root.

    A block is a child of a list or sequence that has a sibling of its class, outermost first. A leaf outside the blocks with
    at least half as many elements as the largest block (or 2^20 where there are no blocks) is apart. So is, wherever it stands, a
    module that says `travels_alone`, such as a tile of `zerodp.TiledLinear`.
    """
    blocks: dict[str, nn.Module] = {}

    def look(prefix: str, module: nn.Module) -> None:
        repeated = Counter(type(child) for child in module.children()) if isinstance(module, CONTAINERS) else Counter()
        for key, child in module.named_children():
            name = f"{prefix}.{key}" if prefix else key
            if _alone(child):
                continue
            if repeated[type(child)] > 1 and not isinstance(child, CONTAINERS) and _worth_it(child):
                blocks[name] = child
            else:
                look(name, child)

    look("", model)
    inside = {id(m) for block in blocks.values() for m in block.modules()}
    threshold = max((_numel(block) for block in blocks.values()), default=2**21) // 2
    large = {
        name: module
        for name, module in model.named_modules()
        if name
        and id(module) not in inside
        and next(module.children(), None) is None
        and sum(p.numel() for p in module._parameters.values() if p is not None) >= threshold
    }
    return {
        name: module
        for name, module in model.named_modules()
        if name in blocks or name in large or (name and _alone(module))
    }


def _alone(module: nn.Module) -> bool:
    return getattr(module, "travels_alone", False) is True


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _worth_it(module: nn.Module) -> bool:
    numel = _numel(module)
    return numel >= SMALL_BLOCK if not any(True for _ in module.children()) else numel > 0


def tensor_mesh(model: nn.Module) -> DeviceMesh | None:
    """The mesh over which parameters of `model` are DTensors, if some are; `check_model` sees that there is one only."""
    return next((t.device_mesh for t in (*model.parameters(), *model.buffers()) if isinstance(t, DTensor)), None)


Rule = Callable[[str, nn.Module], bool]
