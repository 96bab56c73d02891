"""The model's buffers for a while: in their original dtypes, as rank 0 has them, or kept in case something fails. They are no part of any unit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from .local import local_of
from .runtime import Runtime


@contextlib.contextmanager
def original_buffers(runtime: Runtime) -> Iterator[None]:
    """Inside, cast buffers are in their original dtype; what is written to them is kept."""
    cast = [module._buffers[key] for module, key, _ in runtime.buffers]
    for (module, key, dtype), buffer in zip(runtime.buffers, cast, strict=True):
        module._buffers[key] = buffer.to(dtype)  # type: ignore[union-attr]
    try:
        yield
    finally:
        for (module, key, _), buffer in zip(runtime.buffers, cast, strict=True):
            buffer.copy_(module._buffers[key])  # type: ignore[union-attr, arg-type]
            module._buffers[key] = buffer


@contextlib.contextmanager
def rank0_buffers(runtime: Runtime) -> Iterator[None]:
    """Inside, every rank sees rank 0's buffers, which are what state dicts and checkpoints hold."""
    own = [
        (module, key, buffer)
        for module in runtime.module_names
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    for module, key, buffer in own:
        module._buffers[key] = sent = buffer.clone(memory_format=torch.contiguous_format)
        runtime.comm.broadcast(local_of(sent), "(buffers)", runtime.comm.mesh.world)
    try:
        yield
    finally:
        for module, key, buffer in own:
            module._buffers[key] = buffer


@contextlib.contextmanager
def kept_buffers(runtime: Runtime) -> Iterator[None]:
    """What fails inside leaves the buffers as they were. (Parameters that torch loads into are copies, which go.)"""
    before = [
        (module, key, buffer, buffer.detach().clone())
        for module in runtime.module_names
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    except BaseException:
        for module, key, buffer, values in before:
            module._buffers[key] = buffer
            buffer.detach().copy_(values)
        raise
