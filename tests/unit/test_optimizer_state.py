"""What torch's optimizers expect of states and parameters: which entry is on which device, and which classes have fast kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _default_to_fused_or_foreach

from zerodp.core.local import Local
from zerodp.core.optimizer import SegmentParameter
from zerodp.core.optimizer_state import to_plain

DEVICE = torch.device("meta")  # stands for an accelerator: it is another device than the host


@pytest.mark.parametrize("settings", [{}, {"fused": None, "capturable": False}, {"fused": True}, {"capturable": True}])
def test_steps_are_counted_on_the_host_but_by_fused_and_capturable_optimizers(settings: dict[str, Any]) -> None:
    """As torch's own load_state_dict places them."""
    whole = torch.ones(2, 3, device=DEVICE)
    state = {"step": torch.tensor(3.0), "mu_product": torch.tensor(0.5), "exp_avg": whole, "note": "mine", "count": 3}
    plain = to_plain(state, Local(nn.Parameter(torch.zeros(2, 3)), True), None, settings, DEVICE)  # type: ignore[arg-type]
    assert plain["step"].device.type == ("meta" if any(settings.values()) else "cpu")
    assert plain["mu_product"].device == DEVICE
    assert plain["exp_avg"].shape == whole.shape
    assert (plain["note"], plain["count"]) == ("mine", 3)


def test_segments_are_parameters_that_torch_has_fast_kernels_for() -> None:
    """Asked for fused ones, which the CPU has too; foreach goes by the same list of classes, and by accelerators."""
    segment = SegmentParameter(torch.zeros(3), requires_grad=False)
    assert _default_to_fused_or_foreach([segment], differentiable=False, use_fused=True) == (True, False)
