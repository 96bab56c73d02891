"""The pool itself: results by rank, clean state between calls, and what is said when a rank fails, hangs or dies."""

from __future__ import annotations

import os
import random
import time
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.ranks.pool import Pool, RankFailure, on_ranks


def place(factor: int) -> tuple[int, int, int]:
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return factor * dist.get_rank(), dist.get_world_size(), int(total)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_back_by_rank(ranks: Pool, world_size: int) -> None:
    total = world_size * (world_size + 1) // 2
    assert ranks.run(world_size, place, 10) == [(10 * rank, world_size, total) for rank in range(world_size)]


def process() -> int:
    return os.getpid()


def test_processes_and_their_group_stay(ranks: Pool) -> None:
    first = ranks.run(2, process)
    groups = ranks.groups
    assert ranks.run(2, process) == first
    assert ranks.groups == groups
    assert ranks.run(3, process)[:2] == first


def spoil() -> None:
    random.seed(5)
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def look() -> tuple[float, float, torch.dtype, bool]:
    return random.random(), torch.rand(()).item(), torch.get_default_dtype(), torch.is_grad_enabled()


def test_state_is_clean_between_calls(ranks: Pool) -> None:
    fresh = ranks.run(2, look)
    ranks.run(2, spoil)
    assert ranks.run(2, look) == fresh
    assert fresh[0] == fresh[1]
    assert fresh[0][2:] == (torch.float32, True)


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        one, other = 1, 2
        assert one == other
    dist.barrier()


def test_first_failing_rank_is_reported_and_the_rest_are_released(ranks: Pool) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        ranks.run(3, fail_on, 1)
    assert time.monotonic() - began < 8
    assert caught.value.rank == 1
    text = str(caught.value)
    assert "test_pool.fail_on on 3 ranks" in text
    assert "rank 1 failed\n  | Traceback" in text
    assert "assert 1 == 2" in text
    assert "rank 0 failed after that" in text
    assert ranks.run(3, place, 1)[2] == (2, 3, 6)


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(100)


def test_hang_names_the_rank_and_where_it_was(ranks: Pool) -> None:
    with pytest.raises(RankFailure, match="did not end within 1 s") as caught:
        ranks.run(2, hang_on, 1, timeout=1)
    assert caught.value.rank == 1
    assert "in hang_on" in str(caught.value)
    assert "rank 0" not in str(caught.value)
    assert ranks.run(2, place, 1) == [(0, 2, 3), (1, 2, 3)]


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("last words", flush=True)
        os._exit(3)


def test_death_of_a_rank_is_reported_with_what_it_printed(ranks: Pool) -> None:
    with pytest.raises(RankFailure, match="exit code 3") as caught:
        ranks.run(2, die_on, 1)
    assert caught.value.rank == 1
    assert "last words" in str(caught.value)
    assert ranks.run(2, place, 1) == [(0, 2, 3), (1, 2, 3)]


def warn() -> None:
    warnings.warn("careless", UserWarning, stacklevel=1)


class Closing:
    def __del__(self) -> None:
        raise ValueError("while it was closed")


def leave_rubbish() -> None:
    rubbish = Closing()
    rubbish.itself = rubbish  # type: ignore[attr-defined]


@pytest.mark.parametrize(("function", "message"), [(warn, "careless"), (leave_rubbish, "while it was closed")])
def test_warnings_and_unraisable_exceptions_are_errors(ranks: Pool, function: Callable[[], None], message: str) -> None:
    with pytest.raises(RankFailure, match=message):
        ranks.run(1, function)


@on_ranks(2, 4)
def test_decorated_body_runs_on_the_ranks(world_size: int) -> None:
    assert dist.get_world_size() == world_size


@on_ranks(2)
@pytest.mark.parametrize("argument", ["a", "b"])
def test_decorated_body_takes_parameters(argument: str, stage: int) -> None:
    assert dist.get_world_size() == 2
    assert argument in "ab"
    assert stage in range(4)
