"""Whole values outside passes: full parameters, gradients and state dicts, and the way back into the shards.

Everything here is a collective: all ranks must call it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..agreement import require_same, values_of
from ..errors import CheckpointError, ConfigError, ShardedError
from ..offload.home import GRADIENT, MASTER, Home, walk
from .bits import checksum, differing, same_bits, same_values
from .buffers import kept_buffers, original_buffers, rank0_buffers
from .control import Kind
from .layout import Segment
from .local import local_of
from .runtime import Runtime
from .unit import Cut, Flat, Unit

Slice = slice


def runtime_of(model: nn.Module) -> Runtime:
    runtime = getattr(model, "_zerodp", None)
    if not isinstance(runtime, Runtime):
        raise ConfigError(f"expected a model that zerodp.shard returned, got a {type(model).__name__}")
    return runtime


def _units_of(target: nn.Module | Iterable[nn.Module]) -> tuple[Runtime, list[Unit], bool]:
    """(runtime, the units that hold the parameters of these modules, whether these are all)."""
    modules = [target] if isinstance(target, nn.Module) else list(target)
    parameters = [p for module in modules for p in module.parameters()]
    wheres = [p._zerodp for p in parameters if hasattr(p, "_zerodp")]
    if not wheres or len(wheres) != len(parameters):
        raise ConfigError("full_params: expected a model that zerodp.shard returned, or modules of it")
    runtime = wheres[0].flat.unit.runtime
    found = {where.flat.unit.index for where in wheres}
    return runtime, [u for u in runtime.units if u.index in found], len(found) == len(runtime.units)


@contextlib.contextmanager
def full_params(model_or_modules: nn.Module | Iterable[nn.Module], write: bool = False) -> Iterator[None]:
    """Full parameters on every rank inside; forward runs without collectives, so generation may differ in length.

    With `write=True` what rank 0 has at the end is kept: it reaches the shards and masters, whose bits stay as they are
    where nothing was edited.

    Raises:
        ShardedError: an edit without `write=True` (on every rank; the values are as before), or a call inside a pass.
    """
    runtime, units, everything = _units_of(model_or_modules)
    runtime.require_idle("full_params()")
    runtime.lending.take_back()
    runtime.lending.before_change()  # where parameters stay whole, an edit changes the shards at once
    runtime.control.require(Kind.FULL)
    if write and runtime.places.delay.behind:
        runtime.places.delay.publish()
        runtime.changed()  # or an update that forward does not have yet would look like an edit
    if write and any(unit.opened for unit in units):
        raise ShardedError(
            "full_params(write=True) inside another full_params() of the same parameters: ask for write=True on the outer one"
        )
    brought = [unit for unit in units if not unit.opened]
    for unit in brought:
        if unit.pages and not unit.present:
            unit.launch()
    for unit in units:
        unit.show()
        runtime.edits.forget(unit)
        unit.holders += 1
        unit.opened += 1
    flats = [flat for unit in brought for flat in unit.flats]
    before = [] if write else [Before(flat) for flat in flats]
    runtime.open += everything
    failing = True
    try:
        yield
        failing = False
    finally:
        runtime.open -= everything
        for unit in units:
            unit.holders -= 1
            unit.opened -= 1
        if runtime.comm.broken is None and write:
            _keep(runtime, brought)
        elif runtime.comm.broken is None:
            _drop(runtime, brought, before, failing)


def _keep(runtime: Runtime, units: list[Unit]) -> None:
    """Rank 0's edits into the shards of all ranks."""
    runtime.lending.before_change()
    for unit in units:
        for flat in unit.flats:
            commit(runtime, flat, _page(flat))
            flat.changed()
    runtime.lending.note()
    for unit in [*runtime.pager.cache.clear(), *units]:
        unit.free()


class Before:
    """What a flat was when it was opened for reading, so that an edit is seen and undone."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.versions = [p._version for p in flat.parameters]
        self.sums = [checksum(view) for view in _page(flat).views]
        # Where parameters stay whole this rank's part of them may be the master itself.
        self.own = [parts[flat.group.rank].clone() for parts in _page(flat).parts] if flat.full is not None else []

    def edited(self) -> str | None:
        """The first parameter that was edited: seen by its version, or (made through .data) by its values."""
        now = zip(self.flat.names, self.flat.parameters, _page(self.flat).views, self.versions, self.sums, strict=True)
        return next((n for n, p, view, version, s in now if p._version != version or checksum(view) != s), None)

    def restore(self, runtime: Runtime) -> None:
        if self.flat.full is not None:
            for parts, before in zip(self.flat.full.parts, self.own, strict=True):
                parts[self.flat.group.rank].copy_(before)
            for handle in self.flat.gather_into(self.flat.full, runtime.comm):
                handle.wait()


def _drop(runtime: Runtime, units: list[Unit], before: list[Before], failing: bool) -> None:
    """Give the pages back, and refuse edits."""
    edited = next((name for one in before if (name := one.edited()) is not None), None)
    said = runtime.comm.exchange_objects(edited, "the end of full_params()")
    edited = next((name for name in said if name is not None), None)
    if edited is not None:
        for one in before:
            one.restore(runtime)
    for unit in units:
        if edited is not None:
            runtime.pager.cache.forget(unit)
        if unit.kept:
            unit.hide()
        else:
            unit.free()
    if edited is not None and not failing:
        raise ShardedError(
            f"parameter {edited!r} was edited inside full_params() without write=True; the edit is dropped"
        )


def _page(flat: Flat) -> Cut:
    page = flat.page
    assert page is not None, "full_params gathers before it looks"
    return page


def commit(runtime: Runtime, flat: Flat, page: Cut) -> None:
    """Rank 0's `page` into the shards; elements that equal what the shard casts to keep the shard's bits."""
    flat.agree(page.whole, runtime.comm)
    for home in walk(flat.homes, (MASTER,), (MASTER,)):
        new, mine = page.parts[home.piece][flat.group.rank], flat.master[home.piece]
        if new.data_ptr() != mine.data_ptr():
            new = new.to(mine.device)
            old = mine.to(new.dtype)
            mine.copy_(torch.where(differing(old, new), new.to(mine.dtype), mine))
            home.source.publish()


# ---- state dicts


def whole_values(runtime: Runtime, flat: Flat) -> list[Tensor]:
    """Local tensors of one flat, each in the dtype it had before `shard()`, from the masters (a collective)."""
    if flat.full is not None and all(home.source.is_master and home.source.is_page for home in flat.homes):
        flat.wait()
        whole = flat.cut(flat.full.whole.clone())
    else:
        whole = flat.cut(torch.empty(flat.layout.padded_numel, dtype=flat.shard_dtype, device=runtime.arena.device))
        for handle in flat.gather_into(whole, runtime.comm, masters=True):
            handle.wait()
    return [view.to(dtype) for view, dtype in zip(whole.views, flat.original_dtypes, strict=True)]


def full_values(runtime: Runtime, flat: Flat) -> Iterator[Tensor]:
    """`whole_values` as the whole tensors that tensor-parallel ranks hold parts of (a collective)."""
    for one, value in zip(flat.locals, whole_values(runtime, flat), strict=True):
        yield one.full(value, runtime.comm, flat.unit.name)


@contextlib.contextmanager
def whole(runtime: Runtime) -> Iterator[None]:
    """Inside, parameters (and floating-point buffers) are ordinary again, full and in their original dtypes."""
    runtime.require_idle("state_dict()")
    runtime.lending.take_back()
    runtime.control.require(Kind.STATE)
    for flat in runtime.flats():
        flat.replace(whole_values(runtime, flat))
    with original_buffers(runtime):
        try:
            yield
        finally:
            for flat in runtime.flats():
                flat.restore(flat.unit.visible)
                runtime.edits.forget(flat.unit)
            runtime.rearm()


def undress(runtime: Runtime, state_dict: dict[str, Any]) -> None:
    """Whole tensors in place of DTensors (a collective)."""
    for key, value in state_dict.items():
        if isinstance(value, DTensor):
            state_dict[key] = runtime.comm.full(value, key)


def _dressed(runtime: Runtime, state_dict: Any) -> Any:
    """This rank's parts of whole tensors, as DTensors, where the model has those."""
    dressed = copy.copy(state_dict)  # with the versions that modules put on it
    for key, own in runtime.plain_state_dict(keep_vars=True).items():
        value = state_dict.get(key)
        if isinstance(own, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
            if value.shape == own.shape:  # or torch says so
                dressed[key] = distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)
    return dressed


def require_closed(runtime: Runtime, what: str) -> None:
    """
    Raises:
        ShardedError: inside a pass, or inside full_params(), which has the values and may edit them.
    """
    runtime.require_idle(what)
    if any(unit.opened for unit in runtime.units):
        raise ShardedError(
            f"{what} inside full_params(): leave it first, so that what was edited has reached the shards"
        )


@torch.inference_mode(False)  # what is made here must be trainable
def load(runtime: Runtime, state_dict: Any, plainly: Callable[[Any], Any]) -> Any:
    """Run torch's own load on whole parameters, then take what changed into the shards."""
    require_closed(runtime, "load_state_dict()")
    problem, result = _two_values(runtime, state_dict), None
    with whole(runtime):
        require_same(runtime.comm.exchange_objects(values_of(state_dict), "the same load"), "load_state_dict()")
        before = {flat: [value.clone() for value in _held(flat)] for flat in runtime.flats()}
        with kept_buffers(runtime):
            try:
                result = plainly(_dressed(runtime, state_dict)) if problem is None else None
            except RuntimeError as error:
                problem = CheckpointError(str(error))
            runtime.control.share(problem)
        runtime.lending.before_change()
        for flat, values in before.items():
            pairs = enumerate(zip(_held(flat), values, strict=True))
            _write(flat, {i: (_laid(flat, i, a), _laid(flat, i, b)) for i, (a, b) in pairs if not same_bits(a, b)})
    runtime.changed()
    return result


def _held(flat: Flat) -> list[Tensor]:
    return [one.held(parameter) for one, parameter in zip(flat.locals, flat.parameters, strict=True)]


def _two_values(runtime: Runtime, state_dict: Any) -> CheckpointError | None:
    """Tied names are one parameter here; which of two values would win should not depend on their order."""
    first: dict[int, str] = {}
    for name, value in runtime.plain_state_dict(keep_vars=True).items():
        other = first.setdefault(id(value), name)
        a, b = state_dict.get(other), state_dict.get(name)
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a is not b and not same_values(a, b):
            return CheckpointError(
                f"{other!r} and {name!r} are one parameter in this model, but have two values in the state dict; make them equal, or leave one out"
            )
    return None


def _write(flat: Flat, edited: dict[int, tuple[Tensor, Tensor]]) -> None:
    """This rank's segments of parameters whose values changed: (new, old) by index, 1-D in memory order."""
    rows: dict[Home, list[Segment]] = {}
    for segment in (s for s in flat.segments if s.index in edited):
        rows.setdefault(flat.homes[segment.piece], []).append(segment)
    for home in walk(rows, (MASTER,), (MASTER,)):
        for segment in rows[home]:
            mine = flat.master[segment.piece][segment.offset : segment.offset + segment.numel]
            a, b = (value[segment.start : segment.stop].to(mine.device) for value in edited[segment.index])
            mine.copy_(torch.where(differing(a, b), a.to(mine.dtype), mine))


def _laid(flat: Flat, index: int, value: Tensor) -> Tensor:
    size, stride, _ = flat.shapes[index]
    laid = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device).copy_(value)
    return laid.as_strided((laid.numel(),), (1,))


def full_state_dict(model: nn.Module, rank0_only: bool = True, device: str | torch.device = "cpu") -> dict[str, Any]:
    """The plain model's state dict on `device`, gathered unit by unit (a collective); `{}` on the other ranks by default."""
    runtime = runtime_of(model)
    runtime.require_idle("full_state_dict()")
    runtime.lending.take_back()
    runtime.control.require(Kind.STATE)
    keeps = not rank0_only or runtime.comm.mesh.world.rank == 0
    values: dict[int, Tensor] = {}
    for flat in runtime.flats():
        for parameter, value in zip(flat.parameters, full_values(runtime, flat), strict=True):
            if keeps:
                values[id(parameter)] = value.to(device, copy=True)
    with original_buffers(runtime), rank0_buffers(runtime):
        plain = runtime.plain_state_dict(keep_vars=True)
    if not keeps:
        return {}
    result: dict[str, Any] = {}
    for key, value in plain.items():
        if id(value) in values:
            value = values[id(value)]
        elif isinstance(value, Tensor):
            value = local_of(value).detach().to(device, copy=True)
        result[key] = value
    return result


# ---- gradients and shards


def full_grads(model: nn.Module) -> dict[str, Tensor]:
    """The reduced, unscaled gradients as the optimizer will see them, by name, on every rank (a collective)."""
    runtime = runtime_of(model)
    with_gradient = runtime.control.with_gradient(runtime.settle(Kind.GRADIENTS))
    result: dict[str, Tensor] = {}
    for flat in runtime.flats():
        if flat.grad is None:
            continue
        dtype, device = flat.grad[0].dtype, runtime.arena.device
        whole = flat.cut(torch.empty(flat.layout.padded_numel, dtype=dtype, device=device))
        for home in walk(flat.homes, (GRADIENT,)):
            parts = whole.parts[home.piece]
            parts[flat.group.rank].copy_(flat.grad[home.piece])
            runtime.comm.all_gather(whole.pieces[home.piece], flat.group, flat.unit.name, parts).wait()
        if flat.grad_scale != 1.0:
            whole.whole.div_(flat.grad_scale)
        for index, name in enumerate(flat.names):
            if index in with_gradient[flat]:
                result[name] = flat.locals[index].full(whole.views[index], runtime.comm, flat.unit.name).clone()
    order = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    return dict(sorted(result.items(), key=lambda item: order.get(item[0], 0)))


def local_shards(model: nn.Module, kind: str = "parameters") -> Iterator[tuple[str, Slice, Tensor]]:
    """(name, slice of the flattened parameter in memory order, this rank's part of it), live: what is written there counts.

    Parts that are kept may be written to later, too, between passes; each pass and step then begins with a small message that asks all ranks.
    Not so what rests on disk, gradients, and with `delayed_update`: ask for them again.

    Of a DTensor the slice is of this rank's local tensor.
    For "parameters" the parts are the masters, in the dtype the optimizer updates; for "gradients" the reduced gradients.
    """
    runtime = runtime_of(model)
    if kind not in ("parameters", "gradients"):
        raise ConfigError(f'local_shards: kind must be "parameters" or "gradients", got {kind!r}')
    if kind == "gradients":
        runtime.settle(Kind.GRADIENTS)
    else:
        runtime.lending.lend()
    return _local(runtime, kind)


def _local(runtime: Runtime, kind: str) -> Iterator[tuple[str, Slice, Tensor]]:
    kinds = (MASTER,) if kind == "parameters" else (GRADIENT,)
    for flat in runtime.flats():
        if kind == "gradients" and flat.grad is None:
            continue
        for home in walk(flat.homes, kinds, kinds):
            for segment in (s for s in flat.segments if s.piece == home.piece):
                mine = flat.master[home.piece] if kind == "parameters" else flat.grad[home.piece]  # type: ignore[index]
                where = slice(segment.start, segment.stop)
                yield flat.names[segment.index], where, mine[segment.offset : segment.offset + segment.numel]
