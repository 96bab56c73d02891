"""Gradients: from each parameter into the unit's bucket, over the wire, summed in rank order, into this rank's shard.

Sums are taken in rank order in fp32 (or wider), element by element, so neither buckets, units nor stages change a bit.
When to launch what is the runtime's business; the optimizer reads `flat.grad`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..offload.home import GRADIENT, walk
from .arena import Arena, Slot
from .bits import same_memory
from .comm import Comm, Handle
from .mesh import Group
from .norms import part as part_of
from .parameter import grad_of, set_grad
from .unit import Cut, Flat, Unit

IN_FLIGHT = 1  # reductions of units that may wait while the next one is launched


class Reducer:
    """Buckets in and reduced gradients out, for all flats of one model."""

    def __init__(self, arena: Arena, comm: Comm, mean: bool, reduce_dtype: torch.dtype | None) -> None:
        self.arena, self.comm, self.mean, self.reduce_dtype = arena, comm, mean, reduce_dtype
        self.loss_scale = 1.0  # of the last backward; all ranks' is the same, and changes in steps only
        self._early: dict[Flat, Tensor | None] = {}  # of the dtype they meet: torch converts others at every use
        self.under_way: deque[tuple[Flat, Iterator[bool]]] = deque()
        self.spreading: list[tuple[Flat, Iterator[bool]]] = []  # of those before: the sums go to the replicas

    # ---- arrival

    def accept(self, flat: Flat, index: int, parameter: Any) -> bool:
        """Move this rank's finished gradient of one parameter into the bucket."""
        if flat.unit.visible and not torch.is_grad_enabled():
            return self._accept(flat, index, parameter, parameter.grad)
        with (
            torch._C.DisableTorchFunctionSubclass(),
            torch.no_grad(),
        ):  # hidden parameters trap uses; create_graph records them
            return self._accept(flat, index, parameter, grad_of(parameter))

    def _accept(self, flat: Flat, index: int, parameter: Any, grad: Tensor | None) -> bool:
        if grad is None:
            return False
        if flat.bucket is None:
            self._open(flat)
        grad = flat.locals[index].part(grad, self.comm, flat.unit.name)
        view = flat.bucket.views[index]  # type: ignore[union-attr]
        scale = self._early[flat]
        if grad.is_sparse:
            raise ConfigError(
                f"parameter {flat.names[index]!r} got a sparse gradient; build its module with sparse=False"
            )
        if index in flat.filled:
            if view.dtype.itemsize < 4:
                flat.promote_bucket(self.arena)
                view = flat.bucket.views[index]  # type: ignore[union-attr]
            view.add_(grad if scale is None else grad * scale)
        elif scale is None:
            view.copy_(grad)
        else:
            torch.mul(grad, scale, out=view)
        flat.filled.add(index)
        flat.has_grad.add(index)
        set_grad(parameter, None)
        return True

    def _open(self, flat: Flat) -> None:
        if self._is_busy(flat):
            self.drain()
        flat.open_bucket(self.arena)
        if flat not in self._early:
            # The mean's 1/N costs nothing while copying; 16-bit gradients would lose small values, so theirs comes after the sum.
            early = self.mean and flat.param_dtype.itemsize >= 4 and self._contributors(flat) > 1
            self._early[flat] = torch.tensor(1.0 / self._contributors(flat), dtype=flat.param_dtype) if early else None

    def _late_scale(self, flat: Flat) -> float:
        scale = 1.0 / self._contributors(flat) if self.mean and flat.param_dtype.itemsize < 4 else 1.0
        return scale if flat.keeps_scale else scale / self.loss_scale

    @staticmethod
    def _contributors(flat: Flat) -> int:
        return flat.group.size * flat.replicas.size

    # ---- reduction

    def launch(self, unit: Unit) -> None:
        """Send what the unit's buckets hold; a rank without gradients gives zeros, so that all take part."""
        for flat in unit.flats:
            if flat.trains or flat.bucket is not None:
                steps = self._reduce(flat)
                next(steps)
                self.under_way.append((flat, steps))
        self._advance(IN_FLIGHT * max(len(unit.flats), 1))

    def drain(self) -> None:
        """Wait until every launched reduction has arrived in `flat.grad`."""
        self._advance(0)

    def _advance(self, limit: int) -> None:
        while len(self.under_way) > limit:
            self._end_spreading()
            flat, steps = self.under_way.popleft()
            if any(steps):
                self.spreading.append((flat, steps))
        if not limit:
            self._end_spreading()

    def _end_spreading(self) -> None:
        while self.spreading:
            deque(self.spreading.pop()[1], maxlen=0)  # runs it to its end

    def _is_busy(self, flat: Flat) -> bool:
        return any(flat is busy for busy, _ in (*self.under_way, *self.spreading))

    def _reduce(self, flat: Flat) -> Iterator[bool]:
        """One flat's reduction; yields while the wire works, True when nothing else is left. Launches happen in the order of calls, the same on
        all ranks."""
        scale = self._late_scale(flat)
        promoted = flat.bucket is not None and flat.bucket.whole.dtype != flat.param_dtype
        bucket, slot = self._complete_bucket(flat)
        group, replicas, name = flat.group, flat.replicas, flat.unit.name
        borrowed: list[Slot] = [slot] if slot is not None else []
        target = self._landing(flat, bucket) if replicas.size == 1 else None
        first = [
            self._send(piece, group, name, "reduce_scatter", borrowed, parts, landing)
            for piece, parts, landing in zip(bucket.pieces, bucket.parts, target or repeat(None), strict=False)
        ]
        yield False
        sums = [handle.wait() for handle in first]
        if replicas.size > 1:
            own = [parts[group.rank] for parts in bucket.parts]
            if group.size > 1:
                own = [self._sum(parts, part, borrowed) for parts, part in zip(sums, own, strict=True)]
            second = [self._send(part, replicas, name, "all_reduce", borrowed) for part in own]
            yield False
            sums = [handle.wait() for handle in second]
        fresh = flat.grad is None
        if flat.keeps_scale:
            if flat.grad is not None and flat.grad_scale != self.loss_scale:  # of a backward before the last step
                for home in flat.homes:
                    home.scale_gradient(self.loss_scale / flat.grad_scale)
            flat.grad_scale = self.loss_scale
        flat.grad = flat.grad or target or flat.grad_storage(self.arena, promoted)
        spread = []
        for parts, home in zip(sums, flat.homes, strict=True):
            with home.summing(fresh) as whole:  # what rests elsewhere takes space here for one piece at a time
                mine = whole if replicas.size == 1 else whole.view(replicas.size, -1)[replicas.rank]
                if fresh:
                    self._sum(parts, mine, borrowed, scale)
                else:
                    mine.add_(self._sum(parts, None, borrowed, scale))
                if replicas.size > 1:
                    spread.append(self.comm.all_gather(whole, replicas, name, op="all_reduce", count=0))
                    if not home.sums_in_place:
                        spread.pop().wait()
        first.clear()  # with the results, which are views of what is given back
        del parts, sums, mine, whole, bucket
        for slot in borrowed:
            self.arena.give(slot)
        if spread:
            yield True
            for handle in spread:
                handle.wait()

    def _complete_bucket(self, flat: Flat) -> tuple[Cut, Slot | None]:
        """Take the bucket out of the flat, with zeros for what did not come, in the dtype of the wire."""
        if flat.bucket is None:
            self._open(flat)
        bucket, slot = flat.take_bucket()
        assert bucket is not None
        if not flat.filled:
            bucket.whole.zero_()
        elif len(flat.filled) < len(flat.parameters):
            for index, view in enumerate(bucket.views):
                if index not in flat.filled:
                    view.zero_()
        flat.filled.clear()
        wire_dtype = self.reduce_dtype or bucket.whole.dtype
        if wire_dtype != bucket.whole.dtype and self._contributors(flat) > 1:
            wire = self.arena.take(bucket.whole.numel(), wire_dtype, "buckets", flat.unit.name)
            wire.tensor.copy_(bucket.whole)
            if slot is not None:
                self.arena.give(slot)
            bucket, slot = wire.cut(flat.key, flat.cut), wire
        return bucket, slot

    def _landing(self, flat: Flat, bucket: Cut) -> list[Tensor] | None:
        """The place of a first gradient, where one of the other ranks' parts can arrive right there."""
        if (
            not self.comm.lands
            or flat.group.size == 1
            or flat.persistent is not None
            or flat.grad is not None
            or self._is_busy(flat)
        ):
            return None
        if not all(home.sums_in_place for home in flat.homes):
            return None
        return flat.grad_storage(self.arena, False) if flat.grad_dtype == bucket.whole.dtype else None

    def _send(
        self,
        piece: Tensor,
        group: Group,
        name: str,
        op: str,
        borrowed: list[Slot],
        parts: Any = None,
        landing: Tensor | None = None,
    ) -> Handle:
        receive = [] if landing is None else [landing]
        needed = self.comm.receive_parts(group) - len(receive)
        if needed > 0:
            numel = piece.numel() // group.size
            slot = self.arena.take(needed * numel, piece.dtype, "buckets", name)
            borrowed.append(slot)
            receive += slot.tensor.view(needed, numel).unbind()
        return self.comm.reduce_scatter(piece, receive, group, name, parts, op)

    def _sum(self, parts: Sequence[Tensor], out: Tensor | None, borrowed: list[Slot], scale: float = 1.0) -> Tensor:
        """parts[0] + parts[1] + ... in that order, in at least fp32, times `scale`, into `out` (or into space of ours)."""
        total = parts[0]
        dtype = torch.float32 if total.dtype.itemsize < 4 else total.dtype
        if total.dtype != dtype:
            slot = self.arena.take(total.numel(), dtype, "buckets")
            borrowed.append(slot)
            total = slot.tensor.copy_(total)
        for part in parts[1:-1]:
            total.add_(part)
        direct = out is not None and out.dtype == dtype
        if len(parts) > 1:
            total = torch.add(total, parts[-1], out=out if direct else total)
        if scale != 1.0:
            total.mul_(scale)
        if out is not None and total is not out and not same_memory(total, out):
            out.copy_(total)
        return total if out is None else out

    # ---- what is there

    def forget(self, flat: Flat, index: int) -> None:
        """As if this parameter had got no gradient since zero_grad."""
        self.drain()
        self._zero(flat, index)
        flat.has_grad.discard(index)

    def clear(self, flat: Flat, chosen: set[int], keep_zeros: bool = False) -> None:
        """zero_grad of the chosen parameters: drop (or zero) what was reduced and what still waits in the bucket."""
        self.drain()
        rest = {index for index, p in enumerate(flat.parameters) if p.requires_grad} - chosen
        if keep_zeros or rest:
            for index in chosen:
                self._zero(flat, index)
            if not keep_zeros:
                flat.has_grad -= chosen
            return
        flat.clear_grad(self.arena)
        _, slot = flat.take_bucket()
        if slot is not None:
            self.arena.give(slot)
        flat.filled.clear()
        flat.grad_scale = 1.0

    def _zero(self, flat: Flat, index: int) -> None:
        if flat.bucket is not None and index in flat.filled:
            flat.bucket.views[index].zero_()
        homes = [flat.homes[s.piece] for s in flat.segments if s.index == index and flat.grad is not None]
        for home in walk(homes, (GRADIENT,), (GRADIENT,)):
            for view in parts_of(flat, home.piece, index):
                view.zero_()


def parts_of(flat: Flat, piece: int, index: int) -> list[Tensor]:
    """Of parameter `index`, this rank's parts of the reduced gradient in one piece."""
    return [part_of(flat, s) for s in flat.segments if s.index == index and s.piece == piece]
