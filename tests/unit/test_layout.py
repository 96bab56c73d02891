"""Where every element lies: the layout answers parameter -> offset and rank -> segments, and the two agree."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerodp.core.layout import ALIGN, Layout, build

numels = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 1000), st.sampled_from([63, 64, 65, 128])), max_size=9)
num_shards = st.integers(1, 7)
num_replicas = st.integers(1, 3)
max_piece = st.one_of(st.none(), st.integers(1, 3000))


def owned(layout: Layout) -> list[tuple[int, int, int]]:
    """Every (parameter, element, position in the flat buffer) that some rank owns, by its own segments."""
    found = []
    for rank in range(layout.num_shards):
        for segment in layout.segments(rank):
            begin, end = layout.part(segment.piece, rank)
            assert begin + segment.offset + segment.numel <= end
            for k in range(segment.numel):
                found.append((segment.index, segment.start + k, begin + segment.offset + k))
    return found


@given(numels, num_shards, num_replicas, max_piece)
def test_every_element_has_one_owner_and_lies_where_the_offsets_say(
    numels: list[int], num_shards: int, num_replicas: int, max_piece: int | None
) -> None:
    layout = build(numels, num_shards, num_replicas, max_piece)
    expected = [(i, k, layout.offsets[i] + k) for i, numel in enumerate(numels) for k in range(numel)]
    assert sorted(owned(layout)) == expected
    assert layout.numel == sum(numels)


@given(numels, num_shards, num_replicas, max_piece)
def test_every_start_and_cut_is_aligned(
    numels: list[int], num_shards: int, num_replicas: int, max_piece: int | None
) -> None:
    layout = build(numels, num_shards, num_replicas, max_piece)
    assert all(offset % ALIGN == 0 for offset in layout.offsets)
    assert all(cut % (num_shards * num_replicas * ALIGN) == 0 for cut in layout.cuts)
    for rank in range(num_shards):
        for segment in layout.segments(rank):
            assert segment.start % ALIGN == 0
            assert segment.offset % ALIGN == 0
            assert segment.stop % ALIGN == 0 or segment.stop == numels[segment.index]


@given(numels, num_shards, num_replicas, max_piece)
def test_parts_are_equal_disjoint_and_cover_the_buffer(
    numels: list[int], num_shards: int, num_replicas: int, max_piece: int | None
) -> None:
    layout = build(numels, num_shards, num_replicas, max_piece)
    parts = [layout.part(piece, rank) for piece in range(len(layout.piece_numels)) for rank in range(num_shards)]
    assert parts[0][0] == 0
    assert parts[-1][1] == layout.padded_numel
    assert all(this[1] == following[0] for this, following in itertools.pairwise(parts))
    assert all(end - begin == layout.piece_numels[i // num_shards] for i, (begin, end) in enumerate(parts))
    assert sum(layout.piece_numels) == layout.shard_numel


@given(numels, num_shards, num_replicas, max_piece)
def test_padding_is_bounded(numels: list[int], num_shards: int, num_replicas: int, max_piece: int | None) -> None:
    layout = build(numels, num_shards, num_replicas, max_piece)
    assert layout.padded_numel < layout.numel + ALIGN * (len(numels) + num_shards * num_replicas) + 1


@given(numels, num_shards, num_replicas, st.integers(1, 3000))
def test_pieces_keep_the_limit_and_are_of_nearly_equal_size(
    numels: list[int], num_shards: int, num_replicas: int, limit: int
) -> None:
    layout = build(numels, num_shards, num_replicas, limit)
    smallest_possible = num_shards * num_replicas * ALIGN
    pieces = [numel * num_shards for numel in layout.piece_numels]
    assert max(pieces) <= max(limit, smallest_possible)
    assert max(pieces) - min(pieces) <= smallest_possible


@given(numels, num_shards, max_piece)
def test_empty_parameters_belong_to_exactly_one_rank(numels: list[int], num_shards: int, max_piece: int | None) -> None:
    layout = build(numels, num_shards, 1, max_piece)
    holders = [segment.index for rank in range(num_shards) for segment in layout.segments(rank) if segment.numel == 0]
    assert sorted(holders) == [index for index, numel in enumerate(numels) if numel == 0]


def test_a_layout_by_hand() -> None:
    """Toy B on two ranks: 15 and 5 and 5 and 1 elements, each start on a multiple of 64, 256 in all, 128 for each rank."""
    layout = build([15, 5, 5, 1], num_shards=2)
    assert layout.offsets == (0, 64, 128, 192)
    assert layout.padded_numel == 256
    assert layout.shard_numel == 128
    first, second = layout.segments(0), layout.segments(1)
    assert [(s.index, s.start, s.stop, s.offset) for s in first] == [(0, 0, 15, 0), (1, 0, 5, 64)]
    assert [(s.index, s.start, s.stop, s.offset) for s in second] == [(2, 0, 5, 0), (3, 0, 1, 64)]


def test_a_parameter_that_straddles_ranks() -> None:
    layout = build([200], num_shards=3)
    assert [[(s.start, s.stop) for s in layout.segments(rank)] for rank in range(3)] == [[(0, 128)], [(128, 200)], []]


def test_nothing_to_lay_out() -> None:
    layout = build([], num_shards=2)
    assert layout.numel == 0
    assert layout.segments(0) == layout.segments(1) == []


def test_a_layout_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        build([1], 1).num_shards = 2  # type: ignore[misc]
