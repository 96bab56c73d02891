"""What travels together: a `Unit` is a page of parameters, one `Flat` buffer per dtype and trainability.

A flat owns its storage (masters, gathered memory, gradient bucket, reduced gradient) and the moves between them that
concern one rank: launch the gather, show, hide, free. When a page comes or goes is decided elsewhere, and where masters and
reduced gradients rest is known to the homes of its pieces only (see `offload.home`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..tiers import ARRIVED, Transfer
from .arena import Arena, Parts, Slot
from .bits import same_memory
from .comm import Comm, Handle
from .layout import Layout, Segment, build
from .local import Local, local
from .mesh import Mesh
from .parameter import Where, placeholder, twin
from .stages import Residency

if TYPE_CHECKING:
    from ..offload.home import Home
    from .runtime import Runtime


class Cut(NamedTuple):
    """A flat buffer [padded_numel] and its views."""

    whole: Tensor
    views: list[Tensor]  # per parameter, in its local shape
    pieces: list[Tensor]
    parts: list[Parts]  # per piece, each rank's


_keys: dict[Any, int] = {}  # flats that are cut alike share views; comparing numbers is cheaper than comparing layouts


class Flat:
    """Parameters of one unit with the same compute dtype and the same trainability when they were sharded."""

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
        residency: Residency,
        mesh: Mesh,
        max_piece_bytes: int,
    ) -> None:
        # of compute, of what rests here, of reduced gradients
        self.param_dtype, self.shard_dtype, self.grad_dtype = dtypes
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.original_dtypes = [p.dtype for p in self.parameters]
        self.classes = [type(p) for p in self.parameters]
        self.locals: list[Local] = [local(p, mesh.tensor.rank == 0) for p in self.parameters]
        self.puts = [one.put for one in self.locals]
        self.group, self.replicas = mesh.place(residency.shards_optimizer)
        self.residency = residency
        self.layout: Layout = build(
            [one.size.numel() for one in self.locals],
            self.group.size,
            self.replicas.size,
            max(max_piece_bytes // self.param_dtype.itemsize, 1),
        )
        self.shapes = [
            (one.size, one.strides, offset) for one, offset in zip(self.locals, self.layout.offsets, strict=True)
        ]
        self.key = _keys.setdefault((self.layout, tuple(self.shapes)), len(_keys))
        self.homes: list[Home] = []  # of each piece; see `settle`
        self.pages = residency.shards_parameters
        self.segments: list[Segment] = self.layout.segments(self.group.rank)
        self.unit: Unit
        self.full: Cut | None = None  # where parameters stay whole
        self.master: list[Tensor] = []  # this rank's part of each piece, in shard_dtype; what the optimizer updates
        self.slot: Slot | None = None  # where the page is, while it is here
        self.handles: list[Handle | Transfer] = []
        self.stale = False  # the shards were stepped since the last gather
        self.version = 0  # of the values
        self.optimized = False  # an optimizer steps these shards
        # gradients
        self.look()
        self.persistent: Cut | None = None  # where gradients stay whole
        self.bucket: Cut | None = None
        self.bucket_slot: Slot | None = None
        self.filled: set[int] = set()
        self.grad: list[Tensor] | None = None  # reduced, this rank's part of each piece
        self.grad_slot: Slot | None = None  # where it rests, if that is not the bucket
        self.has_grad: set[int] = set()  # parameters with a gradient on this rank since zero_grad
        # Unsharded 16-bit gradients rest in param_dtype; fp16 ones keep their loss scale, or small values would vanish.
        stored = self.param_dtype if not residency.shards_gradients else self.grad_dtype
        self.keeps_scale = stored == torch.float16
        self.grad_scale = 1.0  # the loss scale still in `grad`
        self.nodes: list[Any] = []

    # ---- set-up

    def settle(self, homes: list[Home]) -> None:
        """Where this rank's part of each piece will rest."""
        self.homes = homes
        # With one rank to a shard, what gathers would copy from is already the whole page, if it is here and needs no cast.
        whole = self.group.size == 1 and all(home.source.is_page for home in homes)
        self.pages = self.residency.shards_parameters and not whole

    def fill(self, arena: Arena, comm: Comm, values: Sequence[Tensor]) -> None:
        """Take rank 0's `values` of the parameters, keep this rank's part, and hide the parameters."""
        dtype, numel = self.shard_dtype, self.layout.padded_numel
        stays = not self.pages
        slot = None
        if stays and dtype == self.param_dtype:
            whole = arena.allocate(numel, dtype, "parameters")
        else:  # the same staging space for one unit after the other
            slot = arena.take(numel, dtype, "unsharded", self.unit.name)
            whole = slot.tensor
        whole.zero_()  # padding too is the same everywhere
        for value, one, (size, stride, offset) in zip(values, self.locals, self.shapes, strict=True):
            whole.as_strided(size, stride, offset).copy_(one.part(value, comm, self.unit.name))
        self.agree(whole, comm)
        values_here = self.cut(whole)
        if slot is None:
            self.full = values_here
        elif stays:
            self.full = self.cut(arena.allocate(numel, self.param_dtype, "parameters").copy_(whole))
        self.master = [
            home.take(parts[self.group.rank]) for home, parts in zip(self.homes, values_here.parts, strict=True)
        ]
        if slot is not None:
            arena.give(slot, done=True)  # the backend's thread may let go of what it sent a moment later
        if not self.residency.shards_gradients and self.trains:
            self.keep_gradients(arena)
        hole = placeholder(arena.empty(1, self.param_dtype))
        self.holes = [hole.as_strided(size, (0,) * len(size)) for size, _, _ in self.shapes]
        self.twins = [twin(cls) for cls in self.classes]
        for index, parameter in enumerate(self.parameters):
            parameter._zerodp = Where(self, index)  # type: ignore[attr-defined]
            self.puts[index](parameter, self.holes[index] if self.full is None else self.full.views[index])
        self.conceal()

    def agree(self, whole: Tensor, comm: Comm) -> None:
        """Rank 0's values for all in a buffer of the whole page; of what tensor-parallel ranks split, each takes its own part's."""
        mesh, name = comm.mesh, self.unit.name
        comm.broadcast(whole, name, mesh.data)
        if mesh.tensor.size > 1:
            for one, offset in zip(self.locals, self.layout.offsets, strict=True):
                if not one.split:
                    comm.broadcast(whole[offset : offset + one.size.numel()], name, mesh.tensor)

    def widen_shard(self, dtype: torch.dtype) -> None:
        """From here on this rank's part rests in `dtype`."""
        self.shard_dtype = dtype
        for home in self.homes:
            home.widen()

    def keep_gradients(self, arena: Arena) -> None:
        if self.persistent is None:
            self.persistent = self.cut(arena.allocate(self.layout.padded_numel, self.param_dtype, "gradients"))

    def changed(self) -> None:
        """The parameters have other values from here on. What was saved of the old ones is of no use, which autograd tells as for in-place changes."""
        self.version += 1
        torch.autograd.graph.increment_version(self.parameters)

    def look(self) -> int:
        """How many parameters want a gradient; asked once per backward, as users freeze and unfreeze."""
        with torch._C.DisableTorchFunctionSubclass():  # asking hidden parameters one by one would cost more
            count = sum(p.requires_grad for p in self.parameters)
        self.trains = count > 0
        return count

    def cut(self, whole: Tensor) -> Cut:
        views = [whole.as_strided(size, stride, offset) for size, stride, offset in self.shapes]
        pieces = [whole[piece] for piece in self.layout.pieces]
        return Cut(whole, views, pieces, [Parts(piece, self.group.size, self.group.rank) for piece in pieces])

    # ---- the page

    @property
    def page(self) -> Cut | None:
        """The gathered parameters, if they are here."""
        return self.full if self.slot is None else self.slot.cut(self.key, self.cut)

    def launch(self, arena: Arena, comm: Comm) -> None:
        """Start bringing the whole page here."""
        if self.full is None:
            self.slot = arena.take(self.layout.padded_numel, self.param_dtype, "unsharded", self.unit.name)
        page = self.page
        assert page is not None
        self.handles = self.gather_into(page, comm)
        self.stale = False

    def gather_into(self, out: Cut, comm: Comm, masters: bool = False) -> list[Handle | Transfer]:
        """Start gathering all ranks' parts into `out`, cast to its dtype: the masters, or what forward computes with."""
        handles: list[Handle | Transfer] = []
        for home, piece, parts in zip(self.homes, out.pieces, out.parts, strict=True):
            coming = (home.read if masters else home.source.fetch)(parts[self.group.rank])
            if self.group.size > 1:
                with coming.behind():  # so that what this rank computes meanwhile waits for neither
                    handles.append(comm.all_gather(piece, self.group, self.unit.name, parts))
            elif coming is not ARRIVED:
                handles.append(coming)
        return handles

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()
        self.handles = []

    def reveal(self) -> None:
        """Parameters are themselves again, with their values."""
        if self.slot is not None:
            self.replace(self.page.views)  # type: ignore[union-attr]
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
            if self.unit.runtime.comm.broken is None:
                self.wait()
            self.handles = []
            visible = self.unit.visible
            looks = zip(self.classes, self.twins, self.puts, self.holes, strict=True)
            for parameter, (cls, hidden, put, hole) in zip(self.parameters, looks, strict=True):
                if not visible:
                    parameter.__class__ = cls
                put(parameter, hole)
                parameter.__class__ = hidden
            slot, self.slot = self.slot, None
            arena.give(slot)

    def replace(self, values: list[Tensor]) -> None:
        """Parameters are ordinary ones with these values, until `restore`."""
        for parameter, cls, put, value in zip(self.parameters, self.classes, self.puts, values, strict=True):
            parameter.__class__ = cls
            put(parameter, value)

    def restore(self, visible: bool) -> None:
        """Back to what is here, seen or not."""
        page = self.page
        self.replace(self.holes if page is None else page.views)
        if not visible:
            self.conceal()

    # ---- gradients: storage only

    def open_bucket(self, arena: Arena) -> None:
        """Staging space for this rank's gradients, in the dtype they have."""
        if self.persistent is None:
            self.bucket_slot = arena.take(self.layout.padded_numel, self.param_dtype, "buckets", self.unit.name)
            self.bucket = self.bucket_slot.cut(self.key, self.cut)
            return
        if self.grad is not None and same_memory(self.grad[0], self.persistent.parts[0][self.group.rank]):
            # The reduced gradient of an earlier backward is in this rank's own part: it needs a place of its own now.
            moved = self._grad_memory(arena, torch.promote_types(self.grad_dtype, torch.float32))  # to add up in
            for new, old in zip(moved, self.grad, strict=True):
                new.copy_(old)
            self.grad = moved
        self.bucket = self.persistent

    def promote_bucket(self, arena: Arena) -> None:
        """Further gradients come on top: go on in fp32, so that small ones are not rounded away."""
        assert self.bucket is not None
        wide = arena.take(self.layout.padded_numel, torch.float32, "buckets", self.unit.name)
        wide.tensor.copy_(self.bucket.whole)
        _, narrow = self.take_bucket()
        if narrow is not None:
            arena.give(narrow)
        self.bucket_slot, self.bucket = wide, wide.cut(self.key, self.cut)

    def take_bucket(self) -> tuple[Cut | None, Slot | None]:
        """The bucket and its slot, which are the caller's from here on."""
        taken = self.bucket, self.bucket_slot
        self.bucket = self.bucket_slot = None
        return taken

    def grad_storage(self, arena: Arena, promoted: bool) -> list[Tensor]:
        """Where the first reduced gradient after zero_grad goes; one that was added up in fp32 is not rounded again."""
        if self.persistent is None:
            return [home.new_gradient() for home in self.homes]
        if not promoted or self.grad_dtype == self.param_dtype:
            return [parts[self.group.rank] for parts in self.persistent.parts]
        return self._grad_memory(arena, self.grad_dtype)

    def _grad_memory(self, arena: Arena, dtype: torch.dtype) -> list[Tensor]:
        self.grad_slot = arena.take(self.layout.shard_numel, dtype, "gradients", self.unit.name)
        return self._divided(self.grad_slot.tensor)

    def _divided(self, shard: Tensor) -> list[Tensor]:
        """A shard's parts of each piece."""
        numels = self.layout.piece_numels
        return [shard] if len(numels) == 1 else list(shard.split(list(numels)))

    def clear_grad(self, arena: Arena) -> None:
        if self.grad is not None and self.persistent is None:
            for home in self.homes:
                home.drop_gradient()
        self.grad = None
        slot, self.grad_slot = self.grad_slot, None
        if slot is not None:
            arena.give(slot)  # which waits while a tensor of the user's still sees it
        self.has_grad.clear()

    def close(self, arena: Arena) -> None:
        """Give back all that this rank holds; the parameters have their values elsewhere by now."""
        self.clear_grad(arena)
        _, slot = self.take_bucket()
        if slot is not None:
            arena.give(slot)
        self.full = self.persistent = None
        self.master = []
        homes, self.homes = self.homes, []
        for home in homes:
            home.close()


class Unit:
    """A page: the flats of one unit, and whether its parameters can be seen."""

    def __init__(self, name: str, index: int, module: nn.Module | None, flats: list[Flat]) -> None:
        self.name, self.index, self.module, self.flats = name, index, module, flats
        self.runtime: Runtime
        for flat in flats:
            flat.unit = self
        self.pages = any(flat.pages for flat in flats)
        self.far = [home.source for flat in flats if flat.pages for home in flat.homes if home.source.is_far]
        self.gathered_bytes = sum(f.layout.padded_numel * f.param_dtype.itemsize for f in flats if f.pages)
        self.present = not self.pages  # its values are here or under way
        self.visible = False
        self.kept = False  # the cache keeps it between uses
        self.opened = 0  # full_params contexts that keep it, on all ranks alike
        self.holders = 0  # frames and contexts that need it
        self.surrounds = module is None  # other units are used between its own uses; see `Runtime`
        self.look()
        self.arrivals = 0  # gradients that came in this backward

    def look(self) -> bool:
        self.expected = sum(flat.look() for flat in self.flats)  # gradients, at most
        self.trains = self.expected > 0
        self.adapts = 0 < self.expected < sum(len(flat.parameters) for flat in self.flats)  # with frozen parameters
        return self.trains

    def launch(self) -> None:
        """Start gathering what is not here."""
        runtime = self.runtime
        runtime.event("gather", self)
        for flat in self.flats:
            if flat.pages:
                flat.launch(runtime.arena, runtime.comm)
                runtime.saved.came(flat)
        self.present = True

    def show(self) -> None:
        """Wait for the page and let the parameters be used."""
        if not self.visible:
            self.reveal()
            self.runtime.used(self)

    def reveal(self) -> None:
        """`show` for what is always here; no use of its own."""
        if not self.visible:
            for flat in self.flats:
                if flat.handles:
                    flat.wait()
                flat.reveal()
            self.visible = True
            if self.runtime.passes:
                self.runtime.edits.show(self)

    def hide(self) -> None:
        """Trap uses again; the page stays."""
        if self.visible:
            self.runtime.edits.hide(self)
            self.visible = False
            for flat in self.flats:
                flat.conceal()

    def free(self) -> None:
        """Give the page back, if it is one."""
        if not (self.pages and self.present):
            return self.hide()
        runtime = self.runtime
        runtime.edits.hide(self)
        for flat in self.flats:
            if flat.slot is not None:
                del runtime.saved.pages[flat.slot.address]
                flat.free(runtime.arena)
            else:
                flat.conceal()
        self.visible = self.present = False
        runtime.event("free", self)
