"""Where the inputs of checkpointed calls rest: each one split over ranks or not, in a tier, and brought back in time.

One store per sharded model, so that its `stats` show what it holds, and one per device for calls outside of any. It knows
tensors and tiers; it does not know what is called, nor when it is recomputed.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..config import FLOATS, Offload
from ..core.arena import Arena, Slot
from ..core.comm import CommRow
from ..core.control import spread
from ..core.runtime import RUNTIMES, Runtime
from ..errors import StorageError
from ..tiers import Ledger, Tier, Transfer
from ..tiers.device import DeviceTier
from ..tiers.disk import DiskTier
from ..tiers.host import HostTier
from .replicated import Partition

KIND = "activations"


class Saved:
    """One input at rest: this rank's part of the memory that it spans, or all of it where it is not split."""

    def __init__(self, store: Store, tensor: Tensor, tier: Tier, partition: Partition | None, label: str) -> None:
        self.store, self.tier, self.label = store, tier, label
        self.comm = partition.comm if partition is not None else None
        self.source = weakref.ref(tensor)  # the same input of several calls is kept once
        self.like: tuple[Any, ...] | None = None  # of a DTensor
        if isinstance(tensor, DTensor):
            self.like = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        local = local_of(tensor)
        memory = span(local)
        self.size, self.stride, self.dtype = local.shape, local.stride(), local.dtype
        self.requires_grad, self.numel = tensor.requires_grad, memory.numel()
        group = self.comm.mesh.world if self.comm is not None else None
        ranks, rank = (group.size, group.rank) if group is not None else (1, 0)
        self.part_numel, self.ranks = -(-memory.numel() // ranks), ranks
        self.mine = slice(rank * self.part_numel, min((rank + 1) * self.part_numel, memory.numel()))
        self.slot: Slot | None = None  # where it is brought to
        self.transfer: Transfer | None = None
        self.ticket = tier.put(memory[self.mine.start : self.mine.stop], KIND, label)

    def bring(self) -> None:
        """Start moving this rank's part to the device."""
        if self.slot is None:
            numel = self.part_numel * self.ranks
            # Its size follows the sequence, as that of what rests does; pages and buckets have the same sizes in every step.
            self.slot = self.store.arena.take(numel, self.dtype, "unsharded", self.label, near=KIND)
            self.transfer = self.tier.fetch(self.ticket, self.slot.tensor[self.mine.start : self.mine.stop])

    def take(self) -> Tensor:
        """The input as it was, to be recomputed from; gathered from all ranks where it is split (a collective)."""
        self.bring()
        (slot, self.slot), (transfer, self.transfer) = (self.slot, None), (self.transfer, None)
        assert slot is not None
        assert transfer is not None
        transfer.wait()
        if self.comm is not None:
            wire = slot.tensor if self.dtype in FLOATS else slot.tensor.view(torch.uint8)  # backends lack some dtypes
            self.comm.all_gather(wire, self.comm.mesh.world, self.label).wait()
            del wire
        tensor = torch.empty(0, dtype=self.dtype, device=slot.tensor.device)
        tensor.set_(slot.tensor.untyped_storage(), 0, self.size, self.stride)  # no view: it has its own version
        self.store.arena.give(slot)  # which reuses it only when nobody sees the tensor any more
        if self.like is not None:
            mesh, placements, size, stride = self.like
            tensor = DTensor.from_local(tensor, mesh, placements, run_check=False, shape=size, stride=stride)
        return tensor.detach().requires_grad_(self.requires_grad)

    def __del__(self) -> None:
        # May run at any moment, in any thread; the store frees it at its next use.
        if hasattr(self, "ticket"):
            self.store.dropped.append((self.tier, self.ticket, self.slot, self.transfer))


class Store:
    """The inputs at rest of one model (or of none) on one device."""

    def __init__(self, arena: Arena, runtime: Runtime | None = None) -> None:
        self.arena = arena
        self.runtime = weakref.ref(runtime) if runtime is not None else lambda: None  # it keeps this store alive
        self.tiers: dict[Any, Tier] = {}  # by `Offload`; and one of `zerodp.sleep`
        self.partitions: dict[tuple[int, ...], Partition] = {}
        self.shared: weakref.WeakValueDictionary[Any, Saved] = weakref.WeakValueDictionary()
        self.dropped: deque[tuple[Tier, Any, Slot | None, Transfer | None]] = deque()
        self.latest: weakref.ref[Any] | None = None  # the last call: in backward it comes first

    def keep(self, inputs: Sequence[Any], partition: Any, offload: Offload, label: str) -> list[Any]:
        """Each input as a `Saved` where it is split or moved, else itself. With a partition, a collective of its ranks."""
        self.settle()
        over = self._partition(partition) if partition is not None else None
        if over is not None and len(over.ranks) == 1:
            over = None
        movable = {place: tensor for place, tensor in enumerate(inputs) if self._movable(tensor, over)}
        split = dict.fromkeys(movable, False)
        if over is not None:
            spans = [(span(local_of(t)), (t.shape, t.dtype, local_of(t).stride())) for t in movable.values()]
            split.update(zip(movable, over.replicated(spans, label), strict=False))
        kept = list(inputs)
        for place, tensor in movable.items():
            if split[place] or offload.activations != "device":
                kept[place] = self._saved(tensor, offload, over if split[place] else None, label)
        return kept

    def tell(self, error: StorageError) -> None:
        """The other ranks of the model, and of the calls that are split, raise this rank's error too."""
        runtime = self.runtime()
        models = [runtime.comm] if runtime is not None else []
        spread(error, [*models, *(p._comm for p in self.partitions.values() if p._comm is not None)])

    def settle(self) -> None:
        """Free what was dropped since the last use."""
        while self.dropped:
            tier, ticket, slot, transfer = self.dropped.popleft()
            if transfer is not None:
                transfer.wait()
            if slot is not None:
                self.arena.give(slot)
            tier.free(ticket)

    def close(self) -> None:
        """Give back what nobody keeps any more; inputs still at rest cannot be brought back."""
        self.settle()
        for tier in self.tiers.values():
            tier.close()
        self.tiers.clear()

    def _movable(self, tensor: Any, over: Partition | None) -> bool:
        """Dense tensors of this device that live for this call only; parameters rest where they rest."""
        if type(tensor) is not Tensor and not _is_dtensor(tensor):
            return False
        local = local_of(tensor)
        return (
            local.layout == torch.strided
            and _same_device(local.device, self.arena.device)
            and not (local.is_conj() or local.is_neg() or local.is_quantized or tensor.is_inference())
            and local.numel() >= (len(over.ranks) if over is not None else 1)
            and _extent(local) <= 2 * local.numel()
        )

    def _saved(self, tensor: Tensor, offload: Offload, partition: Partition | None, label: str) -> Saved:
        key = (id(tensor), tensor._version, offload, partition)
        saved = self.shared.get(key)
        if saved is None or saved.source() is not tensor:
            saved = self.shared[key] = Saved(self, tensor, self._tier(offload), partition, label)
        return saved

    def _partition(self, mesh: Any) -> Partition:
        found = Partition(mesh)
        known = self.partitions.get(found.ranks)
        if known is None or not known.stands:
            known = self.partitions[found.ranks] = found
        return known

    def _tier(self, offload: Offload) -> Tier:
        if offload not in self.tiers:
            device = self.arena.device
            if offload.activations == "device":
                self.tiers[offload] = DeviceTier(self.arena)
            elif offload.activations == "host":
                self.tiers[offload] = HostTier(device)
            else:
                self.tiers[offload] = DiskTier(offload.path, device, offload.host_bytes or 0)
        return self.tiers[offload]

    # ---- what `stats` shows

    @property
    def rows(self) -> Iterable[CommRow]:
        return (row for p in self.partitions.values() if p._comm is not None for row in p._comm.rows.values())

    @property
    def ledgers(self) -> list[Ledger]:
        """Of all tiers in use."""
        return [ledger for tier in self.tiers.values() for ledger in tier.ledgers()]

    def bytes_at(self, place: str, others: Iterable[Ledger] = ()) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes on the "host" or on "disk" by kind, those of `others` included: (now, peak)."""
        self.settle()
        now, peak = {KIND: 0}, {KIND: 0}
        for ledger in (ledger for ledger in (*self.ledgers, *others) if ledger.place == place):
            for kind, most in ledger.peak.items():
                if most:
                    now[kind] = now.get(kind, 0) + ledger.now[kind]
                    peak[kind] = peak.get(kind, 0) + most
        return now, peak

    def reset(self) -> None:
        """Count collectives and peaks anew."""
        self.settle()
        for partition in self.partitions.values():
            if partition._comm is not None:
                partition._comm.rows.clear()
        for tier in self.tiers.values():
            tier.reset_peaks()


_of_models: weakref.WeakKeyDictionary[Runtime, Store] = weakref.WeakKeyDictionary()
_of_devices: dict[torch.device, Store] = {}


def store_of(runtime: Runtime) -> Store:
    """The store of a sharded model."""
    if runtime not in _of_models:
        _of_models[runtime] = Store(runtime.arena, runtime)
    return _of_models[runtime]


def current_store(device: torch.device) -> Store:
    """The store of the sharded model whose pass is under way on this device, else the device's own."""
    for runtime in reversed(list(RUNTIMES.values())):  # of a model inside another the inner one, on all ranks alike
        under_way = runtime.passes and runtime.comm.broken is None  # a pass that broke never ends
        if under_way and _same_device(runtime.arena.device, device):
            return store_of(runtime)
    if device not in _of_devices:
        _of_devices[device] = Store(Arena(device))
    return _of_devices[device]


def local_of(tensor: Any) -> Tensor:
    """The tensor's own memory on this rank, apart from autograd."""
    local: Tensor = tensor._local_tensor if _is_dtensor(tensor) else tensor
    return local.detach()


def span(tensor: Tensor) -> Tensor:
    """The memory between a tensor's first and last element, 1-D: all of it, so that its strides come back as they were."""
    return tensor.as_strided((_extent(tensor),), (1,), tensor.storage_offset())


def _extent(tensor: Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_dtensor(tensor: Any) -> bool:
    return type(tensor) is DTensor


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a == b or (a.type == b.type and None in (a.index, b.index))
