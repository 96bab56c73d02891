"""Which gathered units are worth keeping between uses: a byte budget between stage 3 (nothing) and stage 2 (everything).

Whether a unit counts as kept is a function of the launches alone, never of what one rank happens to hold, so that all ranks
agree on which gathers to leave out.
"""

from __future__ import annotations

from .unit import Unit


class Cache:
    """Units whose pages stay, in the order in which they were gathered."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.kept: dict[int, Unit] = {}
        self.kept_bytes = 0

    def admit(self, unit: Unit, returns_soonest: bool) -> list[Unit]:
        """Keep `unit` if it fits. The result is what must go for it.

        returns_soonest: what comes later in this pass is needed sooner after it (a forward that a backward follows, or a
            backward that the next forward follows), so the oldest go first: Bélády's rule for these orders. Otherwise the
            passes run round in a circle, and what is kept stays.
        """
        size = unit.gathered_bytes
        if size > self.budget_bytes or unit.index in self.kept:
            return []
        gone = []
        if returns_soonest:
            for other in list(self.kept.values()):
                if self.kept_bytes + size <= self.budget_bytes:
                    break
                gone.append(self._drop(other))
        if self.kept_bytes + size <= self.budget_bytes:
            self.kept[unit.index] = unit
            self.kept_bytes += size
            unit.kept = True
        return gone

    def forget(self, unit: Unit) -> None:
        if unit.kept:
            self._drop(unit)

    def clear(self) -> list[Unit]:
        """After a step nothing that was gathered is current."""
        return [self._drop(unit) for unit in list(self.kept.values())]

    def _drop(self, unit: Unit) -> Unit:
        del self.kept[unit.index]
        self.kept_bytes -= unit.gathered_bytes
        unit.kept = False
        return unit
