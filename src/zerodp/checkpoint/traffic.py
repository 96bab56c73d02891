"""How many bytes of checkpoints this rank has moved, per model; `zerodp.stats(model).checkpoint` shows it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from ..core.runtime import Runtime


@dataclass
class Traffic:
    """Bytes that this rank read and wrote for checkpoints, and the seconds that its last save has kept it from training."""

    bytes_read: int = 0
    bytes_written: int = 0
    stall_seconds: float = 0.0


_of: weakref.WeakKeyDictionary[Runtime, Traffic] = weakref.WeakKeyDictionary()


def of(runtime: Runtime) -> Traffic:
    return _of.setdefault(runtime, Traffic())
