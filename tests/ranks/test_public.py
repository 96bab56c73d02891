"""The public ways to values: full_params, full_grads, local_shards, state dicts, unshard, describe, compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import Oracle, Task, Tensors, adamw, all_close, close, copied, momentum, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net, ToyA, X, toy_b

precisions = pytest.mark.parametrize("precision", [None, "bf16"])


def sharded(stage: int, **options: Any) -> tuple[Any, Any, Any, Tensors]:
    """A sharded net, its optimizer, a plain twin, and the values that both began with."""
    torch.manual_seed(3)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    start = copied(dict(model.state_dict()))
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, **{"units": [Block], **options})
    return model, optimizer, plain, start


def step(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    squares(model, rows(3)(number, 0, dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


def apart(model: nn.Module) -> bool:
    """Whether nothing is gathered in stage 3."""
    return zerodp.stats(model).memory.now["unsharded"] == 0


@on_ranks(2, 3)
def test_full_params_shows_all_values(stage: int) -> None:
    model, optimizer, plain, start = sharded(stage)
    with zerodp.full_params(model):
        all_close("inside", copied(dict(model.named_parameters())), start)
        assert all(type(p) is nn.Parameter for p in model.parameters())
        x = torch.ones(2, 3)
        with torch.no_grad():
            for _ in range(dist.get_rank() + 1):  # no collectives inside
                close("forward", model(x), plain(x))
    assert apart(model)
    step(model, optimizer)
    with zerodp.full_params(model):
        inside = copied(dict(model.named_parameters()))
    all_close("latest", inside, dict(model.state_dict()))


@on_ranks(2)
def test_full_params_of_some_modules(stage: int) -> None:
    model, _, _, start = sharded(3)
    with zerodp.full_params([model.blocks[0], model.blocks[2].a]):
        close("asked for", model.blocks[0].a.weight.detach().clone(), start["blocks.0.a.weight"])
        close("asked for", model.blocks[2].a.weight.detach().clone(), start["blocks.2.a.weight"])
        with pytest.raises(zerodp.ShardedError, match=r"blocks\.1\.a\.weight"):
            model.blocks[1].a.weight.sum()
    assert apart(model)


@on_ranks(2)
def test_nested_contexts(stage: int) -> None:
    model, _, _, start = sharded(stage)
    with zerodp.full_params(model):
        with zerodp.full_params(model.blocks[0]):
            close("inner", model.blocks[0].a.weight.detach().clone(), start["blocks.0.a.weight"])
        close("outer", model.blocks[0].a.weight.detach().clone(), start["blocks.0.a.weight"])
    assert apart(model)


@on_ranks(2)
@pytest.mark.parametrize("write", [False, True])
def test_exception_inside_passes_through(write: bool, stage: int) -> None:
    model, optimizer, _, start = sharded(stage)
    with pytest.raises(KeyError, match="mine"), zerodp.full_params(model, write=write):
        raise KeyError("mine")
    assert apart(model)
    all_close("unchanged", dict(model.state_dict()), start)
    step(model, optimizer)


@on_ranks(2)
@precisions
def test_written_values_of_rank_0_win(precision: str | None, stage: int) -> None:
    model, optimizer, _, start = sharded(stage, precision=precision)
    with zerodp.full_params(model, write=True), torch.no_grad():
        model.blocks[1].a.weight.fill_(1 + dist.get_rank())
        model.emb.bias.data.zero_()
    start["blocks.1.a.weight"].fill_(1)
    start["emb.bias"].zero_()
    all_close("written", dict(model.state_dict()), start)
    step(model, optimizer)
    assert not torch.equal(model.state_dict()["blocks.1.a.weight"], start["blocks.1.a.weight"])


@on_ranks(2)
def test_unedited_elements_keep_their_masters_bits(stage: int) -> None:
    """bf16 shows 8 bits of each value; writing one element must not round the others' fp32 masters."""
    model, _, _, start = sharded(stage, precision="bf16")
    with zerodp.full_params(model, write=True), torch.no_grad():
        model.emb.weight[0, 0] = 2.0
    start["emb.weight"][0, 0] = 2.0
    all_close("masters", dict(model.state_dict()), start)


EDITS: dict[str, Callable[[Any], Any]] = {
    "in place": lambda model: model.emb.weight.add_(1),
    "a slice": lambda model: model.emb.weight[0].zero_(),
    "through .data": lambda model: model.emb.weight.data.mul_(2),
    "another view": lambda model: model.emb.weight.view(-1)[:3].fill_(7),
}


@on_ranks(2)
@pytest.mark.parametrize("edit", EDITS)
def test_edits_without_write_are_refused_on_all_ranks(edit: str, stage: int) -> None:
    """Also when only one rank made them; the values are as before everywhere."""
    model, optimizer, _, start = sharded(stage)
    with pytest.raises(zerodp.ShardedError, match=r"emb\.weight.*write=True"):
        edited(model, EDITS[edit], on_rank=1)
    all_close("unchanged", dict(model.state_dict()), start)
    with torch.no_grad():
        assert model(torch.ones(1, 3)).isfinite().all()
    step(model, optimizer)


def edited(model: nn.Module, edit: Callable[[Any], Any], on_rank: int) -> None:
    with zerodp.full_params(model), torch.no_grad():
        if dist.get_rank() == on_rank:
            edit(model)


@on_ranks(2)
def test_context_inside_a_pass_is_an_error(stage: int) -> None:
    class Opens(Net):
        def forward(self, x: Tensor) -> Tensor:
            with zerodp.full_params(self):
                return super().forward(x)

    model, _ = zerodp.shard(Opens(), stage=stage)
    with pytest.raises(zerodp.ShardedError, match="inside a forward"):
        model(torch.ones(1, 3))


@on_ranks(2, 3)
def test_full_grads_are_those_of_the_oracle(stage: int, world_size: int) -> None:
    task = Task(Net, rows(3), optimizer=adamw, steps=1)
    (record,) = Oracle(task, world_size).run(dist.get_rank())
    model, optimizer = zerodp.shard(*task.build(0), stage=stage, units=[Block])
    assert zerodp.full_grads(model) == {}
    squares(model, rows(3)(0, 0, dist.get_rank())).backward()
    gradients = zerodp.full_grads(model)
    assert list(gradients) == [name for name, _ in Net().named_parameters()]
    all_close("gradient", gradients, record.gradients, 0.0 if world_size == 2 else 1e-6)
    gradients["emb.weight"].zero_()  # a copy: the optimizer's are untouched
    optimizer.step()
    all_close("parameter", dict(model.state_dict()), record.parameters, 0.0 if world_size == 2 else 1e-6)


@on_ranks(2, 3)
@precisions
def test_local_shards_cover_every_element_once(precision: str | None, stage: int, world_size: int) -> None:
    model, _, _, start = sharded(stage, precision=precision)
    seen = {name: torch.zeros(tensor.numel()) for name, tensor in start.items()}
    for name, at, piece in zerodp.local_shards(model):
        assert isinstance(at, slice)
        assert piece.dtype == torch.float32
        close(name, piece.detach().clone(), start[name].flatten()[at])
        seen[name][at] += 1
    for count in seen.values():
        dist.all_reduce(count)
        assert (count == (world_size if stage == 0 else 1)).all()


@on_ranks(2)
@precisions
def test_written_masters_count(precision: str | None, stage: int) -> None:
    model, _, _, start = sharded(stage, precision=precision)
    with torch.no_grad():
        for name, _, piece in zerodp.local_shards(model):
            if name == "emb.weight":
                piece.fill_(0.5)
    start["emb.weight"].fill_(0.5)
    all_close("state", dict(model.state_dict()), start)
    with torch.no_grad():
        plain = Net()
        plain.load_state_dict(start)
        close("forward", model(torch.ones(1, 3)).float(), plain(torch.ones(1, 3)), 1e-6 if precision is None else 0.05)
    with zerodp.full_params(model):
        assert (model.emb.weight == 0.5).all()


@on_ranks(2)
@precisions
def test_masters_that_are_held_may_be_written_to_later(precision: str | None, stage: int) -> None:
    """After passes and steps, by the ranks that have the parameter; forwards inside full_params still need not match."""
    model, optimizer, plain, _ = sharded(stage, precision=precision)
    x = torch.ones(1, 3)

    def sent() -> int:
        zerodp.stats(model).reset()
        step(model, optimizer)
        return sum(row.wire_bytes for row in zerodp.stats(model).comm)

    step(model, optimizer)
    before = sent()
    held = [(name, piece) for name, _, piece in zerodp.local_shards(model)]
    for value in (2.0, 3.0):
        sent()
        assert sent() == before  # the engine's own changes are no edits
        with zerodp.full_params(model), torch.no_grad():
            for _ in range(dist.get_rank() + 1):
                model(x)
        expected = copied(model.state_dict())
        with torch.no_grad():
            for piece in (piece for name, piece in held if name == "head.bias"):
                piece.fill_(value)
            seen = model(x).float()
        expected["head.bias"].fill_(value)
        all_close("state", copied(model.state_dict()), expected)
        plain.load_state_dict(expected)
        close("forward", seen, plain(x).detach(), 1e-6 if precision is None else 0.05)


class Remembers(nn.Module):
    """Has a buffer that its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(3))
        self.lin = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.last.copy_(x[0])  # type: ignore[operator]
        out: Tensor = self.lin(x)
        return out


@on_ranks(2)
def test_a_load_that_fails_leaves_the_buffers_alone(stage: int) -> None:
    """Also where one rank alone has what does not fit, and where buffers are cast."""
    torch.manual_seed(0)
    net = Remembers()
    precision = zerodp.Precision(torch.bfloat16, buffer_dtype=torch.bfloat16) if stage == 2 else None
    model, _ = zerodp.shard(net, stage=stage, precision=precision)
    model(torch.randn(8, 3) + dist.get_rank())
    before = copied(dict(model.named_buffers()))
    good = copied(model.state_dict())
    bad = {key: value + 1 for key, value in good.items()}
    if dist.get_rank() == 1:
        bad["lin.weight"] = torch.ones(5, 5)
    with pytest.raises(zerodp.CheckpointError, match="size mismatch"):
        model.load_state_dict(bad)
    all_close("buffer", copied(dict(model.named_buffers())), before)
    assert all(torch.equal(value, good[key]) for key, value in model.state_dict().items())
    model.load_state_dict({key: value + 1 for key, value in good.items()})
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, (good[key] + 1).to(buffer.dtype))


@on_ranks(2)
def test_written_gradients_count(stage: int) -> None:
    """B17 without offload: the gradients scaled by 0.1, the norm and the update follow."""
    model = ToyA()
    model, optimizer = zerodp.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    model((dist.get_rank() + 1) * X).backward()
    for _, _, piece in zerodp.local_shards(model, kind="gradients"):
        piece.mul_(0.1)
    close("gradient", zerodp.full_grads(model)["w"], 0.15 * X, 1e-7)
    assert optimizer.clip_grad_norm_(float("inf")) == pytest.approx(0.82158, abs=1e-5)
    optimizer.step()
    close("w", model.state_dict()["w"], 1 - 0.015 * X, 1e-6)


@on_ranks(2)
def test_unknown_kind_of_shards(stage: int) -> None:
    model, _, _, _ = sharded(stage)
    with pytest.raises(zerodp.ConfigError, match=r"parameters.*gradients.*'grads'"):
        zerodp.local_shards(model, kind="grads")


@on_ranks(2, 3)
@precisions
def test_state_dict_is_the_plain_one(precision: str | None, stage: int, world_size: int) -> None:
    model, optimizer, plain, start = sharded(stage, precision=precision)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    all_close("state", dict(state), start)
    assert all(type(tensor) is Tensor for tensor in state.values())
    step(model, optimizer)
    all_close("a copy", dict(state), start)
    with_prefix = model.state_dict(prefix="net.")
    assert list(with_prefix) == [f"net.{name}" for name in plain.state_dict()]


@on_ranks(2, 3)
@precisions
def test_load_state_dict(precision: str | None, stage: int, world_size: int) -> None:
    model, optimizer, plain, _ = sharded(stage, precision=precision)
    torch.manual_seed(11)
    wanted = copied(dict(Net().state_dict()))
    result = model.load_state_dict(wanted)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    all_close("loaded", dict(model.state_dict()), wanted)
    plain.load_state_dict(wanted)
    with torch.no_grad():
        x = torch.ones(2, 3)
        close("forward", model(x).float(), plain(x), 1e-6 if precision is None else 0.05)
    step(model, optimizer)


@on_ranks(2)
def test_load_of_parts_and_errors(stage: int) -> None:
    """As in torch: keys that lack or are too many, and wrong shapes, by name; nothing has changed then."""
    model, _, _, start = sharded(stage)
    part = {"emb.weight": torch.ones(6, 3), "other": torch.ones(1)}
    with pytest.raises(zerodp.CheckpointError, match=r"(?s)[Mm]issing.*emb\.bias.*[Uu]nexpected.*other"):
        model.load_state_dict(part)
    result = model.load_state_dict({"emb.weight": torch.ones(6, 3), "other": torch.ones(1)}, strict=False)
    assert "emb.bias" in result.missing_keys
    assert result.unexpected_keys == ["other"]
    start["emb.weight"] = torch.ones(6, 3)
    all_close("part", dict(model.state_dict()), start)
    wrong = {**start, "blocks.1.a.weight": torch.ones(5, 7)}
    with pytest.raises(zerodp.CheckpointError, match=r"(?s)blocks\.1\.a\.weight.*\[5, 7\].*\[12, 6\]"):
        model.load_state_dict(wrong)


@on_ranks(2)
def test_error_on_one_rank_is_the_same_on_all(stage: int) -> None:
    """Rank 1's file lacks a key."""
    model, optimizer, _, start = sharded(stage)
    mine = dict(start)
    if dist.get_rank() == 1:
        del mine["head.bias"]
    with pytest.raises(zerodp.CheckpointError, match=r"head\.bias"):
        model.load_state_dict(mine)
    step(model, optimizer)


@on_ranks(2)
def test_full_state_dict(stage: int) -> None:
    model, _, plain, start = sharded(stage)
    state = zerodp.full_state_dict(model)
    if dist.get_rank() == 0:
        assert list(state) == list(plain.state_dict())
        all_close("rank 0", state, start)
    else:
        assert state == {}
    all_close("all ranks", zerodp.full_state_dict(model, rank0_only=False), start)
    assert apart(model)


@on_ranks(2)
@precisions
def test_unshard_gives_plain_objects_back(precision: str | None, stage: int) -> None:
    """Trained sharded, then on in plain torch: the same as the oracle all the way."""
    task = Task(Net, rows(3), optimizer=adamw, steps=4, brief=False)
    expected = Oracle(task, 2).run(0)
    model, optimizer = task.build(0)
    group, identity = optimizer.param_groups[0], model.head.weight
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer = zerodp.shard(model, optimizer, stage=stage, units=[Block], precision=precision)
    for number in range(2):
        step(model, optimizer, number)
        scheduler.step()
    model, optimizer = zerodp.unshard(model, optimizer)
    assert (type(model), type(optimizer)) == (Net, torch.optim.AdamW)
    assert model.head.weight is identity
    assert optimizer.param_groups[0] is group
    assert all(mine is theirs for mine, theirs in zip(group["params"], model.parameters(), strict=True))
    assert all(type(p) is nn.Parameter and p.is_leaf and p.dtype == torch.float32 for p in model.parameters())
    if precision is not None:
        return
    all_close("values", copied(dict(model.named_parameters())), expected[1].parameters)
    for number in (2, 3):
        for rank in range(2):
            (squares(model, rows(3)(number, 0, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    all_close("went on", copied(dict(model.named_parameters())), expected[3].parameters)


@on_ranks(2)
def test_unshard_gives_gradients_back(stage: int) -> None:
    """Those of a backward that no step has taken yet: the mean over the ranks."""
    task = Task(Net, rows(3), optimizer=adamw)
    plain, optimizer = task.build(0)
    for rank in range(2):
        (squares(plain, task.batch(0, 0, rank)) / 2).backward()
    optimizer.step()
    model, own = zerodp.shard(*task.build(0), stage=stage, units=[Block])
    squares(model, task.batch(0, 0, dist.get_rank())).backward()
    model, own = zerodp.unshard(model, own)
    own.step()
    all_close("stepped", copied(dict(model.named_parameters())), copied(dict(plain.named_parameters())))


@on_ranks(2)
def test_unshard_then_shard_again(stage: int) -> None:
    task = Task(Net, rows(3), optimizer=adamw, steps=4)
    expected = Oracle(task, 2).run(0)
    model, optimizer = zerodp.shard(*task.build(0), stage=stage, units=[Block])
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    model, optimizer = zerodp.shard(*zerodp.unshard(model, optimizer), stage=(stage + 1) % 4)
    step(model, optimizer, 2)
    step(model, optimizer, 3)
    all_close("went on", dict(model.state_dict()), expected[3].parameters)


@on_ranks(2)
def test_the_model_stays_itself(stage: int) -> None:
    class Mine(Net):
        """A model of the user."""

        note = "kept"

        def helper(self) -> int:
            return len(self.blocks)

    model = Mine()
    names, modules = [n for n, _ in model.named_parameters()], [n for n, _ in model.named_modules()]
    same, optimizer = zerodp.shard(model, momentum(model), stage=stage)
    assert same is model
    assert isinstance(model, Mine)
    assert isinstance(model, zerodp.ShardedModule)
    assert isinstance(optimizer, torch.optim.SGD)
    assert (model.note, model.helper(), type(model).__name__) == ("kept", 3, "Mine")
    assert [n for n, _ in model.named_parameters()] == names
    assert [n for n, _ in model.named_modules()] == modules


@on_ranks(2)
def test_describe_says_what_rests_where(stage: int) -> None:
    model, optimizer, _, _ = sharded(stage, precision="bf16")
    step(model, optimizer)
    text = zerodp.describe(model)
    for word in ("(root)", "blocks.0", "blocks.2", "bfloat16", "master", "first_moment", "second_moment"):
        assert word in text, word
    memory = zerodp.stats(model).memory
    assert f"{memory.now['first_moment']:,}" in text


@on_ranks(2)
def test_compare_agrees_with_itself_and_finds_a_difference(stage: int) -> None:
    batches = [rows(3)(step, 0, dist.get_rank()) for step in range(3)]
    good = zerodp.compare(Net, lambda ps: torch.optim.SGD(ps, lr=0.1), batches, squares, stage=stage)
    assert good
    assert (good.equal, good.steps, good.first_difference) == (True, 3, None)

    def uneven(model: nn.Module, batch: Tensor) -> Tensor:
        factor = 1.5 if isinstance(model, zerodp.ShardedModule) else 1.0
        return squares(model, batch) * factor

    bad = zerodp.compare(toy_b, lambda ps: torch.optim.SGD(ps, lr=0.1), batches, uneven, stage=stage)
    assert not bad
    assert "loss in step 1" in str(bad.first_difference)


CALLS: dict[str, Callable[[Any], Any]] = {
    "full_grads": zerodp.full_grads,
    "local_shards": zerodp.local_shards,
    "full_state_dict": zerodp.full_state_dict,
    "stats": zerodp.stats,
    "describe": zerodp.describe,
    "unshard": zerodp.unshard,
    "full_params": lambda model: zerodp.full_params(model).__enter__(),
}


@on_ranks(2)
@pytest.mark.parametrize("call", CALLS)
def test_plain_models_are_refused(call: str) -> None:
    with pytest.raises(zerodp.ConfigError, match=r"zerodp\.shard"):
        CALLS[call](toy_b())
