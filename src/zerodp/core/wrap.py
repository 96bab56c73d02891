"""Which parameters travel together: the rule that turns a model into units, and its checks. Pure bookkeeping on modules."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..config import AUTO, Config
from ..errors import ConfigError
from .local import block_of, local_of
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


def choose_modules(model: nn.Module, units: Any) -> dict[str, nn.Module]:
    """Name -> module of every unit but the root."""
    named = {name: module for name, module in model.named_modules() if name}
    if units is None:
        return automatic(model)
    if callable(units) and not isinstance(units, tuple):
        return {name: module for name, module in named.items() if units(name, module)}
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
                f"units: the model has no module like {what}; it has {', '.join(sorted({type(m).__name__ for m in named.values()}))}"
            )
        chosen.update(hits)
    return {name: module for name, module in named.items() if name in chosen}


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
        and not any(module.children())
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


def check_model(model: nn.Module) -> None:
    """What no layout can hold is refused by name."""
    mesh = tensor_mesh(model)
    for name, buffer in model.named_buffers():
        _check_placements(name, buffer, mesh)
        if isinstance(buffer, DTensor) and any(placement.is_shard() for placement in buffer.placements):
            raise ConfigError(
                f"buffer {name!r} is a DTensor with placements {buffer.placements}; buffers must be whole on every rank, Replicate()"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(
                f"parameter {name!r} is uninitialized (a lazy module): run one forward pass before shard()"
            )
        held = local_of(parameter)
        if held.layout.__str__() != "torch.strided" or type(held).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise ConfigError(
                f"parameter {name!r} is a {type(parameter).__name__}; only dense torch.nn.Parameters can be sharded"
            )
        _check_placements(name, parameter, mesh)
        if parameter.dtype.is_complex:
            raise ConfigError(f"parameter {name!r} is complex; store its real and imaginary parts as two parameters")
        if not _dense(held):
            raise ConfigError(
                f"parameter {name!r} of shape {tuple(held.shape)} has strides {held.stride()}, which overlap or leave gaps; "
                "make it from a contiguous tensor"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"module {name!r} gives sparse gradients, which cannot be reduced here; build it with sparse=False"
            )


def tensor_mesh(model: nn.Module) -> DeviceMesh | None:
    """The mesh over which parameters of `model` are DTensors, if some are; `check_model` sees that there is one only."""
    return next((t.device_mesh for t in (*model.parameters(), *model.buffers()) if isinstance(t, DTensor)), None)


def _check_placements(name: str, tensor: Tensor, mesh: DeviceMesh | None) -> None:
    """A DTensor must be whole tensors, or blocks of them, over the one mesh of all."""
    if not isinstance(tensor, DTensor):
        return
    odd = [placement for placement in tensor.placements if type(placement) not in (Shard, Replicate)]
    if odd:
        raise ConfigError(
            f"{name!r} is a DTensor with placement {odd[0]!r}; parameters can be Shard(dim) or Replicate() over the tensor-parallel mesh: "
            "redistribute it before shard()"
        )
    if tensor.device_mesh != mesh:
        raise ConfigError(
            f"{name!r} is a DTensor over mesh dims {tensor.device_mesh.mesh_dim_names}, others are over {mesh.mesh_dim_names if mesh else None}; "
            "put all on one mesh, with Replicate() over the dims that do not split them"
        )
    sizes, _ = block_of(tensor)
    if tuple(sizes) != tuple(local_of(tensor).shape):
        raise ConfigError(
            f"{name!r} is a DTensor whose local tensor has shape {tuple(local_of(tensor).shape)}, expected {tuple(sizes)} by its placements "
            f"{tensor.placements}; make it by distribute_tensor"
        )


def _dense(parameter: Tensor) -> bool:
    """Whether the elements fill one block of memory, in whatever order of dims."""
    expected = 1
    for stride, size in sorted((st, n) for st, n in zip(parameter.stride(), parameter.shape, strict=True) if n != 1):
        if stride != expected:
            return parameter.numel() == 0
        expected *= size
    return True


Rule = Callable[[str, nn.Module], bool]
