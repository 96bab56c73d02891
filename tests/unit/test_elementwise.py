"""Which optimizers can run on shards: those whose update of a part of the parameters does not depend on the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.test_optimizers import ELEMENTWISE, REFUSED
from zerodp import ConfigError
from zerodp.elementwise import check_elementwise, num_moments


class Normalised(torch.optim.Optimizer):
    """Each parameter's update is elementwise but for the norm of all gradients together."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            mine = [p for p in group["params"] if p.grad is not None]
            norm = sum(float(p.grad.square().sum()) for p in mine) ** 0.5
            for p in mine:
                p.add_(p.grad, alpha=-group["lr"] / norm)


class Adapting(torch.optim.Optimizer):
    """Finds its rate from a sum over all parameters, as Prodigy does; its first steps are too small to be seen in a weight."""

    def __init__(self, params: Any, d: float = 1e-9):
        super().__init__(params, {"d": d, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            mine = [p for p in group["params"] if p.grad is not None]
            group["numerator"] += group["d"] * sum(float(p.grad.abs().sum()) for p in mine)
            for p in mine:
                p.add_(p.grad.sign(), alpha=-(group["d"] + group["numerator"]) * 1e-3)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))


@pytest.mark.parametrize("cls", [Normalised, Adapting])
def test_one_figure_of_all_parameters_is_not_elementwise(cls: Any) -> None:
    net = model()
    optimizer = cls(net.parameters())
    before = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    with pytest.raises(ConfigError, match=f"{cls.__name__} is not elementwise.*depends on the rest"):
        check_elementwise(optimizer)
    assert {k: v for k, v in optimizer.param_groups[0].items() if k != "params"} == before
    assert not optimizer.state


@pytest.mark.parametrize("name", REFUSED)
def test_whole_matrices(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*elementwise"):
        check_elementwise(REFUSED[name](model()))


def test_elementwise_ones_pass() -> None:
    """Also when they have stepped before, and with a learning rate in a tensor, which the trial leaves alone."""
    for name, make in ELEMENTWISE.items():
        net = model()
        optimizer = make(net)
        check_elementwise(optimizer)
        net(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        check_elementwise(optimizer)
        assert all(len(state) for state in optimizer.state.values()), name
    assert num_moments(ELEMENTWISE["AdamW"](model())) == 2
    assert num_moments(ELEMENTWISE["Adam"](model())) == 3
    assert num_moments(torch.optim.SGD(model().parameters(), lr=0.1)) == 0
