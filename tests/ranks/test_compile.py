"""torch.compile of blocks and of whole models, before and after shard(), and the keys of state dicts under wrappers."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import zerodp
from tests.ranks.oracle import Oracle, Record, Task, Zero, all_close, parity, rows, same, squares, train
from tests.ranks.pool import on_ranks
from tests.ranks.test_models import MODELS, encoder
from tests.ranks.toys import Block, CheckpointedNet, Net

case = pytest.mark.case
whole_and_sharded = pytest.mark.parametrize("stage", [1, 3], ids="zero{}".format)
TASK = Task(Net, rows(3))


def compile_blocks(model: nn.Module, **options: Any) -> None:
    for module in model.modules():
        if isinstance(module, Block) or type(module).__name__ in ("LlamaDecoderLayer", "TransformerEncoderLayer"):
            module.compile(**options)


def compiled(task: Task, made: str, **options: Any) -> Task:
    """The same task, with the sharded model's blocks compiled, when it is built or once it is sharded."""

    def build() -> nn.Module:
        model = task.model()
        if made == "before":
            compile_blocks(model, **options)
        return model

    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        if made == "after" and step == 0:
            compile_blocks(model, **options)

    return dataclasses.replace(task, model=build, between=between)


def compiled_records(task: Task, made: str, options: dict[str, Any], **settings: Any) -> list[Record]:
    return train(compiled(task, made, **options), lambda model, optimizer: Zero(model, optimizer, **settings))


@case("B108")
@on_ranks(2)
@pytest.mark.parametrize(
    ("made", "backend", "stage"),
    [
        *(("before", "aot_eager", stage) for stage in range(4)),
        *(("after", "aot_eager", stage) for stage in (1, 3)),
        ("after", "eager", 3),
    ],
)
def test_compiled_blocks(made: str, backend: str, stage: int) -> None:
    """As uncompiled ones, to the last bit: these backends use torch's own kernels."""
    records = compiled_records(TASK, made, {"backend": backend}, stage=stage, units=[Block])
    same(records, Oracle(TASK, 2).run(dist.get_rank()))


@on_ranks(2)
def test_units_are_found_among_compiled_blocks() -> None:
    """torch.compile's wrapper of a block has a length only where the block has one."""

    def build() -> nn.Module:
        model = Net()
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend="eager")  # type: ignore[assignment]
        return model

    task = dataclasses.replace(TASK, model=build)
    records = train(task, lambda model, optimizer: Zero(model, optimizer, stage=3))
    for record in records:
        record.parameters = {name.replace("._orig_mod", ""): tensor for name, tensor in record.parameters.items()}
    same(records, Oracle(TASK, 2).run(dist.get_rank()))


@case("B108")
@on_ranks(2)
@pytest.mark.parametrize(
    ("in_place", "backend", "stage"),
    [(False, "eager", 1), (False, "aot_eager", 3), (True, "eager", 3), (True, "aot_eager", 1)],
)
def test_compiled_model(in_place: bool, backend: str, stage: int) -> None:
    """torch.compile(model), which gives another module around it, and model.compile()."""
    outside: list[Any] = []

    def loss(model: Any, x: Tensor) -> Tensor:
        if isinstance(model, zerodp.ShardedModule) and not outside:
            outside.append(model.compile(backend=backend) if in_place else torch.compile(model, backend=backend))
        return squares(outside[0] if outside and outside[0] is not None else model, x)

    task = Task(Net, rows(3), loss, micro=(True, False, True), steps=2)
    records = train(task, lambda model, optimizer: Zero(model, optimizer, stage=stage, units=[Block]))
    same(records, Oracle(dataclasses.replace(task, loss=squares), 2).run(dist.get_rank()))


@on_ranks(2)
@pytest.mark.parametrize(("backend", "stage"), [("eager", 1), ("aot_eager", 3)])
def test_model_compiled_before_it_is_sharded(backend: str, stage: int) -> None:
    """What is sharded is then torch.compile's wrapper; names and keys are the plain model's all the same."""
    model, optimizer = TASK.build(0)
    model, optimizer = zerodp.shard(torch.compile(model, backend=backend), optimizer, stage=stage, units=[Block])
    expected = Oracle(TASK, 2).run(dist.get_rank())
    for step in range(TASK.steps):
        squares(model, TASK.batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {name.removeprefix("_orig_mod."): tensor for name, tensor in model.state_dict().items()}
    all_close("parameter", state, expected[-1].parameters)
    assert set(optimizer.state_dict()["state"]) == set(expected[-1].parameters)


@case("B37")
@on_ranks(2)
@pytest.mark.parametrize(
    ("backend", "reentrant", "stage"),
    [("eager", False, 3), ("aot_eager", False, 1), ("aot_eager", False, 3), ("aot_eager", True, 3)],
)
def test_dropout_is_drawn_again_under_compile(reentrant: bool, backend: str, stage: int) -> None:
    """The recomputation sees the same dropout as the forward: the result is that of the uncompiled run."""
    task = Task(lambda: CheckpointedNet(reentrant, dropout=0.4), rows(3))
    records = compiled_records(task, "after", {"backend": backend}, stage=stage, units=[Block])
    same(records, Oracle(task, 2).run(dist.get_rank()))


@on_ranks(2)
@whole_and_sharded
def test_compiled_blocks_accumulate_evaluate_and_recompile(stage: int) -> None:
    """Other batch sizes, evaluation and inference mode make other graphs; training stays the same."""

    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        if step == 0 and isinstance(model, zerodp.ShardedModule):
            compile_blocks(model, backend="aot_eager")
        model.eval()
        with torch.no_grad() if step % 2 else torch.inference_mode():
            assert model(torch.ones(1 + step, 3)).isfinite().all()
        model.train()

    def batch(step: int, micro: int, rank: int) -> Tensor:
        return rows(3, 2 + step)(step, micro, rank)

    task = Task(Net, batch, micro=(True, False, True), between=between, steps=3)
    parity(task, stage=stage, units=[Block])


@on_ranks(2)
@whole_and_sharded
def test_hooks_on_parameters_of_compiled_blocks(stage: int) -> None:
    """A compiled backward must not lose them."""

    def register(model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)
        return model

    task = Task(lambda: register(Net()), rows(3))
    records = compiled_records(task, "after", {"backend": "aot_eager"}, stage=stage, units=[Block])
    same(records, Oracle(task, 2).run(dist.get_rank()))


def keys_task(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    net = Net()
    for index, block in enumerate(net.blocks):
        net.blocks[index] = wrap(block)
    return net


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "compile": lambda block: torch.compile(block, backend="eager"),
    "checkpoint": checkpoint_wrapper,
    "both": lambda block: torch.compile(checkpoint_wrapper(block), backend="eager"),
}


@case("B109")
@on_ranks(2)
@whole_and_sharded
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_are_those_of_the_plain_model(wrapper: str, stage: int) -> None:
    """Gradients, optimizer state and units never carry a wrapper's prefix; full states load strictly both ways."""
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    model = keys_task(WRAPPERS[wrapper])
    own_keys = set(model.state_dict())
    names = set(plain.state_dict())
    model, optimizer = zerodp.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), stage=stage, units=[Block])
    squares(model, TASK.batch(0, 0, dist.get_rank())).backward()
    assert set(zerodp.full_grads(model)) == names
    optimizer.step()
    assert set(optimizer.state_dict()["state"]) == names
    assert "_orig_mod" not in zerodp.describe(model)
    assert "_checkpoint_wrapped_module" not in zerodp.describe(model)
    state = model.state_dict()
    assert set(state) == own_keys
    model.load_state_dict(state, strict=True)
    full = zerodp.full_state_dict(model, rank0_only=False)
    unwrapped = {
        name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): t for name, t in full.items()
    }
    plain.load_state_dict(unwrapped, strict=True)


@case("B109")
@on_ranks(2)
@whole_and_sharded
def test_keys_are_plain_under_compile_and_checkpoint(stage: int) -> None:
    """Wrapped from outside, the sharded model's state dict goes strictly into the plain model and back."""
    model, optimizer = zerodp.shard(*TASK.build(0), stage=stage, units=[Block])
    compile_blocks(model, backend="eager")
    outside: Any = torch.compile(model, backend="eager")
    expected = Oracle(TASK, 2).run(dist.get_rank())[-1].parameters
    for step in range(TASK.steps):
        out = checkpoint(outside, TASK.batch(step, 0, dist.get_rank()), use_reentrant=False)
        out.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = dict(model.state_dict())
    all_close("parameter", state, expected)
    plain = Net()
    plain.load_state_dict(state, strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)


INDUCTOR = {"llama": MODELS["llama"], "encoder": dataclasses.replace(MODELS["encoder"], model=lambda: encoder(0.0))}


@on_ranks(2, timeout=110)
@pytest.mark.parametrize("model", INDUCTOR)
def test_inductor(model: str) -> None:
    """Its kernels round otherwise than torch's own, but not otherwise from stage to stage."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch._inductor.compile_fx
    torch._inductor.config.compile_threads = 1  # in this process: no pool of compilers beside the ranks
    task = dataclasses.replace(
        INDUCTOR[model], steps=3, optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    )
    first: list[Record] = []
    for stage in range(4):
        records = compiled_records(task, "after" if stage % 2 else "before", {"backend": "inductor"}, stage=stage)
        first = first or records
        same(records, first)
    same(first, Oracle(task, 2).run(dist.get_rank()), tolerance=1e-5)
