"""What is traced on fake tensors against what a real step takes, and what a trace refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import zerodp
from tests.families import FAMILIES, IMAGES, Family, ResNet, checkpoint_by_torch
from tests.measured import Kept, most_bytes
from zerodp.config import Config
from zerodp.errors import ConfigError
from zerodp.planning.models import Trace
from zerodp.planning.traced import Step, arguments, loss_of, trace


class Pair(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(F.gelu(self.one(x)))
        return out


def drops_gradients(model: nn.Module) -> nn.Module:
    """As a sharded model, which takes each gradient at once."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return model


def measured(model: nn.Module, family: Family) -> tuple[int, int]:
    """(bytes that autograd keeps, the most bytes) of a real step, its second."""
    args, kwargs = arguments(family.inputs)
    drops_gradients(model)

    def step() -> int:
        with Kept(model) as kept:
            value = loss_of(model(*args, **kwargs), family.loss)
        nbytes = kept.nbytes
        value.backward()
        return nbytes

    return step(), most_bytes(step)


def traced(model: nn.Module, family: Family, **options: Any) -> Trace:
    found = zerodp.plan(model, world_size=2, precision=None, inputs=family.inputs, loss=family.loss, **options).trace
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "checkpoints"),
    [
        *((name, "none") for name in FAMILIES),
        *zip(FAMILIES, ("torch", "zerodp", "torch", "zerodp", "torch"), strict=True),
    ],
)
def test_bytes_are_those_of_a_real_step(name: str, checkpoints: str) -> None:
    family = FAMILIES[name]
    torch.manual_seed(0)
    model: Any = family.make()
    if checkpoints == "torch":
        checkpoint_by_torch(model)
    found = traced(model, family, checkpointing="full" if checkpoints == "zerodp" else "selective")
    if checkpoints == "zerodp":
        zerodp.apply_activation_checkpointing(model)
    saved, most = measured(model, family)
    assert found.saved_bytes == pytest.approx(saved, rel=0.05)
    assert found.peak_bytes == pytest.approx(most, rel=0.05)
    assert found.saved_bytes == sum(unit.saved_bytes for unit in found.units)
    assert found.flops == sum(unit.forward_flops + unit.backward_flops for unit in found.units)


def test_flops_are_those_that_torch_counts() -> None:
    """Of convolutions and linears; torch's own counter knows no attention on the CPU."""
    family, model = FAMILIES["resnet"], ResNet()
    found = traced(model, family)
    with FlopCounterMode(display=False) as counter:
        loss_of(model(IMAGES), family.loss).backward()
    assert found.flops == counter.get_total_flops()
    plan = zerodp.plan(model, world_size=2, inputs=IMAGES, loss=family.loss, accumulate=3)
    assert plan.estimates[0].flops == 3 * found.flops


def test_each_unit_has_its_own() -> None:
    """Blocks alike have as much; recomputation is a block's forward once more, in its backward."""
    model = nn.Sequential(*(Pair(64, 256) for _ in range(3)))
    family = Family(lambda: model, torch.zeros(10, 64))
    plain, again = traced(model, family), traced(model, family, checkpointing="full")
    forward = 2 * 2 * 10 * 64 * 256
    assert [unit.forward_flops for unit in plain.units] == [forward] * 3
    # Nothing asks for the gradient of the first input; the last linear is not recomputed, as nothing needs its output.
    assert [unit.backward_flops for unit in plain.units] == [forward * 3 // 2, forward * 2, forward * 2]
    assert [unit.backward_flops for unit in again.units] == [forward * 2, forward * 5 // 2, forward * 5 // 2]
    assert [unit.saved_bytes for unit in plain.units] == [10 * (64 + 2 * 256) * 4] * 3
    assert again.saved_bytes == 3 * 10 * 64 * 4


def test_bf16_keeps_half() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.zeros(8, 64)
    saved = [trace(Step(model, x, None, Config(precision=p))).saved_bytes for p in ("fp32", "bf16")]
    assert saved[0] == 2 * saved[1] > 0


def test_the_module_is_not_touched() -> None:
    model = ResNet()
    before, form = copy.deepcopy(model.state_dict()), copy.deepcopy(vars(model))
    state = torch.get_rng_state()
    zerodp.plan(model, world_size=4, inputs=IMAGES, simulate=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())
    assert vars(model).keys() == form.keys()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_modules_and_inputs_on_the_meta_device() -> None:
    with torch.device("meta"):
        model, images = ResNet(), torch.empty(IMAGES.shape)
    family = FAMILIES["resnet"]
    assert traced(model, Family(ResNet, images, family.loss)) == traced(ResNet(), family)


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out if out.sum() > 0 else -out


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            Chooses(),
            {"inputs": torch.zeros(2, 4)},
            "the step without values failed in forward, in or near unit '(root)'",
        ),
        (nn.Linear(4, 4), {"inputs": torch.zeros(2, 5)}, "Inputs must fit the model"),
        (nn.Linear(4, 4), {"inputs": torch.zeros(2, 4), "loss": lambda y: y}, "got a tensor of shape (2, 4)"),
        (nn.Linear(4, 4), {"inputs": torch.zeros(2, 4), "loss": lambda y: 3}, "got a int"),
        (nn.Linear(4, 4), {"inputs": torch.zeros(2, 4), "batch": 3}, "batch: the inputs say that already"),
        (nn.Linear(4, 4), {"simulate": True}, "a step is run for a torch.nn.Module with its inputs="),
        (1e9, {"simulate": True}, "or (with simulate=True) for a shape; got float"),
        (1e9, {"units": "blocks"}, "units: without a module expected one of block, branch, linear, got 'blocks'"),
        (
            nn.Linear(4, 4),
            {"inputs": torch.zeros(2, 4), "simulate": True, "offload_optimizer": "host"},
            "offload_optimizer is not simulated",
        ),
    ],
)
def test_what_cannot_be_run(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        zerodp.plan(model, world_size=2, **options)
    assert message in str(raised.value)


def test_losses() -> None:
    x = torch.ones(3, requires_grad=True)
    assert loss_of(x, None) == 1
    assert loss_of({"a": 1, "b": x}, None) == 1
    assert loss_of((x * 2,), None) == 2
    assert loss_of(F.mse_loss(x, torch.zeros(3)), None) == 1
    assert loss_of(x, torch.sum) == 3


def test_checkpointing_and_smaller_units_are_remedies() -> None:
    """What is said to make a traced module fit, does."""
    model = nn.Sequential(*(Pair(256, 256) for _ in range(4)))
    options: dict[str, Any] = {"world_size": 4, "precision": "fp32", "inputs": torch.zeros(512, 256), "headroom": 0}
    free = zerodp.plan(model, **options).estimates[3].device_bytes
    found = zerodp.plan(model, device_memory=int(free) - 1, **options)
    assert "activation checkpointing" in found.recommendation.remedies
    assert "smaller units (units=['*.one', '*.two'])" in found.recommendation.remedies
    checkpointed = zerodp.plan(model, device_memory=int(free) - 1, checkpointing="full", **options)
    finer = zerodp.plan(model, device_memory=int(free) - 1, units=["*.one", "*.two"], **options)
    assert checkpointed.fits
    assert finer.fits
    assert checkpointed.estimates[3].device_bytes < finer.estimates[3].device_bytes < free
