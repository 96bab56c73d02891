"""Notices that a pass changed parameters in place: what it changed was a copy for this pass, so the change would be lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ShardedError

if TYPE_CHECKING:
    from .unit import Unit


class Edits:
    """Of one model. It compares the parameters' versions when a pass is shown a unit and when it is hidden."""

    def __init__(self) -> None:
        self.shown: dict[Unit, list[int]] = {}
        self.found = ""  # a parameter that was changed

    def show(self, unit: Unit) -> None:
        self.shown[unit] = _versions(unit)

    def forget(self, unit: Unit) -> None:
        """It is the user's to edit from here on."""
        self.shown.pop(unit, None)

    def hide(self, unit: Unit) -> None:
        before = self.shown.pop(unit, None)
        if before is not None and before != (now := _versions(unit)):
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
                f"parameter {name!r} was edited in place inside a forward or backward pass, where it is a copy for this pass: the edit would not be "
                "kept. Edit it between passes inside 'with zerodp.full_params(model, write=True):', or compute with the changed value without storing it"
            )


def _versions(unit: Unit) -> list[int]:
    return [parameter._version for flat in unit.flats for parameter in flat.parameters]
