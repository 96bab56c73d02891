"""The arena's memory goes back to the system with its last user, and is pinned for as long as somebody has it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zerodp.core.arena import Arena
from zerodp.host_memory import mapped


class Runtime:
    """What of CUDA's runtime is called, on a machine without it."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.registered = code, dict[int, int]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.code == 0:
            self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_it_goes_with_its_last_user(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr("zerodp.core.arena.block", lambda nbytes, pin: mapped(nbytes, runtime if pin else None))
    arena = Arena(torch.device("cpu"), pinned=True, align=4096)
    first, second = (arena.take(numel, torch.float32, "master") for numel in (3000, 5000))
    assert sorted(runtime.registered.values()) == [12288, 20480]
    assert arena.reserved == 12288 + 20480
    seen = second.tensor[7:9]
    seen.fill_(3.0)
    for slot in (first, second):
        arena.give(slot, done=True)
    del slot, first, second
    arena.drop_idle()
    assert list(runtime.registered.values()) == [20480]
    assert seen.tolist() == [3.0, 3.0]
    del seen
    assert not runtime.registered


def test_what_the_system_refuses_is_an_error() -> None:
    runtime = Runtime(code=2)
    with pytest.raises(RuntimeError, match=r"8,192 bytes of host memory could not be pinned \(CUDA error 2\)"):
        mapped(8192, runtime)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_what_is_idle_is_not_resident() -> None:
    """Blocks that are too small to be mapped apart by malloc would stay in its heap, below what was made after them."""
    arena = Arena(torch.device("cpu"))
    torch.empty(2**25 - 2**16, dtype=torch.uint8)  # from here on malloc keeps blocks up to this size in its heap
    slots, others = [], []
    for _ in range(16):
        slots.append(arena.take(2**20, torch.float32, "unsharded"))
        slots[-1].tensor.fill_(1.0)
        others.append(torch.ones(1000))
    before = resident()
    for slot in slots:
        arena.give(slot, done=True)
    slots.clear()
    del slot
    arena.clear()
    assert before - resident() > 60 * 2**20
