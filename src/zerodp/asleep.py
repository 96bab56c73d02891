"""Sleep and wake: everything that a sharded model and its optimizer hold on the device goes to a tier, and comes back.

What stays (masters, whole parameters and gradients, optimizer states, buffers) keeps its tensors: their storages are emptied
and filled again, so that views of them stay views. What is in a slot of an arena is given back, and gets another one. What rests as
far away as asked for, or farther, stays there. Knows memory; what it means is the business of those who use it, who are told to wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .config import PLACES, Offload
from .core.access import require_closed, runtime_of
from .core.arena import Slot
from .core.control import Kind
from .core.local import local_of
from .core.runtime import Runtime
from .core.unit import Flat
from .errors import ConfigError, ShardedError, StorageError, ZeroError
from .offload.elsewhere import Elsewhere
from .offload.home import LEDGER, Home, is_elementwise, moment_kind
from .offload.sleeping import trapped
from .offload.source import Kept as KeptSource
from .residual.store import store_of
from .tiers import Tier
from .tiers.disk import DiskTier
from .tiers.host import HostTier

NOTHING = torch.empty(0)  # stands in a list for what is away


def sleep(model: nn.Module, optimizer: Any = None, to: str = "host", path: str | None = None) -> None:
    """Move all that the sharded model and its optimizer hold on the device off it, until `zerodp.wake` (a collective).

    Whole parameters, masters, gradients, those that wait under `no_sync()` too, optimizer states, buffers, and the arena's idle
    memory. What is offloaded already stays where it is; only `to="disk"` moves what rests in host memory, too. Tensors stay the same
    objects and views of them stay views, but for gradients, and for masters moved from host memory, that `local_shards` handed out.
    Until `wake` every use of the model, of its buffers and of its optimizer raises `ShardedError`; `stats` and `describe` work.

    Args:
        model: what `zerodp.shard` returned.
        optimizer: its sharded optimizer, which goes along in any case.
        to: "host" (pinned where there is an accelerator) or "disk".
        path: folder for the file of "disk"; None = the system's folder for temporary files.

    Raises:
        ConfigError: another model's optimizer, or another place.
        ShardedError: inside a pass or `full_params()`, or asleep already.
        StorageError: the disk has no room; nothing has been moved then, on any rank.
    """
    runtime = runtime_of(model)
    require_closed(runtime, "sleep()")
    runtime.lending.take_back()
    runtime.lending.before_change()
    runtime.control.require(Kind.SLEEP)
    asleep, problem = Asleep(runtime, model, to), None
    try:
        if optimizer is not None and optimizer is not runtime.optimizer:
            raise ConfigError("sleep: this optimizer was not sharded with this model")
        asleep.put_by(_tier(to, path, runtime.arena.device))
    except (ConfigError, StorageError) as error:
        problem = error
    except RuntimeError as error:
        problem = _no_memory("sleep", error)
    try:
        runtime.control.share(problem)
    except BaseException:
        asleep.forget()
        raise
    asleep.begin()


def wake(model: nn.Module) -> None:
    """Bring back what `zerodp.sleep` moved away, every bit of it (a collective).

    Raises:
        ShardedError: the model is awake.
        StorageError: what was kept cannot be read; the model stays asleep then, on all ranks.
    """
    runtime = runtime_of(model)
    asleep: Asleep | None = runtime.lending.asleep
    if asleep is None:
        raise ShardedError("wake(): this model is awake; zerodp.sleep(model) puts it to sleep")
    runtime.control.require(Kind.WAKE)
    problem: StorageError | None = None
    try:
        asleep.bring_back()
    except StorageError as error:
        problem = error
    except RuntimeError as error:
        problem = _no_memory("wake", error)
    try:
        runtime.control.share(problem)
    except BaseException:
        asleep.empty()
        raise
    asleep.end()


def _no_memory(what: str, error: RuntimeError) -> StorageError:
    """What torch raises on one rank, for all of them."""
    if isinstance(error, ZeroError):
        raise error
    return StorageError(f"{what}: there is no room for the values: {str(error).splitlines()[0]}")


def _tier(to: str, path: str | None, device: torch.device) -> Tier:
    if to not in PLACES[1:]:
        raise ConfigError(f"sleep: to must be one of {', '.join(map(repr, PLACES[1:]))}, got {to!r}")
    if path is not None and to != "disk":
        raise ConfigError('sleep: path is the folder of to="disk"')
    return HostTier(device) if to == "host" else DiskTier(Offload(path=path).path, device)


@dataclass
class Kept:
    """A storage that is emptied and filled again. counted: by the arena's ledger."""

    storage: torch.UntypedStorage
    kind: str
    label: str
    counted: bool
    nbytes: int = field(init=False)
    ticket: Any = None

    def __post_init__(self) -> None:
        self.nbytes = self.storage.nbytes()

    def bytes(self) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


@dataclass
class Moved:
    """Values in a slot: a flat's bucket, its reduced gradient, or (with a `home`) that of one piece."""

    flat: Flat
    slot: Slot | None
    kind: str
    home: Home | None = None
    numel: int = field(init=False)
    dtype: torch.dtype = field(init=False)
    ticket: Any = None

    def __post_init__(self) -> None:
        assert self.slot is not None
        self.numel, self.dtype = self.slot.tensor.numel(), self.slot.tensor.dtype

    def leave(self) -> Slot:
        """Take the slot out of where it is."""
        slot, self.slot = self.slot, None
        assert slot is not None
        if self.kind == "buckets":
            self.flat.take_bucket()
        elif self.home is not None:
            self.home.slot, self.flat.grad[self.home.piece] = None, NOTHING  # type: ignore[index]
        else:
            self.flat.grad_slot, self.flat.grad = None, [NOTHING for _ in self.flat.homes]
        return slot

    def settle(self) -> None:
        """Put the slot, which is another one now, in its place."""
        flat, slot = self.flat, self.slot
        assert slot is not None
        if self.kind == "buckets":
            flat.bucket_slot, flat.bucket = slot, slot.cut(flat.key, flat.cut)
        elif self.home is not None:
            self.home.slot, flat.grad[self.home.piece] = slot, slot.tensor  # type: ignore[index]
        else:
            flat.grad_slot, flat.grad = slot, flat._divided(slot.tensor)


@dataclass
class Rested:
    """What a ticket of the host tier stands for, a home's or a source's, while it is on disk."""

    owner: Elsewhere | KeptSource
    name: str
    numel: int = field(init=False)
    dtype: torch.dtype = field(init=False)
    back: Any = None  # the ticket that it gets
    ticket: Any = None

    def __post_init__(self) -> None:
        self.numel, self.dtype = self.values.numel(), self.values.dtype

    @property
    def values(self) -> Tensor:
        return self.owner.tier.open(self.owner.resting()[self.name]).wait()

    @property
    def kind(self) -> str:
        return LEDGER.get(self.name, "parameters")


class Asleep:
    """What one rank has put away. message: what a use of the model is told."""

    def __init__(self, runtime: Runtime, model: nn.Module, to: str) -> None:
        self.runtime, self.model, self.arena = runtime, model, runtime.arena
        self.nearer = PLACES[: PLACES.index(to)] if to in PLACES else ()  # where nothing is to rest meanwhile
        self.message = f"the model is asleep, its values are {'in host memory' if to == 'host' else 'on disk'} (zerodp.sleep): zerodp.wake(model) brings them back"
        self.tier: Tier | None = None
        self.kept: list[Kept] = []
        self.moved: list[Moved] = []
        self.rested: list[Rested] = []
        self.traps: list[tuple[Tensor, type]] = []

    # ---- there

    def put_by(self, tier: Tier) -> None:
        """Copy everything; the model still has it."""
        self.tier = tier
        self._rest()
        self.kept = list(self._storages())
        self.moved = list(self._slots())
        self.rested = list(self._tickets())
        for one in self.kept:
            one.ticket = tier.put(one.bytes(), one.kind, one.label)
        for other in self.moved:
            assert other.slot is not None
            other.ticket = tier.put(other.slot.tensor, other.kind, other.flat.unit.name)
        for third in self.rested:
            third.ticket = tier.put(third.values, third.kind)

    def begin(self) -> None:
        """Let go of it."""
        if self.arena.device.type != "cpu":
            torch.accelerator.synchronize(self.arena.device)  # the copies have ended
        self.empty()
        for one in self.kept:
            if one.counted:
                self.arena.add(one.kind, -one.nbytes)
        for other in self.moved:
            self.arena.give(other.leave())
        self.arena.settle()
        self.arena.drop_idle()
        for third in self.rested:
            third.owner.leave(third.name)
        if self.rested:
            self.runtime.places.host.close()  # its idle memory goes; it can be used again
        if self.arena.device.type != "cpu":
            torch.accelerator.empty_cache()
        for tensor in self._seen():
            self.traps.append((tensor, type(tensor)))
            tensor.__class__ = trapped(type(tensor), self.message)
        assert self.tier is not None
        store_of(self.runtime).tiers["asleep"] = self.tier  # where `stats` finds it
        self.runtime.lending.asleep = self

    def empty(self) -> None:
        for one in self.kept:
            one.storage.resize_(0)

    def forget(self) -> None:
        """Nothing is put away after all."""
        if self.tier is not None:
            self.tier.close()

    # ---- and back

    def bring_back(self) -> None:
        assert self.tier is not None
        for one in self.kept:
            self.tier.ahead(one.ticket)
        for one in self.kept:
            one.storage.resize_(one.nbytes)
            self.tier.fetch(one.ticket, one.bytes()).wait()
        for other in self.moved:
            if other.slot is None:
                other.slot = self.arena.take(other.numel, other.dtype, other.kind, other.flat.unit.name)
            self.tier.fetch(other.ticket, other.slot.tensor).wait()
        for third in self.rested:
            home = third.owner.tier
            if third.back is None:
                third.back = home.reserve(third.numel, third.dtype, third.kind)
            self.tier.fetch(third.ticket, home.open(third.back).wait()).wait()

    def end(self) -> None:
        """The model has it again."""
        for one in self.kept:
            if one.counted:
                self.arena.add(one.kind, one.nbytes)
        for other in self.moved:
            other.settle()
        for tensor, cls in self.traps:
            tensor.__class__ = cls
        for third in self.rested:
            third.owner.come_back(third.name, third.back)
        self.runtime.lending.asleep = None
        self.runtime.lending.note()  # other tensors are no edits
        assert self.tier is not None
        del store_of(self.runtime).tiers["asleep"]
        self.tier.close()

    # ---- what there is

    def _rest(self) -> None:
        """Nothing is under way, and no page is kept."""
        runtime = self.runtime
        runtime.reducer.drain()
        for unit in runtime.pager.cache.clear():
            runtime.pager.let_go(unit)
        for flat in runtime.flats():
            flat.wait()
            for home in flat.homes:
                home.source.arrive()
                home.arrive()
        store_of(runtime).settle()

    def _storages(self) -> Iterator[Kept]:
        seen: set[int] = set()

        def new(storage: torch.UntypedStorage) -> bool:
            fresh = storage._cdata not in seen and storage.nbytes() > 0 and storage.resizable()
            seen.add(storage._cdata)
            return fresh

        for storage, kind in self.arena.lasting:
            if new(storage):
                yield Kept(storage, kind, "", counted=True)
        for segment, key, value in self._states():
            if self._goes(segment, value) and new(value.untyped_storage()):
                kind = moment_kind(key) if is_elementwise(value, segment) else "other_state"
                yield Kept(value.untyped_storage(), kind, segment.full_name, counted=False)
        for buffer in self._buffers():
            if new(local_of(buffer).untyped_storage()):
                yield Kept(local_of(buffer).untyped_storage(), "parameters", "(buffers)", counted=False)

    def _slots(self) -> Iterator[Moved]:
        for flat in self.runtime.flats():
            if flat.bucket_slot is not None:
                yield Moved(flat, flat.bucket_slot, "buckets")
            if flat.grad_slot is not None:
                yield Moved(flat, flat.grad_slot, "gradients")
            for home in flat.homes:
                if home.place == "device" and home.slot is not None:
                    yield Moved(flat, home.slot, "gradients", home)

    def _tickets(self) -> Iterator[Rested]:
        for home in (home for flat in self.runtime.flats() for home in flat.homes):
            for owner in (home, home.source):
                if isinstance(owner, (Elsewhere, KeptSource)) and owner.place in self.nearer:
                    yield from (Rested(owner, name) for name in owner.resting())

    def _states(self) -> Iterator[tuple[Any, str, Tensor]]:
        """The optimizer's tensors; scalars stay."""
        optimizer = self.runtime.optimizer
        for segment, state in optimizer.state.items() if optimizer is not None else ():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    yield segment, key, value

    def _goes(self, segment: Any, value: Tensor) -> bool:
        """Whether an optimizer's tensor rests too near, and where its segment's states do."""
        home = segment.flat.homes[segment.segment.piece]
        return home.place in self.nearer and value.device == home.arena.device

    def _buffers(self) -> Iterator[Tensor]:
        for module in self.model.modules():
            for buffer in module._buffers.values():
                if buffer is not None and buffer.device == self.arena.device:
                    yield buffer

    def _seen(self) -> Iterator[Tensor]:
        """Tensors that the user may have, other than parameters, which guard themselves. The optimizer's rest wherever they do."""
        emptied = {one.storage._cdata for one in self.kept}
        found = [*(self.runtime.optimizer._zerodp if self.runtime.optimizer is not None else ())]
        found += [value for _, _, value in self._states()]
        found += [one for one in self._buffers() if local_of(one).untyped_storage()._cdata in emptied]
        yield from {id(one): one for one in found}.values()
