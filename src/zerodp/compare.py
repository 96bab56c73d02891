"""`compare`: the user's own model, sharded and unsharded, side by side."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.serialization import default_restore_location

from .api import shard
from .checkpoint import randomness
from .core.access import full_grads, full_state_dict
from .core.comm import gather_objects
from .core.mesh import Group
from .errors import ConfigError

END = object()  # where a rank has no batch any more


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    equal: every loss, gradient and parameter agrees within the tolerance; steps: how many were run; first_difference: where
    the first one is, in words, or None; largest: the largest absolute difference seen.
    """

    equal: bool
    steps: int
    first_difference: str | None
    largest: float

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        verdict = "equal" if self.equal else f"first difference: {self.first_difference}"
        return f"{self.steps} steps, {verdict} (largest difference {self.largest:.3g})"


def compare(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    batches: Iterable[Any],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *,
    tolerance: float = 1e-6,
    **options: Any,
) -> Comparison:
    """Train a model sharded over the ranks, and the same model unsharded on every rank, and name the first tensor that differs.

    Args:
        make_model: builds the model; called with the same seed for both runs.
        make_optimizer: takes `model.parameters()`.
        batches: this rank's batches, one per step; at least one, and all ranks have equally many.
        loss_fn: (model, batch) -> scalar loss.
        tolerance: largest absolute difference that counts as equal.
        options: of :func:`zerodp.shard`.

    The unsharded run is the oracle: it sees every rank's batch in turn, adds up gradients of loss / world size, and steps
    once. Whole gradients and parameters are held on every rank, so use a small model. A model that `make_model` splits over
    tensor-parallel ranks stays so in both runs, and each data-parallel rank's batch counts once; with `loss_parallel` call
    `compare` inside of it.

    Each rank's loss is computed in the same random state in both runs (torch's on the host and the device, Python's, numpy's),
    and the caller's is put back in the end.

    Raises:
        ConfigError: no batches, or not equally many on all ranks; and what :func:`zerodp.shard` raises.
    """
    before = randomness.state()
    try:
        return _compared(make_model, make_optimizer, batches, loss_fn, tolerance, options)
    finally:
        randomness.restore(before)


def _compared(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    batches: Iterable[Any],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    tolerance: float,
    options: dict[str, Any],
) -> Comparison:
    seed = torch.initial_seed() % 2**31
    torch.manual_seed(seed)
    model = make_model()
    torch.manual_seed(seed)
    plain = make_model()
    optimizer = make_optimizer(model.parameters())
    model, optimizer = shard(model, optimizer, **options)
    runtime = model._zerodp
    plain.to(runtime.arena.device)
    plain.load_state_dict(_like(plain.state_dict(), full_state_dict(model, rank0_only=False)))
    oracle = make_optimizer(plain.parameters())
    data, mean = runtime.comm.mesh.data, runtime.reducer.mean
    largest, first, steps = 0.0, None, 0
    for steps, (batch, everyone) in enumerate(_in_step(batches, data, runtime.arena.device), 1):
        loss = loss_fn(model, batch)
        optimizer.backward(loss)
        after = randomness.state()
        for rank, (theirs, state) in enumerate(everyone):
            randomness.restore(state)
            expected = loss_fn(plain, theirs)
            if rank == data.rank:
                pairs = [("loss", _whole(loss.detach()), _whole(expected.detach()))]
            (expected / data.size if mean else expected).backward()
        randomness.restore(after)
        pairs += _gradients(model, plain)
        optimizer.step()
        oracle.step()
        optimizer.zero_grad()
        oracle.zero_grad()
        pairs += _values(model, plain)
        for name, a, b in pairs:
            difference = _difference(a, b)
            largest = max(largest, difference)
            if first is None and not difference <= tolerance:
                first = f"{name} in step {steps} differs by {difference:.3g}"
    return Comparison(first is None, steps, first, largest)


def _in_step(
    batches: Iterable[Any], data: Group, device: torch.device
) -> Iterator[tuple[Any, list[tuple[Any, dict[str, Any]]]]]:
    """Per step this rank's batch, and every data-parallel rank's batch, on this device, with the random state it is used in.

    Raises:
        ConfigError: on all ranks: no rank has a batch, or some ran out of them before the others.
    """
    mine = iter(batches)
    for step in itertools.count(1):
        batch = next(mine, END)
        sent = gather_objects(None if batch is END else _packed((batch, randomness.state())))
        without = [rank for rank, one in enumerate(sent) if one is None]
        if len(without) == len(sent):
            if step == 1:
                raise ConfigError("batches: expected at least one on every rank, got none, so nothing was compared")
            return
        if without:
            other = next(rank for rank, one in enumerate(sent) if one is not None)
            raise ConfigError(
                f"batches: expected equally many on all ranks, got {step - 1} on rank {without[0]} and more on rank {other}; "
                "cut all ranks to the same number of steps"
            )
        sent = [sent[rank] for rank in data.ranks] if len(sent) > 1 else sent
        yield batch, [_unpacked(one, device) for one in sent]


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(sent: bytes, device: torch.device) -> Any:
    """What was on another rank's accelerator is on this rank's; what was on the host stays there."""

    def placed(storage: Any, place: str) -> Any:
        return default_restore_location(storage, place if place == "cpu" else str(device))

    return torch.load(io.BytesIO(sent), map_location=placed, weights_only=False)


def _gradients(model: nn.Module, plain: nn.Module) -> list[tuple[str, Tensor, Tensor]]:
    """(name, sharded, unsharded) of the gradients that the unsharded model has."""
    got = full_grads(model)
    wanted = {name: _whole(p.grad) for name, p in plain.named_parameters() if p.grad is not None}
    return [
        (f"gradient of {name}", got[name] if name in got else torch.zeros_like(grad), grad)
        for name, grad in wanted.items()
    ]


def _values(model: nn.Module, plain: nn.Module) -> list[tuple[str, Tensor, Tensor]]:
    """(name, sharded, unsharded) of parameters and buffers."""
    now, parameters = full_state_dict(model, rank0_only=False), dict(plain.named_parameters())
    return [
        (f"{'parameter' if name in parameters else 'buffer'} {name}", now[name], _whole(value))
        for name, value in plain.state_dict().items()
        if isinstance(value, Tensor)
    ]


def _like(own: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    """The values of `full`, distributed as those of `own` are."""
    return {
        name: distribute_tensor(value, own[name].device_mesh, own[name].placements, src_data_rank=None)
        if isinstance(own[name], DTensor)
        else value
        for name, value in full.items()
    }


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    return float((a.double().cpu() - b.double().cpu()).abs().max()) if a.numel() else 0.0
