"""Comparing tensors bit by bit. Pure functions of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

storage_address: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]  # tells storages apart


def checksum(tensor: Tensor) -> tuple[int, int]:
    """Of the bits, and of the bits by their place: other values, or the same ones elsewhere, give another sum."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    total = placed = 0
    for number, values in enumerate(as_bits(flat).view(-1).split(2**20)):
        bits = values.long()
        here = int(bits.sum())
        total += here
        placed += number * here + int((bits * torch.arange(len(bits), device=bits.device)).sum())
    return total, placed


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) if a.numel() else True


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors begin at one place, also where tensors have no memory."""
    return storage_address(a) == storage_address(b) and a.storage_offset() == b.storage_offset()


def same_values(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and same_bits(a.contiguous(), b.contiguous())


def as_bits(flat: Tensor) -> Tensor:
    """[numel] of any dtype as whole numbers [numel, words]."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(flat.dtype.itemsize, torch.int64)
    return flat.contiguous().view(words).view(flat.numel(), flat.dtype.itemsize // words.itemsize)


def differing(a: Tensor, b: Tensor) -> Tensor:
    """[numel] bool: where two flat tensors of one dtype have other bits."""
    return (as_bits(a) != as_bits(b)).any(-1)
