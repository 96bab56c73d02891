"""ZeRO-Infinity's formulas: sizes of states and working memory, and how much bandwidth keeps the devices busy."""

from __future__ import annotations

from .symbols import Number

PEAK_FLOPS = 70e12  # of a V100, achievable, per the paper


def transformer_parameters(layers: Number, h: Number) -> Number:
    """12·L·h²: the matrices of the blocks."""
    return 12 * layers * h**2


def state_bytes(layers: Number, h: Number) -> Number:
    """20 bytes per parameter: fp32 gradients are counted beside the 16-bit ones."""
    return 20 * transformer_parameters(layers, h)


def checkpoint_bytes(b: Number, s: Number, h: Number, layers: Number, every: Number = 1) -> Number:
    return 2 * b * s * h * layers / every


def activation_bytes(b: Number, s: Number, h: Number, a: Number, layers: Number) -> Number:
    """All activations without checkpointing: 2·b·s·L·(16h + 2as) bytes."""
    return 2 * b * s * layers * (16 * h + 2 * a * s)


def working_state_bytes(h: Number, tiles: Number = 1) -> Number:
    """MSWM: the largest operator's parameters and gradients in 16 bits, h to 4h; tiling makes them one tile's."""
    return 2 * 2 * h * 4 * h / tiles


def working_activation_bytes(b: Number, s: Number, h: Number, a: Number, every: Number = 1) -> Number:
    """AWM: what lies between two activation checkpoints."""
    return b * s * every * (16 * h + 2 * a * s)


def flops_per_step(b: Number, s: Number, parameters: Number) -> Number:
    """2·4·b·s·params: forward, backward at twice that, and recomputation."""
    return 2 * 4 * b * s * parameters


def intensity_of_parameters(b: Number, s: Number) -> Number:
    """FLOPs per byte of parameters and gradients moved."""
    return s * b


def intensity_of_optimizer(b: Number, s: Number) -> Number:
    return s * b / 4


def intensity_of_checkpoints(h: Number, every: Number = 1) -> Number:
    return 24 * h * every


def efficiency(intensity: Number, bandwidth: Number, peak: Number = PEAK_FLOPS) -> Number:
    """Compute time over compute and transfer time, when nothing overlaps; bandwidth in bytes per second."""
    return intensity * bandwidth / (intensity * bandwidth + peak)
