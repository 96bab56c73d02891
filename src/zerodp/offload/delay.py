"""The update of what rests off the device, one step behind: it runs in a thread beside the next forward and backward pass.

`step()` hands it the gradients and returns; the next `step()` waits for it and only then lets forward compute with what came out. So step t + 1
computes with parameters that miss the update of step t. Whoever looks at states waits for it first.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from .elsewhere import Elsewhere
from .handed import Handed
from .home import MASTER, STATES, Home, walk, windows
from .stepping import LARGE_WINDOW_NUMEL, WINDOW_NUMEL, Update, run

if TYPE_CHECKING:
    from ..core.optimizer import SegmentParameter, ShardedOptimizer
    from ..core.unit import Flat

Chosen = Mapping[Home, Sequence["SegmentParameter"]]


class Delay:
    """Of one model. `warm_up_steps`: ordinary ones before the first that is delayed; None: there are no others."""

    def __init__(self, warm_up_steps: int | None) -> None:
        self.left = warm_up_steps
        self.threads = ThreadPoolExecutor(1, "zerodp-update") if warm_up_steps is not None else None
        self.thread: int | None = None
        self.running: Future[None] | None = None
        self.update: Update | None = None
        self.disk: Any = None  # the tier that the update uses in its thread, if it does
        self.lenders: list[Elsewhere] = []
        self.leaving: list[tuple[Any, Any]] = []  # (tier, ticket) of gradients that were dropped while they are read
        self.unpublished: list[Home] = []
        self.behind: set[Flat] = set()  # flats whose sources are older than their masters, the same ones on all ranks

    def step(self, optimizer: ShardedOptimizer, chosen: Chosen, flats: set[Flat]) -> set[Flat]:
        """Update these segments, now or beside what comes. The result is the flats that have new values for forward, of this step or the last."""
        fresh = self.publish()
        self.update = update = Update(optimizer)
        if self.left is None or self.left > 0:
            self.left = None if self.left is None else self.left - 1
            run(update, chosen)
            update.conclude()
            return fresh | flats
        # Where the master itself serves gathers (a parameter that was frozen at first), it must not change beside them.
        beside = [home for home in chosen if isinstance(home, Elsewhere) and not home.source.is_master]
        later = set[Home](beside)
        run(update, {home: segments for home, segments in chosen.items() if home not in later})
        handed = [Handed(home, chosen[home], self) for home in beside]
        self.unpublished, self.behind = [*beside], flats
        self.disk = next((home.tier for home in beside if not home.live), None)
        assert self.threads is not None
        self.running = self.threads.submit(self._beside, update, handed)
        return fresh | flats

    def end(self) -> None:
        """Wait for the update that runs beside; forward computes with what it did before."""
        if self.running is None or threading.get_ident() == self.thread:
            return
        running, self.running = self.running, None
        try:
            with contextlib.nullcontext() if self.disk is None else self.disk.telling():
                running.result()
        finally:
            for home in self.lenders:
                home.reader = None
            for tier, ticket in self.leaving:
                tier.free(ticket)
            self.lenders, self.leaving = [], []
        assert self.update is not None
        self.update.conclude()

    def close(self) -> None:
        """Wait for it, and let go of all that it was about."""
        self.end()
        self.update, self.unpublished, self.behind = None, [], set()
        if self.threads is not None:
            self.threads.shutdown()

    def publish(self) -> set[Flat]:
        """Wait for it, and give what came out to forward. The result is the flats that changed."""
        self.end()
        for home in walk(self.unpublished, (MASTER,)):
            home.source.publish()
        for home in self.unpublished:
            home.source.arrive()
        fresh, self.unpublished, self.behind = self.behind, [], set()
        return fresh

    def _beside(self, update: Update, later: list[Handed]) -> None:
        """In the thread. What fails here the caller of `end` tells the others."""
        self.thread = threading.get_ident()
        with torch.no_grad(), contextlib.nullcontext() if self.disk is None else self.disk.together():
            for live, numel in ((True, LARGE_WINDOW_NUMEL), (False, WINDOW_NUMEL)):
                homes = [one for one in later if one.home.live == live]
                for window in windows(homes, (MASTER, STATES), (MASTER, STATES), numel):
                    update.step([one for handed in window for one in handed.segments])
