"""Windows over homes: whatever has begun is ended, once, also where something fails."""

from __future__ import annotations

from typing import Any

import pytest

import zerodp
from zerodp.offload.home import windows


class Counted:
    """What `windows` goes through: how often it is in use, and whether it fails, and where."""

    numel = 1

    def __init__(self, fails: str = "") -> None:
        self.fails, self.users, self.changed = fails, 0, [()]

    def begin(self, kinds: tuple[str, ...]) -> None:
        self.users += 1
        self._fail("begin")

    def show(self) -> None:
        self._fail("show")

    def end(self, changed: tuple[str, ...]) -> None:
        self.users -= 1
        self.changed.append(changed)

    def _fail(self, where: str) -> None:
        if self.fails == where:
            raise zerodp.StorageError("the disk is gone")


@pytest.mark.parametrize("fails", ["begin", "show"])
@pytest.mark.parametrize("place", range(4))
def test_nothing_stays_in_use_when_one_fails(fails: str, place: int) -> None:
    homes: list[Any] = [Counted(fails if number == place else "") for number in range(4)]
    with pytest.raises(zerodp.StorageError):
        for window in windows(homes, ("master",), ("master",), 2):
            assert all(home.users == 1 for home in window)
    assert [home.users for home in homes] == [0] * 4


def test_all_are_kept_as_they_were_changed() -> None:
    homes: list[Any] = [Counted() for _ in range(5)]
    assert [len(window) for window in windows(homes, ("master",), ("master",), 2)] == [2, 2, 1]
    assert all((home.users, home.changed) == (0, [(), ("master",)]) for home in homes)
