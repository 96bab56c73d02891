"""Segments as boxes, checksums of joined blocks, and torch.save files made by hand."""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerodp.checkpoint import archive, sums
from zerodp.checkpoint.boxes import boxes, contiguous_strides, overlap, view
from zerodp.checkpoint.tensors import SegmentTensor
from zerodp.host_memory import raw


@st.composite
def segments(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """(shape, strides of a dense tensor with its dims in any order, start, stop)."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    inner = contiguous_strides([shape[d] for d in order])
    strides = [0] * len(shape)
    for dim, stride in zip(order, inner, strict=True):
        strides[dim] = stride
    numel = math.prod(shape)
    start = draw(st.integers(0, numel))
    return shape, tuple(strides), start, draw(st.integers(start, numel))


@settings(max_examples=300, deadline=None)
@given(segments())
def test_boxes_hold_the_segment(segment: tuple[tuple[int, ...], tuple[int, ...], int, int]) -> None:
    """Written box by box into an empty tensor, they fill the segment's elements, each once, and nothing else."""
    shape, strides, start, stop = segment
    memory_of = torch.arange(1, math.prod(shape) + 1)
    expected = torch.zeros_like(memory_of)
    expected[start:stop] = memory_of[start:stop]
    got = torch.zeros_like(memory_of).as_strided(shape, strides)
    found = boxes(shape, strides, start, stop)
    for box in found:
        place = got[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        assert not place.any()
        place.copy_(view(memory_of[box.start : box.stop], box, shape, strides))
    assert torch.equal(got, expected.as_strided(shape, strides))
    assert len(found) <= max(2 * len(shape) - 1, 1)
    assert [box.start for box in found[1:]] == [box.stop for box in found[:-1]]


@pytest.mark.parametrize(
    ("shape", "start", "stop", "sizes"),
    [
        ((4, 5), 0, 20, [(4, 5)]),
        ((4, 5), 3, 17, [(1, 2), (2, 5), (1, 2)]),
        ((4, 5), 6, 9, [(1, 3)]),
        ((4, 5), 5, 7, [(1, 2)]),
        ((7,), 2, 6, [(4,)]),
        ((), 0, 1, [()]),
        ((), 0, 0, []),
        ((0, 3), 0, 0, [(0, 3)]),
        ((2, 3, 4), 1, 23, [(1, 1, 3), (1, 2, 4), (1, 2, 4), (1, 1, 3)]),
    ],
)
def test_known_boxes(shape: tuple[int, ...], start: int, stop: int, sizes: list[tuple[int, ...]]) -> None:
    assert [box.sizes for box in boxes(shape, contiguous_strides(shape), start, stop)] == sizes


def test_overlap() -> None:
    assert overlap((0, 2), (3, 4), (1, 0), (5, 3)) == ((1, 2), (2, 1))
    assert overlap((0, 2), (3, 4), (3, 2), (1, 4)) is None
    assert overlap((), (), (), ()) == ((), ())


def test_a_tensor_of_segments_answers_dcp() -> None:
    values = torch.arange(20.0)
    tensor = SegmentTensor((4, 5), (5, 1), torch.float32, [(3, values[3:17])])
    items = tensor.__create_write_items__("w", tensor)
    assert [(tuple(i.tensor_data.chunk.offsets), tuple(i.tensor_data.chunk.sizes)) for i in items] == [
        ((0, 3), (1, 2)),
        ((1, 0), (2, 5)),
        ((3, 0), (1, 2)),
    ]
    assert torch.equal(tensor.__get_tensor_shard__(items[1].index), values.view(4, 5)[1:3])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3 * sums.BLOCK_BYTES + 5), st.binary(max_size=9))
def test_sums_are_joined_without_another_pass(num_bytes: int, before: bytes) -> None:
    data = os.urandom(num_bytes)
    whole = sums.of_blocks(sums.block_sums(data), num_bytes)
    assert whole == zlib.crc32(data)
    assert sums.joined(zlib.crc32(before), whole, num_bytes) == zlib.crc32(before + data)
    assert sums.from_text(sums.as_text(sums.block_sums(data))) == sums.block_sums(data)


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.uint16, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4)], ids=str)
def test_archives_are_torch_files(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 5).to(dtype)
    data = bytes(raw(tensor))
    head, tail = archive.wrap(shape, dtype, len(data), zlib.crc32(data), 13)
    assert (13 + len(head)) % archive.ALIGN_BYTES == 0
    found = torch.load(io.BytesIO(head + data + tail), weights_only=True)
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert bytes(raw(found)) == data
    assert zipfile.ZipFile(io.BytesIO(head + data + tail)).testzip() is None


def test_archives_above_four_gigabytes(tmp_path: os.PathLike[str]) -> None:
    """Only the ends are written: the file has a hole where the values would be."""
    num_bytes = 2**32 + 8
    head, tail = archive.wrap((num_bytes,), torch.uint8, num_bytes, 0, 0)
    path = os.path.join(tmp_path, "large")
    with open(path, "wb") as file:
        file.write(head)
        file.seek(num_bytes, os.SEEK_CUR)
        file.write(tail)
    assert torch.load(path, weights_only=True, mmap=True).shape == (num_bytes,)
