"""Notices that parameters were changed in place where what is changed is a copy, so that the change would be lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import ShardedError

if TYPE_CHECKING:
    from .core.unit import Unit


class Edits:
    """Of one model. It compares the parameters' versions when a pass is shown a unit and when it is hidden, and before the next."""

    def __init__(self) -> None:
        self.shown: dict[Unit, list[int]] = {}
        self.hidden: dict[Unit, list[int]] = {}  # of units whose values stay here, since their last pass
        self.found = ""  # a parameter that was changed

    def show(self, unit: Unit) -> None:
        now = self.shown[unit] = _versions(unit)
        self._compare(unit, self.hidden.pop(unit, now), now)

    def forget(self, unit: Unit) -> None:
        """It is the user's to edit from here on."""
        self.shown.pop(unit, None)
        self.hidden.pop(unit, None)

    def hide(self, unit: Unit) -> None:
        before = self.shown.pop(unit, None)
        if before is not None:
            now = _versions(unit)
            self._compare(unit, before, now)
            if not unit.pages:
                self.hidden[unit] = now

    def _compare(self, unit: Unit, before: list[int], now: list[int]) -> None:
        if before != now:
            names = [name for flat in unit.flats for name in flat.names]
            self.found = next(name for name, old, new in zip(names, before, now, strict=True) if old != new)

    def refuse(self) -> None:
        """
        Raises:
            ShardedError: a parameter was changed.
        """
        if self.found:
            name, self.found = self.found, ""
            raise ShardedError(
                f"parameter {name!r} was edited in place inside a forward or backward pass, or through detach() before one, where it is a copy: the "
                "edit would not be kept. Edit it between passes inside 'with zerodp.full_params(model, write=True):', or compute with the changed "
                "value without storing it"
            )


def _versions(unit: Unit) -> list[int]:
    return [parameter._version for flat in unit.flats for parameter in flat.parameters]
