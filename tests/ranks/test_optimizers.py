"""The user's own optimizer over this rank's segments: groups, schedules, state by name, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import Oracle, Task, adamw, agree_with, all_close, close, parity, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Lion, Net, toy_b

case = pytest.mark.case


class Lamb(torch.optim.Optimizer):
    """Scales each update by the norm of its weight over the norm of the update."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * (p.norm() / (p.grad.norm() + 1e-12)), alpha=-group["lr"])


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


REFUSED: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Muon": lambda model: torch.optim.Muon(matrices(model), lr=0.1),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1),
    "Lamb": lambda model: Lamb(model.parameters()),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters()),
}


@case("B127", "B129", "B130", "B131")
@on_ranks(2)
@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_need_whole_matrices_are_refused(name: str, stage: int) -> None:
    """And what was passed in is as before."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    optimizer = REFUSED[name](model)
    with pytest.raises(zerodp.ConfigError, match=f"{name}.*elementwise"):
        zerodp.shard(model, optimizer, stage=stage)
    assert type(model) is nn.Sequential
    assert type(optimizer).__name__ == name
    assert len(optimizer.state) == 0
    assert model(torch.ones(1, 6)).isfinite().all()


ELEMENTWISE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "nesterov": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "SGD fused": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
    "Adam fused": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),
    "AdamW": adamw,
    "AdamW fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "AdamW foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.3),
    "Adagrad fused": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1, fused=True),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5, centered=True),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
    "RAdam": lambda model: torch.optim.RAdam(model.parameters(), lr=0.01),
    "Adadelta": lambda model: torch.optim.Adadelta(model.parameters()),
    "Adamax": lambda model: torch.optim.Adamax(model.parameters(), lr=0.01),
    "ASGD": lambda model: torch.optim.ASGD(model.parameters(), lr=0.01),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.01),
    "Lion": lambda model: Lion(model.parameters()),
    "tensor lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01)),
    "maximize": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, maximize=True),
}


@on_ranks(2)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers(name: str) -> None:
    task = Task(Net, rows(3), optimizer=ELEMENTWISE[name], steps=4)
    agree_with(task, *({"stage": stage, "units": [Block]} for stage in range(4)))


@on_ranks(2)
def test_state_made_in_the_constructor_is_kept(stage: int) -> None:
    """Adagrad's accumulators, one of them changed by the user before shard()."""
    model = toy_b()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.3)
    optimizer.state[model[0].weight]["sum"].copy_(torch.arange(15.0).view(5, 3))
    model, optimizer = zerodp.shard(model, optimizer, stage=stage)
    state = optimizer.state_dict()["state"]
    close("changed", state["0.weight"]["sum"], torch.arange(15.0).view(5, 3))
    close("untouched", state["2.weight"]["sum"], torch.full((1, 5), 0.3))


@on_ranks(2)
def test_state_of_a_used_optimizer_is_kept(stage: int) -> None:
    """Two steps in plain torch, the same on all ranks, then shard() and go on."""
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    optimizer, reference = adamw(model), adamw(plain)
    for net, its in ((model, optimizer), (plain, reference)):
        for step in range(2):
            squares(net, rows(3)(step, 0, 0)).backward()
            its.step()
            its.zero_grad()
    model, optimizer = zerodp.shard(model, optimizer, stage=stage, units=[Block])
    for step in range(2, 4):
        squares(model, rows(3)(step, 0, 0)).backward()  # the same batch on both ranks
        squares(plain, rows(3)(step, 0, 0)).backward()
        for its in (optimizer, reference):
            its.step()
            its.zero_grad()
    all_close("parameters", dict(model.state_dict()), dict(plain.state_dict()))


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Interleaved: groups do not follow the model's order."""
    net: Any = model
    return torch.optim.AdamW(
        [
            {"params": [net.head.bias, net.emb.weight, *net.blocks[1].parameters()], "lr": 0.1, "weight_decay": 0.0},
            {"params": [net.emb.bias, *net.blocks[0].parameters()], "lr": 0.01, "weight_decay": 0.1},
        ]
    )


@case("B134")
@on_ranks(2)
def test_groups_and_one_added_later(stage: int) -> None:
    """The rest joins after two steps; moments so far are kept, and the state has three groups by name."""

    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        if step == 2:
            net: Any = model
            optimizer.add_param_group({"params": [*net.blocks[2].parameters(), net.head.weight], "lr": 0.05})

    task = Task(Net, rows(3), optimizer=grouped, steps=5, between=between)
    parity(task, stage=stage, units=[Block])
    model, optimizer = task.build(0)
    model, optimizer = zerodp.shard(model, optimizer, stage=stage, units=[Block])
    between(2, model, optimizer)
    squares(model, rows(3)(0, 0, 0)).backward()
    optimizer.step()
    state = optimizer.state_dict()
    assert [group["lr"] for group in state["param_groups"]] == [0.1, 0.01, 0.05]
    assert [len(group["params"]) for group in state["param_groups"]] == [6, 5, 5]
    assert state["param_groups"][0]["params"][:2] == ["head.bias", "emb.weight"]


@on_ranks(2)
def test_settings_changed_in_the_groups_count(stage: int) -> None:
    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
            group["weight_decay"] = 0.01 * step

    parity(Task(Net, rows(3), optimizer=grouped_all, between=between, steps=3), stage=stage)


def grouped_all(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": rest, "lr": 0.5}], lr=0.1)


@case("B135")
@on_ranks(2)
@pytest.mark.parametrize("made", ["before", "after"])
def test_first_step_follows_the_warm_up(made: str, stage: int) -> None:
    model = toy_b()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def schedule(its: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(its, lambda step: step / 10)

    scheduler = schedule(optimizer) if made == "before" else None
    model, optimizer = zerodp.shard(model, optimizer, stage=stage)
    scheduler = scheduler or schedule(optimizer)
    for expected in (0.0, 0.01, 0.02):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
        squares(model, rows(3)(0, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        if expected == 0.0:
            all_close("unchanged", dict(model.state_dict()), start)
        scheduler.step()
    assert not torch.equal(model.state_dict()["0.weight"], start["0.weight"])


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda its: torch.optim.lr_scheduler.CosineAnnealingLR(its, 10),
    "one cycle": lambda its: torch.optim.lr_scheduler.OneCycleLR(its, 0.1, total_steps=10),
    "sequential": lambda its: torch.optim.lr_scheduler.SequentialLR(
        its,
        [torch.optim.lr_scheduler.ConstantLR(its, 0.1, 2), torch.optim.lr_scheduler.ExponentialLR(its, 0.9)],
        milestones=[2],
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("made", ["before", "after"])
def test_schedules(made: str, name: str) -> None:
    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        if step == 0:
            schedulers[id(optimizer)] = schedulers.get(id(optimizer)) or SCHEDULES[name](optimizer)
        else:
            schedulers[id(optimizer)].step()

    def build(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        if made == "before":
            schedulers[id(optimizer)] = SCHEDULES[name](optimizer)
        return optimizer

    schedulers: dict[int, Any] = {}
    parity(Task(Net, rows(3), optimizer=build, steps=5, between=between), stage=3)


@on_ranks(2, 3)
def test_state_dict_is_the_plain_state_by_name(stage: int, world_size: int) -> None:
    """Compared with the oracle's moments; loaded into a fresh sharded pair it gives the same next steps."""
    task = Task(Net, rows(3), optimizer=adamw, steps=3)
    oracle = Oracle(task, world_size)
    oracle.run(0)
    model, optimizer = zerodp.shard(*task.build(0), stage=stage, units=[Block])

    def steps(net: Any, its: Any, numbers: range) -> None:
        for step in numbers:
            squares(net, rows(3)(step, 0, dist.get_rank())).backward()
            its.step()
            its.zero_grad()

    steps(model, optimizer, range(3))
    state = optimizer.state_dict()
    names = [name for name, _ in oracle.master.named_parameters()]
    assert list(state["state"]) == names
    assert [name for group in state["param_groups"] for name in group["params"]] == names
    tolerance = 0.0 if world_size == 2 else 1e-6
    for name, parameter in oracle.master.named_parameters():
        for key, value in oracle.optimizer.state[parameter].items():
            close(f"{key} of {name}", torch.as_tensor(state["state"][name][key]), torch.as_tensor(value), tolerance)

    other = (stage + 1) % 4
    fresh, fresh_optimizer = zerodp.shard(*task.build(0), stage=other)
    fresh.load_state_dict(model.state_dict())
    fresh_optimizer.load_state_dict(state)
    steps(model, optimizer, range(3, 5))
    steps(fresh, fresh_optimizer, range(3, 5))
    all_close("continued", dict(fresh.state_dict()), dict(model.state_dict()))


@on_ranks(2)
def test_groups_are_this_ranks_segments_with_the_users_settings(stage: int) -> None:
    model = Net()
    optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "lr": 0.3, "note": "mine"}])
    group = optimizer.param_groups[0]
    model, sharded = zerodp.shard(model, optimizer, stage=stage)
    assert isinstance(sharded, zerodp.ShardedOptimizer)
    assert isinstance(sharded, torch.optim.AdamW)
    assert sharded.param_groups[0] is group
    assert (group["lr"], group["note"]) == (0.3, "mine")
    assert all(tensor.dim() == 1 for tensor in group["params"])
    owned = torch.tensor(sum(tensor.numel() for tensor in group["params"]))
    dist.all_reduce(owned)
    total = sum(p.numel() for p in model.parameters())
    assert owned == total * (dist.get_world_size() if stage == 0 else 1)


@on_ranks(2)
def test_step_hooks_and_closures(stage: int) -> None:
    model = toy_b()
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage)
    calls = []
    optimizer.register_step_pre_hook(lambda its, args, kwargs: calls.append("pre"))
    optimizer.register_step_post_hook(lambda its, args, kwargs: calls.append("post"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = squares(model, rows(3)(0, 0, dist.get_rank()))
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.isfinite()
    assert calls == ["pre", "post"]


@on_ranks(2)
def test_non_finite_gradients_without_scaling_are_stepped_as_in_torch(stage: int) -> None:
    model = nn.Linear(3, 1)
    model, optimizer = zerodp.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    (model(torch.ones(1, 3)) * math.inf).sum().backward()
    optimizer.step()
    assert not optimizer.last_step_skipped
    assert not model.state_dict()["weight"].isfinite().any()


@on_ranks(2)
def test_two_optimizers_cannot_share_one_model(stage: int) -> None:
    model = toy_b()
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage)
    with pytest.raises(zerodp.ConfigError, match="sharded already"):
        zerodp.shard(model, optimizer, stage=stage)
