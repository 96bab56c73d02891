"""The optimizer's own step over this rank's segments, in windows: all that lies ready at once, the rest home by home.

A window brings what rests elsewhere, gives gradients the dtype of the master, steps, and hands the new values to what gathers copy
from. Settings are the groups' own in every window, so that all windows together count as one step.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..core.norms import part
from ..core.parameter import set_grad
from .home import GRADIENT, MASTER, STATES, Home, windows

if TYPE_CHECKING:
    from ..core.arena import Slot
    from ..core.optimizer import SegmentParameter, ShardedOptimizer
    from ..core.unit import Flat

WINDOW_NUMEL = 2**19  # elements of a window that needs memory of its own; a piece with more is its window
# Of one that needs none: often enough that the last one's masters are copied to where gathers read meanwhile.
LARGE_WINDOW_NUMEL = 2**23
OWN = ("param_groups", "state")
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def run(update: Update, chosen: Mapping[Home, Sequence[SegmentParameter]]) -> None:
    """Update these segments, each of which has a reduced gradient; the others are left alone."""
    groups: dict[
        tuple[float, Flat | None], list[Home]
    ] = {}  # by the least elements of a window, and what no window reaches beyond
    for home, segments in chosen.items():
        if not home.live or not all(fits(one) for one in segments):
            # On the device as much memory for casts as the largest flat needs; elsewhere enough to be worth a call.
            key: tuple[float, Flat | None] = (math.inf, home.flat) if home.place == "device" else (WINDOW_NUMEL, None)
        else:
            key = (math.inf if home.source.is_master else LARGE_WINDOW_NUMEL, None)
        groups.setdefault(key, []).append(home)
    for (numel, _), homes in groups.items():
        for window in windows(homes, (MASTER, GRADIENT, STATES), (MASTER, STATES), numel):
            slots = [slot for home in window for slot in _give(chosen[home])]
            try:
                update.step([one for home in window for one in chosen[home]])
            finally:
                for home, slot in slots:
                    home.arena.give(slot)
            for home in window:
                home.source.publish()
    if update.last is None:
        update.step([])  # for what the optimizer does besides


def fits(one: SegmentParameter) -> bool:
    """Whether the optimizer can take the gradient as it rests."""
    assert one.flat.grad is not None
    rests = one.flat.grad[one.segment.piece]
    return rests.dtype == one.dtype and rests.device == one.device and one.flat.grad_scale == 1.0


def _give(segments: Iterable[SegmentParameter]) -> Iterator[tuple[Home, Slot]]:
    """Their gradients, cast for this window only, so that no full-size copy appears."""
    for one in segments:
        gradient, home = part(one.flat, one.segment), one.flat.homes[one.segment.piece]
        home.uses(gradient)
        if fits(one):
            set_grad(one, gradient)
        else:
            slot = home.arena.take(gradient.numel(), one.dtype, "buckets", home.name)
            set_grad(one, slot.tensor.copy_(gradient).div_(one.flat.grad_scale))
            yield home, slot


class Update:
    """One step of an optimizer in as many calls of its own `step` as it takes.

    Each runs on a stand-in, an object of the same class with the same state, whose groups hold the window's segments only.
    """

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self.optimizer = optimizer
        self.before = {
            **optimizer.__dict__,
            **{hooks: OrderedDict() for hooks in HOOKS},
        }  # those run once, with the optimizer itself
        self.groups = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        self.group_of = {id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.last: Any = None
        for hook in list(optimizer._optimizer_step_pre_hooks.values()):
            hook(optimizer, (), {})

    def step(self, segments: Sequence[SegmentParameter]) -> None:
        stand_in = object.__new__(type(self.optimizer))
        stand_in.__dict__.update(self.before)
        stand_in.param_groups = [{"params": [], **settings} for settings in self.groups]
        for one in segments:
            if id(one) in self.group_of:
                stand_in.param_groups[self.group_of[id(one)]]["params"].append(one)
        try:
            type(self.optimizer).__mro__[2].step(stand_in)  # type: ignore[attr-defined]
        finally:
            for one in segments:
                set_grad(one, None)  # or it would be taken for the next gradient, and keep this one's memory
        self.last = stand_in

    def conclude(self) -> None:
        """What a step changes in the optimizer itself, settings and counters of its own, is kept once."""
        if self.last is not None:
            changed = {k: v for k, v in self.last.__dict__.items() if v is not self.before.get(k) and k not in OWN}
            self.optimizer.__dict__.update(changed)
            for group, before, after in zip(
                self.optimizer.param_groups, self.groups, self.last.param_groups, strict=False
            ):
                group.update({k: v for k, v in after.items() if k != "params" and v is not before.get(k)})
        for hook in list(self.optimizer._optimizer_step_post_hooks.values()):
            hook(self.optimizer, (), {})
