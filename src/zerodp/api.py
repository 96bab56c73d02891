"""`shard()`: wires the pieces together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .checkpoint.weights import Weights
from .config import AUTO, Config
from .core import mesh as meshes
from .core import module, optimizer_state, wrap
from .core.arena import Arena
from .core.comm import Comm, gather_objects
from .core.control import share_verdict, spread, told
from .core.local import local_of
from .core.module import ShardedModule
from .core.optimizer import Engine, ShardedOptimizer
from .core.precision import LossScaler, by_dtypes
from .core.reducer import Reducer
from .core.runtime import Runtime
from .core.unit import Flat, Unit
from .elementwise import check_elementwise, num_moments
from .errors import ConfigError, RankMismatchError, ZeroError
from .materialise import Initialised, Source
from .offload.capacity import check_capacity
from .offload.places import Places
from .planning import automatic
from .residual.activations import Blocks, blocks_of
from .shardable import check_model


@torch.inference_mode(False)  # what is made here must be trainable
def shard(model: nn.Module, optimizer: Any = None, config: Config | None = None, **options: Any) -> tuple[Any, Any]:
    """Shard `model` and `optimizer` over the ranks of the process group, in place (a collective).

    Args:
        model: any module on the CPU, the training device or the meta device; rank 0's values are taken on all ranks. What is
            on the meta device is initialised or read from `weights`, unit by unit; see docs/big-models.md.
        optimizer: an elementwise torch optimizer over parameters of `model`, or None (a teacher, inference).
        config: a `zerodp.Config`; `options` override its fields by name.

    Returns:
        The same model object, whose class gains `ShardedModule`, and the same optimizer object, whose class gains
        `ShardedOptimizer` (or None).

    Raises:
        ConfigError: a setting, model or optimizer that cannot work; CheckpointError: `weights` that do not fit the model;
            RankMismatchError: ranks that came with different ones. On every rank alike, before anything is changed.
    """
    problem: ZeroError | None = None
    try:
        settings = Config.of(config, options)
    except ConfigError as error:
        settings, problem = Config(mesh=options.get("mesh", getattr(config, "mesh", None))), error
    tensor_mesh = wrap.tensor_mesh(model) if isinstance(model, nn.Module) else None
    _meet(settings.mesh)
    mesh, wrong_mesh = meshes.resolve(settings.mesh, settings.device, tensor_mesh)
    problem, facts, blocks = problem or wrong_mesh, [], None
    if problem is None:
        try:
            plans = _check(model, optimizer, settings)
            source = _source(model, plans, settings, mesh.data.rank == 0)
            blocks = blocks_of(model, settings)
            facts = [*_facts(settings, plans, optimizer), *(blocks.facts if blocks else ())]
        except ZeroError as error:
            problem = error
        except Exception as error:  # of a function or class of the user's; the other ranks must hear of it
            problem = ZeroError(f"shard() failed: {type(error).__name__}: {error}")
            problem.__cause__ = error
    comm = Comm(mesh, exact=mesh.backend != "nccl", check=settings.check)
    share_verdict(comm.exchange_objects(told(problem), "the other ranks' shard()"), problem)
    _compare(comm.exchange_objects(facts, "the other ranks' shard()"))
    comm.mesh = meshes.connect(mesh)
    if settings.exact is not None:
        comm.exact = settings.exact
    device = _device(settings, mesh.device_type, model)
    if settings.stage == AUTO:
        plans = automatic.choose(model, optimizer, plans, settings, device, comm)
    return assemble(model, optimizer, settings, plans, source, comm, Arena(device, beside_activations=True), blocks)


def _meet(mesh: Any) -> None:
    """Fails at once where a rank is gone; making new process groups would wait for it until the time limit."""
    group = meshes.meeting(mesh)
    if group is None or "gloo" not in str(dist.get_backend_config(group)):
        return
    try:
        gather_objects(None, group)
    except RuntimeError as error:
        raise ZeroError(
            f"rank {dist.get_rank()}: another rank ended before it came to shard(), or the process group's time limit passed. Look at the "
            f"other ranks' own errors first. ({str(error).splitlines()[0][:200]})"
        ) from error


def _check(model: nn.Module, optimizer: Any, config: Config) -> list[wrap.Plan]:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"shard: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, ShardedModule):
        raise ConfigError("shard: this model is sharded already; zerodp.unshard(model) undoes it")
    if any(isinstance(part, ShardedModule) for part in model.modules()):
        raise ConfigError("shard: a part of this model is sharded already; shard the whole model once")
    check_model(model)
    plans = wrap.plan_units(model, config)
    if config.offload.params != "device" and not any(plan.residency.shards_parameters for plan in plans):
        raise ConfigError(
            f"offload: params={config.offload.params!r} needs stage 3, for at least one unit: in the stages below every rank keeps whole parameters "
            "on the device, which is what they save time with; use stage=3, or offload the optimizer alone"
        )
    if not plans:
        raise ConfigError("shard: the model has no parameters")
    if optimizer is not None:
        _check_optimizer(model, optimizer)
    return plans


def _source(model: nn.Module, plans: list[wrap.Plan], config: Config, gives: bool) -> Source:
    """Where values come from; what has none and gets none is found here."""
    meta = [name for name, p in model.named_parameters() if isinstance(p, DTensor) and p.is_meta]
    if meta:
        raise ConfigError(
            f"parameter {meta[0]!r} is a DTensor on the meta device, whose parts nothing here can initialise; build the model with values before "
            "parallelize_module"
        )
    if config.weights is not None:
        return Weights(config.weights, model, plans, gives)
    return Initialised(model, plans, gives)


def _check_optimizer(model: nn.Module, optimizer: Any) -> None:
    if isinstance(optimizer, ShardedOptimizer):
        raise ConfigError("shard: this optimizer is sharded already")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"shard: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    known = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ConfigError(
                    f"shard: parameter group {number} of the optimizer holds a tensor of shape {tuple(parameter.shape)} that is no parameter of "
                    "the model; build the optimizer over model.parameters() of the model that is sharded"
                )
    for state in optimizer.state.values():
        if any(isinstance(value, torch.Tensor) and value.is_meta for value in state.values()):
            raise ConfigError(
                f"shard: {type(optimizer).__name__} made state on the meta device when it was built, which has no values; build the model with "
                "values for this optimizer, or choose one that makes its state at the first step"
            )
    check_elementwise(optimizer)


def _facts(config: Config, plans: list[wrap.Plan], optimizer: Any) -> list[str]:
    """What must be the same on all ranks, in words."""
    facts = [
        f"{name}={getattr(config, name)!r}"
        for name in (
            "stage",
            "precision",
            "reduction",
            "exact",
            "unsharded_bytes",
            "prefetch",
            "bucket_bytes",
            "weights",
            "check",
        )
    ]
    facts.append(
        f"offload={dataclasses.replace(config.offload, path=None)!r}"
    )  # each machine may have a folder of its own
    for plan in plans:
        facts += [
            f"unit {plan.name!r}: {name} {tuple(p.shape)} {p.dtype} trainable={p.requires_grad}{_placements(p)}"
            for name, p, _ in plan.parameters
        ]
    if optimizer is not None:
        names = {id(p): name for plan in plans for name, p, _ in plan.parameters}
        for number, group in enumerate(optimizer.param_groups):
            facts.append(f"{type(optimizer).__name__} group {number}: {[names[id(p)] for p in group['params']]}")
    return facts


def _placements(parameter: nn.Parameter) -> str:
    return f" {parameter.placements}" if isinstance(parameter, DTensor) else ""


def _compare(everyone: list[list[str]]) -> None:
    for rank, facts in enumerate(everyone):
        if facts != everyone[0]:
            a, b = next(
                ((a, b) for a, b in zip([*everyone[0], "nothing"], [*facts, "nothing"], strict=False) if a != b),
                ("nothing", "more"),
            )
            raise RankMismatchError(f"shard() was called differently: rank 0 has {a}; rank {rank} has {b}")


def assemble(
    model: nn.Module,
    optimizer: Any,
    config: Config,
    plans: list[wrap.Plan],
    source: Source,
    comm: Comm,
    arena: Arena,
    blocks: Blocks | None = None,
) -> tuple[Any, Any]:
    """Everything after the checks: what `shard` returns, over these ranks and in this memory."""
    scaler = LossScaler(config.precision)
    reducer = Reducer(
        arena, comm, config.reduction == "mean", config.precision.reduce_dtype if config.precision else None
    )
    flats = [_flats(plan, config, comm) for plan in plans]
    places = _places(model, optimizer, config, [flat for of_unit in flats for flat in of_unit], comm, arena.device)
    units = [Unit(plan.name, index, plan.module, flats[index]) for index, plan in enumerate(plans)]
    names = {module: name for name, module in model.named_modules()}
    runtime = Runtime(units, arena, comm, reducer, names, config)
    runtime.places = places
    plain = _plain_optimizer(optimizer)
    for unit in units:
        unit.runtime = runtime
        for flat in unit.flats:
            flat.fill(arena, comm, source.values(flat))
    _buffers(model, config, source, runtime)
    model.__class__ = type(type(model).__name__, (ShardedModule, type(model)), {"__module__": type(model).__module__})
    model._zerodp = runtime  # type: ignore[assignment]
    runtime.hooks = module.install(model, runtime, config.precision)
    if blocks is not None:
        blocks.apply()
        runtime.hooks.append(blocks)
    runtime.optimizer = None
    if optimizer is not None:
        runtime.optimizer = _take_optimizer(optimizer, plain, runtime, scaler)
    arena.clear()
    comm.rows.clear()  # counting begins with the first pass
    return model, runtime.optimizer


def _flats(plan: wrap.Plan, config: Config, comm: Comm) -> list[Flat]:
    """One flat per (dtypes, trainable)."""
    kinds = by_dtypes(plan.parameters, config.precision)
    ranks = comm.mesh.place(plan.residency.shards_optimizer)[0].size
    max_bytes = config.bucket_bytes_on(comm.mesh.backend, ranks)
    return [Flat(named, dtypes, plan.residency, comm.mesh, max_bytes) for (dtypes, _), named in kinds.items()]


def _places(
    model: nn.Module, optimizer: Any, config: Config, flats: list[Flat], comm: Comm, device: torch.device
) -> Places:
    """Decide where each piece rests, and see on all ranks that there is room for it."""
    places = Places(config.offload, device, lambda error: spread(error, [comm]))
    needs, said = dict[str, int](), list[Any]()

    def on_all(action: Callable[[], None]) -> None:
        problem: ZeroError | None = None
        try:
            action()
        except ZeroError as error:
            problem = error
        if config.offload.moves_states:
            share_verdict(comm.exchange_objects(told(problem), "the other ranks' shard()"), problem)

    def settle() -> None:
        moments = num_moments(optimizer) if optimizer is not None and config.offload.moves_states else 0
        needs.update(places.settle(flats, moments))
        said.extend(places.report(needs))

    on_all(settle)
    if config.offload.moves_states:
        share_verdict([told(check_capacity(comm.exchange_objects(said, "the other ranks' shard()")))], None)
        on_all(lambda: places.claim(needs))
    return places


def _device(config: Config, device_type: str, model: nn.Module) -> torch.device:
    if config.device is not None:
        return config.device
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def _buffers(model: nn.Module, config: Config, source: Source, runtime: Runtime) -> None:
    """Rank 0's buffers on all ranks, on the device, in the dtype asked for."""
    wanted = config.precision.buffer_dtype if config.precision is not None else None
    for holder in model.modules():
        for key, buffer in holder._buffers.items():
            if buffer is None:
                continue
            buffer = source.buffer(buffer).to(runtime.arena.device)
            sent = local_of(buffer).contiguous()
            runtime.comm.broadcast(sent, "(buffers)", runtime.comm.mesh.world)
            local_of(buffer).copy_(sent)
            if wanted is not None and buffer.is_floating_point() and buffer.dtype != wanted:
                runtime.buffers.append((holder, key, buffer.dtype))
                buffer = buffer.to(wanted)
            holder._buffers[key] = buffer


# ---- the optimizer


def _plain_optimizer(optimizer: Any) -> Any:
    """Its groups' parameters and its state, before the parameters are sharded."""
    if optimizer is None:
        return None
    return [list(group["params"]) for group in optimizer.param_groups], dict(optimizer.state)


def _take_optimizer(optimizer: Any, plain: Any, runtime: Runtime, scaler: LossScaler) -> ShardedOptimizer:
    """The user's optimizer object over this rank's segments. Its groups stay the same dicts, so schedulers keep them."""
    groups, states = plain
    wrapped = optimizer.__dict__.pop("step", None)  # an LR scheduler's wrapper around the plain step
    optimizer.__class__ = type(
        type(optimizer).__name__, (ShardedOptimizer, type(optimizer)), {"__module__": type(optimizer).__module__}
    )
    engine = optimizer._zerodp = Engine(runtime, scaler, optimizer.state)
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        members = optimizer._members(parameters)
        group["params"] = [segment for member in members for segment in engine.segments_of(*member)]
        if "param_names" in group:
            group["param_names"] = [segment.full_name for segment in group["params"]]
        engine.members.append(members)
    optimizer.state.clear()
    optimizer_state.from_plain(optimizer, states)
    if getattr(wrapped, "_wrapped_by_lr_sched", False):
        optimizer.step = _Stepper(optimizer)
    return optimizer  # type: ignore[no-any-return]


class _Stepper:
    """Stands where an LR scheduler put its own wrapper, which it looks for; our step keeps the books it kept."""

    _wrapped_by_lr_sched = True

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self.__self__, self.__func__ = optimizer, type(optimizer).step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)
