"""Model states: bytes per device of parameters, gradients and optimizer, by the paper and as this library holds them.

Padding is the caller's: `whole`, `shard` and `owned` are what a layout says, or Ψ and Ψ/N where only a count is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.stages import Residency
from ...errors import ConfigError
from ...tiers.host import KEPT_BYTES
from .symbols import Number, choose, differs, least, most

MOMENTS = {
    "adam": 2,
    "adamw": 2,
    "nadam": 2,
    "radam": 2,
    "rmsprop": 1,
    "adagrad": 1,
    "momentum": 1,
    "lion": 1,
    "sgd": 0,
}
MASTER_BYTES = MOMENT_BYTES = ACCUMULATED_BYTES = 4


@dataclass(frozen=True)
class BytesPolicy:
    """Bytes per parameter: the explicit convention behind a total such as 16, 18 or 20.

    parameters: in the dtype of compute; gradients: reduced, kept until the step; optimizer: fp32 master, moments, and the
    fp32 gradients where they are kept beside the 16-bit ones.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def __str__(self) -> str:
        return (
            f"{self.total} bytes per parameter: {self.parameters} parameters + {self.gradients} gradients + "
            f"{self.optimizer} optimizer"
        )


def policy(element_bytes: int, moments: int, total: int | None = None) -> BytesPolicy:
    """The policy for parameters of `element_bytes` and an optimizer with so many fp32 moments.

    With 16 bits and Adam: 16 (ZeRO: 16-bit gradients), 18 (fp32 gradients), 20 (ZeRO-Infinity: both). By default the first.

    Raises:
        ConfigError: a total that no convention gives.
    """
    low = element_bytes < MASTER_BYTES
    base = BytesPolicy(element_bytes, element_bytes, MOMENT_BYTES * moments + (MASTER_BYTES if low else 0))
    known = [base]
    if low:
        known.append(BytesPolicy(element_bytes, 4, base.optimizer))
        known.append(BytesPolicy(element_bytes, element_bytes, base.optimizer + 4))
    found = next((one for one in known if total in (None, one.total)), None)
    if found is None:
        raise ConfigError(
            f"bytes_per_parameter: with {8 * element_bytes}-bit parameters and {moments} moments expected one of "
            f"{', '.join(str(one.total) for one in known)}, got {total!r}"
        )
    return found


def paper_bytes(numel: Number, ranks: Number, residency: Residency, per: BytesPolicy) -> Number:
    """ZeRO's formula: each kind whole, or one rank's part where the stage shards it."""
    return (
        numel * per.parameters / choose(residency.shards_parameters, ranks, 1)
        + numel * per.gradients / choose(residency.shards_gradients, ranks, 1)
        + numel * per.optimizer / choose(residency.shards_optimizer, ranks, 1)
    )


def fp32_values(numel: Number, ranks: Number, residency: Residency) -> Number:
    """Values, not bytes, of unmixed training with Adam: 4Ψ; 2Ψ + 2Ψ/N; Ψ + 3Ψ/N; 4Ψ/N."""
    return paper_bytes(numel, ranks, residency, BytesPolicy(1, 1, 2))


@dataclass(frozen=True)
class Sizes:
    """Bytes per element of one flat: in compute, at rest and of reduced gradients; and how many moments an optimizer keeps."""

    compute: Number
    rest: Number
    gradient: Number
    moments: Number


def held(
    residency: Residency,
    size: Sizes,
    whole: Number,
    shard: Number,
    owned: Number,
    alone: Number = False,
    accumulates: Number = False,
    optimizer_away: Number = False,
    parameters_away: Number = False,
    trains: Number = True,
    together: Number = True,
) -> dict[str, Number]:
    """Bytes of one flat that this library holds after a backward pass, by kind; the last two kinds are not on the device.

    whole: elements of the flat buffer; shard: of this rank's part; owned: of parameters in that part, for moments have no
    padding. alone: the shard group is one rank; accumulates: several reduced backward passes per step; optimizer_away:
    master, moments and sharded gradients rest on another tier, so a shard in the dtype of compute rests here;
    parameters_away: that one rests on another tier too, where parameters are sharded at all; together: on the same one as the
    optimizer's. What does not train has no master of its own: it rests with the parameters.
    """
    low = differs(size.compute, size.rest)
    optimizer_away = choose(trains, optimizer_away, 0)
    parameters_away = choose(residency.shards_parameters, parameters_away, 0)
    # As core.unit.Flat: with one rank to a shard, what gathers would copy from is the whole page, if it is here and needs no cast.
    is_page = choose(
        residency.shards_parameters,
        choose(alone, choose(optimizer_away, parameters_away, choose(low, 1, parameters_away)), 1),
        0,
    )
    computed = choose(low, choose(optimizer_away, shard * size.compute, 0), shard * size.rest)
    master = choose(low, shard * size.rest, choose(optimizer_away + parameters_away, shard * size.rest, 0))
    kept = choose(low, choose(parameters_away, 0, shard * size.rest), 0)
    optimizer = choose(trains, master + owned * size.rest * size.moments, kept)
    copied = choose(trains, choose(low, 1, choose(optimizer_away, choose(together, 0, 1), 1)), 0)
    moved = choose(copied, shard * size.compute, choose(trains, 0, shard * size.rest))
    sharded_gradients = choose(residency.shards_gradients, shard * size.gradient, 0)
    # Whole gradients stay in the dtype of compute; the sum over several backward passes needs fp32 beside them.
    whole_gradients = whole * size.compute + choose(accumulates, shard * ACCUMULATED_BYTES, 0)
    gradients = choose(residency.shards_gradients, choose(optimizer_away, 0, sharded_gradients), whole_gradients)
    return {
        "parameters": choose(is_page, choose(parameters_away, 0, computed), whole * size.compute),
        "gradients": choose(trains, gradients, 0),
        "optimizer": choose(optimizer_away, 0, optimizer),
        "optimizer_away": choose(optimizer_away, optimizer + choose(trains, sharded_gradients, 0), 0),
        "parameters_away": choose(parameters_away, moved, 0),
    }


def received(bucket_bytes: Number, ranks: Number, exact: Number, lands: Number = False) -> Number:
    """Space to receive one bucket's reduction: every other rank's part where sums are exact, else one part.

    lands: one part arrives where the sum will rest, and needs no space.
    """
    parts = choose(exact, ranks - 1, 1) - choose(lands, 1, 0)
    return choose(ranks - 1, bucket_bytes / ranks * parts, 0)


def leaving(piece_bytes: Number, all_bytes: Number, exact: Number) -> Number:
    """Space of the device for sums of reduced gradients that rest on another tier, of which `all_bytes` are all.

    One piece at a time is summed. Its copy goes on beside the work, except on the CPU, where sums are exact; copies that lag are waited for.
    """
    lagging = choose(exact, 0, most(KEPT_BYTES, 2 * piece_bytes))
    return least(piece_bytes + lagging, all_bytes)


def in_use(
    residency: Residency,
    size: Sizes,
    numel: Number,
    root: Number,
    pages: Number,
    ranks: Number,
    replicas: Number,
    exact: Number,
    accumulates: Number = False,
    opened: Number = 0,
    owned: Number = None,
    optimizer_away: Number = False,
    copied: Number = False,
    leaving: Number = 0,
) -> dict[str, Number]:
    """Bytes at work during a pass: gathered pages, and gradient buckets with what they are received into and summed in.

    numel: elements of the largest unit; root: of the root unit, which may be in use besides; pages: units gathered at one
    time; ranks: of the shard group; opened: bytes of the root's bucket, which is open all the while; owned: elements of its
    parameters that this rank steps on, None for an equal part; exact: sums of received parts in rank order. One unit's gradients
    are on their way while the next one's bucket fills; beside pages they have arrived before that one is sent. optimizer_away: it
    steps elsewhere; copied: what is summed is copied to another tier; leaving: bytes of space for it.
    """
    bucket, low = numel * size.compute, differs(size.compute, size.rest)
    lands = choose(residency.shards_gradients, choose(differs(size.gradient, size.compute), 0, 1), 0)
    lands = choose(accumulates, 0, choose(replicas - 1, 0, choose(copied, 0, lands)))
    ways = choose(residency.shards_parameters, 1, 2) * received(bucket, ranks, exact, lands) + received(
        bucket / ranks, replicas, exact
    )
    sums = choose(low, numel * ACCUMULATED_BYTES / choose(ranks - 1, ranks, replicas), 0)
    reducing = choose(residency.shards_gradients, 2 * bucket + choose(copied, leaving, 0), 0) + ways + sums + opened
    # The optimizer steps on gradients in the master's dtype: others are cast for one unit at a time.
    stored = choose(residency.shards_gradients, size.gradient, choose(accumulates, ACCUMULATED_BYTES, size.compute))
    stepping = choose(differs(stored, size.rest), (numel / ranks if owned is None else owned) * size.rest, 0)
    stepping = choose(optimizer_away, 0, stepping)
    return {
        "unsharded": choose(residency.shards_parameters, pages * bucket + root * size.compute, 0),
        "buckets": most(reducing, stepping),
    }
