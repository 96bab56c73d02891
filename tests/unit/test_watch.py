"""The watch at the end of the process. What it finds while ranks wait is in tests/ranks/test_hangs.py."""

from __future__ import annotations

import threading

import pytest
import torch

from zerodp.core import watch


def test_the_end_waits_until_the_backend_has_let_go() -> None:
    """Its threads drop what they were lent a moment later than the collective ends. An autograd graph stands in for them here."""
    tensor = torch.ones(3, requires_grad=True)
    holders = [tensor.exp()]
    one = watch.Watch()
    assert one.lends(tensor) is tensor
    threading.Timer(0.2, holders.clear).start()
    one._end()
    assert not holders


def test_the_end_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a rank that is gone, say."""
    monkeypatch.setattr(watch, "PATIENCE", 0.1)
    tensor = torch.ones(3, requires_grad=True)
    holder = tensor.exp()
    one = watch.Watch()
    one.lends(tensor)
    one._end()
    assert holder.requires_grad


def test_what_the_backend_has_let_go_of_is_not_kept() -> None:
    tensor = torch.ones(3, requires_grad=True)
    holder = tensor.exp()
    one = watch.Watch()
    one.lends(tensor, torch.ones(3))
    assert one.lent()
    assert list(map(id, one.recent)) == [id(tensor)]
    del holder
    assert not one.lent()
    assert not one.recent


def test_large_messages_are_not_kept() -> None:
    one = watch.Watch()
    one.lends(torch.empty(watch.SMALL_BYTES + 1, dtype=torch.uint8))
    assert not one.recent
