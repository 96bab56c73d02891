"""`compare`: the user's own model, sharded and unsharded, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
    once. Whole gradients and parameters are held on every rank, so use a small model.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    seed = torch.initial_seed() % 2**31
    torch.manual_seed(seed)
    model = make_model()
    torch.manual_seed(seed)
    plain = make_model()
    optimizer = make_optimizer(model.parameters())
    model, optimizer = shard(model, optimizer, **options)
    plain.load_state_dict(full_state_dict(model, rank0_only=False))
    oracle = make_optimizer(plain.parameters())
    largest, first, steps = 0.0, None, 0
    for steps, batch in enumerate(batches, 1):
        everyone = gather_objects(batch)
        state = torch.get_rng_state()
        loss = loss_fn(model, batch)
        optimizer.backward(loss)
        for rank, theirs in enumerate(everyone):
            torch.set_rng_state(state)
            expected = loss_fn(plain, theirs)
            if rank == (dist.get_rank() if world > 1 else 0):
                pairs = [("loss", loss.detach(), expected.detach())]
            (expected / world if options.get("reduction", "mean") == "mean" else expected).backward()
        wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
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
            (f"parameter {name}" if name in dict(plain.named_parameters()) else f"buffer {name}", now[name], value)
            for name, value in plain.state_dict().items()
            if isinstance(value, Tensor)
        ]
        for name, a, b in pairs:
            difference = _difference(a, b)
            largest = max(largest, difference)
            if first is None and not difference <= tolerance:
                first = f"{name} in step {steps} differs by {difference:.3g}"
    return Comparison(first is None, steps, first, largest)


def _difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    return float((a.double().cpu() - b.double().cpu()).abs().max()) if a.numel() else 0.0
