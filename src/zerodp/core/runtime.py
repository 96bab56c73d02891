"""The state of one sharded model between calls: which pass is under way, which units are here, what was launched.

Module hooks call `enter` and `leave`, parameters call `fault`, autograd calls `arrived` and what stands in for saved tensors (see
`saved`), and the optimizer calls `settle`. Everything they cause is launched in the order of the pass's list (see `schedule`).
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..config import Config
from ..edits import Edits
from ..errors import ShardedError
from ..offload.home import MASTER, walk
from .arena import Arena
from .comm import Comm
from .control import Control, Kind
from .lending import Lending
from .pager import Pager
from .parameter import Where, writes
from .reducer import Reducer
from .saved import SavedTensors, pop_hooks
from .schedule import MAX_REVISIONS, REDUCE, Op, Order, Pass, backward_order, forward_order
from .unit import Flat, Unit

ROOT = "(root)"
RUNTIMES: weakref.WeakValueDictionary[int, Runtime] = weakref.WeakValueDictionary()  # in the order of shard()
TRACE_LENGTH = 100_000


class Event(NamedTuple):
    """Something this rank did: kind is gather, use, free, reduce or step; phase is forward, backward or idle."""

    kind: str
    unit: str
    phase: str


@dataclass(eq=False)
class Frame:
    """One hooked module under way: the unit it holds, and pages it used without their own modules' hooks."""

    held: list[Unit] = field(default_factory=list)
    faulted: list[Unit] = field(default_factory=list)
    packs: bool = False  # whether hooks for saved tensors are undone with it


class Runtime:
    """Drives the units of one model."""

    def __init__(
        self, units: list[Unit], arena: Arena, comm: Comm, reducer: Reducer, names: dict[nn.Module, str], config: Config
    ) -> None:
        RUNTIMES[id(self)] = self
        self.units, self.arena, self.comm, self.reducer = units, arena, comm, reducer
        self.module_names = names
        self.unit_of = {unit.module: unit for unit in units if unit.module is not None}
        for module, unit in self.unit_of.items():
            unit.surrounds = any(inner is not module and inner in self.unit_of for inner in module.modules())
        self.pager = Pager(units, config.unsharded_bytes, config.prefetch, self)
        self.paged = any(unit.pages for unit in units)
        self.saved = SavedTensors(self)
        self.passes: list[Pass] = []
        self.frames: list[Frame] = []
        self.orders: dict[tuple[Any, ...], Order] = {}
        # since the last backward: key, units in order of use
        self.forwards: list[tuple[tuple[Any, ...], list[int]]] = []
        self.trace: deque[tuple[str, str, str]] = deque(maxlen=TRACE_LENGTH)  # what `Event` holds
        self.open = 0  # full_params contexts that hold every unit
        self.lending = Lending(self)
        self.synchronizes = True  # False inside no_sync
        self.scaled_backward = False  # the loss was scaled by optimizer.backward
        self.unscaled_backwards = 0
        self.edits = Edits()
        self.buffers: list[tuple[nn.Module, str, torch.dtype]] = []  # cast ones: where, and their original dtype
        self.plain_state_dict: Callable[..., dict[str, Any]]  # the model's own; set when hooks are installed
        self.rearm: Callable[[], None]  # hangs lost gradient hooks again
        self.hooks: list[Any] = []  # handles that undo the module hooks
        self.optimizer: Any = None
        self.places: Any  # `offload.places`: which tier each piece rests in
        self.control = Control(self, comm, config.check)
        comm.last_event = self.last_event

    # ---- events

    @property
    def phase(self) -> str:
        return self.passes[-1].phase if self.passes else "idle"

    @property
    def recomputes(self) -> bool:
        """Whether a module runs inside backward: a checkpoint computes it again."""
        return bool(self.frames) and self.phase == "backward"

    @property
    def era(self) -> int:
        """Goes on when the values of parameters change."""
        return sum(flat.version for flat in self.flats())

    def event(self, kind: str, unit: Unit | None) -> None:
        self.trace.append((kind, unit.name if unit is not None else "", self.phase))

    def last_event(self) -> str:
        if not self.trace:
            return "nothing yet"
        kind, unit, phase = self.trace[-1]
        return f"{kind} of {unit!r} in {phase}" if unit else kind

    def used(self, unit: Unit) -> None:
        if self.passes:
            self.passes[-1].uses.append(unit.index)
            self.event("use", unit)

    # ---- forward

    def enter(self, module: nn.Module) -> bool:
        """A hooked module begins. True if this begins a pass, which is when inputs are cast."""
        self.end_failed()
        begins = not self.passes
        if begins:
            self.frames.clear()
            self._begin_forward(module)
        frame = Frame()
        if self.paged and torch.is_grad_enabled():
            frame.packs = self.saved.push()
        self.frames.append(frame)
        unit = self.unit_of.get(module)
        if unit is not None:
            self.demand(unit)
            self._hold(unit, frame.held)
        return begins

    def leave(self, module: nn.Module) -> bool:
        """A hooked module ends, by an exception perhaps. True if this ended the pass."""
        if not self.frames:
            return False
        self.end_failed()
        frame = self.frames.pop()
        if frame.packs:
            pop_hooks()
        for unit in frame.held + frame.faulted:
            self._unhold(unit)
        if self.frames or self.phase != "forward":
            return False
        self._end_forward()
        return True

    def _begin_forward(self, module: nn.Module) -> None:
        self.lending.begin_forward()
        self.control.look()
        key = ("forward", self.module_names.get(module, "?"), torch.is_grad_enabled())
        order = self.orders.get(key)
        if order is None:
            order = self.orders[key] = Order(forward_order(u.index for u in self._units_under(module) if u.pages), 0)
        self.passes.append(Pass("forward", key, order))

    def _end_forward(self) -> None:
        current = self.passes[-1]
        self.pager.finish(current)
        self.passes.remove(current)
        if current.key[2] and not self.open:
            self.forwards = [*self.forwards[-7:], (current.key, current.uses)]
        if not self.open:  # inside full_params forward passes need not match those of other ranks
            self.control.post(Kind.FORWARD, current)
        self.edits.refuse()

    def _units_under(self, module: nn.Module) -> list[Unit]:
        inside = {id(p) for p in module.parameters()}
        return [u for u in self.units if any(id(p) in inside for flat in u.flats for p in flat.parameters)]

    # ---- backward

    def begin_backward(self, *_: Any) -> None:
        """Called by whatever autograd reaches first; may be called again."""
        self.end_failed()
        if self.passes and self.passes[-1].phase == "backward":
            return
        self.control.look()
        self.reducer.drain()  # of the backward before, whose buckets the forward had the time to send
        synchronizes = self.synchronizes
        trains = tuple(unit.index for unit in self.units if unit.look())
        entered = tuple(dict.fromkeys(key for key, _ in self.forwards))
        key = ("backward", entered, several := len(self.forwards) > 1, synchronizes, trains)
        order = self.orders.get(key)
        if order is None:
            order = self.orders[key] = Order(
                self._first_backward_order(set(trains) if synchronizes else set()), self.pager.prefetch
            )
        uses = Counter(index for _, used in self.forwards for index in used)
        awaited = (uses.keys() & set(trains)) - order.silent
        current = Pass(
            "backward", key, order, synchronizes=synchronizes, awaited=awaited, forward=uses, several=several
        )
        for unit in self.units:
            unit.arrivals = 0
        self.unscaled_backwards += not self.scaled_backward
        self.passes.append(current)
        for unit in self.units:
            if not unit.pages:
                unit.reveal()  # gradients are cheaper to take from parameters that trap nothing

        def ended() -> None:
            self.end_backward()

        current.alive = weakref.ref(ended)  # autograd holds it until it has called it, or thrown it away
        torch.autograd.Variable._execution_engine.queue_callback(ended)

    def _first_backward_order(self, trains: set[int]) -> list[Op]:
        """Built from the order of use just seen, on rank 0."""
        self.control.require(Kind.ORDER, 0)
        uses = [index for _, used in self.forwards for index in used]
        uses = self.comm.exchange_objects(uses, "the order of units in the first backward pass")[0]
        known = {unit.index for unit in self.units}
        entered = {op[1] for key, _ in self.forwards for op in self.orders[key].ops} | set(uses)
        if not self.forwards:
            entered = known
        whole = any(key[1] == "" for key, _ in self.forwards)
        registered = [unit.index for unit in self.units if unit.index in entered or (whole and not unit.pages)]
        pages = {unit.index for unit in self.units if unit.pages}
        root = next((unit.index for unit in self.units if unit.name == ROOT), -1)
        return backward_order(uses, registered, pages, trains, root)

    def arrived(self, flat: Flat, index: int, parameter: Any) -> None:
        """Autograd finished this rank's gradient of one parameter."""
        if not self.passes or self.passes[-1].phase != "backward":
            self.begin_backward()
        if not self.reducer.accept(flat, index, parameter):
            return
        self.pager.arrived(flat.unit, self.passes[-1])

    def end_backward(self) -> None:
        """Autograd has gone through the whole graph, or failed."""
        current = self.passes[-1] if self.passes else None
        if current is None or current.phase != "backward":
            return
        if current.order.reduces and not current.arrived:
            current.missed = True
        current.order.arrivals = {unit.index: unit.arrivals for unit in self.units if unit.arrivals}
        current.order.silent = current.forward.keys() - current.order.arrivals.keys()
        self.pager.finish(current)
        self.passes.remove(current)
        self.forwards.clear()
        self.control.post(Kind.BACKWARD, current)
        self.edits.refuse()

    def end_failed(self) -> None:
        """What begins with every use: end a backward pass that an exception has ended; the other ranks may still expect its launches."""
        self.lending.require_awake()
        if self.passes and self.passes[-1].failed:
            self.end_backward()

    def require_idle(self, what: str) -> None:
        """Raises ShardedError where a forward or backward pass is under way, or the model is asleep."""
        self.end_failed()
        self.look()
        if self.passes:
            raise ShardedError(f"{what} inside a forward or backward pass: parameters are gathered on use there")

    # ---- demand, launch, release

    def look(self) -> None:
        """Somebody looks at masters or states: what runs beside training, an update or a copy of new values, ends first."""
        self.places.delay.end()
        self.places.copies.end()

    def fault(self, where: Where, use: str) -> None:
        """A hidden parameter is used: bring its unit here, or say why not."""
        self.lending.require_awake()
        unit = where.flat.unit
        if unit.pages and not self.passes and torch._C._current_graph_task_id() != -1:
            self.begin_backward()
        if self.passes:
            self.demand(unit)
            if self.frames and self.phase == "forward" and unit.pages and unit.holders == 0:
                faulted = self.frames[-1].faulted
                self._hold(unit, faulted)
                if len(faulted) > 2:  # whatever still looks at the oldest keeps its slot alive; a new use faults again
                    self._unhold(faulted.pop(0))
        elif unit.pages or use == "data" or writes(use):
            what = "is sharded" if unit.pages else "keeps its values in shards"
            raise ShardedError(
                f"parameter {where.name!r} {what} (unit {unit.name!r}) and was used by {use!r} outside forward and backward. Use "
                "'with zerodp.full_params(model):' to read it, 'zerodp.full_params(model, write=True)' to edit it, or call the model itself"
            )
        else:
            for flat in unit.flats:
                flat.wait()

    def demand(self, unit: Unit) -> None:
        """This rank needs the unit's parameters now."""
        if unit.visible:
            return
        if torch._C._len_torch_dispatch_stack() > 0:
            # selective checkpointing watches every operation of the model; bringing a page is none of them
            with _disable_current_modes():
                self._bring(unit)
        else:
            self._bring(unit)

    def _bring(self, unit: Unit) -> None:
        if unit.pages:
            if not self.passes:
                raise ShardedError(
                    f"a saved tensor of unit {unit.name!r} was read outside forward and backward; its page is not here"
                )
            self.pager.page_in(unit, self.passes[-1])
        unit.show()

    def _hold(self, unit: Unit, holder: list[Unit]) -> None:
        unit.holders += 1
        holder.append(unit)

    def _unhold(self, unit: Unit) -> None:
        unit.holders -= 1
        if unit.holders == 0 and self.phase == "forward" and unit.pages:
            self.pager.release(unit)

    # ---- steps and collectives outside passes

    def settle(self, what: Kind, argument: int = 0) -> Tensor:
        """All ranks are here, nothing is under way, and no gradient waits in a bucket anywhere. The result is the ranks' messages."""
        self.end_failed()
        self.lending.take_back()
        self.reducer.drain()
        rows = self.control.require(what, argument)
        self.reduce_waiting(rows)
        self.reducer.drain()
        return rows

    def reduce_waiting(self, rows: Tensor) -> None:
        """What came after its unit's reduction, on whatever rank."""
        if bool(rows[:, Control.WAITING].any()):
            waiting = self.control.mask(rows, Control.UNITS)
            for unit in (unit for unit in self.units if waiting >> unit.index & 1):
                self.pager.fingerprint.add(REDUCE, unit.index)
                self.event("reduce", unit)
                self.reducer.launch(unit)

    def stepped(self) -> None:
        self.refresh()
        self.event("step", None)

    def changed(self) -> None:
        """The masters have other values, on all ranks: forward computes with these from here on."""
        for home in walk((h for flat in self.flats() for h in flat.homes if not h.source.is_master), (MASTER,)):
            home.source.publish()
        for flat in self.flats():
            flat.changed()
            flat.stale = True
        self.refresh()

    def refresh(self) -> None:
        """The shards have new values: what was gathered is old, and whole parameters are fetched at once, in order."""
        self.lending.note()
        for unit in self.pager.cache.clear():
            self.pager.let_go(unit)
        for unit in self.units:
            for flat in unit.flats:
                if flat.full is not None and flat.stale:
                    flat.launch(self.arena, self.comm)
            if any(flat.handles for flat in unit.flats):
                self.event("gather", unit)

    def flats(self) -> Iterable[Flat]:
        return (flat for unit in self.units for flat in unit.flats)

    def revise(self, key: tuple[Any, ...], arrived: bool) -> None:
        """A pass did not follow its list: take rank 0's order for the next time."""
        order = self.orders[key]
        if order.revisions < MAX_REVISIONS:
            record = self.comm.exchange_objects(order.record, "the new order of a pass")[0]
            order.revise([(kind, index) for kind, index in record], arrived)
