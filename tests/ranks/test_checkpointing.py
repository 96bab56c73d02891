"""torch's own activation checkpointing: the recomputation faults its parameters in again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import zerodp
from tests.ranks.oracle import Task, parity, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, CheckpointedNet, Net

case = pytest.mark.case
kinds = pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])


def output(model: nn.Module, x: Tensor) -> Tensor:
    """Backward starts from the output itself, which is no scalar."""
    out: Tensor = model(x)
    return out


@case("B40")
@on_ranks(2)
@kinds
def test_backward_from_an_output_that_is_no_scalar(reentrant: bool, stage: int) -> None:
    parity(Task(lambda: CheckpointedNet(reentrant), rows(3), output), stage=stage, units=[Block])


class Repeated(nn.Module):
    def __init__(self, reentrant: bool):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for _ in range(3):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=self.reentrant))
        return x


@case("B41")
@on_ranks(2)
@kinds
@pytest.mark.parametrize("units", [None, [nn.Linear]], ids=["whole", "layers"])
def test_one_layer_in_several_checkpoints(reentrant: bool, units: Any, stage: int) -> None:
    """Re-entrant, the layer's gradient comes in three parts; those after the first are reduced apart."""
    parity(Task(lambda: Repeated(reentrant), rows(4)), stage=stage, units=units, tolerance=1e-6 if reentrant else 0.0)


@on_ranks(2)
@kinds
@pytest.mark.parametrize("micro", [(True, True), (False, True)], ids=["synced", "no_sync"])
def test_one_layer_in_several_checkpoints_accumulated(reentrant: bool, micro: tuple[bool, ...], stage: int) -> None:
    task = Task(lambda: Repeated(reentrant), rows(4), micro=micro)
    parity(task, stage=stage, tolerance=1e-6 if reentrant else 0.0)


class Nested(nn.Module):
    """Units inside a unit, checkpointed at both levels."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Sequential(Block(6), Block(6))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.pair:
            x = checkpoint(block, x, use_reentrant=False)
        return x * self.scale


class NestedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Nested() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def sum_of_two(model: nn.Module, x: Tensor) -> Tensor:
    first, second = model(x), model(x.flip(0))
    return (first + second).pow(2).mean()


@case("B43")
@on_ranks(2)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_two_forwards_through_nested_units(prefetch: int, stage: int) -> None:
    parity(Task(NestedNet, rows(3), sum_of_two), stage=stage, units=[Block, Nested], prefetch=prefetch)


@on_ranks(2)
@kinds
def test_dropout_is_drawn_again(reentrant: bool, stage: int) -> None:
    parity(Task(lambda: CheckpointedNet(reentrant, dropout=0.4), rows(3)), stage=stage, units=[Block])


@on_ranks(2)
@kinds
def test_model_checkpointed_from_outside(reentrant: bool, stage: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant).pow(2).mean()

    parity(Task(Net, rows(3), loss), stage=stage, units=[Block])


class Sequenced(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint_sequential(list(self.blocks), 2, self.emb(x), use_reentrant=False))


@on_ranks(2)
def test_sequence_in_segments(stage: int) -> None:
    parity(Task(Sequenced, rows(3)), stage=stage, units=[Block])


KEPT: dict[str, Callable[[str], bool]] = {  # by the operation that forward keeps the result of
    "matmuls": lambda operation: "mm." in operation,
    "everything": lambda operation: True,
    "views": lambda operation: "aten.t." in operation,
    "all but one": lambda operation: "tanh" not in operation,
}


@on_ranks(2)
@pytest.mark.parametrize("keeps", KEPT)
def test_selective_checkpointing(keeps: str, stage: int) -> None:
    """Also where it keeps views of the page that forward had, and that is gone when it computes the rest again."""

    def keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if KEPT[keeps](str(operation)) else CheckpointPolicy.PREFER_RECOMPUTE

    def selectively(net: Net, index: int, x: Tensor) -> Any:
        contexts = functools.partial(create_selective_checkpoint_contexts, keep)
        return checkpoint(net.blocks[index], x, use_reentrant=False, context_fn=contexts)

    parity(Task(lambda: Net(apply_block=selectively), rows(3)), stage=stage, units=[Block])


@on_ranks(2)
@kinds
def test_low_precision(reentrant: bool, stage: int) -> None:
    task = Task(lambda: CheckpointedNet(reentrant), rows(3), micro=(True, True))
    tolerance = 0.0 if stage >= 2 else 0.01  # whole gradients start in bf16
    parity(task, stage=stage, units=[Block], precision="bf16", dtype=torch.bfloat16, tolerance=tolerance)


@on_ranks(2)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_recomputation_gathers_each_unit_once_more_at_most(prefetch: int) -> None:
    """Forward, then once for recomputation and backward together."""
    model = CheckpointedNet(reentrant=False)
    model, _ = zerodp.shard(model, stage=3, units=[Block], prefetch=prefetch)
    x = rows(3)(0, 0, 0)
    squares(model, x).backward()
    zerodp.stats(model).reset()
    squares(model, x).backward()
    gathers = [event.unit for event in zerodp.stats(model).trace if event.kind == "gather"]
    assert all(gathers.count(f"blocks.{index}") == 2 for index in range(3)), gathers
    assert zerodp.stats(model).memory.now["unsharded"] == 0


@on_ranks(2)
@pytest.mark.parametrize("outside", [True, False], ids=["around the model", "around a block"])
def test_hooks_of_the_users_own_stay_in_charge(outside: bool, stage: int) -> None:
    """They get what autograd saves but for pages, which keep nothing here."""
    seen: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.numel())
        return tensor.clone()

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    class Hooked(Block):
        def __call__(self, x: Tensor) -> Any:
            with hooks:
                return super().__call__(x)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        seen.clear()
        with hooks if outside else contextlib.nullcontext():
            out = model(x)
        assert seen
        if isinstance(model, zerodp.ShardedModule):
            assert not model._zerodp.arena.pinned()
        return out.pow(2).mean()  # type: ignore[no-any-return]

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), *((Block if outside else Hooked)(8) for _ in range(3)))

    parity(Task(build, rows(3), loss), stage=stage, units=[Block])


class Changed(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(super().forward(x))
        out = h.square()
        h.add_(1)
        return out


@on_ranks(2)
def test_saved_tensor_that_is_changed_is_an_error(stage: int) -> None:
    """As without hooks for saved tensors, where torch looks itself."""
    model = nn.Sequential(nn.Linear(3, 8), *(Changed(8) for _ in range(2)))
    model, _ = zerodp.shard(model, stage=stage, units=[Changed])
    out = model(rows(3)(0, 0, 0))
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        out.sum().backward()


class Counted(nn.Module):
    """Hooks of its own, which keep what autograd saves as it is: the norm's parameters among it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, width)
        self.saved = 0

    def pack(self, tensor: Tensor) -> Tensor:
        self.saved += tensor.numel()
        return tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor):
            return x + torch.tanh(self.layer(self.norm(x)))


@on_ranks(2)
@pytest.mark.parametrize("frozen", ["", "norm", "layer"])
def test_hooks_inside_a_unit_that_keep_parameters(frozen: str, stage: int) -> None:
    """Whoever keeps a parameter itself finds its values in backward."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 8), *(Counted() for _ in range(3)))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen or frozen not in name)
        return model

    parity(Task(build, rows(3)), stage=stage, units=[Counted])


@on_ranks(2)
def test_checkpoint_around_the_whole_model(stage: int) -> None:
    """The saved tensors are the checkpoint's, so that backward computes them again."""
    calls = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        calls.append("step")
        return checkpoint(model, x, use_reentrant=False).pow(2).mean()  # type: ignore[no-any-return]

    def build() -> nn.Module:
        model = Net()
        next(m for m in model.modules() if isinstance(m, Block)).register_forward_pre_hook(
            lambda *_: calls.append("block")
        )
        return model

    parity(Task(build, rows(3), loss), stage=stage, units=[Block])
    assert calls.count("block") == 2 * calls.count("step") > 0
