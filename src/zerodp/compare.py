"""`compare`: the user's own model, sharded and unsharded, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .api import shard
from .core.access import full_grads, full_state_dict
from .core.comm import gather_objects


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
        batches: this rank's batches, one per step; all ranks have equally many.
        loss_fn: (model, batch) -> scalar loss.
        tolerance: largest absolute difference that counts as equal.
        options: of :func:`zerodp.shard`.

    The unsharded run is the oracle: it sees every rank's batch in turn, adds up gradients of loss / world size, and steps
    once. Whole gradients and parameters are held on every rank, so use a small model. A model that `make_model` splits over
    tensor-parallel ranks stays so in both runs, and each data-parallel rank's batch counts once; with `loss_parallel` call
    `compare` inside of it.
    """
    seed = torch.initial_seed() % 2**31
    torch.manual_seed(seed)
    model = make_model()
    torch.manual_seed(seed)
    plain = make_model()
    optimizer = make_optimizer(model.parameters())
    model, optimizer = shard(model, optimizer, **options)
    plain.load_state_dict(_like(plain.state_dict(), full_state_dict(model, rank0_only=False)))
    data = model._zerodp.comm.mesh.data
    oracle = make_optimizer(plain.parameters())
    largest, first, steps = 0.0, None, 0
    for steps, batch in enumerate(batches, 1):
        everyone = gather_objects(batch)
        everyone = [everyone[rank] for rank in data.ranks] if len(everyone) > 1 else everyone
        state = torch.get_rng_state()
        loss = loss_fn(model, batch)
        optimizer.backward(loss)
        for rank, theirs in enumerate(everyone):
            torch.set_rng_state(state)
            expected = loss_fn(plain, theirs)
            if rank == data.rank:
                pairs = [("loss", _whole(loss.detach()), _whole(expected.detach()))]
            (expected / data.size if options.get("reduction", "mean") == "mean" else expected).backward()
        wanted = {name: _whole(p.grad) for name, p in plain.named_parameters() if p.grad is not None}
        got = full_grads(model)
        pairs += [
            (f"gradient of {name}", got[name] if name in got else torch.zeros_like(grad), grad)
            for name, grad in wanted.items()
        ]
        optimizer.step()
        oracle.step()
        optimizer.zero_grad()
        oracle.zero_grad()
        now = full_state_dict(model, rank0_only=False)
        pairs += [
            (
                f"parameter {name}" if name in dict(plain.named_parameters()) else f"buffer {name}",
                now[name],
                _whole(value),
            )
            for name, value in plain.state_dict().items()
            if isinstance(value, Tensor)
        ]
        for name, a, b in pairs:
            difference = _difference(a, b)
            largest = max(largest, difference)
            if first is None and not difference <= tolerance:
                first = f"{name} in step {steps} differs by {difference:.3g}"
    return Comparison(first is None, steps, first, largest)


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
