"""What `compare` sends between ranks, without ranks."""

from __future__ import annotations

import torch

from zerodp.compare import _packed, _unpacked


def test_a_batch_arrives_where_it_is_used() -> None:
    """Tensors of the host stay there; those of a device come to this rank's, here the one that needs no hardware."""
    sent = {"ids": torch.arange(3), "x": (torch.ones(2, device="meta"), 5)}
    found = _unpacked(_packed(sent), torch.device("meta"))
    assert torch.equal(found["ids"], sent["ids"])
    assert (found["x"][0].device.type, found["x"][0].shape, found["x"][1]) == ("meta", (2,), 5)
