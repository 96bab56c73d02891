"""Precision without processes: what its fields may be, which dtypes follow, and the loss scale as a series."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import zerodp
from zerodp import Config, ConfigError, Precision
from zerodp.core.precision import LossScaler, computes_in_fp32, dtypes_of

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("param_dtype", torch.int8),
        ("param_dtype", "bf16"),
        ("reduce_dtype", torch.int32),
        ("grad_dtype", "fp32"),
        ("master_dtype", None),
        ("buffer_dtype", torch.bool),
        ("output_dtype", 16),
        ("loss_scale", "static"),
        ("loss_scale", 0.0),
        ("loss_scale", True),
        ("init_scale", -1.0),
        ("growth_interval", 0),
        ("growth_interval", 1.5),
        ("growth", 1.0),
        ("backoff", 0.0),
        ("backoff", 1.0),
        ("hysteresis", 0),
        ("min_scale", 0.0),
    ],
)
def test_wrong_values_name_field_and_value(field: str, value: Any) -> None:
    settings = {"param_dtype": BF16, field: value}
    with pytest.raises(ConfigError) as caught:
        Precision(**settings)
    assert f"Precision.{field}" in str(caught.value)
    assert repr(value) in str(caught.value)


def test_defaults_are_the_documented_ones() -> None:
    precision = dataclasses.asdict(Precision(FP16))
    assert precision == {
        "param_dtype": FP16,
        "reduce_dtype": None,
        "grad_dtype": None,
        "master_dtype": FP32,
        "buffer_dtype": None,
        "cast_inputs": True,
        "output_dtype": None,
        "loss_scale": "dynamic",
        "init_scale": 2.0**16,
        "growth_interval": 2000,
        "backoff": 0.5,
        "growth": 2.0,
        "hysteresis": 1,
        "min_scale": 1.0,
    }


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Precision(BF16).param_dtype = FP16  # type: ignore[misc]


@pytest.mark.parametrize(("name", "dtype"), [("fp32", FP32), ("bf16", BF16), ("fp16", FP16)])
def test_by_name(name: str, dtype: torch.dtype) -> None:
    precision = Config(precision=name).precision  # type: ignore[arg-type]
    assert precision == Precision(dtype)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'bf17'.*did you mean 'bf16'"):
        Config(precision="bf17")  # type: ignore[arg-type]


def parameter(dtype: torch.dtype, trainable: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=trainable and dtype.is_floating_point)


@pytest.mark.parametrize(
    ("own", "precision", "expected"),
    [
        (FP32, None, (FP32, FP32, FP32)),
        (FP32, Precision(FP32), (FP32, FP32, FP32)),
        (FP32, Precision(BF16), (BF16, FP32, FP32)),
        (FP32, Precision(FP16), (FP16, FP32, FP32)),
        (FP32, Precision(BF16, grad_dtype=BF16), (BF16, FP32, BF16)),
        (FP32, Precision(BF16, master_dtype=FP64), (BF16, FP64, FP32)),
        (BF16, None, (BF16, FP32, FP32)),
        (BF16, Precision(BF16), (BF16, FP32, FP32)),
        (BF16, Precision(FP32), (FP32, FP32, FP32)),
        (FP64, None, (FP64, FP64, FP64)),
    ],
)
def test_dtypes_of_a_trainable_parameter(own: torch.dtype, precision: Precision | None, expected: Any) -> None:
    """Compute, at rest, reduced gradients."""
    assert dtypes_of(parameter(own), precision, keeps_dtype=False) == expected


def test_frozen_parameters_pay_for_no_master() -> None:
    assert dtypes_of(parameter(BF16, trainable=False), None, keeps_dtype=False)[:2] == (BF16, BF16)
    assert dtypes_of(parameter(FP32, trainable=False), Precision(BF16), keeps_dtype=False)[0] == BF16


@pytest.mark.parametrize("own", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_integer_and_quantised_parameters_are_left_alone(own: torch.dtype) -> None:
    codes = nn.Parameter(torch.zeros(2, dtype=own), requires_grad=False)
    assert dtypes_of(codes, Precision(BF16), keeps_dtype=False) == (own, own, own)


def test_batch_norms_keep_their_dtype() -> None:
    assert computes_in_fp32(nn.BatchNorm2d(3))
    assert not computes_in_fp32(nn.LayerNorm(3))
    assert dtypes_of(parameter(FP32), Precision(BF16), keeps_dtype=True)[0] == FP32


def series(precision: Precision, overflows: str) -> list[float]:
    """The scale after each step; x = overflow."""
    scaler = LossScaler(precision)
    found = []
    for step in overflows:
        scaler.update(step == "x")
        found.append(scaler.scale)
    return found


def test_dynamic_scale() -> None:
    assert series(Precision(FP16, init_scale=8.0, growth_interval=2), "..x..xx") == [8, 16, 8, 8, 16, 8, 4]


def test_hysteresis_is_refilled_by_growth_only() -> None:
    precision = Precision(FP16, init_scale=8.0, growth_interval=2, hysteresis=3)
    assert series(precision, "xx.x..xxx") == [8, 8, 8, 4, 4, 8, 8, 8, 4]


def test_scale_never_falls_below_the_minimum() -> None:
    assert series(Precision(FP16, init_scale=3.0, backoff=0.5, min_scale=2.0), "x") == [2.0]


def test_overflow_at_the_minimum_is_an_error() -> None:
    with pytest.raises(zerodp.ZeroError, match="smallest loss scale"):
        series(Precision(FP16, init_scale=4.0), "xxx")


def test_fixed_scale_never_moves() -> None:
    assert series(Precision(FP16, loss_scale=128.0), "..xx.") == [128.0] * 5


@pytest.mark.parametrize("precision", [None, Precision(BF16), Precision(FP32)])
def test_only_fp16_is_scaled(precision: Precision | None) -> None:
    scaler = LossScaler(precision)
    assert not scaler.active
    assert scaler.scale == 1.0


def test_state_goes_through_a_dict() -> None:
    precision = Precision(FP16, init_scale=8.0, growth_interval=4, hysteresis=2)
    first, second = LossScaler(precision), LossScaler(precision)
    for overflow in (False, True, False, False, False):
        first.update(overflow)
    second.load_state_dict(first.state_dict())
    for scaler in (first, second):
        scaler.update(False)
    assert (first.scale, second.scale) == (16.0, 16.0)
