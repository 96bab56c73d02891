"""A wire of chosen latency and bandwidth inside the process: every collective ends no sooner than such a wire would have it end.

It needs no rights, unlike link.py. One wire carries what both lanes send, one transfer after another; the bytes are really sent
beside it, so it should be slower than the real wire.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from zerodp.core.access import runtime_of
from zerodp.core.comm import Handle


class _Due:
    """Stands among the works of a handle, and is waited for like them."""

    def __init__(self, moment: float) -> None:
        self.moment = moment

    def wait(self) -> None:
        time.sleep(max(self.moment - time.perf_counter(), 0.0))


def delay(model: torch.nn.Module, latency: float, bandwidth: float) -> None:
    """From here on the collectives of a sharded model take `latency` seconds and then its bytes at `bandwidth` per second, if
    that is longer than they really take."""
    comm = runtime_of(model).comm
    free = [0.0]

    def slowed(call: Any) -> Any:
        def launch(whole: torch.Tensor, *rest: Any, **named: Any) -> Handle:
            handle: Handle = call(whole, *rest, **named)
            if handle.works:
                size = handle.group.size
                sent = whole.nbytes * (size - 1) / size
                free[0] = max(time.perf_counter(), free[0]) + latency + sent / bandwidth
                handle.works = [*handle.works, _Due(free[0])]
            return handle

        return launch

    comm.all_gather, comm.reduce_scatter = slowed(comm.all_gather), slowed(comm.reduce_scatter)  # type: ignore[method-assign]
