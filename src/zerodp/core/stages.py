"""The one table that knows what the stage numbers mean. A stage is a choice of residency, nothing more."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Residency:
    """Where the training state of a unit rests between uses.

    shards_optimizer: optimizer state and master are split over the shard group (else each rank holds all, and the shard
        group is one rank while every rank is a replica).
    shards_gradients: a bucket is given back once it is reduced (else the whole gradient buffer is kept).
    shards_parameters: gathered parameters are given back after use (else they stay in a persistent buffer).
    """

    shards_optimizer: bool
    shards_gradients: bool
    shards_parameters: bool


STAGES = {
    0: Residency(False, False, False),
    1: Residency(True, False, False),
    2: Residency(True, True, False),
    3: Residency(True, True, True),
}
WHOLE = STAGES[0]
