"""Worker processes that stay alive between tests, one per rank, and the decorator that runs a test's body on them.

``@on_ranks(2)`` above ``def test_something(stage)`` runs the body on two ranks; its parameters are pytest's, as ever.
By hand, with the fixture ``ranks``: ``first, second = ranks.run(2, function, argument)``, a function of a module's top
level and the results in rank order.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import worker
from tests.ranks.worker import Failure, Success

Answers = dict[int, Success | Failure]

LIMIT = 60.0  # seconds a call may take
GRACE = 10.0  # seconds the other ranks have to end once one has failed


class RankFailure(Exception):
    """A call failed; ``rank`` is the one that failed first."""

    def __init__(self, rank: int, message: str):
        super().__init__(message)
        self.rank = rank


def forks() -> Any:
    """A context of `multiprocessing` whose processes are forks of one that has made the slow imports already."""
    # inherited by the ranks: they share the cores, and only a process without threads may be forked
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.ranks.worker", "pytest", "zerodp", "tests.ranks.preload"])
    return context


class Worker:
    """The parent's end of one rank."""

    def __init__(self, context: Any, rank: int, folder: Path):
        self.rank = rank
        self.log = folder / f"rank{rank}.log"
        self.log.touch()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=worker.serve, args=(theirs, rank, self.log), daemon=True)
        self.process.start()
        theirs.close()
        self.log_start = 0

    def send(self, *message: Any) -> None:
        self.log_start = self.log.stat().st_size
        self.connection.send(message)

    def answer(self) -> Success | Failure:
        """What the rank says; the end of its process is a failure of the rank."""
        try:
            answer: Success | Failure = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join(GRACE)
            summary = f"the process ended with exit code {self.process.exitcode}"
            answer = Failure(summary, summary)
        if isinstance(answer, Failure) and (printed := self.output()):
            answer.account += f"\nand printed\n{printed}"
        return answer

    def output(self) -> str:
        """What the rank printed since the last message to it."""
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            return file.read().decode(errors="replace")[-4000:]

    def stack(self) -> str:
        """Where the rank is now, by its own account."""
        stacks = self.log.with_suffix(".stacks")
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        main_thread = stacks.read_text().rpartition("(most recent call first):\n")[2]
        return "\n".join(main_thread.splitlines()[:30])

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class Pool:
    """Ranks 0 to 3, started when first needed. One call at a time; the process group follows the world size."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.context = forks()
        self.workers: list[Worker] = []
        self.world_size = 0  # of the process group that stands, 0 = none
        self.groups = 0

    def run(
        self, world_size: int, function: Callable[..., Any], /, *args: Any, timeout: float = LIMIT, **kwargs: Any
    ) -> list[Any]:
        """``function(*args, **kwargs)`` on every rank: the results by rank, or the first failing rank's traceback."""
        __tracebackhide__ = True
        self.form(world_size)
        payload = pickle.dumps((function, args, kwargs))
        answers, stuck = self.exchange(self.workers[:world_size], ("call", sys.path, payload), timeout)
        results = {rank: answer.value for rank, answer in answers.items() if isinstance(answer, Success)}
        if len(results) < world_size:
            name = f"{function.__module__}.{function.__qualname__}"
            raise self.failure(f"{name} on {world_size} ranks", timeout, answers, stuck)
        return [results[rank] for rank in range(world_size)]

    def failure(self, name: str, timeout: float, answers: Answers, stuck: dict[int, str]) -> RankFailure:
        """What to raise: the first failure whole, the later ones in a line, then where the stuck ranks are."""
        self.world_size = 0  # whatever happened, the next call gets a new process group
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}
        ranks = sorted(failures, key=lambda rank: failures[rank].at)
        report = [name if failures else f"{name} did not end within {timeout:g} s"]
        report += [f"rank {rank} failed\n{indent(failures[rank].account)}" for rank in ranks[:1]]
        report += [f"rank {rank} failed after that: {failures[rank].summary[:500]}" for rank in ranks[1:]]
        report += [f"rank {rank} was still at\n{indent(stack)}" for rank, stack in stuck.items()]
        return RankFailure(ranks[0] if ranks else min(stuck), "\n".join(report))

    def form(self, world_size: int) -> None:
        """The process group of this size, anew if it is another one that stands, or one that an error has spoilt."""
        __tracebackhide__ = True
        if self.world_size == world_size:
            return
        while len(self.workers) < world_size:
            self.workers.append(Worker(self.context, len(self.workers), self.folder))
        self.groups += 1
        store = self.folder / f"store{self.groups}"
        answers, stuck = self.exchange(self.workers, ("join", world_size, str(store)), LIMIT)
        if stuck or any(isinstance(answer, Failure) for answer in answers.values()):
            raise self.failure(f"forming a process group of {world_size} ranks", LIMIT, answers, stuck)
        self.world_size = world_size

    def exchange(
        self, workers: list[Worker], message: tuple[Any, ...], timeout: float
    ) -> tuple[Answers, dict[int, str]]:
        """Send to the workers and collect their answers, first come first; and the stacks of those that never answered.

        Whoever did not answer, or ended, takes the whole pool with it: the next call starts new processes.
        """
        __tracebackhide__ = True
        waiting: dict[Any, Worker] = {rank.connection: rank for rank in workers}
        for rank in workers:
            rank.send(*message)
        answers: Answers = {}
        deadline = time.monotonic() + timeout
        while waiting and (ready := wait(list(waiting), max(deadline - time.monotonic(), 0))):
            for connection in ready:
                rank = waiting.pop(connection)
                answers[rank.rank] = rank.answer()
                if isinstance(answers[rank.rank], Failure):
                    deadline = min(deadline, time.monotonic() + GRACE)
        stuck = {rank.rank: rank.stack() for rank in waiting.values()}
        if stuck or not all(rank.process.is_alive() for rank in workers):
            self.close()
        return answers, stuck

    def close(self) -> None:
        """End the processes. The next call starts new ones."""
        for rank in self.workers:
            rank.kill()
        self.workers.clear()
        self.world_size = 0


def on_ranks(*world_sizes: int, timeout: float = LIMIT) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The body of the test runs on every rank of a pool of each of these sizes."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        named = inspect.signature(body).parameters
        several = len(world_sizes) > 1

        @functools.wraps(body)
        def test(ranks: Pool, world_size: int = world_sizes[0], **parameters: Any) -> None:
            __tracebackhide__ = True
            if "world_size" in named:
                parameters["world_size"] = world_size
            ranks.run(world_size, test, timeout=timeout, **parameters)

        names = ["ranks", *(name for name in named if name != "world_size"), *(["world_size"] if several else [])]
        test.on_rank = body  # type: ignore[attr-defined]
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        )
        return pytest.mark.parametrize("world_size", world_sizes, ids="world{}".format)(test) if several else test

    return decorate


def indent(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.rstrip().splitlines())
