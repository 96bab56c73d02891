"""The update of what rests on the host, one step behind: it runs in a thread beside the next forward and backward pass.

`step()` hands it the gradients and returns; the next `step()` waits for it and only then lets forward compute with what came out. So step t + 1
computes with parameters that miss the update of step t. Whoever looks at states waits for it first.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.norms import part
from ..core.parameter import set_grad
from ..tiers import Opened
from .elsewhere import Elsewhere
from .home import GRADIENT, Home
from .stepping import LARGE_WINDOW_NUMEL, Update, fits, run

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
        later = [(h, these) for h, these in chosen.items() if isinstance(h, Elsewhere) and not h.source.is_master]
        beside = {home for home, _ in later}
        run(update, {home: segments for home, segments in chosen.items() if home not in beside})
        gradients = {one: self._gradient(home, one) for home, segments in later for one in segments}
        arriving = [home.tier.open(home.tickets[GRADIENT]) for home, _ in later if home.keeps_gradient]
        self.unpublished, self.behind = [home for home, _ in later], flats
        assert self.threads is not None
        self.running = self.threads.submit(
            self._beside, update, [segments for _, segments in later], gradients, arriving
        )
        return fresh | flats

    def end(self) -> None:
        """Wait for the update that runs beside; forward computes with what it did before."""
        if self.running is None or threading.get_ident() == self.thread:
            return
        running, self.running = self.running, None
        try:
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
        for home in self.unpublished:
            home.source.publish()
        for home in self.unpublished:
            home.source.arrive()
        fresh, self.unpublished, self.behind = self.behind, [], set()
        return fresh

    def _gradient(self, home: Elsewhere, one: SegmentParameter) -> Tensor:
        """What the update reads while the next pass makes another one: as it rests, until somebody wants to write there, or a copy."""
        gradient = part(one.flat, one.segment)
        home.uses(gradient)
        if home.keeps_gradient and fits(one):
            home.reader = self
            self.lenders.append(home)
            return gradient
        home.arrive()
        ticket = home.tier.reserve(gradient.numel(), one.dtype, "gradients", home.name)
        self.leaving.append((home.tier, ticket))
        copy: Tensor = home.tier.open(ticket).wait()
        return copy.copy_(gradient).div_(one.flat.grad_scale)

    def _beside(
        self,
        update: Update,
        later: list[Sequence[SegmentParameter]],
        gradients: dict[SegmentParameter, Tensor],
        arriving: list[Opened],
    ) -> None:
        self.thread = threading.get_ident()
        for gradient in arriving:
            gradient.wait()
        window: list[SegmentParameter] = []
        with torch.no_grad():
            for segments in later:
                for one in segments:
                    set_grad(one, gradients[one])
                window += segments
                if sum(one.numel() for one in window) >= LARGE_WINDOW_NUMEL:
                    update.step(window)
                    window = []
            update.step(window)
