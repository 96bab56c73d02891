"""Looks at a wait that takes long: what is every rank waiting for, and can that still come?

A rank waits for launch k of a lane. If each rank of a set waits for a launch that some other rank of the set has not made,
none of them can ever go on. Ranks that do not wait here (computing, saving, sleeping) are never suspected, so slowness is no
error. The ranks tell each other through the process group's store, and only while a wait is long.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from ..errors import RankMismatchError

if TYPE_CHECKING:
    from .comm import Handle

PATIENCE, INTERVAL, HEARING = 2.0, 0.5, 8.0  # seconds
_uses = getattr(Tensor, "_use_count", lambda tensor: 1)  # by C++; releases that lack it need no interpreter to let go
SMALL_BYTES = 2**16  # of tensors that are kept until the end


class Watch:
    """One thread per process for all sharded models; it sleeps but for a glance every `INTERVAL`."""

    def __init__(self) -> None:
        self.current: Handle | None = None
        self.counts: dict[str, int] = {}  # launches per lane
        self.history: deque[tuple[str, int, str]] = deque(maxlen=64)  # (lane, sequence, what)
        self.models: dict[tuple[int, ...], int] = {}
        self.thread: threading.Thread | None = None
        self.ended = threading.Event()
        self.recent: deque[Tensor] = deque(maxlen=32)  # what threads of the backend's may still hold
        atexit.register(self._end)
        # of the thread: the wait it saw last, since when, whether the others know of it, and what seemed wrong
        self.seen: tuple[str, int] | None = None
        self.since, self.published, self.suspicion = 0.0, False, ""

    # ---- kept by the engine

    def number(self, ranks: tuple[int, ...]) -> str:
        """A name for the next model over these ranks; the same on all of them, as they shard models in the same order."""
        self.models[ranks] = self.models.get(ranks, 0) + 1
        return f"{self.models[ranks]}/{'-'.join(map(str, ranks))}"

    def forget(self) -> None:
        """Count anew: another process group stands, whose ranks need not have the same past."""
        for counted in (self.models, self.counts, self.history):
            counted.clear()

    def launched(self, lane: str, what: str) -> int:
        sequence = self.counts[lane] = self.counts.get(lane, 0) + 1
        self.history.append((lane, sequence, what))
        return sequence

    def lends(self, first: Tensor, *others: Tensor) -> Tensor:
        """To the backend, which copies small messages in threads; see `_end`. The result is the first."""
        self.lent()
        self.recent.extend(tensor for tensor in (first, *others) if tensor.nbytes <= SMALL_BYTES)
        return first

    def lent(self) -> bool:
        """Whether the backend still holds any of them. The others are let go here."""
        held = [tensor for tensor in self.recent if _uses(tensor) > 1]
        self.recent.clear()
        self.recent.extend(held)
        return bool(held)

    def start(self) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name="zerodp-watch", daemon=True)
            self.thread.start()

    def _end(self) -> None:
        """Python ends threads that it does not wait for inside whatever they call, and a call of torch's then aborts the process: of this thread,
        or of one of the backend's that lets go of a tensor which Python knows, too."""
        self.ended.set()
        if self.thread is not None:
            self.thread.join(PATIENCE)
        limit = time.monotonic() + PATIENCE
        while self.lent() and time.monotonic() < limit:
            time.sleep(0.001)

    def verdict(self, model: str) -> tuple[str, str] | None:
        """(type, text) of the error that any rank has found about this model, if one has."""
        try:
            store = _store()
            for _ in range(6):  # the finder writes before it breaks, but the break may come here through a third rank
                if store.check([f"verdict/{model}"]):
                    kind, text = json.loads(store.get(f"verdict/{model}"))
                    store.add(f"heard/{model}", 1)
                    return kind, text
                time.sleep(0.05)
        except (RuntimeError, ValueError):
            pass  # the store lives in rank 0's process, which may be the one that is gone
        return None

    def tell(self, model: str, kind: str, text: str) -> bool:
        """Let the other ranks know, also those that wait for this one. The first verdict stands: whether it is this one."""
        with contextlib.suppress(RuntimeError, ValueError):
            store = _store()
            if store.add(f"told/{model}", 1) == 1:
                store.set(f"verdict/{model}", json.dumps([kind, text]))
                return True
            store.add(f"heard/{model}", 1)
        return False

    def await_heard(self, model: str, others: int) -> None:
        """Until so many ranks know the verdict, for a while: they may need this process to hear it."""
        end = time.monotonic() + HEARING
        with contextlib.suppress(RuntimeError, ValueError):
            while _store().add(f"heard/{model}", 0) < others and time.monotonic() < end:
                time.sleep(0.05)

    # ---- the thread

    def _run(self) -> None:
        while not self.ended.wait(INTERVAL):
            try:
                self._glance()
            except (RuntimeError, ValueError):  # no store any more: rank 0 is gone, which the connections tell as well
                self.seen, self.published = None, False

    def _glance(self) -> None:
        """A method of its own, so that no handle, with the memory of its result, is held while the thread sleeps."""
        handle = self.current
        wait = None if handle is None or not handle.comm.watched else (handle.lane, handle.sequence)
        if handle is None or wait is None or wait != self.seen:
            self.seen, self.since, self.suspicion = wait, time.monotonic(), ""
            if self.published:
                _publish({})
                self.published = False
        elif time.monotonic() - self.since > PATIENCE:
            if not self.published:
                _publish(self._state(handle))
                self.published = True
            if _store().check([f"verdict/{handle.comm.number}"]):
                handle.comm.sever()  # a rank that this one waits for has met an error and gone on
            found = stuck(_states(handle), dist.get_rank())
            if found and found == self.suspicion and self.current is handle:
                self._raise_alarm(handle, found)
                found = ""
            self.suspicion = found

    def _state(self, handle: Handle) -> dict[str, Any]:
        model = handle.comm.number + ":"
        return {
            "model": handle.comm.number,
            "lane": handle.lane,
            "sequence": handle.sequence,
            "what": handle.what,
            "group": list(handle.group.ranks),
            "launched": {lane: count for lane, count in self.counts.items() if lane.startswith(model) or count},
            "history": list(self.history),
            "last": handle.comm.last_event(),
        }

    def _raise_alarm(self, handle: Handle, found: str) -> None:
        for model in {state["model"] for state in _states(handle).values() if state}:
            self.tell(model, RankMismatchError.__name__, found)
        handle.comm.sever()


def stuck(states: dict[int, dict[str, Any]], me: int) -> str:
    """A report if rank `me` is in a set of ranks that can never go on, else ''. An empty state is a rank that does not wait."""
    ranks = {rank for rank, state in states.items() if state}
    for _ in states:  # take out, again and again, who waits only for launches that have been made or can still be
        ranks = {
            r for r in ranks if any(q != r and q in states[r]["group"] and _lacks(states[q], states[r]) for q in ranks)
        }
    if me not in ranks:
        return ""
    lines = [
        f"rank {rank} waits for {state['what']}, after {state['last']}" if state else f"rank {rank} does not wait"
        for rank, state in states.items()
    ]
    return (
        f"the ranks wait for different things and would wait for ever: {'; '.join(lines)}. Every rank must call the same modules, "
        "backward passes, steps and collective functions of zerodp in the same order; inside zerodp.full_params() forward "
        "passes need not match, and units of stage 2 may be used more often on one rank than on another"
    )


def _lacks(state: dict[str, Any], wait: dict[str, Any]) -> bool:
    """Whether the rank in `state` has not launched what `wait` waits for, or has launched something else in its place."""
    lane, sequence = wait["lane"], wait["sequence"]
    if state["launched"].get(lane, 0) < sequence:
        return True
    return any(a == lane and n == sequence and what != wait["what"] for a, n, what in state["history"])


def _store() -> Any:
    return dist.PrefixStore("zerodp", dist.distributed_c10d._get_default_store())


def _publish(state: dict[str, Any]) -> None:
    _store().set(str(dist.get_rank()), json.dumps(state))


def _states(handle: Handle) -> dict[int, dict[str, Any]]:
    store = _store()
    ranks = handle.comm.mesh.world.ranks
    return {rank: json.loads(store.get(str(rank))) if store.check([str(rank)]) else {} for rank in ranks}


WATCH = Watch()
