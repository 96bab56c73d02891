"""What a step really takes on the CPU: bytes by torch's allocator, and what autograd keeps by its own hooks."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from zerodp import host_memory


def unmapped() -> Any:
    """A context in which arenas take all their memory from torch's allocator."""
    return mock.patch.object(host_memory, "LEAST_BYTES", sys.maxsize)


def most_bytes(step: Callable[[], Any]) -> int:
    """The most that `step` holds at one time beyond what there was before, as the allocator reports it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the profiler's own
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            step()
    results: Any = seen.profiler.kineto_results  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    del seen, results
    gc.collect()  # results that outlive the next profile, with the backend's threads in both, break the heap when they go
    total = most = 0
    for _, nbytes in changes:
        total += nbytes
        most = max(most, total)
    return most


class Kept:
    """Bytes of the storages that autograd saves, without those of `model`'s parameters; a context for the forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages: dict[int, int] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda saved: saved)

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(self.storages.values())

    def __enter__(self) -> Kept:
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)
