"""Norms of the sharded gradients. Blocks of 64 elements are reduced alike however the shards are cut; their sum is in float64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..offload.home import GRADIENT, Home, walk
from .layout import ALIGN, Segment

if TYPE_CHECKING:
    from .optimizer import Engine, SegmentParameter
    from .unit import Flat


def part(flat: Flat, segment: Segment) -> Tensor:
    """The reduced gradient of a segment, a view."""
    assert flat.grad is not None
    return flat.grad[segment.piece][segment.offset : segment.offset + segment.numel]


def _with_gradient(engine: Engine) -> dict[Home, list[SegmentParameter]]:
    """The engine's segments that have a gradient, by the homes where they rest."""
    found: dict[Home, list[SegmentParameter]] = {}
    for segment in engine:
        if segment.flat.grad is not None and segment.numel():
            found.setdefault(segment.flat.homes[segment.segment.piece], []).append(segment)
    return found


def total_norm(engine: Engine, p: float) -> float:
    """The global p-norm of the unscaled gradients, the same on all ranks (a collective)."""
    found = _with_gradient(engine)
    powers = [
        _power(part(s.flat, s.segment), p) * (s.flat.grad_scale ** -(p if p != math.inf else 1.0))
        for home in walk(found, (GRADIENT,))
        for s in found[home]
        if _counts(s.flat, s.segment.index)
    ]
    places = {power.device: [one for one in powers if one.device == power.device] for power in powers}
    mine = torch.cat(
        [torch.stack(these).cpu() for these in places.values()] or [torch.zeros(1, dtype=torch.float64, device="cpu")]
    )
    mine = mine.max() if p == math.inf else mine.sum()
    rows = engine.runtime.comm.exchange(mine.reshape(1), "the gradient norm").wait()[:, 0]
    total = float(rows.max() if p == math.inf else rows.sum())
    if p != math.inf:
        total = total ** (1.0 / p)
    # fp32 is what gradients know; it also takes away the last bits, in which float64 sums of other cuts may differ
    return float(torch.tensor(total, dtype=torch.float32, device="cpu")) if math.isfinite(total) else total


def _counts(flat: Flat, index: int) -> bool:
    """Each element of the global gradient counts once: replicas, and tensor-parallel copies, leave theirs to the first of them."""
    return flat.replicas.rank == 0 and flat.locals[index].first


def _power(tensor: Tensor, p: float) -> Tensor:
    """sum(|x|^p), or max(|x|), in float64."""
    whole = tensor.numel() // ALIGN * ALIGN
    norms = [torch.linalg.vector_norm(tensor[:whole].view(-1, ALIGN), p, dim=1, dtype=torch.float32)] if whole else []
    if whole < tensor.numel():
        norms.append(torch.linalg.vector_norm(tensor[whole:], p, dtype=torch.float32).reshape(1))
    blocks = torch.cat(norms).double() if len(norms) > 1 else norms[0].double()
    return blocks.max() if p == math.inf else blocks.pow_(p).sum()


def scale_gradients(engine: Engine, factor: float) -> None:
    """Of the engine's parameters; pieces hold those of other groups and optimizers, too."""
    if factor != 1.0:
        for home, segments in _with_gradient(engine).items():
            home.scale_gradient(factor, segments)


def overflows(engine: Engine) -> bool:
    """Whether this rank's reduced gradients hold an infinity or NaN."""
    found = _with_gradient(engine)
    most = [_power(part(s.flat, s.segment), math.inf) for home in walk(found, (GRADIENT,)) for s in found[home]]
    return not all(math.isfinite(float(power)) for power in most)
