"""Pinned memory is registered as long as a slot of it, or a tensor of a slot, is in somebody's hands, and not a byte more."""

from __future__ import annotations

import pytest
import torch

from zerodp.core.arena import Arena
from zerodp.pinned import Registered


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
    monkeypatch.setattr("zerodp.core.arena.pinned", lambda nbytes: Registered(-1, nbytes).register(runtime))
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
        Registered(-1, 8192).register(runtime)
