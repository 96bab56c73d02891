"""The device's own memory as a tier: parts of tensors in slots of an arena, which counts them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.arena import Arena, Slot
from . import ARRIVED, Ledger, Resting, Transfer


class DeviceTier:
    """Copies within device memory; tickets are slots."""

    latent = False

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def put(self, tensor: Tensor, kind: str, label: str = "") -> Slot:
        slot = self.reserve(tensor.numel(), tensor.dtype, kind, label)
        slot.tensor.copy_(tensor)
        return slot

    def reserve(self, numel: int, dtype: torch.dtype, kind: str, label: str = "") -> Slot:
        return self.arena.take(numel, dtype, kind, label)

    def write_back(self, ticket: Slot, tensor: Tensor) -> None:
        ticket.tensor.copy_(tensor)

    def fetch(self, ticket: Slot, out: Tensor) -> Transfer:
        out.copy_(ticket.tensor)
        return ARRIVED

    def open(self, ticket: Slot) -> Resting:
        return Resting(ticket.tensor)

    def ahead(self, ticket: Slot) -> None:
        """It is here."""

    def free(self, ticket: Slot) -> None:
        self.arena.give(ticket)

    def close(self) -> None:
        self.arena.drop_idle()

    def ledgers(self) -> list[Ledger]:
        return [Ledger("device", self.arena.now, self.arena.peak)]

    def reset_peaks(self) -> None:
        self.arena.reset_peaks()
