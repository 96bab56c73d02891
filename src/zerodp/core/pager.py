"""Which pages come and go, and when: walks a pass's list, launches it, and lets go of what this rank does not need.

It never decides what a rank does, only when: launches happen in the order of the list (see `schedule`), whoever asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cache import Cache
from .schedule import GATHER, REDUCE, Fingerprint, Op, Pass
from .unit import Unit

if TYPE_CHECKING:
    from .runtime import Runtime

HINTS = 2  # gathers beyond the prefetched ones


class Pager:
    """Residency of the units of one model."""

    def __init__(self, units: list[Unit], budget_bytes: int, prefetch: int, runtime: Runtime) -> None:
        self.units, self.prefetch, self.runtime = units, prefetch, runtime
        self.cache = Cache(budget_bytes)
        self.fingerprint = Fingerprint()
        self.wanted: Unit | None = None  # on its way to being shown

    def page_in(self, unit: Unit, current: Pass) -> None:
        self.wanted = unit
        current.record.append((GATHER, unit.index))
        position = current.ahead.pop(unit.index, None)
        if position is None:
            position = current.find(GATHER, unit.index)
            if position is not None:
                self.launch_through(current, position)
            elif not unit.present:
                self._extra(unit, current)
        if position is not None:
            for index, place in list(current.ahead.items()):
                if place < position and not self._awaits(index, current):  # this rank went past it
                    del current.ahead[index]
                    self.let_go(self.units[index])
        if current.phase == "backward":
            self.begin(unit, current)
        comes_halfway = current.phase == "backward" and unit.expected > 0 and bool(self.runtime.reducer.under_way)
        self._prefetch(current, self.prefetch - comes_halfway)
        self._hint(current)
        self.wanted = None

    def begin(self, unit: Unit, current: Pass) -> None:
        """The unit's backward is under way, so that of the unit before is over: autograd goes back in the order of forward.

        Nothing else tells that a unit ends whose parameters do not all get gradients: frozen ones, experts that this batch did not use.
        """
        if unit.index in current.begun or (unit.trains and (unit.surrounds or current.forward[unit.index] > 1)):
            return
        current.begun.append(unit.index)
        if len(current.begun) > 1:
            before = self.units[current.begun.pop(0)]
            if 0 < before.arrivals < before.expected:
                self.complete(before, current)
            if before.arrivals or not before.trains:
                self.let_go(before)

    def arrived(self, unit: Unit, current: Pass) -> None:
        """One more of the unit's gradients is in its bucket."""
        current.arrived = True
        unit.arrivals += 1
        if unit.index in current.complete:
            current.missed = True  # later than expected: the bucket stays open until the next reduction
            if (REDUCE, unit.index) in current.record:
                current.record.remove((REDUCE, unit.index))
            current.record.append((REDUCE, unit.index))
            return
        if unit.arrivals == 1:
            self.begin(unit, current)
        usual = current.order.arrivals.get(unit.index, unit.expected)
        if unit.pages and 2 * unit.arrivals in (usual, usual + 1):
            self.halfway(current)
        if unit.arrivals == unit.expected:
            self.complete(unit, current)

    def halfway(self, current: Pass) -> None:
        """Half of a page's gradients are here: the bucket before its own goes, and then the next page comes.

        Either alone would stand in memory for the whole of the unit's backward. So one of them does at a time, and each has
        half of the computing to hide behind.
        """
        self.runtime.reducer.drain()
        self._prefetch(current, self.prefetch)

    def _prefetch(self, current: Pass, most: int) -> None:
        ops = current.order.ops
        while current.pointer < len(ops) and ops[current.pointer][0] == GATHER and len(current.ahead) < most:
            index = ops[current.pointer][1]
            if self._launch(ops[current.pointer]):
                current.ahead[index] = current.pointer
            current.pointer += 1

    def _hint(self, current: Pass) -> None:
        """What the list gathers after what is under way starts on its way from disk, which is the longest."""
        following = current.order.ops[current.pointer : current.pointer + 3 * HINTS]
        for index in [index for kind, index in following if kind == GATHER][:HINTS]:
            for source in self.units[index].far:
                source.ahead()

    def launch_through(self, current: Pass, last: int) -> None:
        """Launch the list up to and including `last`.

        Gathers before a gather were for other ranks, and are let go here, but for units whose backward is still to come: a checkpoint that
        computes them again may go through them in another order. Before a reduction the last ones are those that the list
        put ahead of their use.
        """
        ops = current.order.ops
        while current.pointer <= last:
            position = current.pointer
            current.pointer += 1
            if not self._launch(ops[position]) or position == last:
                continue
            index = ops[position][1]
            if ops[last][0] == GATHER and not self._awaits(index, current):
                self.let_go(self.units[index])
                continue
            current.ahead[index] = position
            unsure = [index for index in current.ahead if not self._awaits(index, current)]
            for index in unsure[: max(len(current.ahead) - self.prefetch, 0)]:  # in the order of their launches
                del current.ahead[index]
                self.let_go(self.units[index])

    def _awaits(self, index: int, current: Pass) -> bool:
        """Whether this rank may be about to use the unit though the list has it elsewhere: where a checkpoint computes again, or several
        forwards came before, their uses may go another way. Its forward used it, and none of its gradients has come yet."""
        unsure = self.runtime.recomputes or current.several
        return unsure and index in current.awaited and self.units[index].arrivals == 0

    def _launch(self, op: Op) -> bool:
        """Launch one operation of the list. True if a page came that was not here, or is kept and may be dropped before its use."""
        kind, index = op
        unit = self.units[index]
        if kind == REDUCE:
            self.fingerprint.add(kind, index)
            self.runtime.event("reduce", unit)
            self.runtime.reducer.launch(unit)
            return False
        if unit.kept or unit.opened:
            return True
        self.fingerprint.add(kind, index)
        came = not unit.present
        if came:
            unit.launch()
        else:
            self._take_part(unit)
        current = self.runtime.passes[-1]
        soonest = current.phase == "backward" or bool(current.key[2])
        for gone in self.cache.admit(unit, soonest):
            if not gone.visible and gone is not self.wanted and gone.index not in current.ahead:
                self.let_go(gone)  # the others go when this rank is done with them
        return came

    def _take_part(self, unit: Unit) -> None:
        """The list gathers a unit that this rank happens to hold: give the others their parts all the same."""
        self.runtime.event("gather", unit)
        for flat in unit.flats:
            if flat.pages:
                slot = self.runtime.arena.take(flat.layout.padded_numel, flat.param_dtype, "unsharded", unit.name)
                for handle in flat.gather_into(slot.cut(flat.key, flat.cut), self.runtime.comm):
                    handle.wait()
                self.runtime.arena.give(slot)

    def _extra(self, unit: Unit, current: Pass) -> None:
        """A demand that the list does not have: all ranks must want it now. The next list will have it.

        A rank that used all experts of a block may be further in the list than one that did not. So whatever has some of its gradients is
        over (see `begin`), or the others would wait for its reduction where this rank waits for them; and who is behind catches up.
        """
        current.missed = True
        for other in self.units if current.phase == "backward" else ():
            if 0 < other.arrivals < other.expected and not other.surrounds and other.index not in current.complete:
                self.complete(other, current)
        most = self.runtime.control.meet(unit.index)
        while self.fingerprint.launches < most and current.pointer < len(current.order.ops):
            position, current.pointer = current.pointer, current.pointer + 1
            if self._launch(current.order.ops[position]):
                current.ahead[current.order.ops[position][1]] = position
        if not unit.present:
            self.fingerprint.add(GATHER, unit.index)
            unit.launch()

    def let_go(self, unit: Unit) -> None:
        if unit.present and unit.pages and unit.holders == 0 and not (unit.kept or self._expected(unit)):
            unit.free()

    def _expected(self, unit: Unit) -> bool:
        """By the pass around this one: a forward in which somebody goes backward has its next pages here already."""
        return any(unit.index in outer.ahead for outer in self.runtime.passes[:-1])

    def release(self, unit: Unit) -> None:
        """This rank is done with the unit for now."""
        if unit.kept or self._expected(unit):
            unit.hide()
        else:
            unit.free()

    def complete(self, unit: Unit, current: Pass) -> None:
        """All gradients of the unit are in: reduce it, and let its page go, unless frozen parameters may still be of use."""
        if current.synchronizes:
            current.record.append((REDUCE, unit.index))
            current.complete.add(unit.index)
            if current.find(REDUCE, unit.index) is None:
                current.missed = True
            elif (last := current.reducible(self.prefetch)) is not None:
                self.launch_through(current, last)
        if not unit.adapts:
            if unit.index in current.begun:
                current.begun.remove(unit.index)
            if unit.pages and unit.holders == 0:
                self.release(unit)

    def finish(self, current: Pass) -> None:
        """The end of a pass launches the rest of its list; nothing stays but what is held or kept."""
        if self.runtime.comm.broken is None:
            self.launch_through(current, len(current.order.ops) - 1)
        for unit in self.units:
            if unit.holders == 0:
                self.release(unit)
        current.order.record = current.record
