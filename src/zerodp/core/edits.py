"""Parameters that a pass changes in place: what it sees of them is a copy, so the edit would be lost, and is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ShardedError

if TYPE_CHECKING:
    from .runtime import Runtime
    from .unit import Unit


def versions(unit: Unit) -> list[int]:
    return [p._version for flat in unit.flats for p in flat.parameters]


def look(unit: Unit) -> None:
    """Remember an edit since the unit was shown to a pass."""
    if unit.visible and unit.versions and unit.versions != (now := versions(unit)):
        names = [name for flat in unit.flats for name in flat.names]
        unit.runtime.edited = next(n for n, old, new in zip(names, unit.versions, now, strict=True) if old != new)


def refuse(runtime: Runtime) -> None:
    """
    Raises:
        ShardedError: the pass that ended has edited a parameter.
    """
    name, runtime.edited = runtime.edited, ""
    if name:
        raise ShardedError(
            f"parameter {name!r} was edited in place inside a forward or backward pass, where it is a copy for this pass: the edit would not be "
            "kept. Edit it between passes inside 'with zerodp.full_params(model, write=True):', or compute with the changed value without storing it"
        )
