"""`save`: agree, collect, write, make visible."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.access import require_closed, runtime_of
from ..core.comm import Channel
from ..core.control import Kind, share_verdict
from ..core.runtime import Runtime
from ..core.stages import STAGES
from ..errors import CheckpointError, ConfigError, RankMismatchError, ZeroError
from ..version import VERSION
from . import background, folders, traffic
from .background import Saving
from .contents import Contents, collect
from .inventory import optimizer_of
from .writer import Writer


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    extra: dict[str, Any] | None = None,
    asynchronous: bool = False,
    keep: int | None = None,
) -> Saving | None:
    """Write a checkpoint to the folder `path`, which all ranks must share (a collective). It appears there whole or not at all.

    It holds the parameters (fp32 masters where there are some) and rank 0's buffers by their names in the plain model, the optimizer's states
    and settings, the loss scaler, each rank's random state, and `extra`. What stood at `path` is replaced.

    Args:
        extra: a dict of rank 0's; tensors and plain values, or objects with a `state_dict()`, such as LR schedulers.
        asynchronous: return once the values are copied to host memory. The next `save`, `load` or `latest` waits for it, as the end of the
            program does, and raises its failure.
        keep: delete older complete checkpoints in the same parent folder until this many are left.

    Returns:
        None, or with `asynchronous=True` a `Saving` with `wait()` and `done`.

    Raises:
        ConfigError: something that cannot be saved, by name; ShardedError: inside a pass; RankMismatchError: other arguments on some rank;
        CheckpointError: it could not be written. All on every rank; what stood at `path` before is untouched then.
    """
    runtime = runtime_of(model)
    require_closed(runtime, "save()")
    runtime.lending.take_back()
    begin = time.perf_counter()
    target, token = Path(os.path.abspath(path)), uuid.uuid4().hex[:8]
    contents, config, problem = Contents(), None, None
    try:
        background.wait()
        _check(target, keep, asynchronous)
        contents = collect(runtime, optimizer_of(runtime, optimizer, "save"), extra)
        config = hugging_face_config(model)
    except ZeroError as error:
        problem = error
    except Exception as error:  # of the user's own state_dict(), perhaps, which runs on rank 0 alone
        problem = CheckpointError(f"save to {target}: {explained(error)}")
    runtime.control.require(Kind.SAVE)
    runtime.control.share(problem)
    arguments = [str(target), optimizer is not None, asynchronous, keep]
    token = same_on_all(runtime, "save", [arguments, token])
    channel = Channel(runtime.comm.mesh, apart=asynchronous)  # the control group may be in use while a thread saves
    facts = _facts(runtime)

    counts = traffic.of(runtime)

    copy = _copy(runtime, contents) if asynchronous else None

    def job() -> None:
        if copy is not None:
            _together(channel, target, token, copy)
        counts.bytes_written += write(contents, target, token, channel, keep, facts, config)

    saving = None
    if asynchronous:
        saving = background.start(job, f"save to {target}")
    else:
        job()
    counts.stall_seconds = time.perf_counter() - begin
    return saving


def _copy(runtime: Runtime, contents: Contents) -> Callable[[], None]:
    """Begin to put a copy in the place of all values: at once of what may change at any time, the rest by calling the result.

    That is for the saving thread. What only steps change is copied beside training, and the next step waits for it.
    """
    staging, copied, counts = _Staging(runtime), threading.Event(), traffic.of(runtime)
    problem: Exception | None = None
    try:
        contents.staged(staging, sharded=False)
        if runtime.lending.ever_lent or not all(home.live for flat in runtime.flats() for home in flat.homes):
            contents.staged(staging, sharded=True)  # the disk is training's from here on
            contents.reader.close()
            copied.set()
    except Exception as error:  # no memory; the other ranks learn of it in the thread
        problem = error
    behind = _Behind(runtime.arena.device)

    def rest() -> None:
        try:
            if problem is not None:
                raise problem
            if not copied.is_set():
                with behind:
                    contents.staged(staging, sharded=True)
        finally:
            copied.set()

    def wait() -> None:
        begin = time.perf_counter()
        copied.wait()
        counts.stall_seconds += time.perf_counter() - begin

    runtime.lending.readers.append(wait)
    return rest


class _Behind:
    """On an accelerator: a stream that begins where the caller's is now, for another thread to copy on."""

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = None
        if device.type != "cpu":
            reached = torch.accelerator.current_stream(device).record_event()
            self.stream = torch.Stream(device=device)
            self.stream.wait_event(reached)

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.stream is not None:
            self.stream.synchronize()
            self.stream.__exit__(*error)


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in `folder`, by the time it was written; None where there is none.

    A checkpoint counts if its manifest is intact and every file is there with its size. The ranks may each call it alone.

    Raises:
        CheckpointError: an asynchronous save of this process has failed.
    """
    background.wait()
    return folders.newest(Path(os.path.abspath(folder)))


def same_on_all(runtime: Runtime, what: str, arguments_and_token: list[Any]) -> Any:
    """Compare the ranks' arguments; the result is rank 0's token."""
    everyone = runtime.comm.exchange_objects(arguments_and_token, f"the arguments of {what}()")
    for rank, (arguments, _) in enumerate(everyone):
        if arguments != everyone[0][0]:
            raise RankMismatchError(
                f"{what}() was called differently: rank 0 with {everyone[0][0]}; rank {rank} with {arguments}"
            )
    return everyone[0][1]


def write(
    contents: Contents,
    target: Path,
    token: str,
    channel: Channel,
    keep: int | None,
    facts: dict[str, Any],
    config: dict[str, Any] | None,
) -> int:
    """All of a save that needs no model any more, in the caller's thread or another one. The result is this rank's bytes."""
    first, writer = channel.world.rank == 0, Writer(folders.temporary(target, token))
    try:
        _together(channel, target, token, lambda: folders.prepare(target, token) if first else None)
        rows = _together(channel, target, token, lambda: writer.write(contents, channel.world.rank))
        everyone = channel.collect(rows)

        def conclude() -> None:
            writer.conclude(everyone, contents.aliases, {**facts, "time_ns": time.time_ns()}, config)
            folders.commit(target, token)
            if keep is not None:
                folders.keep_newest(target, keep)

        _together(channel, target, token, lambda: conclude() if first else None)
        return int(rows["bytes"])
    finally:
        contents.reader.close()
        if first:
            folders.discard(target, token)


def _together(channel: Channel, target: Path, token: str, action: Callable[[], Any]) -> Any:
    """Do something on this rank; what fails on one is raised on all, when nothing of this save is left."""
    result: Any = None
    problem: Exception | None = None
    try:
        result = action()
    except Exception as error:
        problem = error if isinstance(error, ZeroError) else CheckpointError(f"save to {target}: {explained(error)}")
    said = channel.exchange(None if problem is None else [type(problem).__name__, str(problem)])
    if any(said):
        if channel.world.rank == 0:
            folders.discard(target, token)
        channel.exchange(None)
    share_verdict(said, problem)
    return result


def explained(error: Exception) -> str:
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"
    text = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    advice = {
        errno.ENOSPC: "free some space, or save elsewhere",
        errno.EDQUOT: "the quota is used up: free some space, or save elsewhere",
        errno.EFBIG: "the limit on the size of a file is reached (ulimit -f)",
        errno.ENOENT: "all ranks must see the same folder, on a file system that they share",
        errno.EACCES: "the folder may not be written to",
    }.get(error.errno or 0, "look at the file system")
    return f"{text}; {advice}"


def _check(target: Path, keep: int | None, asynchronous: bool) -> None:
    if not isinstance(asynchronous, bool):
        raise ConfigError(f"save: asynchronous must be True or False, got {asynchronous!r}")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ConfigError(f"save: keep must be a whole number of at least 1, or None, got {keep!r}")
    try:
        folders.check_target(target)
    except OSError as error:
        raise CheckpointError(f"save to {target}: {explained(error)}") from None


def _facts(runtime: Runtime) -> dict[str, Any]:
    mesh, residencies = runtime.comm.mesh, {flat.residency for flat in runtime.flats()}
    return {
        "world_size": mesh.world.size,
        "mesh": {"replicate": mesh.replicate.size, "shard": mesh.shard.size, "tensor": mesh.tensor.size},
        "stages": [number for number, residency in STAGES.items() if residency in residencies],
        "torch": torch.__version__,
        "zerodp": VERSION,
    }


def hugging_face_config(model: nn.Module) -> dict[str, Any] | None:
    """A Hugging Face model's configuration, for exports; others may have an attribute of that name that means nothing here."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if not callable(to_dict):
        return None
    try:
        config = json.loads(json.dumps(to_dict()))
    except (TypeError, ValueError):
        return None
    return {**config, "architectures": [type(model).__name__]} if isinstance(config, dict) else None


_buffers: weakref.WeakKeyDictionary[Runtime, list[Tensor]] = weakref.WeakKeyDictionary()


class _Staging:
    """Host memory that the saves of one model use one after another, pinned where there is an accelerator."""

    def __init__(self, runtime: Runtime) -> None:
        self.mine, self.next = _buffers.setdefault(runtime, []), 0

    def __call__(self, values: Tensor) -> Tensor:
        number, self.next = self.next, self.next + 1
        if number == len(self.mine):
            self.mine.append(values.new_empty(0, device="cpu"))
        buffer = self.mine[number]
        if buffer.dtype != values.dtype or buffer.numel() != values.numel():
            pinned = values.device.type != "cpu"
            buffer = self.mine[number] = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=pinned)
        return buffer.copy_(values.detach())
