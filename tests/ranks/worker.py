"""One rank of the pool: a process that waits for calls, runs them, and reports.

Owns the state of its process (seeds, warnings, the process group). Knows nothing about tests or about zerodp.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # slow to import: once here, then forked
import torch.distributed as dist

# Warnings that torch gives itself, in plain runs as well.
UNAVOIDABLE = [("The .grad attribute of a Tensor that is not a leaf", r"torch\._(dynamo|subclasses|functorch)")]
GROUP_TIMEOUT = datetime.timedelta(seconds=120)


@dataclass
class Success:
    value: Any


@dataclass
class Failure:
    summary: str
    account: str
    at: float = field(default_factory=time.monotonic)  # one clock for all processes: tells who failed first


def serve(connection: Connection, rank: int, log: Path) -> None:
    """Answer ``join`` and ``call`` messages until the pool closes the connection."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    stacks = open(log.with_suffix(".stacks"), "w")  # open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN as well, so reading it shows
    explain_assertions()
    collect()
    with contextlib.suppress(EOFError):
        while True:
            kind, *message = connection.recv()
            answer = run(*message) if kind == "call" else join(rank, *message)
            connection.send_bytes(pickle.dumps(answer))
            if isinstance(answer, Failure):
                leave_in_error()
            del answer


def explain_assertions() -> None:
    """A plain ``assert`` in a rank shows its values, as it does in pytest's own process."""
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config())


def join(rank: int, world_size: int, store: str) -> Success:
    """Leave the process group, and enter a new one if this rank is in it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank < world_size:
        method = f"file://{store}"
        dist.init_process_group("gloo", method, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)
    return Success(None)


def run(path: list[str], payload: bytes) -> Success | Failure:
    """Unpickle a call and run it in a clean state."""
    sys.path[:] = path
    try:
        with clean_state():
            function, args, kwargs = pickle.loads(payload)
            return Success(getattr(function, "on_rank", function)(*args, **kwargs))
    except BaseException as error:  # pytest.fail and SystemExit are no Exceptions, and each must reach the parent
        return Failure(f"{type(error).__name__}: {error}", describe(error))


@contextlib.contextmanager
def clean_state() -> Iterator[None]:
    """Every call starts from the same state, with warnings as errors; what it leaves behind is collected."""
    random.seed(0)
    torch.default_generator.manual_seed(0)
    ignored: list[str] = []
    sys.unraisablehook = lambda hooked: ignored.append(f"{hooked.err_msg or hooked.object}: {hooked.exc_value!r}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for message, module in UNAVOIDABLE:
                warnings.filterwarnings("ignore", message, module=module)
            yield
            collect()
    finally:
        sys.unraisablehook = sys.__unraisablehook__
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch._dynamo.reset()
    if ignored:
        raise AssertionError(f"exceptions that Python could only print: {ignored}")


def collect() -> None:
    """Take the call's garbage away; what it imported stays for ever, and need not be looked through again and again."""
    global modules
    gc.collect()
    if len(sys.modules) != modules:
        modules = len(sys.modules)
        gc.freeze()


modules = 0


def leave_in_error() -> None:
    """Close the connections to the other ranks, so that those waiting for this one fail at once instead of hanging."""
    gc.collect()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def describe(error: BaseException) -> str:
    """The traceback without the frames of this file."""
    trace: Any = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
