"""The save that is under way in this process: one at a time, waited for at the next call and at exit, and never failing unseen."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable

from ..errors import CheckpointError

_log = logging.getLogger("zerodp")


class Saving:
    """A save that goes on while training does; `zerodp.save(..., asynchronous=True)` returns it."""

    def __init__(self, job: Callable[[], None], what: str) -> None:
        self.what = what
        self._error: BaseException | None = None
        self._job, self._told = job, False
        # not a daemon: the interpreter waits for it at exit
        self._thread = threading.Thread(target=self._run, name="zerodp-save")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is on the disk.

        Raises:
            CheckpointError: it could not be written; what stood at its path before is untouched.
        """
        self._thread.join()
        if self._error is not None and not self._told:
            self._told = True
            raise CheckpointError(f"the asynchronous {self.what} failed: {self._error}") from self._error

    def _run(self) -> None:
        try:
            self._job()
        except BaseException as error:
            self._error = error

    def report(self) -> None:
        """At exit: say what nobody has asked for."""
        self._thread.join()
        if self._error is not None and not self._told:
            _log.critical(
                "the asynchronous %s failed, and the program ended without looking: %s", self.what, self._error
            )


_current: Saving | None = None


def start(job: Callable[[], None], what: str) -> Saving:
    global _current
    _current = Saving(job, what)
    return _current


def wait() -> None:
    """Wait for the save under way, if there is one.

    Raises:
        CheckpointError: it failed, and this was not said before.
    """
    global _current
    pending, _current = _current, None
    if pending is not None:
        pending.wait()


@atexit.register
def _report() -> None:
    if _current is not None:
        _current.report()
