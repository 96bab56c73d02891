"""One device under one stage, all closed forms together, for a model of equal units: what the page computes.

`estimate.py` applies the same forms to real units one by one; for equal units both give the same numbers.
"""

from __future__ import annotations

from ...core.stages import Residency
from . import activations, states, traffic
from .symbols import Number, choose, least

# What the formula asks for, in order; flags are 0 or 1.
INPUTS = (
    "numel", "largest", "root", "layers", "hidden", "heads", "vocabulary",
    "ranks", "replicas", "tensor_parallel", "sequence_parallel",
    "shards_optimizer", "shards_gradients", "shards_parameters",
    "compute", "rest", "gradient", "moments", "policy_parameters", "policy_gradients", "policy_optimizer",
    "batch", "sequence", "accumulate", "accumulates", "keeps_scores", "checkpoints", "partitions",
    "optimizer_away", "parameters_away", "together", "activations_away",
    "plain_kept", "plain_working", "checkpointed_kept", "checkpointed_working", "pages", "unsharded_bytes", "exact", "buffers",
    "gathers", "bucket", "bucket_per_rank", "copies_sums",
)  # fmt: skip


def device(*values: Number) -> dict[str, Number]:
    """Bytes by kind, and elements per step, from values in the order of `INPUTS`.

    Traced activations, of a model that has no shape, are bytes that do not change with batch and sequence: kept for backward and
    working, of the model as it is and with its blocks checkpointed.
    """
    p = dict(zip(INPUTS, values, strict=True))
    residency = Residency(p["shards_optimizer"], p["shards_gradients"], p["shards_parameters"])
    size = states.Sizes(p["compute"], p["rest"], p["gradient"], p["moments"])
    numel, largest, root = (p[name] / p["tensor_parallel"] for name in ("numel", "largest", "root"))
    ranks = choose(residency.shards_optimizer, p["ranks"], 1)
    replicas = choose(residency.shards_optimizer, p["replicas"], p["ranks"] * p["replicas"])
    part = numel / ranks
    alone = choose(ranks - 1, 0, 1)
    held = states.held(
        residency,
        size,
        numel,
        part,
        part,
        alone,
        p["accumulates"],
        p["optimizer_away"],
        p["parameters_away"],
        True,
        p["together"],
    )
    opened = choose(residency.shards_gradients, choose(p["largest"] - p["root"], root * size.compute, 0), 0)
    least_bucket = least(p["bucket"], p["bucket_per_rank"] * ranks)
    bucket = choose(p["optimizer_away"] + p["parameters_away"], least_bucket, p["bucket"])
    piece = least(largest, bucket / size.compute) / ranks
    used = states.in_use(
        residency, size, largest, root, p["pages"], ranks, replicas, p["exact"], p["accumulates"], opened,
        optimizer_away=p["optimizer_away"],
        copied=choose(p["optimizer_away"], p["copies_sums"], 0),
        leaving=states.leaving(piece * size.gradient, part * size.gradient, p["exact"]),
    )  # fmt: skip
    kept = choose(residency.shards_parameters, p["unsharded_bytes"], 0)
    gathered = choose(residency.shards_parameters, numel * size.compute, 0)
    acts = activations.model_bytes(
        p["sequence"], p["batch"], p["hidden"], p["heads"], p["vocabulary"], p["layers"], p["tensor_parallel"],
        p["sequence_parallel"], p["keeps_scores"], p["checkpoints"], p["partitions"], p["compute"],
    )  # fmt: skip
    activations_kept = acts["kept"] + choose(p["checkpoints"], p["checkpointed_kept"], p["plain_kept"])
    working = acts["working"] + choose(p["checkpoints"], p["checkpointed_working"], p["plain_working"])
    here = activations_kept * choose(p["activations_away"], least(2 / p["layers"], 1), 1)
    per = states.BytesPolicy(p["policy_parameters"], p["policy_gradients"], p["policy_optimizer"])
    sent = traffic.sent_elements(numel, ranks, replicas, residency, p["accumulate"], p["gathers"])
    return {
        "model_states": states.paper_bytes(numel, p["ranks"], residency, per),
        "parameters": held["parameters"],
        "gradients": held["gradients"],
        "optimizer": held["optimizer"],
        "unsharded": least(used["unsharded"] + kept, gathered),
        "buckets": used["buckets"],
        "activations": here + working,
        "buffers": p["buffers"],
        "working": working,
        "away": held["optimizer_away"] + held["parameters_away"] + choose(p["activations_away"], activations_kept, 0),
        "wire_elements": traffic.paper_elements(numel, residency),
        "sent_elements": sent["all_gather"] + sent["reduce_scatter"] + sent["all_reduce"],
    }
