"""A home as an update beside training sees it: with the gradients that its segments had at the step, while the next ones arrive.

They are lent as they rest, or where training will write into them, as a copy in the same tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..core.norms import part
from ..core.parameter import set_grad
from ..tiers import Opened
from .elsewhere import Elsewhere
from .home import GRADIENT, multiply
from .stepping import fits

if TYPE_CHECKING:
    from ..core.optimizer import SegmentParameter
    from .delay import Delay


class Handed:
    """Made at the step; the rest is called in the update's thread, as `windows` does."""

    def __init__(self, home: Elsewhere, segments: Sequence[SegmentParameter], delay: Delay) -> None:
        self.home, self.segments, self.tier = home, segments, home.tier
        self.rests: list[tuple[Any, slice]] = []  # of each segment: its gradient's ticket, and where it is in there
        self.factors: list[tuple[float, list[slice] | None]] = []
        self.scale = 1.0
        self.opened: list[Opened] = []
        self.casts: list[tuple[Any, Opened]] = []
        # Host memory is not asked for in threads, so what must be cast there is cast now.
        if home.keeps_gradient and (not home.live or all(fits(one) for one in segments)):
            self._lend(delay)
        else:
            home.arrive()
            for one in segments:
                self.rests.append((self._copy(one), slice(None)))
                delay.leaving.append((self.tier, self.rests[-1][0]))

    def _lend(self, delay: Delay) -> None:
        home = self.home
        home.reader = delay
        delay.lenders.append(home)
        self.factors, self.scale = list(home.factors), home.flat.grad_scale
        for place in (one.segment for one in self.segments):
            self.rests.append((home.tickets[GRADIENT], slice(place.offset, place.offset + place.numel)))

    def _copy(self, one: SegmentParameter) -> Any:
        gradient = part(one.flat, one.segment)
        self.home.uses(gradient)
        ticket = self.tier.reserve(gradient.numel(), one.dtype, "gradients", self.home.name)
        opened = self.tier.open(ticket)
        opened.wait().copy_(gradient).div_(one.flat.grad_scale)
        opened.close(changed=True)
        return ticket

    @property
    def numel(self) -> int:
        return self.home.numel

    def begin(self, kinds: tuple[str, ...]) -> None:
        self.home.begin(kinds)
        self.opened = [self.tier.open(ticket) for ticket in dict.fromkeys(ticket for ticket, _ in self.rests)]

    def show(self) -> None:
        self.home.show()
        found = [opened.wait() for opened in self.opened]
        for factor, spans in self.factors:
            multiply(found[0], factor, spans)
        values = found * len(self.rests) if len(found) == 1 else found
        for one, (_, where), gradient in zip(self.segments, self.rests, values, strict=True):
            set_grad(one, self._fitting(gradient[where], one))

    def _fitting(self, gradient: Tensor, one: SegmentParameter) -> Tensor:
        """As the optimizer can take it; in memory of the tier, for this window only."""
        if gradient.dtype == one.dtype and self.scale == 1.0:
            return gradient
        ticket = self.tier.reserve(gradient.numel(), one.dtype, "buckets", self.home.name)
        self.casts.append((ticket, self.tier.open(ticket)))
        return self.casts[-1][1].wait().copy_(gradient).div_(self.scale)

    def end(self, changed: tuple[str, ...]) -> None:
        for one in self.segments:
            set_grad(one, None)  # where the optimizer never came to it
        self.home.end(changed)
        for opened in self.opened:
            opened.close(changed=False)
        for ticket, opened in self.casts:
            opened.close(changed=False)
            self.tier.free(ticket)
        self.opened, self.casts = [], []
