"""Edits of parameters where they would be lost: an error names the parameter, wherever and however it is edited."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import adamw, all_close, copied, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net


class Clamping(Net):
    """Edits a parameter in forward, before it is used or after."""

    edits = True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        if self.edits:
            with torch.no_grad():
                self.blocks[1].a.weight.clamp_(-0.1, 0.1)
        return out


@on_ranks(2)
def test_an_edit_in_forward_is_refused(stage: int) -> None:
    """Also without gradients; the model can be used afterwards."""
    torch.manual_seed(0)
    model: Any = Clamping()
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[Block])
    x = rows(3)(0, 0, 0)
    for gradients in (True, False):
        with (
            torch.set_grad_enabled(gradients),
            pytest.raises(zerodp.ShardedError, match=r"'blocks.1.a.weight' was edited inside a forward"),
        ):
            model(x)
    model.edits = False
    for _ in range(2):
        squares(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()


class Constrained(nn.Linear):
    """As models of EEG constrain their weights."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.1)
        return super().forward(x)


class Initialised(nn.Linear):
    """Its first batch decides on its bias."""

    done = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.done:
            self.bias.data.copy_(-super().forward(x).mean(0).detach())
            self.done = True
        return super().forward(x)


@on_ranks(2)
@pytest.mark.parametrize("units", [None, [nn.Linear]], ids=["whole", "layers"])
def test_another_tensor_in_a_parameters_place_is_refused(units: Any, stage: int) -> None:
    """In every pass, and what was there is there again."""
    model: Any = nn.Sequential(nn.Linear(3, 6), Constrained(6, 6), nn.Linear(6, 3))
    before = copied(model.state_dict())
    model, _ = zerodp.shard(model, adamw(model), stage=stage, units=units)
    for _ in range(2):
        with pytest.raises(zerodp.ShardedError, match=r"'1.weight' was edited inside a forward"):
            model(rows(3)(0, 0, 0))
    model[1].__class__ = nn.Linear
    squares(model, rows(3)(0, 0, 0)).backward()
    all_close("parameters", dict(model.state_dict()), before)


@on_ranks(2)
@pytest.mark.parametrize(("precision", "stage"), [(None, 3), ("bf16", 0), ("bf16", 1), ("bf16", 2), ("bf16", 3)])
def test_values_written_through_data_into_a_copy_are_refused(precision: Any, stage: int) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 6), Initialised(6, 6), nn.Linear(6, 3))
    model, _ = zerodp.shard(model, adamw(model), stage=stage, precision=precision)
    with pytest.raises(zerodp.ShardedError, match=r"'1.bias' was edited inside a forward"):
        model(torch.ones(2, 3) * (1 + dist.get_rank()))


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_edit_through_detach_is_refused(stage: int) -> None:
    """Where parameters stay whole: what pages come and go has nothing to detach. Reading is fine."""
    torch.manual_seed(0)
    model: Any = Net()
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[Block])
    x = rows(3)(0, 0, 0)

    def step() -> None:
        squares(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    model.blocks[0].a.weight.detach().norm()
    step()
    model.blocks[0].a.weight.detach().mul_(0.5)
    with pytest.raises(zerodp.ShardedError, match=r"'blocks.0.a.weight' was edited.*through detach\(\).*write=True"):
        model(x)
    with zerodp.full_params(model, write=True):
        model.blocks[0].a.weight.detach().mul_(0.5)
    step()
    step()


@on_ranks(2)
def test_an_embedding_that_edits_its_weights_is_refused(stage: int) -> None:
    """torch's `max_norm` scales rows in forward, each rank other ones."""
    model: Any = nn.Sequential(nn.Embedding(9, 6, max_norm=0.1), nn.Linear(6, 3))
    model, _ = zerodp.shard(model, adamw(model), stage=stage)
    with pytest.raises(zerodp.ShardedError, match=r"'0.weight' was edited inside a forward"):
        model(torch.arange(4))


@on_ranks(2)
def test_an_edit_in_backward_is_refused(stage: int) -> None:
    torch.manual_seed(0)
    model: Any = Net()

    def edit(module: Any, *_: Any) -> None:
        with torch.no_grad():
            module.b.bias.add_(1.0)

    model, _ = zerodp.shard(model, adamw(model), stage=stage, units=[Block])
    model.blocks[1].register_full_backward_pre_hook(edit)
    with pytest.raises(zerodp.ShardedError, match=r"'blocks.1.b.bias' was edited inside a forward or backward"):
        squares(model, rows(3)(0, 0, 0)).backward()


BETWEEN: dict[str, Callable[[nn.Parameter], Any]] = {
    "out=": lambda p: torch.zeros(p.shape, out=p),
    "out= of an operation": lambda p: torch.add(p, 1.0, out=p),
    "inplace=": lambda p: F.relu(p, inplace=True),
    "in-place": lambda p: p.mul_(2.0),
    "an item": lambda p: p.__setitem__(0, 1.0),
    "several": lambda p: torch._foreach_mul_([p], 2.0),
}


@on_ranks(2)
def test_an_edit_between_passes_is_refused(stage: int) -> None:
    model: Any = Net()
    model, _ = zerodp.shard(model, adamw(model), stage=stage, precision="bf16")
    before = copied(dict(model.state_dict()))
    for edit in BETWEEN.values():
        with (
            torch.no_grad(),
            pytest.raises(zerodp.ShardedError, match=r"'head.bias' .* outside forward and backward"),
        ):
            edit(model.head.bias)
    all_close("kept", dict(model.state_dict()), before)


@on_ranks(2)
def test_edits_inside_full_params_are_no_such_edits(stage: int) -> None:
    """And forward may run in between."""
    model: Any = Net()
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[Block])
    x = rows(3)(0, 0, 0)
    with zerodp.full_params(model, write=True), torch.no_grad():
        model(x)
        model.blocks[0].a.bias.fill_(0.5)
        model(x)
    assert bool((model.state_dict()["blocks.0.a.bias"] == 0.5).all())
    squares(model, x).backward()
    optimizer.step()


@on_ranks(2)
def test_forwards_inside_full_params_need_not_match(stage: int) -> None:
    """With gradients either; what trains afterwards is the same."""
    found = []
    for extra in (False, True):
        torch.manual_seed(0)
        model: Any = Net()
        model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[Block])
        for step in range(3):
            with zerodp.full_params(model):
                for _ in range(dist.get_rank() * extra):
                    model(rows(3)(9, 0, 0))
            squares(model, rows(3)(step, 0, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(copied(dict(model.state_dict())))
    all_close("trained", found[1], found[0])


@on_ranks(2)
def test_a_step_inside_full_params_is_refused(stage: int) -> None:
    model: Any = Net()
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage)
    squares(model, rows(3)(0, 0, 0)).backward()
    for write in (False, True):
        with (
            zerodp.full_params(model, write=write),
            pytest.raises(zerodp.ShardedError, match=r"step\(\) inside full_params"),
        ):
            optimizer.step()
    optimizer.step()


@on_ranks(2)
def test_wrong_arguments_of_the_optimizer() -> None:
    model: Any = Net()
    model, optimizer = zerodp.shard(model, adamw(model))
    for norm in ("x", None, -1.0, float("nan")):
        with pytest.raises(zerodp.ConfigError, match="max_norm must be a number of at least 0"):
            optimizer.clip_grad_norm_(norm)
    with pytest.raises(zerodp.ConfigError, match="norm_type must be above 0"):
        optimizer.clip_grad_norm_(1.0, "x")
    with pytest.raises(zerodp.CheckpointError, match="expected a dict with 'state' and 'param_groups'"):
        optimizer.load_state_dict(5)
    with pytest.raises(zerodp.ShardedError, match="pickling of a sharded optimizer"):
        pickle.dumps(optimizer)


@on_ranks(2)
def test_parameters_over_the_same_memory_are_refused() -> None:
    """Tied by `.data`; parts of one memory that do not overlap are fine."""
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(zerodp.ConfigError, match=r"'0.weight' and '1.weight' are different Parameters over the same"):
        zerodp.shard(model, adamw(model))
    memory = torch.randn(18)
    for number in range(2):
        model[number].weight = nn.Parameter(memory[9 * number : 9 * number + 9].view(3, 3))
    zerodp.shard(model, adamw(model))


def stepping(model: Any, optimizer: Any) -> None:
    optimizer.step()


def writing(model: Any, optimizer: Any) -> None:
    with zerodp.full_params(model, write=True):
        model.head.weight.data.zero_()


def loading(model: Any, optimizer: Any) -> None:
    model.load_state_dict(Net().state_dict())


@on_ranks(2)
@pytest.mark.parametrize("change", [stepping, writing, loading])
def test_backward_through_values_that_have_changed_is_refused(change: Callable[[Any, Any], None], stage: int) -> None:
    """Torch refuses it too. Afterwards training goes on."""
    torch.manual_seed(0)
    model: Any = Net()
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[Block])
    x = rows(3)(0, 0, 0)
    old = squares(model, x)
    squares(model, x).backward()
    change(model, optimizer)
    with pytest.raises(zerodp.ShardedError, match=r"before the parameters changed.*Run forward again"):
        old.backward()
    optimizer.zero_grad()
    for _ in range(2):
        squares(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_a_step_that_changes_nothing_makes_no_forward_old(stage: int) -> None:
    model: Any = Net()
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[Block])
    loss = squares(model, rows(3)(0, 0, 0))
    optimizer.step()
    loss.backward()


@on_ranks(2)
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_step_inside_a_pass_is_refused(place: str, stage: int) -> None:
    torch.manual_seed(0)
    model: Any = Net()
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[Block])
    x = rows(3)(0, 0, 0)
    squares(model, x).backward()
    where = "forward" if place == "forward" else "full_backward"
    hook = getattr(model.blocks[1], f"register_{where}_hook")(lambda *_: optimizer.step())
    with pytest.raises(zerodp.ShardedError, match=rf"step\(\) inside a {place} pass"):
        squares(model, x).backward()
    hook.remove()
    optimizer.zero_grad()
    squares(model, x).backward()
    optimizer.step()


@on_ranks(2)
def test_a_load_inside_full_params_is_refused(stage: int) -> None:
    """What was loaded would be lost when the context keeps what it has."""
    model, _ = zerodp.shard(Net(), stage=stage, units=[Block])
    with (
        zerodp.full_params(model, write=True),
        pytest.raises(zerodp.ShardedError, match=r"load_state_dict\(\) inside full_params"),
    ):
        model.load_state_dict(Net().state_dict())


@on_ranks(2)
def test_a_module_inside_a_unit_can_be_pickled_while_it_is_whole(stage: int) -> None:
    torch.manual_seed(0)
    model: Any = Net()
    expected = model.blocks[0].a.weight.detach().clone()
    zerodp.shard(model, stage=stage, units=[Block])
    with zerodp.full_params(model):
        part = pickle.loads(pickle.dumps(model.blocks[0].a))
        with pytest.raises(zerodp.ShardedError, match="pickling of a sharded model"):
            pickle.dumps(model.head)  # which has hooks of the whole model's
    assert type(part.weight) is nn.Parameter
    assert torch.equal(part.weight, expected)
    part(torch.ones(1, 6)).sum().backward()
    assert part.weight.grad is not None
