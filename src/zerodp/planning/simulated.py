"""One rank among thousands, without the others: the real engine runs steps over groups that send nothing, on fake tensors.

Schedule, layouts, ledgers and counts are the engine's own; it does not know that nothing is there. Time is not simulated here.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..api import assemble
from ..config import Precision
from ..core import wrap
from ..core.comm import Comm, CommRow
from ..core.runtime import Event
from ..errors import ConfigError
from ..inspect import stats
from .closed.states import MOMENTS
from .estimate import amount
from .fakes import FakeArena, FakeValues, fake_inputs, fake_mesh, new_mode
from .recorder import Recorder
from .setup import Setup
from .traced import Step, arguments, attempt, copied, loss_of, modules_of

WARM_UP = 1  # steps before the one that is reported: the optimizer makes its state in the first


@dataclass(frozen=True)
class Simulation:
    """What one rank held and sent in a step.

    now, peak: bytes on the device by kind, as `zerodp.stats` gives them, after the step and at the most of each kind;
    activations_bytes: the most of what the model's own operations made and kept; peak_bytes: the most of all at one time, in
    `peak_phase` ("forward", "backward" or "step") of `peak_unit`. wire_elements, wire_bytes, launches: what it sent, padding
    included, in how many collectives; comm: these by operation, unit and dtype; trace: the events of the step in order.
    """

    world_size: int
    rank: int
    stage: int
    now: dict[str, int]
    peak: dict[str, int]
    activations_bytes: int
    peak_bytes: int
    peak_unit: str
    peak_phase: str
    wire_elements: int
    wire_bytes: int
    launches: int
    comm: tuple[CommRow, ...]
    trace: tuple[Event, ...]

    def __str__(self) -> str:
        kinds = ", ".join(f"{amount(nbytes)} {kind}" for kind, nbytes in self.peak.items() if nbytes)
        return (
            f"rank {self.rank} of {self.world_size}, stage {self.stage}, simulated: {amount(self.peak_bytes)} at the most, in "
            f"{self.peak_phase} of {self.peak_unit!r} ({kinds}, {amount(self.activations_bytes)} activations); {self.launches:,} collectives "
            f"that send {amount(self.wire_bytes)} in a step"
        )

    def as_json(self) -> dict[str, Any]:
        """All but the collectives and events one by one."""
        return {name: value for name, value in vars(self).items() if name not in ("comm", "trace")}


def simulate(step: Step, setup: Setup, stage: int, rank: int = 0) -> Simulation:
    """A step of rank `rank` of `setup.world_size`, as if its model had been sharded on all of them; a copy without memory is.

    Raises:
        ConfigError: what cannot be simulated, or a step that cannot be run without values.
    """
    check(setup, rank)
    config = dataclasses.replace(
        step.config,
        stage=stage,
        precision=_without_scale(setup.precision),
        prefetch=setup.prefetch,
        unsharded_bytes=setup.unsharded_bytes,
        bucket_bytes=setup.bucket_bytes_on(1),
    )
    twin, mode = copied(step.model, setup.checkpointing == "full"), new_mode()
    plain = _optimizer(setup.optimizer, list(twin.parameters()))
    plans = wrap.plan_units(twin, config)
    recorder = Recorder(modules_of(plans, twin), [])
    arena = FakeArena(mode, recorder.sample)
    recorder.outside = lambda: arena.total + arena.reserved - arena.lent  # idle memory too is held
    comm = Comm(fake_mesh(setup.world_size, rank, setup.replicate), exact=setup.exact, check=False)
    comm.pairwise = setup.exact  # as on gloo, where sums are exact by default
    sharded, optimizer = assemble(twin, plain, config, plans, FakeValues(twin, mode), comm, arena)
    args, kwargs = arguments(fake_inputs(step.inputs, mode))

    def train() -> None:
        for _ in range(setup.accumulate):
            value = attempt(recorder, lambda: loss_of(sharded(*args, **kwargs), step.loss))
            attempt(recorder, value.backward)
            del value
        recorder.stepping = True
        optimizer.step()
        recorder.stepping = False

    with warnings.catch_warnings(), recorder.watching(sharded):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        for _ in range(WARM_UP):
            train()
            optimizer.zero_grad()
        stats(sharded).reset()
        recorder.reset_peaks()
        resting = recorder.live_bytes  # the optimizer's state
        train()
    seen = stats(sharded)
    memory = seen.memory
    return Simulation(
        setup.world_size,
        rank,
        stage,
        memory.now,
        memory.peak,
        recorder.live_peak - resting,
        recorder.peak.nbytes,
        *recorder.peak.place,
        seen.wire_elements,
        seen.wire_bytes,
        seen.launches,
        tuple(seen.comm),
        tuple(seen.trace),
    )


def check(setup: Setup, rank: int) -> None:
    """
    Raises:
        ConfigError: what is not simulated.
    """
    away = [name for name in ("optimizer", "params", "activations") if getattr(setup, f"offload_{name}") != "device"]
    if away or setup.tensor_parallel > 1:
        what = f"offload_{away[0]}" if away else "tensor_parallel"
        raise ConfigError(f"simulate: {what} is not simulated; leave it out, or plan without simulate")
    if not 0 <= rank < setup.world_size:
        raise ConfigError(f"simulate: expected a rank of 0 to {setup.world_size - 1}, got {rank}")


def _without_scale(precision: Precision | None) -> Precision | None:
    """bf16 for fp16: as many bytes, and no loss scale, which goes by values."""
    if precision is None or precision.param_dtype != torch.float16:
        return precision
    others = {name: getattr(precision, name) for name in ("reduce_dtype", "grad_dtype")}
    others = {name: torch.bfloat16 if dtype == torch.float16 else dtype for name, dtype in others.items()}
    return Precision(torch.bfloat16, master_dtype=precision.master_dtype, buffer_dtype=precision.buffer_dtype, **others)


# ---- optimizers


class Keeps(torch.optim.Optimizer):
    """An optimizer of so many values beside each parameter; what it does with them is nobody's concern here."""

    def __init__(self, params: Any, moments: int) -> None:
        super().__init__(params, {"lr": 0.1})
        self.names = ["exp_avg", "exp_avg_sq", *(f"value_{number}" for number in range(2, moments))][:moments]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            for name in self.names:
                if name not in self.state[parameter]:
                    self.state[parameter][name] = torch.zeros_like(parameter)
            parameter.add_(parameter.grad, alpha=-0.1)


def _optimizer(kind: str | int, parameters: list[Tensor]) -> torch.optim.Optimizer:
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "adam": lambda ps: torch.optim.Adam(ps, fused=True),
        "adamw": lambda ps: torch.optim.AdamW(ps, fused=True),
    }
    if kind in makers:
        return makers[str(kind)](parameters)
    return Keeps(parameters, kind if isinstance(kind, int) else MOMENTS[kind])
