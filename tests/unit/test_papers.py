"""The papers' numbers, digit by digit, from the planner's closed forms. Known misprints are not in here."""

from __future__ import annotations

import math

import pytest

from zerodp.core.stages import STAGES
from zerodp.errors import ConfigError
from zerodp.planning.closed import activations, infinity, states, traffic

ADAM = states.policy(2, 2)
GB, GIB, TIB, K = 1e9, 2**30, 2**40, 1024
SHARDED = (1, 2, 3)


def per_device(stage: int, numel: float, ranks: int) -> float:
    return float(states.paper_bytes(numel, ranks, STAGES[stage], ADAM))


def as_printed(value: float, printed: str) -> bool:
    """Table 1 truncates where it prints integers, and rounds where it prints decimals."""
    if "." not in printed:
        return math.floor(value) == int(printed)
    return abs(value - float(printed)) <= 0.5 * 10 ** -len(printed.split(".")[1]) + 1e-9


# ---- ZeRO


def test_mixed_precision_adam_is_16_bytes() -> None:
    assert (ADAM.parameters, ADAM.gradients, ADAM.optimizer, ADAM.total) == (2, 2, 12, 16)
    assert per_device(0, 1.5e9, 1) == 24 * GB


def test_other_conventions_are_named() -> None:
    assert (states.policy(2, 2, 18).gradients, states.policy(2, 2, 20).optimizer) == (4, 16)
    assert str(states.policy(2, 2, 18)) == "18 bytes per parameter: 2 parameters + 4 gradients + 12 optimizer"
    assert states.policy(4, 2).total == 16
    with pytest.raises(ConfigError, match="expected one of 16, 18, 20, got 17"):
        states.policy(2, 2, 17)


@pytest.mark.parametrize(("stage", "printed"), list(enumerate(["120", "31.4", "16.6", "1.9"])))
def test_figure_1(stage: int, printed: str) -> None:
    assert as_printed(per_device(stage, 7.5e9, 64) / GB, printed)


TABLE_1 = """
1    120  120  120   2048 2048 2048  16000  16000  16000
4    52.5 41.3 30    896  704  512   7000   5500   4000
16   35.6 21.6 7.5   608  368  128   4750   2875   1000
64   31.4 16.6 1.88  536  284  32    4187   2218   250
256  30.4 15.4 0.47  518  263  8     4046   2054   62.5
1024 30.1 15.1 0.12  513  257  2     4011   2013   15.6
"""
CELLS = [
    (numel, stage, int(ranks), printed)
    for ranks, *cells in (line.split() for line in TABLE_1.strip().splitlines())
    for (numel, stage), printed in zip([(n, s) for n in (7.5e9, 128e9, 1e12) for s in SHARDED], cells, strict=True)
]


@pytest.mark.parametrize(("numel", "stage", "ranks", "printed"), CELLS)
def test_table_1(numel: float, stage: int, ranks: int, printed: str) -> None:
    assert as_printed(per_device(stage, numel, ranks) / GB, printed)


def test_table_1_has_54_cells() -> None:
    assert len(CELLS) == 54


def test_the_bold_cells_of_table_1_fit_32_gb() -> None:
    """In each column, the first that fits."""
    bold = {(7.5e9, 1): 64, (7.5e9, 2): 16, (7.5e9, 3): 4, (128e9, 3): 64, (1e12, 3): 1024}
    for numel in (7.5e9, 128e9, 1e12):
        for stage in SHARDED:
            fitting = [n for n in (1, 4, 16, 64, 256, 1024) if per_device(stage, numel, n) <= 32 * GB]
            assert (fitting or [None])[0] == bold.get((numel, stage))


TABLE_2 = [
    (1, 2e9, 7.6e9, 14.4e9, 128e9),
    (2, 4e9, 15.2e9, 28.8e9, 256e9),
    (4, 8e9, 30.4e9, 57.6e9, 0.5e12),
    (8, 16e9, 60.8e9, 115.2e9, 1e12),
    (16, 32e9, 121.6e9, 230.4e9, 2e12),
]


@pytest.mark.parametrize("row", TABLE_2, ids=lambda row: f"mp{row[0]}")
def test_table_2_theory(row: tuple[float, ...]) -> None:
    """32 GB over bytes per parameter at N = 64, times MP; rows below the first are its rounded figures times MP, 0.5T is 512B."""
    mp, *sizes = row
    for stage, printed in enumerate(sizes):
        fits = 32 * GB / per_device(stage, 1, 64) * mp
        assert fits == pytest.approx(printed, rel=0.025 if printed in (0.5e12, 1e12, 2e12) else 0.01)


@pytest.mark.parametrize(("stage", "factor"), list(enumerate([1, 4, 8])))
def test_reduction_limits(stage: int, factor: int) -> None:
    assert per_device(0, 1e9, 10**9) / per_device(stage, 1e9, 10**9) == pytest.approx(factor, rel=1e-6)
    assert per_device(3, 1e9, 1024) * 1024 == per_device(0, 1e9, 1)


@pytest.mark.parametrize(("stage", "factor"), list(enumerate([2, 2, 2, 3])))
def test_communication_volumes(stage: int, factor: int) -> None:
    assert traffic.paper_elements(7, STAGES[stage]) == factor * 7
    sent = traffic.sent_elements(640, 1 if stage == 0 else 10, 10 if stage == 0 else 1, STAGES[stage])
    assert sum(sent.values()) == pytest.approx(factor * 640 * 9 / 10, rel=1e-15)


@pytest.mark.parametrize(("stage", "expected"), list(enumerate([4, 2 + 2 / 8, 1 + 3 / 8, 4 / 8])))
def test_unmixed_precision_in_values(stage: int, expected: float) -> None:
    """4P; 2P + 2P/N; P + 3P/N; 4P/N. Their limits are 2x and 4x, not those of mixed precision."""
    assert states.fp32_values(1, 8, STAGES[stage]) == expected
    if stage in SHARDED[:2]:
        assert 4 / states.fp32_values(1, 10**12, STAGES[stage]) == pytest.approx(2 * stage)


def test_partitioned_checkpoints_cost_a_twelfth() -> None:
    assert activations.partition_elements(1024, 8, 4096) * 12 == activations.tensor_parallel_elements(1024, 8, 4096)
    assert activations.tensor_parallel_elements(3, 1, 5) == 12 * 3 * 5


def test_zero_activations() -> None:
    """1.5B: 60 GB, "8" with checkpoints is loose; 100B: 62.5 GiB of checkpoints, a sixteenth of it partitioned."""
    assert 2 * activations.zero_elements(1600, 32, 1024, 48) / GB == pytest.approx(60.4, abs=0.05)
    assert activations.checkpoint_bytes(1024, 32, 1600, 48) / GB == pytest.approx(5.03, abs=0.005)
    assert 2 * activations.zero_elements(1600, 32, 1024, 1) / GB == pytest.approx(1.26, abs=0.005)
    hundred = activations.checkpoint_bytes(1024, 32, 8192, 125)
    assert hundred / GIB == 62.5
    assert hundred / GB == pytest.approx(67.1, abs=0.05)
    assert activations.checkpoint_bytes(1024, 32, 8192, 125, partitions=16) / GB == pytest.approx(4.2, abs=0.05)


# ---- ZeRO-Offload


@pytest.mark.parametrize(
    ("placement", "per_parameter", "factor"),
    list(zip(traffic.OFFLOAD_PLACEMENTS, (16, 14, 4, 2), (1, 1.14, 4, 8), strict=True)),
)
def test_offload_placements(placement: str, per_parameter: int, factor: float) -> None:
    """The last row is 2M: its own factor of 8 says so."""
    held = traffic.offload_device_bytes(10**9, **traffic.OFFLOAD_PLACEMENTS[placement])
    assert held == per_parameter * 10**9
    assert 16e9 / held == pytest.approx(factor, abs=0.005)


def test_offload_moves_4m_bytes() -> None:
    assert traffic.offload_bytes(10**9) == 4 * 10**9


# ---- ZeRO-Infinity

FIGURE_2A = [
    (0.10, 80, 10, 128, 1.83, 2.03, 0.05, None, 1.63),  # its MSWM is not the formula's
    (0.50, 100, 20, 160, 9.16, 3.91, 0.12, 6.25, 2.50),
    (1.01, 128, 25, 256, 18.31, 7.13, 0.20, 9.77, 3.56),
    (10.05, 195, 64, 512, 182.81, 24.38, 0.76, 64.00, 8.00),
    (101.47, 315, 160, 1024, 1845.70, 88.59, 3.08, 400.00, 18.00),
]


@pytest.mark.parametrize("row", FIGURE_2A, ids=lambda row: f"{row[0]}T")
def test_infinity_figure_2a(row: tuple[float, ...]) -> None:
    """32 samples a node, 1024 tokens; K is 1024, TB and GB are TiB and GiB; AWM is as printed with 4 samples."""
    trillions, layers, width, heads, held, acts, checkpoints, mswm, awm = row
    h = width * K

    def printed(value: float, number: float) -> bool:
        return abs(value - number) <= 0.0051

    # The counts are 12·L·h² with K as 1024, in 10^12.
    assert printed(infinity.transformer_parameters(layers, h) / 1e12, trillions)
    assert printed(infinity.state_bytes(layers, h) / TIB, held)
    assert printed(infinity.activation_bytes(32, 1024, h, heads, layers) / TIB, acts)
    assert printed(infinity.checkpoint_bytes(32, 1024, h, layers) / TIB, checkpoints)
    assert printed(infinity.working_activation_bytes(4, 1024, h, heads) / GIB, awm)
    if mswm is not None:
        assert printed(infinity.working_state_bytes(h) / GIB, mswm)


def test_infinity_efficiency() -> None:
    def efficiency(intensity: float, gigabytes: float) -> float:
        return float(infinity.efficiency(intensity, gigabytes * GB))

    assert efficiency(infinity.intensity_of_parameters(1, 1024), 70) == pytest.approx(0.506, abs=5e-4)
    assert efficiency(infinity.intensity_of_optimizer(1, 1024), 4 * 70) == pytest.approx(0.506, abs=5e-4)
    assert efficiency(infinity.intensity_of_optimizer(2, 1024), 1500) == pytest.approx(0.916, abs=5e-4)
    for h, gigabytes, expected in ((2 * K, 2, 0.58), (8 * K, 1, 0.74), (8 * K, 3, 0.89)):
        assert efficiency(infinity.intensity_of_checkpoints(h), gigabytes) == pytest.approx(expected, abs=0.006)
    assert infinity.intensity_of_checkpoints(2048, every=2) == 2 * 24 * 2048


def test_infinity_intensity_is_compute_over_bytes() -> None:
    """2·4·b·s·params FLOPs over parameters read twice and gradients written, and a second time for recomputation: 8 bytes."""
    assert infinity.flops_per_step(2, 1024, 10**9) / (8 * 10**9) == infinity.intensity_of_parameters(2, 1024)
    assert infinity.flops_per_step(2, 1024, 10**9) / (32 * 10**9) == infinity.intensity_of_optimizer(2, 1024)


def test_tiling_divides_the_working_memory() -> None:
    """Four times the tiles, twice the width in the same space."""
    for tiles, width in ((4, 16 * K), (16, 32 * K), (64, 64 * K)):
        assert infinity.working_state_bytes(width, tiles) == infinity.working_state_bytes(8 * K)


# ---- FSDP


def test_fsdp_cross_host_traffic() -> None:
    """2M(W-1)/(GW) hybrid, 2M(W-1)/W replicated, 3M(W-1)/W full."""
    hybrid, replicated, full = (traffic.cross_host_bytes(s, 1.0, 16, 8) for s in ("hybrid", "replicated", "full"))
    assert (hybrid, replicated, full) == (2 * 15 / (8 * 16), 2 * 15 / 16, 3 * 15 / 16)


# ---- Korthikanti

S, B, H, A = 2048, 1, 12288, 96  # GPT-3
SBH = S * B * H


def test_korthikanti_layers() -> None:
    """Each row of the paper's table, with the whole layer 34sbh + 5as²b."""
    layer, t = activations.layer_bytes, 8
    scores = 5 * A * S / H
    assert scores == 80
    assert layer(S, B, H, A) == SBH * (34 + scores) == 34 * SBH + 5 * A * S**2 * B
    assert layer(S, B, H, A, t) == SBH * (10 + 24 / t + scores / t)
    assert layer(S, B, H, A, t, True) == SBH * (34 / t + scores / t)
    assert layer(S, B, H, A, t, keeps_scores=False) == SBH * (10 + 24 / t)
    assert layer(S, B, H, A, t, True, False) == SBH * 34 / t
    assert activations.checkpoint_bytes(S, B, H, 1) == 2 * SBH
    assert activations.checkpoint_bytes(S, B, H, 1, partitions=t) == 2 * SBH / t


def test_korthikanti_model() -> None:
    """p/L + (4/L)(1 + v/h) inside the bracket; without a pipeline p is 1."""
    layers, v, t = 96, 51200, 8
    total = activations.model_bytes(S, B, H, A, v, layers, t, True, False, False, 1, 2)
    assert sum(total.values()) == pytest.approx(SBH * layers / t * (34 + 1 / layers + 4 / layers * (1 + v / H)))


def test_korthikanti_selective_recomputation() -> None:
    """GPT-3 saves 70 % for 2.7 % more FLOPs, MT-NLG 65 % for 1.6 %."""
    for h, a, saved, cost in ((12288, 96, 0.70, 0.027), (20480, 128, 0.65, 0.016)):
        assert activations.scores_share(2048, h, a) == pytest.approx(saved, abs=0.006)
        assert 5 * a * 2048 / h in (80, 64)
        assert activations.selective_flops_share(2048, h) == pytest.approx(cost, abs=5e-4)
