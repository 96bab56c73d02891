"""Bytes of what a transformer keeps for its backward pass, by ZeRO and by Korthikanti et al. (2022).

b: samples per device and backward pass; s: tokens per sample; h: hidden width; L: layers; a: attention heads; t: tensor
parallel ranks; v: vocabulary. Bytes are for 16-bit elements unless `element_bytes` says otherwise; dropout masks are one byte.
"""

from __future__ import annotations

from .symbols import Number, choose


def zero_elements(h: Number, b: Number, s: Number, layers: Number) -> Number:
    """ZeRO's estimate for models like GPT-2, 12·h·b·s·L elements."""
    return 12 * h * b * s * layers


def layer_bytes(
    s: Number,
    b: Number,
    h: Number,
    a: Number,
    t: Number = 1,
    sequence_parallel: Number = False,
    keeps_scores: Number = True,
    element_bytes: Number = 2,
) -> Number:
    """One layer without checkpointing: sbh(10 + 24/t + 5as/(ht)), or sbh(34/t + 5as/(ht)) with sequence parallelism.

    keeps_scores: False where what the attention makes between QK^T and its output is not kept ("selective"): it is
    recomputed, or a fused kernel never had it.
    """
    split, copied = (
        11 * element_bytes + 2,
        5 * element_bytes,
    )  # 24 and 10: inputs of norms, and of linears, are in every rank
    copied_numel = choose(sequence_parallel, copied / t, copied)
    scores = choose(keeps_scores, a * s / h * (2 * element_bytes + 1) / t, 0)
    return s * b * h * (copied_numel + split / t + scores)


def checkpoint_bytes(
    s: Number,
    b: Number,
    h: Number,
    layers: Number,
    partitions: Number = 1,
    element_bytes: Number = 2,
    every: Number = 1,
) -> Number:
    """Full recomputation keeps the input of every `every`-th layer: 2sbhL; partitioned over the ranks that share it, P_a."""
    return element_bytes * s * b * h * layers / every / partitions


def output_bytes(s: Number, b: Number, h: Number, v: Number, t: Number = 1) -> Number:
    """Embedding dropout, last norm, output projection and fp32 logits: 4sbh/t·(1 + v/h), and sbh/t for the dropout mask."""
    return s * b * h / t * (1 + 4 * (1 + v / h))


def model_bytes(
    s: Number,
    b: Number,
    h: Number,
    a: Number,
    v: Number,
    layers: Number,
    t: Number,
    sequence_parallel: Number,
    keeps_scores: Number,
    checkpoints: Number,
    partitions: Number,
    element_bytes: Number,
) -> dict[str, Number]:
    """Of a whole model on one device: `kept` between forward and backward, and `working` for the layer that recomputes."""
    layer = layer_bytes(s, b, h, a, t, sequence_parallel, keeps_scores, element_bytes)
    inputs = checkpoint_bytes(s, b, h, layers, partitions, element_bytes)
    return {
        "kept": choose(checkpoints, inputs, layer * layers),
        "working": choose(checkpoints, layer, 0) + output_bytes(s, b, h, v, t),
    }


# ---- partitioned checkpoints (P_a) on tensor parallel ranks


def tensor_parallel_elements(s: Number, b: Number, h: Number) -> Number:
    """What one layer under checkpointing sends: two all-reduces in forward, recomputation and backward, each twice its message."""
    return 2 * 3 * 2 * s * b * h


def partition_elements(s: Number, b: Number, h: Number) -> Number:
    """What P_a adds to it: one all-gather of the layer's input."""
    return s * b * h


def scores_share(s: Number, h: Number, a: Number) -> Number:
    """The part of a layer's bytes that selective recomputation saves."""
    scores = 5 * a * s / h
    return scores / (34 + scores)


def selective_flops_share(s: Number, h: Number) -> Number:
    """What that costs by the paper: hardware FLOPs 72bsLh²(1 + s/3h) over the model's 72bsLh²(1 + s/6h), less 1."""
    return s / (6 * h) / (1 + s / (6 * h))
