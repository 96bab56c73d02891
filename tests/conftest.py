"""What all tests share: the pool of ranks, the stages, and the labels of the cases."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests import warm

if TYPE_CHECKING:
    from tests.ranks.pool import Pool


# The same examples in every run; to look for new ones, `make test ARGS="--hypothesis-profile=search"`.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile("same")


def pytest_configure(config: pytest.Config) -> None:
    # For all that the tests start as well: a thread that is woken up waits for its turn. Else a rank that has just sent something
    # is put aside with the lock of its connection in hand, and gloo's thread there asks for that lock without a pause.
    if hasattr(os, "SCHED_BATCH"):  # Linux
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if getattr(config.option, "numprocesses", None):  # this process only gives the others their files
        os.environ[warm.SHARED] = warm.python()
    config.addinivalue_line(
        "markers", "case(*ids): the public bug reports that this test stands for; select with -k B12"
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    for mark in item.iter_markers("case"):
        item.extra_keyword_matches.update(mark.args)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Within a file one world size after the other: a change of the process group costs more than a small test."""
    files = {path: place for place, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (files[item.path], world_size(item)))


def world_size(item: pytest.Item) -> int:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return int(parameters.get("world_size", 0))


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Processes that act as ranks, kept between tests."""
    from tests.ranks.pool import Pool  # and torch with it, which the process that only gives out files does not need

    pool = Pool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture(params=range(4), ids=lambda stage: f"zero{stage}")
def stage(request: pytest.FixtureRequest) -> int:
    """A test that names this argument runs at every stage; parametrise ``stage`` to choose some."""
    return int(request.param)


@pytest.fixture
def fresh_ranks(ranks: Pool) -> Pool:
    """New processes, which hold nothing of earlier tests: no freed memory, no caches of torch's."""
    ranks.close()
    return ranks
