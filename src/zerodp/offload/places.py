"""Which piece rests where: the split of all pieces over device, host and disk, made once, and the tiers that hold them.

A static split is right: every step goes through all pieces once, so whatever an eviction put out would be needed again just as soon.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..config import Offload
from ..errors import StorageError
from ..tiers import Ledger
from ..tiers.disk import DiskTier
from ..tiers.file import ALIGN
from ..tiers.host import HostTier
from . import capacity
from .delay import Chosen, Delay
from .elsewhere import Elsewhere
from .home import Home
from .source import Beside, Copies, Kept, Source
from .told import Told

if TYPE_CHECKING:
    from ..core.optimizer import ShardedOptimizer
    from ..core.unit import Flat


@dataclass
class Link:
    """Bytes of model states that left the device for another tier, and that came back."""

    out: int = 0
    back: int = 0


@dataclass
class Split:
    """The places of one flat's pieces: of its optimizer states, and of what gathers copy from."""

    states: list[str]
    source: list[str]


class Places:
    """Of one model on one device."""

    def __init__(self, offload: Offload, device: torch.device, tell: Callable[[StorageError], None]) -> None:
        self.offload, self.device, self.link = offload, device, Link()
        self.tell = tell  # the other ranks, of what fails here
        self.tiers: dict[str, Any] = {}
        self.copies = Copies()
        self.delay = Delay(offload.warm_up_steps)

    def settle(self, flats: list[Flat], moments: int) -> dict[str, int]:
        """Give every piece of these flats its home. `moments`: values that the optimizer keeps for each element.

        The result is the bytes that will rest on "host" and "disk".

        Raises:
            StorageError: the folder cannot be written to.
        """
        needs = {"device": 0, "host": 0, "disk": 0}
        for flat, one in zip(flats, split(flats, self.offload, moments), strict=True):
            places = list(zip(one.states, one.source, strict=True))
            flat.settle([self._home(flat, piece, *where) for piece, where in enumerate(places)])
            size = state_bytes(flat, moments, self.offload) if flat.trains else flat.shard_dtype.itemsize
            for home, (states, source) in zip(flat.homes, places, strict=True):
                needs[states] += size * home.numel + (3 + moments) * ALIGN  # each in whole blocks, on disk
                if isinstance(home.source, Kept):
                    needs[source] += flat.param_dtype.itemsize * home.numel + ALIGN
        return needs

    def report(self, needs: dict[str, int]) -> list[Any]:
        """What this rank tells the others of its needs, see `capacity`."""
        return capacity.report(self.offload.path or tempfile.gettempdir(), needs["host"], needs["disk"])

    def claim(self, needs: dict[str, int]) -> None:
        """Take the room on disk.

        Raises:
            StorageError: there is less.
        """
        if needs["disk"]:
            self.tier("disk").claim(needs["disk"])

    def _home(self, flat: Flat, piece: int, place: str, params: str) -> Home:
        source = self._source(flat, place, params)
        if place == "device":
            return Home(flat, piece, source)
        return Elsewhere(flat, piece, source, place, self.tier(place), self.host.arena, self.link)

    def _source(self, flat: Flat, place: str, params: str) -> Source:
        """The master serves gathers itself where it rests in the right place, in a dtype that is no more to move."""
        same = place == params and (place == "device" or flat.param_dtype == flat.shard_dtype or not flat.trains)
        if same and not (self.offload.delayed_update and place != "device" and flat.trains):
            return Source()
        if params == "device":
            return Beside(self.host, self.link, self.copies)
        return Kept(params, self.tier(params), self.host, self.link, self.copies)

    @property
    def host(self) -> HostTier:
        return self.tier("host")  # type: ignore[no-any-return]

    def tier(self, place: str) -> Any:
        if place not in self.tiers:
            if place == "host":
                self.tiers[place] = HostTier(self.device)
            else:
                self.tiers[place] = Told(DiskTier(self.offload.path, self.device), self.tell)
        return self.tiers[place]

    def step(self, optimizer: ShardedOptimizer, chosen: Chosen, flats: set[Flat]) -> set[Flat]:
        """Update the chosen segments; what fails on one rank's disk is raised on all. See `Delay.step`.

        Raises:
            StorageError: what could not be written is still in memory, and can be saved.
        """
        if "disk" not in self.tiers:
            return self.delay.step(optimizer, chosen, flats)
        problem: StorageError | None = None
        try:
            with self.tiers["disk"].together():
                flats = self.delay.step(optimizer, chosen, flats)
        except StorageError as error:
            problem = error
        optimizer._zerodp.runtime.control.share(problem)
        return flats

    def close(self) -> None:
        """Give back all that rests elsewhere: the homes have let go of it."""
        self.delay.close()
        self.copies.thread.shutdown()
        for tier in self.tiers.values():
            tier.close()

    # ---- what `stats` shows

    def ledgers(self) -> list[Ledger]:
        return [ledger for tier in self.tiers.values() for ledger in tier.ledgers()]

    def reset(self) -> None:
        self.link.out = self.link.back = 0
        for tier in self.tiers.values():
            tier.reset_peaks()


def split(flats: list[Flat], offload: Offload, moments: int) -> list[Split]:
    """Places of all pieces.

    `fraction` of the elements that train leave the device, the last ones first: the first units' gradients come last in a backward
    pass, so theirs is the update that nothing could hide. Up to `host_bytes` rest in host memory: first what is read in
    every pass, then what only steps read.
    """
    splits = [Split(["device"] * len(f.layout.pieces), ["device"] * len(f.layout.pieces)) for f in flats]
    room = [float("inf") if offload.host_bytes is None else float(offload.host_bytes)]

    def place(wanted: str, nbytes: int) -> str:
        if offload.host_bytes is None or wanted == "device":
            return wanted
        room[0] -= nbytes
        if room[0] < 0:
            room[0] += nbytes
            return "disk"
        return "host"

    if offload.params != "device":
        for flat, one in zip(flats, splits, strict=True):
            if flat.residency.shards_parameters:
                size = flat.param_dtype.itemsize if flat.trains else flat.shard_dtype.itemsize
                one.source = [place(offload.params, size * numel) for numel in flat.layout.piece_numels]
                if not flat.trains:
                    one.states = list(one.source)
    trained = [(f, one) for f, one in zip(flats, splits, strict=True) if f.trains]
    leaves = offload.fraction * sum(f.layout.shard_numel for f, _ in trained) if offload.optimizer != "device" else 0
    for flat, one in reversed(trained):
        numels = flat.layout.piece_numels
        size = state_bytes(flat, moments, offload)
        for piece in reversed(range(len(numels))):
            if leaves <= 0:
                break
            leaves -= numels[piece]
            one.states[piece] = place(offload.optimizer, size * numels[piece])
    return splits


def state_bytes(flat: Flat, moments: int, offload: Offload) -> int:
    """Bytes of master, moments, (where sharded) gradient, and the one that a delayed update reads, for each element off the device."""
    gradient = flat.grad_dtype.itemsize if flat.residency.shards_gradients else 0
    return flat.shard_dtype.itemsize * (1 + moments + bool(offload.delayed_update)) + gradient
