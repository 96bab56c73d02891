"""Claims of the checklist that no other file proves: memory by kind, one copy of every state, and DDP and FSDP2 beside it."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

import zerodp
from tests.ranks.oracle import Task, adamw, close, momentum, parity, rows, run, same, squares, train
from tests.ranks.pool import Pool, on_ranks
from tests.ranks.test_memory import MODEL_STATES, aligned, bytes_of
from tests.ranks.test_plan import predicted
from tests.ranks.toys import Block, Net

case = pytest.mark.case
sharded_stages = pytest.mark.parametrize("stage", [1, 2, 3], ids="zero{}".format)
LOW = zerodp.Precision(torch.bfloat16, grad_dtype=torch.bfloat16)  # 16-bit gradients, as the paper counts
OPTIMIZER = ("master", "first_moment", "second_moment")
EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp.py"


def trained(model: nn.Module, width: int, **options: Any) -> tuple[Any, Any]:
    """Sharded, after one step and another backward: all states are there."""
    model, optimizer = zerodp.shard(model, adamw(model), **options)
    for step in range(2):
        squares(model, torch.ones(2, width)).backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


# ---- memory


@on_ranks(1)
def test_mixed_precision_adam_by_kind() -> None:
    """2 + 2 + (4 + 4 + 4) bytes per parameter, three quarters of them the optimizer's: three fp32 tensors for each parameter."""
    model = aligned()
    numel = sum(p.numel() for p in model.parameters())
    model, optimizer = trained(model, 64, stage=0, units=[nn.Linear], precision=LOW)
    now = zerodp.stats(model).memory.now
    assert {kind: now[kind] / numel for kind in MODEL_STATES} == {
        "parameters": 2, "gradients": 2, "master": 4, "first_moment": 4, "second_moment": 4,
    }  # fmt: skip
    assert bytes_of(model, OPTIMIZER) / bytes_of(model) == 0.75
    masters = [segment for group in optimizer.param_groups for segment in group["params"]]
    assert sum(master.numel() for master in masters) == numel
    for master in masters:
        state = optimizer.state[master]
        for tensor in (master, state["exp_avg"], state["exp_avg_sq"]):
            assert (tensor.dtype, tensor.numel()) == (torch.float32, master.numel())


@on_ranks(2, 4)
@sharded_stages
def test_all_ranks_together_hold_one_copy(stage: int, world_size: int) -> None:
    """Of what a stage shards: 12 bytes per parameter at stage 1, 14 at stage 2 with the gradients. Stage 3 adds nothing that rests: its
    pages are filled from the masters."""
    model = aligned()
    numel = sum(p.numel() for p in model.parameters())
    model, _ = trained(model, 64, stage=stage, units=[nn.Linear], precision=LOW)
    sharded = {1: OPTIMIZER, 2: (*OPTIMIZER, "gradients"), 3: MODEL_STATES}[stage]
    together = torch.tensor([bytes_of(model, sharded)])
    dist.all_reduce(together)
    assert together.item() == {1: 12, 2: 14, 3: 14}[stage] * numel
    whole = {1: 4, 2: 2, 3: 0}[stage] * numel
    assert bytes_of(model) == whole + together.item() // world_size


@case("B65")
@on_ranks(4)
def test_a_million_parameters_on_four_ranks(stage: int) -> None:
    """16, 7, 5.5 and 4 MB by the paper. Measured within 2 %, and as planned to the byte; stage 3 rests without the 16-bit shard."""
    model = nn.Linear(1000, 1000, bias=False)
    found = predicted(model, stage, precision=LOW)
    assert found.model_state_bytes == [16e6, 7e6, 5.5e6, 4e6][stage]
    model, _ = trained(model, 1000, stage=stage, precision=LOW)
    assert bytes_of(model) == found.zerodp_state_bytes
    assert bytes_of(model) == pytest.approx([16e6, 7e6, 5.5e6, 3.5e6][stage], rel=0.02)


@on_ranks(2)
@sharded_stages
@pytest.mark.parametrize("options", [{"ignore": "3.*"}, {"ignore_below": 129}], ids=str)
def test_what_stays_whole_costs_what_it_costs_in_data_parallelism(options: dict[str, Any], stage: int) -> None:
    """A layer of 128 elements beside three that are sharded: its bytes, its all-reduce, and no gather."""
    small, model = 128, nn.Sequential(*aligned(layers=3), nn.Linear(64, 2, bias=False))
    numel = 3 * 64 * 64
    model, optimizer = trained(model, 64, stage=stage, units=[nn.Linear], **options)
    values = {1: 2 * numel + numel, 2: numel + 3 * numel // 2, 3: 2 * numel}[stage]
    assert bytes_of(model) == 4 * (values + 4 * small)
    optimizer.step()
    optimizer.zero_grad()
    zerodp.full_grads(model)  # nothing is under way any more
    zerodp.stats(model).reset()
    squares(model, torch.ones(2, 64)).backward()
    optimizer.step()
    optimizer.zero_grad()
    zerodp.full_grads(model)
    rows = zerodp.stats(model).comm
    gathers = [row for row in rows if row.op == "all_gather"]
    assert {row.unit for row in gathers} == {"0", "1", "2"}
    assert sum(row.elements for row in gathers) == (2 if stage == 3 else 1) * numel // 2
    assert sum(row.elements for row in rows if row.op == "all_reduce") == small


# ---- compute and communication


@on_ranks(2)
def test_every_stage_computes_what_plain_torch_computes() -> None:
    """The same floating-point operations in a step: a stage moves memory about and recomputes nothing."""

    def flops(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        for _ in range(2):
            with FlopCounterMode(display=False) as counter:
                squares(model, rows(3)(0, 0, dist.get_rank())).backward()
                optimizer.step()
            optimizer.zero_grad()
        return int(counter.get_total_flops())

    task = Task(Net, rows(3))
    plain = flops(*task.build(0))
    assert plain > 0
    assert [flops(*zerodp.shard(*task.build(0), stage=stage, units=[Block])) for stage in range(4)] == [plain] * 4


@on_ranks(2, 3)
def test_all_ranks_have_the_same_weights_after_a_step(stage: int, world_size: int) -> None:
    model = Net()
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[Block])
    for step in range(2):
        squares(model, rows(3)(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zerodp.full_params(model):
        mine = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    every: list[Any] = [None] * world_size
    dist.all_gather_object(every, mine)
    for name, tensor in every[0].items():
        close(name, mine[name], tensor)


# ---- many ranks


def on_eight() -> None:
    task = Task(Net, rows(3), optimizer=adamw, steps=2, micro=(False, True))
    reference = parity(task, stage=0, units=[Block], tolerance=1e-6)
    for stage in (1, 2, 3):
        same(run(task, stage=stage, units=[Block]), reference)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    same(run(task, stage=3, units=[Block], mesh=mesh), reference, tolerance=1e-6)
    model, _ = trained(aligned(), 64, stage=3, units=[nn.Linear])
    assert bytes_of(model) == 16 * 4 * 64 * 64 // 8


def test_eight_ranks(ranks: Pool) -> None:
    try:
        ranks.run(8, on_eight, timeout=100)
    finally:
        ranks.close()  # later tests need fewer


# ---- beside torch's own


def example(zero: int | None, clips: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of the example for DDP, or of the same text with its lines for ZeRO put in."""
    text = EXAMPLE.read_text()
    if not clips:
        text = re.sub(r"^ *nn\.utils\.clip_grad_norm_.*\n", "", text, flags=re.MULTILINE)
    if zero is not None:
        text, changed = re.subn(r"^( *)\S.*# ZeRO: (.*)$", r"\1\2", text, flags=re.MULTILINE)
        assert changed == (2 if clips else 1)
        text = text.replace("stage=3", f"stage={zero}")
    script: dict[str, Any] = {"__name__": "example"}
    exec(compile(text, str(EXAMPLE), "exec"), script)
    found: tuple[list[float], dict[str, Tensor]] = script["train"]()
    return found


@on_ranks(2)
@pytest.mark.parametrize("clips", [False, True], ids=["one line", "two lines"])
def test_a_script_for_ddp_changed_by_one_line(clips: bool, stage: int) -> None:
    """Accumulation, a schedule and `state_dict` go on as they were. Without clipping the losses are DDP's to the last bit."""
    losses, weights = example(None, clips)
    assert sum(losses[-4:]) < sum(losses[:4])
    found, state = example(stage, clips)
    assert found == (pytest.approx(losses, abs=1e-6) if clips else losses)
    assert list(state) == list(weights)
    for name, weight in weights.items():
        close(name, state[name], weight, 1e-6 if clips else 0.0)


class FullyShard:
    """torch's FSDP2 as a subject."""

    def __init__(self, model: Any) -> None:
        for block in model.blocks:
            fully_shard(block)
        self.model = fully_shard(model)
        self.optimizer: Any = momentum(model)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()  # the task asks for none

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.full_tensor() for name, p in self.model.named_parameters()}

    def clip(self, max_norm: float) -> float:
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).full_tensor())

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.full_tensor() for name, p in self.model.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        return dict(self.model.named_buffers())


@on_ranks(2)
def test_fully_shard_trains_the_same() -> None:
    """Losses, gradients, norms and weights of five steps, at every stage here."""
    task = Task(Net, rows(3), steps=5, max_norm=0.5)
    theirs = train(task, lambda model, _: FullyShard(model))
    for stage in range(4):
        same(run(task, stage=stage, units=[Block]), theirs, tolerance=1e-6)
