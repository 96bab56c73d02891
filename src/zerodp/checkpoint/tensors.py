"""A tensor of which this rank holds some flat segments, as torch.distributed.checkpoint wants to see it: as boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..offload.lazy_states import read
from .boxes import Box, boxes, contiguous_strides, view


class SegmentTensor:
    """A tensor of `shape`, and this rank's `segments` of it: (start, values [numel]) in memory order; values may be `Unread`.

    They are segments of a dense block of it that begins at `origin` and has `sizes` and `strides`; by default it is all of it.

    It answers DCP's protocol (`__create_write_items__`, `__create_chunk_list__`, `__get_tensor_shard__`), so it may stand in a state dict
    for `dcp.save`, and for `dcp.load`, which then fills the segments in place.
    """

    def __init__(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        segments: Sequence[tuple[int, Any]],
        original: torch.dtype | None = None,
        sharded: bool = True,
        sizes: Sequence[int] | None = None,
        origin: Sequence[int] | None = None,
    ) -> None:
        self.shape, self.strides, self.dtype = torch.Size(shape), tuple(strides), dtype
        self.sizes, self.origin = tuple(shape if sizes is None else sizes), origin
        self.segments = list(segments)
        self.original = original or dtype  # what an export is written in
        self.sharded = sharded  # changes in steps only, when the optimizer asks first

    @classmethod
    def whole(cls, tensor: Tensor) -> SegmentTensor:
        """An ordinary tensor, all of it here."""
        flat = tensor.detach().contiguous().view(-1)
        return cls(tensor.shape, contiguous_strides(tensor.shape), tensor.dtype, [(0, flat)], sharded=False)

    def size(self) -> torch.Size:
        return self.shape

    def boxes(self) -> Iterator[tuple[Box, Tensor]]:
        """Each box of this rank, and the view of its segment that has the values."""
        for start, values in self.segments:
            found = boxes(self.sizes, self.strides, start, start + values.numel(), self.origin)
            here = read(values)
            for box in found:
                yield box, view(here[box.start - start : box.stop - start], box, self.sizes, self.strides)

    def moved(self, move: Callable[[Tensor], Tensor]) -> SegmentTensor:
        """The same with every segment's values replaced by `move` of them."""
        segments = [(start, move(read(values))) for start, values in self.segments]
        return SegmentTensor(
            self.shape, self.strides, self.dtype, segments, self.original, self.sharded, self.sizes, self.origin
        )

    # ---- what DCP asks

    def __create_write_items__(self, key: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(key, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box, _ in self.boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(values for box, values in self.boxes() if torch.Size(box.offsets) == index.offset)
