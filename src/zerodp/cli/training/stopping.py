"""Ending a run early: what asks for it on this rank. That all ranks end at the same step is agreed in `worker`."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = {128 + number for number in SIGNALS}  # exit statuses of a rank that ended cleanly on a signal
LIFELINE = "ZERODP_LIFELINE"  # set where standard input ends when the launcher does
GRACE = 30.0  # seconds that a rank without a launcher has for ending cleanly


class StopRequest:
    """`signal` is the number of the signal that asked this rank to stop, or 0. Asking again changes nothing."""

    def __init__(self) -> None:
        self.signal = 0

    def listen(self) -> None:
        """Catch the signals, also those that the launcher blocked until now, and watch the lifeline."""
        for number in SIGNALS:
            signal.signal(number, self._caught)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if LIFELINE in os.environ:
            threading.Thread(target=_watch_launcher, name="lifeline", daemon=True).start()

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number


def _watch_launcher() -> None:
    """Without its launcher nobody would ever end a rank that hangs."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)
