"""Low precision: fp32 masters, sums in fp32, loss scaling that all ranks decide alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import Task, adamw, all_close, close, parity, rows
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net, ToyA, X, own_loss, toy_a_batch, toy_b

case = pytest.mark.case
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def fp16(**settings: Any) -> zerodp.Precision:
    return zerodp.Precision(torch.float16, **settings)


def wide(stage: int, **settings: Any) -> tuple[nn.Module, zerodp.ShardedOptimizer]:
    """128 elements: on two ranks each owns 64, and element k of the gradient is element k of the input."""
    model = nn.Linear(128, 1, bias=False)
    return zerodp.shard(model, sgd(model), stage=stage, precision=fp16(**settings))


def backward(model: nn.Module, optimizer: zerodp.ShardedOptimizer, bad_on: int | None = None) -> None:
    x = torch.ones(1, 128)
    if bad_on == dist.get_rank():
        x[0, 0] = float("inf")  # in rank 0's shard
    optimizer.backward(model(x).sum())


@on_ranks(2)
@pytest.mark.parametrize("bad_on", [None, 1])
def test_gradients_that_the_step_itself_reduces(bad_on: int | None, stage: int) -> None:
    """Under no_sync they wait until the step, where they are unscaled, and looked at, like any others."""
    model, optimizer = wide(stage, init_scale=1024.0)
    before = model.state_dict()["weight"].clone()
    for _ in range(2):
        with model.no_sync():
            backward(model, optimizer, bad_on)
    if bad_on is None:
        close("gradient", zerodp.full_grads(model)["weight"].float(), torch.full((1, 128), 2.0))
    optimizer.step()
    assert optimizer.last_step_skipped == (bad_on is not None)
    close("weight", model.state_dict()["weight"], before if bad_on is not None else before - 0.1 * 2.0)


@on_ranks(2)
def test_gradients_kept_over_a_change_of_the_scale(stage: int) -> None:
    """Without zero_grad they go on adding up, though the loss scale has grown in between."""
    model, optimizer = wide(stage, init_scale=64.0, growth_interval=1)
    for scale, total in ((64.0, 1.0), (128.0, 2.0), (256.0, 3.0)):
        assert optimizer.loss_scale == scale
        backward(model, optimizer)
        close("gradient", zerodp.full_grads(model)["weight"].float(), torch.full((1, 128), total))
        optimizer.step()


@case("B27", "B28")
@on_ranks(2)
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
@pytest.mark.parametrize("bad_on", [0, 1])
def test_all_ranks_skip_together(bad_on: int, clip: bool, stage: int) -> None:
    model, optimizer = wide(stage, init_scale=1024.0)
    before = model.state_dict()["weight"].clone()
    backward(model, optimizer, bad_on)
    if clip:
        optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert (optimizer.skipped_steps, optimizer.last_step_skipped, optimizer.loss_scale) == (1, True, 512.0)
    close("skipped", model.state_dict()["weight"], before)
    backward(model, optimizer)
    norm = optimizer.clip_grad_norm_(1.0) if clip else 1.0
    assert norm == pytest.approx(128**0.5 if clip else 1.0, rel=1e-3)
    optimizer.step()
    assert (optimizer.skipped_steps, optimizer.last_step_skipped, optimizer.loss_scale) == (1, False, 512.0)
    close("clean step", model.state_dict()["weight"], before - 0.1 * (128**-0.5 if clip else 1.0), 1e-6)


@on_ranks(2)
def test_skipped_step_leaves_the_optimizers_state_alone(stage: int) -> None:
    model = nn.Linear(128, 1, bias=False)
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, precision=fp16(init_scale=1024.0))
    backward(model, optimizer)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.zero_grad()
    backward(model, optimizer, bad_on=1)
    optimizer.step()
    after = optimizer.state_dict()["state"]
    assert optimizer.last_step_skipped
    assert before.keys() == after.keys() == {"weight"}
    for key, value in before["weight"].items():
        assert torch.equal(torch.as_tensor(after["weight"][key]), torch.as_tensor(value)), key


@on_ranks(2)
@pytest.mark.parametrize("units", [None, [Block]], ids=["automatic", "blocks"])
def test_autocast(units: Any, stage: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
            assert out.dtype == torch.bfloat16
        return out.float().pow(2).mean()

    parity(Task(Net, rows(3), loss, micro=(True, True)), stage=stage, units=units)


@on_ranks(2)
def test_overflow_in_one_of_several_micro_batches(stage: int) -> None:
    model, optimizer = wide(stage, init_scale=1024.0)
    before = model.state_dict()["weight"].clone()
    for bad_on in (None, 1, None):
        backward(model, optimizer, bad_on)
    optimizer.step()
    assert optimizer.last_step_skipped
    close("skipped", model.state_dict()["weight"], before)


@case("B30")
@on_ranks(2)
def test_overflow_at_the_lowest_scale_is_an_error(stage: int) -> None:
    model, optimizer = wide(stage, init_scale=4.0, min_scale=1.0)
    for scale in (2.0, 1.0):
        backward(model, optimizer, bad_on=0)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.loss_scale == scale
    backward(model, optimizer, bad_on=0)
    with pytest.raises(zerodp.ZeroError, match="scale"):
        optimizer.step()


@case("B31")
@on_ranks(2)
def test_fixed_scale(stage: int) -> None:
    model = ToyA()
    model, optimizer = zerodp.shard(model, sgd(model), stage=stage, precision=fp16(loss_scale=128.0))
    optimizer.backward(model((dist.get_rank() + 1) * X))
    close("gradient", zerodp.full_grads(model)["w"].float(), 1.5 * X)
    assert optimizer.clip_grad_norm_(float("inf")) == pytest.approx(8.2158, abs=1e-4)
    optimizer.step()
    close("w", model.state_dict()["w"], torch.tensor([0.85, 0.7, 0.55, 0.4]), 1e-6)
    assert optimizer.loss_scale == 128.0


@on_ranks(2)
def test_scale_grows_after_good_steps_and_hysteresis_delays_the_backoff(stage: int) -> None:
    model, optimizer = wide(stage, init_scale=16.0, growth_interval=2, growth=4.0, backoff=0.25, hysteresis=2)
    scales = []
    for bad_on in (None, None, None, 0, 0, None, None, 0, 0):
        backward(model, optimizer, bad_on)
        optimizer.step()
        optimizer.zero_grad()
        scales.append(optimizer.loss_scale)
    # two good steps: 64. The first overflow uses up the hysteresis, the second backs off. Growth refills it.
    assert scales == [16, 64, 64, 64, 16, 16, 64, 64, 16]
    assert optimizer.skipped_steps == 4


@case("B34")
@on_ranks(1, 2)
@pytest.mark.parametrize("given", ["model", "option"])
def test_small_updates_reach_the_master(given: str, stage: int) -> None:
    """Ten updates of 0.001: a bf16 weight alone would stay 1.0."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    options = {"precision": "bf16"} if given == "option" else {}
    if given == "model":
        model = model.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    model, optimizer = zerodp.shard(model, optimizer, stage=stage, **options)
    for _ in range(10):
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    masters = [tensor for _, _, tensor in zerodp.local_shards(model) if tensor.numel()]
    assert all(tensor.dtype == torch.float32 for tensor in masters)
    for tensor in masters:
        close("master", tensor, torch.tensor([0.990]), 1e-6)
    with zerodp.full_params(model):
        close("copy", model.weight.detach().clone(), torch.tensor([[0.98828125]], dtype=torch.bfloat16))
    expected = torch.tensor([[0.98828125]], dtype=torch.bfloat16) if given == "model" else torch.tensor([[0.990]])
    close("state_dict", model.state_dict()["weight"], expected, 1e-6)


@case("B35")
@on_ranks(2)
def test_scheduler_does_not_run_on_skipped_steps(stage: int) -> None:
    model, optimizer = wide(stage)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for bad_on in (0, 1, 0, None):
        backward(model, optimizer, bad_on)
        optimizer.step()
        optimizer.zero_grad()
        if not optimizer.last_step_skipped:
            scheduler.step()
    assert scheduler.last_epoch == 1
    assert optimizer.skipped_steps == 3


@on_ranks(2)
def test_plain_backward_in_fp16_is_an_error_at_the_step(stage: int) -> None:
    model, optimizer = wide(stage)
    model(torch.ones(1, 128)).sum().backward()
    with pytest.raises(zerodp.ZeroError, match="backward"):
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("bad_on", [None, 0, 1])
def test_torchs_grad_scaler(bad_on: int | None, stage: int) -> None:
    model = nn.Linear(128, 1, bias=False)
    model, optimizer = zerodp.shard(model, sgd(model), stage=stage)
    before = model.state_dict()["weight"].clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.ones(1, 128)
    if bad_on == dist.get_rank():
        x[0, 0] = float("inf")
    scaler.scale(model(x).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    skipped = bad_on is not None
    assert scaler.get_scale() == (512.0 if skipped else 1024.0)
    close("weight", model.state_dict()["weight"], before if skipped else before - 0.1, 1e-6)


@on_ranks(2)
@dtypes
@pytest.mark.parametrize("micro", [(True,), (True, True), (False, True)], ids=["one", "synced", "no_sync"])
def test_training_matches_an_oracle_of_the_same_precision(
    micro: tuple[bool, ...], dtype: torch.dtype, stage: int
) -> None:
    """Sharded gradients are kept in fp32: bitwise. Whole ones start in the compute dtype, so the first one is rounded to it."""
    precision = fp16(loss_scale=1.0) if dtype == torch.float16 else "bf16"
    rounded = stage <= 1 and micro[0]
    task = Task(Net, rows(3), micro=micro, steps=5)
    parity(task, stage=stage, units=[Block], precision=precision, dtype=dtype, tolerance=0.01 if rounded else 0.0)


@on_ranks(2)
@dtypes
def test_gradients_kept_in_the_compute_dtype(dtype: torch.dtype, stage: int) -> None:
    precision = zerodp.Precision(dtype, grad_dtype=dtype, loss_scale=1.0)
    parity(Task(Net, rows(3)), stage=stage, precision=precision, dtype=dtype, tolerance=0.01)


@on_ranks(2)
def test_wire_dtype(stage: int) -> None:
    """bf16 gradients may travel in fp32, and fp32 ones in bf16; the sum is taken in fp32 either way."""
    for param_dtype, reduce_dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        model = ToyA()
        precision = zerodp.Precision(param_dtype, reduce_dtype=reduce_dtype)
        model, _ = zerodp.shard(model, sgd(model), stage=stage, precision=precision)
        zerodp.stats(model).reset()
        model((dist.get_rank() + 1) * X).backward()
        close("gradient", zerodp.full_grads(model)["w"].float(), 1.5 * X)
        reductions = [r for r in zerodp.stats(model).comm if r.op == ("all_reduce" if stage == 0 else "reduce_scatter")]
        result = {param_dtype} if stage == 0 else set()  # the other half of an all-reduce, in the dtype it is kept in
        assert {row.dtype for row in reductions} == {reduce_dtype} | result


class Looks(nn.Module):
    """Records the dtype that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, *, mask: Tensor, count: int) -> dict[str, Any]:
        self.seen = (x.dtype, mask.dtype, type(count), self.layer.weight.dtype)
        return {"out": self.layer(x.to(self.layer.weight.dtype)), "more": [x.sum()], "count": count}


@on_ranks(2)
def test_inputs_and_outputs_are_cast(stage: int) -> None:
    model = Looks()
    precision = zerodp.Precision(torch.bfloat16, output_dtype=torch.float32)
    model, _ = zerodp.shard(model, sgd(model), stage=stage, precision=precision)
    out = model(torch.ones(2, 3), mask=torch.ones(2, dtype=torch.bool), count=3)
    assert model.seen == (torch.bfloat16, torch.bool, int, torch.bfloat16)
    assert (out["out"].dtype, out["more"][0].dtype, out["count"]) == (torch.float32, torch.float32, 3)


@on_ranks(2)
def test_inputs_are_left_alone_where_asked(stage: int) -> None:
    model = Looks()
    precision = zerodp.Precision(torch.bfloat16, cast_inputs=False)
    model, _ = zerodp.shard(model, sgd(model), stage=stage, precision=precision)
    out = model(torch.ones(2, 3), mask=torch.ones(2), count=3)
    assert model.seen[0] == torch.float32
    assert out["out"].dtype == torch.bfloat16


@on_ranks(2)
def test_fp32_by_name_and_low_precision_models_promoted(stage: int) -> None:
    parity(Task(Net, rows(3)), stage=stage, precision="fp32")
    model = toy_b().bfloat16()
    model, _ = zerodp.shard(model, sgd(model), stage=stage, precision="fp32")
    with zerodp.full_params(model):
        assert model[0].weight.dtype == torch.float32
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}


@on_ranks(2)
def test_native_bf16_model_keeps_an_fp32_master(stage: int) -> None:
    """As many steps as needed for bf16 alone to be far off."""
    model = toy_b().bfloat16()
    reference = toy_b()
    reference.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert {value.dtype for entry in state.values() for value in entry.values()} == {torch.float32}
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
    assert any(not torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())


@on_ranks(2)
def test_overflow_that_only_the_sum_shows(stage: int) -> None:
    """Finite on each rank, 40000 + 40000 is no fp16 number; summed in fp32 it is, and so is the mean."""
    model = nn.Linear(2, 1, bias=False)
    model, optimizer = zerodp.shard(model, sgd(model), stage=stage, precision=fp16(loss_scale=1.0))
    optimizer.backward(model(torch.full((1, 2), 40000.0)).sum())
    close("gradient", zerodp.full_grads(model)["weight"].float(), torch.full((1, 2), 40000.0))
    optimizer.step()
    assert not optimizer.last_step_skipped


@on_ranks(2)
def test_toy_a_in_each_precision(stage: int) -> None:
    for precision, dtype in (("bf16", torch.bfloat16), (fp16(init_scale=64.0), torch.float16)):
        task = Task(ToyA, toy_a_batch, own_loss, sgd, steps=1)
        (record,) = parity(task, stage=stage, precision=precision, dtype=dtype)
        all_close("w", record.parameters, {"w": torch.tensor([0.85, 0.7, 0.55, 0.4])}, 1e-6)
