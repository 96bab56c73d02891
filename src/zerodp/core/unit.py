"""What travels together: a `Unit` is a page of parameters, one `Flat` buffer per dtype and trainability.

A flat owns its storage (master shard, gathered memory, gradient bucket, reduced gradient) and the moves between them that
concern one rank: launch the gather, show, hide, free. When a page comes or goes is decided elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .arena import Arena, Slot
from .comm import Comm, Handle
from .layout import Layout, Segment, build
from .mesh import Group
from .parameter import Where, placeholder, twin
from .stages import Residency

if TYPE_CHECKING:
    from .runtime import Runtime


class Flat:
    """Parameters of one unit with the same compute dtype and the same trainability when they were sharded."""

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
        residency: Residency,
        place: tuple[Group, Group],
        max_piece_bytes: int,
    ) -> None:
        self.param_dtype, self.shard_dtype, self.grad_dtype = (
            dtypes  # of compute, of what rests here, of reduced gradients
        )
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.original_dtypes = [p.dtype for p in self.parameters]
        self.classes = [type(p) for p in self.parameters]
        self.group, self.replicas = place
        self.residency = residency
        self.layout: Layout = build(
            [p.numel() for p in self.parameters],
            self.group.size,
            self.replicas.size,
            max(max_piece_bytes // self.param_dtype.itemsize, 1),
        )
        self.shapes = [
            (p.shape, _strides(p), offset) for p, offset in zip(self.parameters, self.layout.offsets, strict=True)
        ]
        self.key = (self.layout, tuple(self.shapes))  # flats that are cut alike share views
        # With one rank to a shard and nothing to cast, the master is already the whole page.
        self.pages = residency.shards_parameters and not (self.group.size == 1 and self.param_dtype == self.shard_dtype)
        self.segments: list[Segment] = self.layout.segments(self.group.rank)
        self.unit: Unit
        self.full: Tensor | None = None  # [padded_numel] where parameters stay whole
        self.shard: list[Tensor] = []  # this rank's part of each piece, in shard_dtype
        self.slot: Slot | None = None
        self.handles: list[Handle] = []
        self.stale = False  # the shards were stepped since the last gather
        self.optimized = False  # an optimizer steps these shards
        # gradients
        self.persistent: Tensor | None = None  # [padded_numel] where gradients stay whole
        self.bucket: Tensor | None = None
        self.bucket_slot: Slot | None = None
        self.bucket_views: list[Tensor] = []
        self.filled: set[int] = set()
        self.grad: list[Tensor] | None = None  # reduced, this rank's part of each piece
        self.has_grad: set[int] = set()  # parameters with a gradient on this rank since zero_grad
        # Unsharded 16-bit gradients rest in param_dtype; fp16 ones keep their loss scale, or small values would vanish.
        stored = self.param_dtype if not residency.shards_gradients else self.grad_dtype
        self.keeps_scale = stored == torch.float16
        self.grad_scale = 1.0  # the loss scale still in `grad`
        self.nodes: list[Any] = []

    # ---- set-up

    def fill(self, arena: Arena, comm: Comm) -> None:
        """Take the values of rank 0's parameters, keep this rank's shard, and hide the parameters."""
        dtype = self.shard_dtype
        whole = torch.zeros(self.layout.padded_numel, dtype=dtype, device=arena.device)
        for parameter, (size, stride, offset) in zip(self.parameters, self.shapes, strict=True):
            whole.as_strided(size, stride, offset).copy_(parameter.detach())
        comm.broadcast(whole, self.unit.name)
        parts = [self.layout.part(piece, self.group.rank) for piece in range(len(self.layout.piece_numels))]
        stays = not self.pages
        if stays and dtype == self.param_dtype:
            self.full = whole
            self.shard = [whole[a:b] for a, b in parts]
            arena.add("parameters", whole.nbytes)
        else:
            kind = "parameters" if dtype == self.param_dtype else "master"
            shard = arena.allocate(self.layout.shard_numel, dtype, kind)
            self.shard = list(shard.split(list(self.layout.piece_numels)))
            for piece, (a, b) in zip(self.shard, parts, strict=True):
                piece.copy_(whole[a:b])
            if stays:
                self.full = arena.allocate(self.layout.padded_numel, self.param_dtype, "parameters")
                self.full.copy_(whole)
        if not self.residency.shards_gradients and self.trains:
            self.keep_gradients(arena)
        hole = placeholder(self.param_dtype, arena.device)
        self.holes = [hole.as_strided(size, (0,) * len(size)) for size, _, _ in self.shapes]
        self.twins = [twin(cls) for cls in self.classes]
        for index, parameter in enumerate(self.parameters):
            parameter._zerodp = Where(self, index)  # type: ignore[attr-defined]
            parameter.data = self.holes[index] if self.full is None else self.view_of(self.full, index)
        self.conceal()

    def keep_gradients(self, arena: Arena) -> None:
        if self.persistent is None:
            self.persistent = arena.allocate(self.layout.padded_numel, self.param_dtype, "gradients")

    @property
    def trains(self) -> bool:
        return any(p.requires_grad for p in self.parameters)

    def view_of(self, tensor: Tensor, index: int) -> Tensor:
        size, stride, offset = self.shapes[index]
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)

    # ---- the page

    def launch(self, arena: Arena, comm: Comm, space: Tensor | None = None) -> list[Handle]:
        """Start bringing the whole page into gathered memory (or into `space`)."""
        out = space
        if out is None:
            out = self.full
            if out is None:
                self.slot = arena.take(self.layout.padded_numel, self.param_dtype, "unsharded", self.unit.name)
                out = self.slot.tensor
        handles = self.gather_into(out, comm)
        if space is None:
            self.handles = handles
            self.stale = False
        return handles

    def gather_into(self, out: Tensor, comm: Comm) -> list[Handle]:
        handles = []
        for piece, mine in enumerate(self.shard):
            a, b = self.layout.part(piece, self.group.rank)
            if self.full is None or out is not self.full or self.param_dtype != self.shard_dtype:
                out[a:b].copy_(mine)
            if self.group.size > 1:
                handles.append(comm.all_gather(out[self.layout.pieces[piece]], self.group, self.unit.name))
        return handles

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()
        self.handles = []

    def reveal(self) -> None:
        """Parameters are themselves again, with their values."""
        if self.slot is not None:
            views = self.slot.cut(self.key, self.shapes)
            for parameter, cls, view in zip(self.parameters, self.classes, views, strict=True):
                parameter.__class__ = cls
                parameter.data = view
        else:
            for parameter, cls in zip(self.parameters, self.classes, strict=True):
                parameter.__class__ = cls

    def conceal(self) -> None:
        """Uses of the parameters fault from here on; their values stay where they are."""
        for parameter, cls in zip(self.parameters, self.twins, strict=True):
            parameter.__class__ = cls

    def free(self, arena: Arena) -> None:
        """Give the page back; nothing to do where parameters stay whole."""
        if self.slot is not None:
            if self.handles and self.handles[0].comm.broken is None:
                self.wait()
            self.handles = []
            for parameter, cls, hole, hidden in zip(self.parameters, self.classes, self.holes, self.twins, strict=True):
                parameter.__class__ = cls
                parameter.data = hole
                parameter.__class__ = hidden
            slot, self.slot = self.slot, None
            arena.give(slot)

    def replace(self, values: list[Tensor]) -> None:
        """Parameters are ordinary ones with these values, until `restore`."""
        for parameter, cls, value in zip(self.parameters, self.classes, values, strict=True):
            parameter.__class__ = cls
            parameter.data = value

    def restore(self, visible: bool) -> None:
        """Back to what is here, seen or not."""
        whole = self.full if self.full is not None else self.slot.tensor if self.slot is not None else None
        self.replace(self.holes if whole is None else [self.view_of(whole, i) for i in range(len(self.parameters))])
        if not visible:
            self.conceal()

    # ---- gradients: storage only

    def open_bucket(self, arena: Arena) -> None:
        """Staging space for this rank's gradients, in the dtype they have."""
        if self.persistent is not None:
            if (
                self.grad is not None
                and self.grad[0].untyped_storage()._cdata == self.persistent.untyped_storage()._cdata
            ):
                # The reduced gradient of an earlier backward rests in this rank's own part: it needs a place of its own now.
                moved = arena.allocate(self.layout.shard_numel, _accumulating(self.grad_dtype), "gradients").split(
                    list(self.layout.piece_numels)
                )
                for new, old in zip(moved, self.grad, strict=True):
                    new.copy_(old)
                self.grad = list(moved)
            self.bucket = self.persistent
        else:
            self.bucket_slot = arena.take(self.layout.padded_numel, self.param_dtype, "buckets", self.unit.name)
            self.bucket = self.bucket_slot.tensor
        self._cut_bucket()

    def _cut_bucket(self) -> None:
        assert self.bucket is not None
        if self.bucket_slot is not None:
            self.bucket_views = self.bucket_slot.cut(self.key, self.shapes)
        else:
            self.bucket_views = [self.view_of(self.bucket, i) for i in range(len(self.parameters))]

    def promote_bucket(self, arena: Arena) -> None:
        """Further gradients come on top: go on in fp32, so that small ones are not rounded away."""
        assert self.bucket is not None
        wide = arena.take(self.layout.padded_numel, torch.float32, "buckets", self.unit.name)
        wide.tensor.copy_(self.bucket)
        self.bucket_views = []
        self.drop_bucket(arena, keep_filled=True)
        self.bucket_slot, self.bucket = wide, wide.tensor
        self._cut_bucket()

    def drop_bucket(self, arena: Arena, keep_filled: bool = False) -> None:
        self.bucket, self.bucket_views = None, []
        if not keep_filled:
            self.filled.clear()
        slot, self.bucket_slot = self.bucket_slot, None
        if slot is not None:
            arena.give(slot)

    def grad_storage(self, arena: Arena) -> list[Tensor]:
        """Where the first reduced gradient after zero_grad goes."""
        if self.persistent is not None:
            return [
                self.persistent[slice(*self.layout.part(i, self.group.rank))]
                for i in range(len(self.layout.piece_numels))
            ]
        return list(
            arena.allocate(self.layout.shard_numel, self.grad_dtype, "gradients").split(list(self.layout.piece_numels))
        )

    def clear_grad(self, arena: Arena) -> None:
        if self.grad is not None:
            persistent = None if self.persistent is None else self.persistent.untyped_storage()._cdata
            if self.grad[0].untyped_storage()._cdata != persistent:
                arena.release(sum(g.nbytes for g in self.grad), "gradients")
            self.grad = None
        self.has_grad.clear()


class Unit:
    """A page: the flats of one unit, and whether its parameters can be seen."""

    def __init__(self, name: str, index: int, module: nn.Module | None, flats: list[Flat]) -> None:
        self.name, self.index, self.module, self.flats = name, index, module, flats
        self.runtime: Runtime
        for flat in flats:
            flat.unit = self
        self.pages = any(flat.pages for flat in flats)
        self.gathered_bytes = sum(f.layout.padded_numel * f.param_dtype.itemsize for f in flats if f.pages)
        self.present = not self.pages  # its values are here or under way
        self.visible = False
        self.kept = False  # the cache keeps it between uses
        self.opened = 0  # full_params contexts that keep it, on all ranks alike
        self.holders = 0  # frames and contexts that need it
        self.arrivals = self.expected = 0  # gradients that came in this backward, and how many will

    @property
    def trains(self) -> bool:
        return any(flat.trains for flat in self.flats)

    def launch(self) -> None:
        """Start gathering what is not here."""
        runtime = self.runtime
        runtime.event("gather", self)
        for flat in self.flats:
            if flat.pages:
                flat.launch(runtime.arena, runtime.comm)
                start = flat.slot.buffer.data_ptr()  # type: ignore[union-attr]
                runtime.pages.append((start, start + flat.slot.nbytes, flat))  # type: ignore[union-attr]
        self.present = True

    def show(self) -> None:
        """Wait for the page and let the parameters be used."""
        if not self.visible:
            self.reveal()
            self.runtime.used(self)

    def reveal(self) -> None:
        """`show` for what is always here; no use of its own."""
        if not self.visible:
            self.visible = True
            for flat in self.flats:
                if flat.handles:
                    flat.wait()
                flat.reveal()

    def hide(self) -> None:
        """Trap uses again; the page stays."""
        if self.visible:
            self.visible = False
            for flat in self.flats:
                flat.conceal()

    def free(self) -> None:
        """Give the page back, if it is one."""
        if not (self.pages and self.present):
            return self.hide()
        self.visible = self.present = False
        runtime = self.runtime
        runtime.pages = [page for page in runtime.pages if page[2].unit is not self]
        for flat in self.flats:
            if flat.slot is not None:
                flat.free(runtime.arena)
            else:
                flat.conceal()
        runtime.event("free", self)


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's own strides; `shard()` has refused those that leave gaps or overlap."""
    return (
        tuple(parameter.stride()) if parameter.numel() else tuple(torch.empty(parameter.shape, device="meta").stride())
    )


def _accumulating(dtype: torch.dtype) -> torch.dtype:
    """Reduced gradients of several backward passes add up in at least fp32."""
    return torch.promote_types(dtype, torch.float32)
