"""Notices that parameters were changed in place where what is changed is a copy, so that the change would be lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .core.bits import as_bits, storage_address
from .errors import ShardedError

if TYPE_CHECKING:
    from .core.unit import Flat, Unit


class Edits:
    """Of one model. It compares the parameters' versions when a pass is shown a unit and when it is hidden, and before the next.

    What is written through `.data` has no version. So the first pass that uses a unit compares values and places as well: a module that
    initialises or constrains its own weight in forward does so then.
    """

    def __init__(self) -> None:
        self.shown: dict[Unit, list[int]] = {}
        self.hidden: dict[Unit, list[int]] = {}  # of units whose values stay here, since their last pass
        self.first: dict[Unit, list[int]] = {}  # what units of a first pass looked like when they were shown
        self.known: set[Unit] = set()
        self.found = ""  # a parameter that was changed

    def show(self, unit: Unit) -> None:
        now = self.shown[unit] = _versions(unit)
        self._compare(unit, self.hidden.pop(unit, now), now)
        if unit not in self.known:
            self.first[unit] = _looks(unit)

    def forget(self, unit: Unit) -> None:
        """It is the user's to edit from here on."""
        for kept in (self.shown, self.hidden, self.first):
            kept.pop(unit, None)

    def hide(self, unit: Unit) -> None:
        before = self.shown.pop(unit, None)
        if before is not None:
            now = _versions(unit)
            self._compare(unit, before, now)
            if unit in self.first:
                self._look(unit)
            if not unit.pages:
                self.hidden[unit] = now

    def _look(self, unit: Unit) -> None:
        """At the end of a first pass: it stays one until nothing was changed in it."""
        before, now = self.first.pop(unit), _looks(unit)
        if before == now:
            self.known.add(unit)
            return
        self._compare(unit, before, now)
        for flat in unit.flats:
            if flat.full is not None:
                flat.replace(flat.full.views)

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
                f"parameter {name!r} was edited inside a forward or backward pass, or through detach() before one, where it is a copy: the "
                "edit would not be kept. Edit it between passes inside 'with zerodp.full_params(model, write=True):', or compute with the changed "
                "value without storing it"
            )


def _versions(unit: Unit) -> list[int]:
    """Of the parameters, without the engine's own changes."""
    return [parameter._version - flat.version for flat in unit.flats for parameter in flat.parameters]


def _looks(unit: Unit) -> list[int]:
    """Of each parameter a number that changes with its place, and with its values where these are a copy."""
    with _disable_current_modes(), torch.no_grad():
        return [look for flat in unit.flats for look in _looks_of(flat)]


def _looks_of(flat: Flat) -> list[int]:
    page = flat.page
    if page is None or type(page.whole) is not Tensor or page.whole.is_meta:
        return [0] * len(flat.parameters)
    place = storage_address(page.whole)
    kept = not flat.pages and all(home.source.is_page for home in flat.homes)
    tensors = [one.held(parameter) for one, parameter in zip(flat.locals, flat.parameters, strict=True)]
    moved = [storage_address(tensor) - place for tensor in tensors]
    return moved if kept else [m + _sum(t) for m, t in zip(moved, tensors, strict=True)]


def _sum(tensor: Tensor) -> int:
    """Of the bits, in one reduction without copies: large models have a first pass, too."""
    return int(as_bits(tensor.detach().reshape(-1)).sum(dtype=torch.int64))
