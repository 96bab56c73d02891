"""Shards in other hands: the user's, who may write into them, a save's, which reads them while training goes on, or put away."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import ShardedError
from .control import Control, Kind

if TYPE_CHECKING:
    from .runtime import Runtime


class Lending:
    """Of one model. Whatever changes shards or optimizer state asks here first."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.lent: list[int] | None = None  # versions of the shards when what they hold was last known to all ranks
        self.readers: list[Callable[[], None]] = []  # each returns when somebody has read what there was
        self.asleep: Any = None  # what `zerodp.sleep` has put away
        self.ever_lent = False  # somebody may hold parts of the shards, and write without asking

    def require_awake(self) -> None:
        """
        Raises:
            ShardedError: the values are put away.
        """
        if self.asleep is not None:
            raise ShardedError(self.asleep.message)

    def lend(self) -> None:
        """The shards go to the user, who may write into them."""
        self.require_awake()
        self.before_change()
        self.runtime.look()
        self.ever_lent = True
        if self.lent is None:
            self.lent = self._versions()

    def take_back(self) -> None:
        """If any rank wrote into lent shards, whole parameters are old."""
        if self.lent is not None:
            edited = self.lent != self._versions()
            self.note()
            rows = self.runtime.control.require(Kind.LENT, overflow=edited)
            if bool(rows[:, Control.OVERFLOW].any()):
                self.runtime.changed()

    def begin_forward(self) -> None:
        """Forwards inside `full_params` need not match those of other ranks, so they ask nobody."""
        if not self.runtime.open:
            self.take_back()

    def note(self) -> None:
        """What the shards hold now is no edit. Whoever has parts of them may write at any time from here on.

        But not where an update runs beside training: it and the user would write at the same time, so those ask again each time.
        """
        lasts = self.ever_lent and not self.runtime.places.offload.delayed_update
        self.lent = self._versions() if lasts else None

    def before_change(self) -> None:
        """Wait for those who still read."""
        while self.readers:
            self.readers.pop()()

    def _versions(self) -> list[int]:
        return [home.version for flat in self.runtime.flats() for home in flat.homes]
