"""Mistakes: the same clear error on every rank, before anything has changed, also when only one rank makes one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zerodp
from tests.ranks.oracle import Task, adamw, all_close, close, momentum, parity, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net, ToyA, X, toy_b

case = pytest.mark.case
Options = dict[str, Any]

# What was passed, and what the message must say: the option, what it got, what it expects, and the way out.
OPTIONS: dict[str, tuple[Options, str]] = {
    "misspelt": ({"prefech": 1}, r"unknown option 'prefech'; did you mean 'prefetch'\? Valid: stage, mesh, units, .*"),
    "unknown": ({"colour": "red"}, r"unknown option 'colour'.*Valid: stage, mesh, units"),
    "clipping": ({"gradient_cliping": 1.0}, r"'gradient_cliping'.*optimizer\.clip_grad_norm_\(max_norm\)"),
    "batch size": ({"train_batch_size": 8}, r"'train_batch_size'.*the loader's own batch size"),
    "micro-batches": ({"gradient_accumulation_steps": 2}, r"several backward passes before optimizer\.step\(\)"),
    "renamed": ({"zero_stage": 2}, r"'zero_stage'; in zerodp this is 'stage'"),
    "FSDP's": ({"reshard_after_forward": False}, r"'reshard_after_forward'; in zerodp this is 'stage'"),
    "DeepSpeed's": ({"stage3_max_live_parameters": 1}, r"in zerodp this is 'unsharded_bytes'"),
    "stage": ({"stage": 4}, r"stage: expected one of \[0, 1, 2, 3\].*mapping.*got 4"),
    "stage as text": ({"stage": "3"}, r"stage: expected one of \[0, 1, 2, 3\].*got '3'"),
    "stage as bool": ({"stage": True}, r"stage: expected .*got True"),
    "stage of a unit": ({"stage": {"*": 3, "blocks.*": 5}}, r"stage\['blocks\.\*'\]: expected one of .*got 5"),
    "stages without a rest": ({"stage": {"blocks.*": 3}}, r'stage: a mapping needs "\*".*blocks\.\*'),
    "stage of no unit": ({"stage": {"bloks.*": 1, "*": 3}}, r"stage: no unit is named like 'bloks\.\*'.*'blocks\.0'"),
    "stage keys": ({"stage": {1: 1, "*": 3}}, r"stage: the keys of a mapping are patterns over unit names, got 1"),
    "prefetch": ({"prefetch": -1}, r"prefetch: expected a whole number of at least 0, got -1"),
    "prefetch as text": ({"prefetch": "two"}, r"prefetch: expected a whole number of at least 0, got 'two'"),
    "budget": (
        {"unsharded_bytes": "4 apples"},
        r'unsharded_bytes: expected a number of bytes.*"4GiB", got \'4 apples\'',
    ),
    "budget below 0": ({"unsharded_bytes": -5}, r"unsharded_bytes: expected a whole number of at least 0, got -5"),
    "bucket": ({"bucket_bytes": 0}, r"bucket_bytes: expected a whole number of at least 1, got 0"),
    "ignore_below": ({"ignore_below": 2.5}, r"ignore_below: expected a whole number of at least 0, got 2\.5"),
    "ignore nothing": ({"ignore": "haed.*"}, r"ignore: no parameter is named like 'haed\.\*'.*emb\.weight"),
    "ignore objects": ({"ignore": [nn.Linear]}, r"ignore: expected glob patterns over names, such as 'head\.\*', got"),
    "ignore a number": ({"ignore": 5}, r"ignore: expected glob patterns over names, such as 'head\.\*', got 5"),
    "units": (
        {"units": [5]},
        r"units: expected module classes, glob patterns.*function \(name, module\) -> bool; got 5",
    ),
    "units as number": ({"units": 5}, r"units: expected module classes, glob patterns.*got 5"),
    "units of no class": (
        {"units": [nn.Conv2d]},
        r"units: the model has no module like Conv2d; it has .*Block.*Linear",
    ),
    "units of no name": ({"units": "layers.*"}, r"units: the model has no module like 'layers\.\*'; it has"),
    "precision": (
        {"precision": "bf61"},
        r"precision: expected one of .*zerodp\.Precision.*'bf61'; did you mean 'bf16'",
    ),
    "precision as dtype": ({"precision": torch.bfloat16}, r"precision: expected one of .*got torch\.bfloat16"),
    "reduction": ({"reduction": "avg"}, r'reduction: expected "mean" or "sum", got \'avg\''),
    "exact": ({"exact": "yes"}, r"exact: expected True or False, got 'yes'"),
    "check": ({"check": None}, r"check: expected True or False, got None"),
    "device": ({"device": "gpu:x"}, r"device: expected a torch\.device or its name, got 'gpu:x'"),
    "config": ({"config": {"stage": 3}}, r"config: expected a zerodp\.Config, got dict; pass options by name"),
}


@case("B157", "B158", "B159")
@on_ranks(1, 2)
@pytest.mark.parametrize("mistake", OPTIONS)
def test_options(mistake: str, world_size: int) -> None:
    options, message = OPTIONS[mistake]
    refused_alike(Net(), adamw, message, **options)


def refused_alike(model: Any, make_optimizer: Any, message: str, **options: Any) -> None:
    """A ConfigError that says this, the same text on all ranks; model and optimizer are as they were."""
    optimizer = make_optimizer(model) if callable(make_optimizer) else make_optimizer
    before = type(model), type(optimizer), dict(model.state_dict()) if isinstance(model, nn.Module) else {}
    with pytest.raises(zerodp.ConfigError, match=f"(?s){message}") as caught:
        zerodp.shard(model, optimizer, **options)
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, str(caught.value))
    assert len(set(said)) == 1
    assert (type(model), type(optimizer)) == before[:2]
    if isinstance(model, nn.Module):
        all_close("value", dict(model.state_dict()), before[2])


ON_ONE_RANK = ["misspelt", "stage", "prefetch", "units of no class", "precision", "device", "config"]


@on_ranks(2, 3)
@pytest.mark.parametrize("mistake", ON_ONE_RANK)
def test_mistake_of_one_rank_is_an_error_on_all(mistake: str, world_size: int) -> None:
    """It says whose mistake it was, and the next shard() works."""
    options, message = OPTIONS[mistake]
    mine = options if dist.get_rank() == world_size - 1 else {}
    refused_alike(Net(), adamw, f"^rank {world_size - 1}: .*{message}", **mine)
    parity(Task(Net, rows(3), steps=1), units=[Block], tolerance=1e-6)


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 3))


def overlapping() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(torch.ones(3).expand(3, 3))
    return model


def sharded_inside() -> nn.Module:
    inner, _ = zerodp.shard(nn.Linear(3, 3))
    return nn.Sequential(inner, nn.Linear(3, 3))


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "no module": (lambda: {"weight": torch.ones(3)}, r"expected a torch\.nn\.Module, got dict"),
    "no parameters": (nn.Tanh, r"the model has no parameters"),
    "sharded": (lambda: zerodp.shard(nn.Linear(3, 3))[0], r"sharded already; zerodp\.unshard\(model\) undoes it"),
    "part sharded": (sharded_inside, r"a part of this model is sharded already; shard the whole model once"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), r"'0\.weight' is uninitialized.*run one forward pass"),
    "meta": (
        lambda: nn.ParameterList([torch.empty(3, device="meta")]),
        r"'0': on the meta device, and no module's reset_parameters\(\)",
    ),
    "sparse": (sparse, r"module '0' gives sparse gradients.*sparse=False"),
    "overlapping": (overlapping, r"'weight' of shape \(3, 3\) has strides \(0, 1\).*contiguous"),
}


@on_ranks(2)
@pytest.mark.parametrize("mistake", MODELS)
def test_models(mistake: str) -> None:
    make, message = MODELS[mistake]
    model = make()
    with pytest.raises(zerodp.ConfigError, match=message):
        zerodp.shard(model)


@on_ranks(2)
@pytest.mark.parametrize("mistake", ["no parameters", "sparse", "overlapping"])
def test_model_that_is_wrong_on_one_rank(mistake: str) -> None:
    make, message = MODELS[mistake]
    refused_alike(make() if dist.get_rank() == 1 else nn.Linear(3, 3), None, f"^rank 1: .*{message}")


class Normalised(torch.optim.Optimizer):
    """SGD on gradients of length one: a part of a matrix would have another length."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


class OwnBooks(torch.optim.Optimizer):
    """Elementwise, but keeps its state by the parameters it was made with, not in ``self.state``."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.velocity = {p: torch.zeros_like(p) for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.velocity[p].mul_(0.9).add_(p.grad), alpha=group["lr"])


def of_another_model(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(7, 3).parameters(), lr=0.1)


def with_a_stranger(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": model.parameters()}, {"params": [torch.ones(5)]}], lr=0.1)


def of_a_sharded_model(model: nn.Module) -> Any:
    other = nn.Linear(3, 3)
    return zerodp.shard(other, adamw(other))[1]


OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "of another model": (
        of_another_model,
        r"group 0 .*shape \(3, 7\) that is no parameter of the model; build .*model\.p",
    ),
    "with a stranger": (with_a_stranger, r"group 1 of the optimizer holds a tensor of shape \(5,\)"),
    "none": (lambda model: {"lr": 0.1}, r"expected a torch\.optim\.Optimizer, got dict"),
    "sharded": (of_a_sharded_model, r"this optimizer is sharded already"),
    "normalised": (lambda model: Normalised(model.parameters()), r"Normalised is not elementwise.*AdamW, SGD"),
    "LBFGS": (lambda model: torch.optim.LBFGS(model.parameters()), r"LBFGS.*elementwise.*AdamW, SGD"),
    "own books": (lambda model: OwnBooks(model.parameters()), r"OwnBooks.*elementwise.*AdamW, SGD"),
}


@on_ranks(2)
@pytest.mark.parametrize("mistake", OPTIMIZERS)
def test_optimizers(mistake: str) -> None:
    make, message = OPTIMIZERS[mistake]
    refused_alike(toy_b(), make, message)


@on_ranks(2)
@pytest.mark.parametrize("mistake", ["of another model", "normalised"])
def test_optimizer_that_is_wrong_on_one_rank(mistake: str) -> None:
    make, message = OPTIMIZERS[mistake]
    refused_alike(toy_b(), make if dist.get_rank() == 1 else momentum, f"^rank 1: .*{message}")


@on_ranks(2)
def test_refused_optimizer_goes_on_in_plain_torch(stage: int) -> None:
    """Neither its state nor its settings nor the random state has changed."""
    model, plain = toy_b(), toy_b()
    plain.load_state_dict(model.state_dict())
    optimizer, reference = Normalised(model.parameters()), Normalised(plain.parameters())
    random = torch.get_rng_state()
    with pytest.raises(zerodp.ConfigError):
        zerodp.shard(model, optimizer, stage=stage)
    assert torch.equal(torch.get_rng_state(), random)
    for net, its in ((model, optimizer), (plain, reference)):
        squares(net, rows(3)(0, 0, 0)).backward()
        its.step()
    all_close("parameter", dict(model.state_dict()), dict(plain.state_dict()))


def frozen_head() -> nn.Module:
    net = Net()
    net.head.requires_grad_(False)
    return net


# What rank 1 does otherwise than rank 0, and what the message says of either.
DIFFERENCES: dict[str, tuple[Callable[[], nn.Module], Any, Options, str]] = {
    "stage": (Net, adamw, {"stage": 2}, r"rank 0 has stage=3; rank 1 has stage=2"),
    "prefetch": (Net, adamw, {"prefetch": 0}, r"rank 0 has prefetch=1; rank 1 has prefetch=0"),
    "precision": (Net, adamw, {"precision": "bf16"}, r"rank 0 has precision=None; rank 1 has precision=.*bfloat16"),
    "units": (Net, adamw, {"units": [nn.Linear]}, r"rank 0 has unit .*; rank 1 has unit"),
    "depth": (lambda: Net(depth=4), adamw, {}, r"rank 0 has .*; rank 1 has unit 'blocks\.3'"),
    "width": (lambda: Net(width=8), adamw, {}, r"rank 0 has .*\(6, 3\).*; rank 1 has .*\(8, 3\)"),
    "dtype": (lambda: Net().double(), adamw, {}, r"rank 0 has .*float32.*; rank 1 has .*float64"),
    "frozen": (frozen_head, adamw, {}, r"rank 0 has .*head\.weight.*True; rank 1 has .*head\.weight.*False"),
    "optimizer": (Net, momentum, {}, r"rank 0 has AdamW group 0.*; rank 1 has SGD group 0"),
    "no optimizer": (Net, None, {}, r"rank 0 has AdamW group 0.*; rank 1 has nothing"),
    "check": (Net, adamw, {"check": False}, r"rank 0 has check=True; rank 1 has check=False"),
}


@on_ranks(2)
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_ranks_that_come_with_different_things(difference: str) -> None:
    make, make_optimizer, options, message = DIFFERENCES[difference]
    if dist.get_rank() == 0:
        make, make_optimizer, options = Net, adamw, {}
    model = make()
    optimizer = make_optimizer(model) if make_optimizer else None
    with pytest.raises(zerodp.RankMismatchError, match=f"(?s)shard.*{message}"):
        zerodp.shard(model, optimizer, **options)
    assert type(model) is Net
    parity(Task(Net, rows(3), steps=1), units=[Block])


# ---- meshes


def flat_mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def cube() -> Any:
    return init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("other", "replicate", "shard"))


MESHES: dict[str, tuple[Callable[[], Any], str]] = {
    "no mesh": (lambda: [0, 1], r"mesh: expected a DeviceMesh or a ProcessGroup, got list"),
    "other names": (flat_mesh, r'two named \("replicate", "shard"\), got dims \(\'dp\', \'tp\'\).*pass that slice'),
    "no names": (lambda: init_device_mesh("cpu", (2, 2)), r'two named \("replicate", "shard"\), got dims 2'),
    "three dims": (cube, r"got dims \('other', 'replicate', 'shard'\); of a larger mesh pass that slice"),
}


@on_ranks(4)
@pytest.mark.parametrize("mistake", MESHES)
def test_meshes(mistake: str) -> None:
    make, message = MESHES[mistake]
    refused_alike(Net(), adamw, message, mesh=make())


@on_ranks(2)
@pytest.mark.parametrize("bad_on", [0, 1])
def test_mesh_that_is_wrong_on_one_rank(bad_on: int) -> None:
    refused_alike(Net(), adamw, f"rank {bad_on}: .*mesh: expected", mesh=[0, 1] if dist.get_rank() == bad_on else None)


@on_ranks(2)
@pytest.mark.parametrize("option", ["units", "checkpoint_activations"])
@pytest.mark.parametrize("bad_on", [(0, 1), (1,)], ids=["all", "one"])
def test_function_that_fails(option: str, bad_on: tuple[int, ...]) -> None:
    """The other ranks hear of it."""

    def chooses(name: str, module: nn.Module) -> bool:
        return isinstance(module, Block) if dist.get_rank() not in bad_on else bool(module.nothing)

    refused_alike(Net(), adamw, f"{option}: .*function failed at module 'emb': AttributeError", **{option: chooses})


@on_ranks(2)
def test_optimizer_that_cannot_be_read_on_one_rank() -> None:
    """An error that nobody foresaw: the others hear of it all the same."""
    model = Net()
    optimizer: Any = adamw(model)
    if dist.get_rank() == 1:
        optimizer.param_groups = None
    with pytest.raises(zerodp.ZeroError, match=r"^rank 1: shard\(\) failed: TypeError: "):
        zerodp.shard(model, optimizer)
    parity(Task(Net, rows(3), steps=1), units=[Block])


@on_ranks(2)
def test_model_that_something_else_keeps_in_step() -> None:
    refused_alike(DistributedDataParallel(Net()), adamw, "the model is a DistributedDataParallel.*plain model")
    inside = Net()
    inside.extra = DistributedDataParallel(nn.Linear(2, 2))
    refused_alike(inside, adamw, "module 'extra' is a DistributedDataParallel")


@on_ranks(2)
def test_part_of_a_sharded_model(stage: int) -> None:
    model, _ = zerodp.shard(Net(), stage=stage, units=[Block])
    with pytest.raises(zerodp.ConfigError, match=r"parameter 'a.weight' belongs to a model that is sharded"):
        zerodp.shard(model.blocks[0])


@on_ranks(3)
def test_group_without_this_rank() -> None:
    """Only the rank that is not in it can tell. Afterwards the ranks are in different numbers of groups: no harm."""
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        with pytest.raises(zerodp.ConfigError, match=r"mesh: rank 2 is not among its ranks"):
            zerodp.shard(Net(), mesh=group)
    else:
        zerodp.shard(Net(), mesh=group)
    parity(Task(Net, rows(3), steps=1), units=[Block], tolerance=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("bad_on", [(0, 1), (1,)], ids=["all", "one"])
def test_device_that_is_not_there(bad_on: tuple[int, ...]) -> None:
    device = "mps" if dist.get_rank() in bad_on else None
    refused_alike(Net(), adamw, r"device: .*(serves .*, not 'mps'|no 'mps'); pick", device=device)


def test_without_a_process_group() -> None:
    """In the tests' own process there is none."""
    assert not dist.is_initialized()
    with pytest.raises(zerodp.ConfigError, match=r"needs a process group.*torchrun.*init_process_group\(\)"):
        zerodp.shard(Net())


# ---- configurations that are right


@on_ranks(1, 2)
def test_config_object_and_options_over_it(stage: int, world_size: int) -> None:
    config = zerodp.Config(stage=stage, units=[Block], prefetch=2, unsharded_bytes="1KiB")
    assert (config.prefetch, config.unsharded_bytes) == (2, 1024)
    parity(Task(Net, rows(3), steps=1), config=config, prefetch=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.stage = 0  # type: ignore[misc]


def test_bytes_in_words() -> None:
    for text, expected in (("4GB", 4 * 10**9), ("1.5 MiB", 3 * 2**19), ("10", 10), ("2kb", 2000), (7, 7)):
        assert zerodp.Config(unsharded_bytes=text).unsharded_bytes == expected  # type: ignore[arg-type]


@case("B160")
@on_ranks(2)
@pytest.mark.parametrize("made", ["before", "after"])
def test_warm_up_ends_at_the_users_own_rate(made: str, stage: int) -> None:
    def scheduler(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)

    model = ToyA()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    warm_up = scheduler(optimizer) if made == "before" else None
    model, optimizer = zerodp.shard(model, optimizer, stage=stage)
    warm_up = warm_up or scheduler(optimizer)
    for _ in range(4):
        model(X).backward()
        optimizer.step()
        optimizer.zero_grad()
        warm_up.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-5, rel=1e-12)


# ---- changing the model after it was sharded


@case("B161")
@on_ranks(2)
@pytest.mark.parametrize("change", ["parameter", "module", "added", "removed"])
def test_replaced_parameters_are_found_at_the_next_forward(change: str, stage: int) -> None:
    """By name; put back, the model trains on."""

    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        if not isinstance(model, zerodp.ShardedModule):
            return
        net: Any = model
        head, weight = net.head, net.head.weight
        if change == "parameter":
            net.head.weight = nn.Parameter(torch.ones(3, 6))
        elif change == "module":
            net.head = nn.Linear(6, 3)
        elif change == "added":
            net.head.extra = nn.Linear(2, 2)
        else:
            del net.head.weight
        with pytest.raises(zerodp.ShardedError, match=r"'head.*would not be trained.*full_params.*unshard\(model\)"):
            model(torch.ones(1, 3))
        net.head = head
        if change == "added":
            del net.head.extra
        if change in ("parameter", "removed"):
            net.head._parameters.pop("weight", None)
            bias = net.head._parameters.pop("bias")
            net.head.weight, net.head.bias = weight, bias  # in their old order

    parity(Task(Net, rows(3), steps=2, between=between), stage=stage, units=[Block])


@case("B161")
@on_ranks(2)
def test_loading_by_assignment_is_refused(stage: int) -> None:
    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        if isinstance(model, zerodp.ShardedModule):
            with pytest.raises(zerodp.ConfigError, match=r"assign=True.*use assign=False"):
                model.load_state_dict(Net().state_dict(), assign=True)

    parity(Task(Net, rows(3), steps=2, between=between), stage=stage, units=[Block])


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "half": lambda model: model.half(),
    "to dtype": lambda model: model.to(torch.float64),
    "to device": lambda model: model.to("meta"),
    "to empty": lambda model: model.to_empty(device="meta"),
    "to empty, the same device": lambda model: model.to_empty(device="cpu"),
    "share memory": lambda model: model.share_memory(),
    "memory format": lambda model: model.to(memory_format=torch.channels_last),
    "part": lambda model: model.blocks[1].double(),  # type: ignore[union-attr, operator, index]
}


@case("B162")
@on_ranks(2)
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_other_dtype_or_device_is_refused(conversion: str, stage: int) -> None:
    """With the dtype or device, and the way out; the model trains on as it was."""

    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        if isinstance(model, zerodp.ShardedModule):
            with pytest.raises(zerodp.ShardedError, match=r"(precision|device)=.*|full_params"):
                CONVERSIONS[conversion](model)

    parity(Task(Net, rows(3), steps=2, between=between), stage=stage, units=[Block])


@case("B162")
@on_ranks(2)
def test_part_moved_to_another_device_is_found(stage: int) -> None:
    """At once, or where torch puts other parameters in place of the sharded ones, at the next forward."""
    model, _ = zerodp.shard(Net(), stage=stage, units=[Block])
    with pytest.raises(zerodp.ShardedError, match=r"'blocks\.1.*full_params"):
        model(torch.ones(1, 3) if model.blocks[1].to("meta") else None)


@on_ranks(2)
def test_conversions_that_change_nothing_are_fine(stage: int) -> None:
    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        assert model.float() is model
        assert model.to("cpu") is model
        assert model.to(torch.float32) is model
        assert model.cpu() is model

    parity(Task(Net, rows(3), steps=2, between=between), stage=stage, units=[Block])


def grown(embedding: nn.Embedding, rows: int) -> nn.Embedding:
    """The first rows are kept, the others made at random."""
    larger = nn.Embedding(rows, embedding.embedding_dim)
    with torch.no_grad():
        larger.weight[: embedding.num_embeddings] = embedding.weight
    return larger


@case("B163")
@on_ranks(2)
def test_rows_added_before_sharding_are_those_of_rank_0(stage: int) -> None:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    model[0] = grown(model[0], 12)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, model[0].weight.detach().clone())
    assert not torch.equal(*everyone)
    model, _ = zerodp.shard(model, stage=stage)
    close("rows", model.state_dict()["0.weight"], everyone[0])


@case("B163")
@on_ranks(2)
def test_rows_added_after_sharding_are_an_error(stage: int) -> None:
    model, _ = zerodp.shard(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2)), stage=stage)
    with zerodp.full_params(model):
        larger = grown(model[0], 12)
    model[0] = larger
    with pytest.raises(zerodp.ShardedError, match="'0' is another module"):
        model(torch.tensor([1, 11]))


# ---- other wrong calls


def unshard_wrongly(model: Any, optimizer: Any) -> None:
    zerodp.unshard(model, torch.optim.SGD([torch.ones(1)], lr=0.1))


CALLS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "stats": (lambda model, optimizer: zerodp.stats(nn.Linear(2, 2)), r"zerodp\.shard returned, got a Linear"),
    "describe": (lambda model, optimizer: zerodp.describe(nn.Linear(2, 2)), r"zerodp\.shard returned, got a Linear"),
    "full_grads": (
        lambda model, optimizer: zerodp.full_grads(nn.Linear(2, 2)),
        r"zerodp\.shard returned, got a Linear",
    ),
    "full_params": (lambda model, optimizer: zerodp.full_params(nn.Linear(2, 2)).__enter__(), r"full_params: expected"),
    "unshard": (unshard_wrongly, r"unshard: this optimizer was not sharded with this model"),
    "kind": (lambda model, optimizer: zerodp.local_shards(model, kind="states"), r'"gradients", got \'states\''),
    "norm type": (lambda model, optimizer: optimizer.clip_grad_norm_(1.0, 0), r"norm_type must be above 0 .*got 0"),
    "group of a stranger": (
        lambda model, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]}),
        r"shape \(5,\) that is no parameter of the sharded model",
    ),
    "group twice": (
        lambda model, optimizer: optimizer.add_param_group({"params": list(model.parameters())}),
        r"'0\.weight' is already in a group",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("call", CALLS)
def test_calls(call: str) -> None:
    """An error, and training goes on as if nothing had been."""
    function, message = CALLS[call]

    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        if isinstance(model, zerodp.ShardedModule):
            with pytest.raises(zerodp.ConfigError, match=message):
                function(model, optimizer)

    parity(Task(toy_b, rows(3), steps=2, between=between))


def test_kinds_of_errors() -> None:
    """User code may catch them by what they are in Python, or all together."""
    assert issubclass(zerodp.ConfigError, ValueError)
    assert issubclass(zerodp.ShardedError, RuntimeError)
    for error in (zerodp.ConfigError, zerodp.ShardedError, zerodp.RankMismatchError):
        assert issubclass(error, zerodp.ZeroError)


@on_ranks(1)
def test_one_rank_with_a_mesh_or_a_group(stage: int) -> None:
    task = Task(toy_b, rows(3), optimizer=adamw)
    plain = init_device_mesh("cpu", (1,))
    hybrid = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    expected: list[Tensor] = []
    for mesh in (None, plain, hybrid, dist.group.WORLD):
        records = parity(task, stage=stage, mesh=mesh)
        expected.append(records[-1].parameters["0.weight"])
    assert all(torch.equal(one, expected[0]) for one in expected)
