"""Activation checkpoints whose inputs are split over ranks, or rest on the host or on disk.

The oracle is torch's own checkpoint, and plain torch behind that: equal to the last bit.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import zerodp
from tests.ranks.oracle import Task, all_close, close, parity, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net
from zerodp.residual.store import Store, current_store

case = pytest.mark.case
WORLD: Any = "world"  # stands for the process group, which a parametrisation cannot name
kinds = pytest.mark.parametrize(
    ("partition", "offload"),
    [(WORLD, None), (None, "host"), (WORLD, "host"), (WORLD, "disk")],
    ids=["split", "host", "split host", "split disk"],
)


def over(partition: Any) -> Any:
    return dist.group.WORLD if partition == WORLD else partition


def store() -> Store:
    """Of calls outside a sharded model."""
    found = current_store(torch.device("cpu"))
    found.settle()
    return found


def same_rows(width: int) -> Callable[[int, int, int], Tensor]:
    """The same batch on all ranks, as the ranks of a model-parallel group have it."""
    batch = rows(width)
    return lambda step, micro, rank: batch(step, micro, 0)


def plainly(function: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, **kwargs)


def ours(partition: Any = None, offload: Any = None) -> Any:
    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        return zerodp.activation_checkpoint(function, *args, partition=over(partition), offload=offload, **kwargs)

    return call


class Dropping(Net):
    """Blocks behind dropout, each under the checkpoint that is given."""

    def __init__(self, call: Any = plainly):
        super().__init__()
        self.drop, self.call = nn.Dropout(0.3), call

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for block in self.blocks:
            x = self.call(lambda y, block=block: block(self.drop(y)), x)
        out: Tensor = self.head(x)
        return out


# ---- values


@on_ranks(2)
@kinds
def test_sharded_training_is_the_oracles(partition: Any, offload: Any, stage: int) -> None:
    """Dropout differs by rank here: the first input is the same on all ranks, the later ones are not."""
    parity(Task(lambda: Dropping(ours(partition, offload)), same_rows(3)), stage=stage, units=[Block])


@on_ranks(2)
def test_inputs_that_differ_are_kept_whole(stage: int) -> None:
    parity(Task(lambda: Dropping(ours(WORLD)), rows(3)), stage=stage, units=[Block])


def gradients(call: Any, x: Tensor, model: Callable[..., Net] = Dropping) -> list[Tensor]:
    torch.manual_seed(5)
    net = model(call)
    torch.manual_seed(7)
    x = x.clone().requires_grad_()
    return list(torch.autograd.grad(net(x).pow(2).sum(), [x, *net.parameters()]))


@on_ranks(2, 4)
@kinds
def test_without_a_sharded_model(partition: Any, offload: Any) -> None:
    x = torch.randn(5, 3)
    for mine, theirs in zip(gradients(ours(partition, offload), x), gradients(plainly, x), strict=True):
        close("gradient", mine, theirs)
    assert store().arena.now["activations"] == 0


@case("B38")
@on_ranks(2, 4)
@kinds
def test_all_kinds_of_inputs(partition: Any, offload: Any, world_size: int) -> None:
    """Sizes that no number of ranks divides, masks, integers, None, scalars, nesting, one tensor twice, odd strides."""
    weight = torch.randn(7, requires_grad=True)
    seen: list[Any] = []

    def function(x: Tensor, mask: Tensor, power: int, nothing: None, pair: Any, *, rest: Any) -> Tensor:
        seen.append((x is rest["again"], pair[1].stride(), rest["expanded"].stride(), type(pair), nothing, power))
        h = torch.where(mask, x * weight, pair[0].to(x.dtype)) ** power
        h = h + pair[1].sum(0)[:7] * rest["scale"] + rest["again"] + rest["expanded"][0] + rest["half"].float()
        out: Tensor = torch.tanh(h) * h
        return out

    def run(call: Any) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(7, requires_grad=True)
        h, y = x * 2, torch.randn(8, 3).t()
        rest = {"again": h, "scale": torch.tensor(0.5), "expanded": torch.randn(7).expand(4, 7), "half": h.bfloat16()}
        out = call(function, h, h > 0, 3, None, (torch.arange(7), y), rest=rest)
        assert out.requires_grad
        return [out.detach(), *torch.autograd.grad(out.sum(), [x, weight])]

    for mine, theirs in zip(run(ours(partition, offload)), run(plainly), strict=True):
        close("value", mine, theirs)
    assert len(seen) == 4
    assert len(set(seen)) == 1


@on_ranks(2)
@kinds
def test_double_backward_and_retained_graphs(partition: Any, offload: Any) -> None:
    def run(call: Any) -> list[Tensor]:
        x = torch.linspace(-1, 1, 6, requires_grad=True)
        out = call(lambda h: torch.tanh(h * h) * h, x * 2)
        once = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
        first = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
        return [once, first.detach(), torch.autograd.grad(first.sum(), x)[0]]

    for mine, theirs in zip(run(ours(partition, offload)), run(plainly), strict=True):
        close("derivative", mine, theirs)
    assert store().arena.now["activations"] == 0


@case("B43")
@on_ranks(2)
@kinds
def test_several_forwards_before_a_backward(partition: Any, offload: Any, stage: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        first, second = model(x), model(x.flip(0))
        return (first + second).pow(2).mean()

    parity(Task(lambda: Dropping(ours(partition, offload)), same_rows(3), loss), stage=stage, units=[Block])


@case("B41")
@on_ranks(2)
def test_one_layer_in_several_checkpoints(stage: int) -> None:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = torch.tanh(ours(WORLD, "host")(self.layer, x))
            return x

    parity(Task(Repeated, same_rows(4)), stage=stage)


@case("B36", "B40")
@on_ranks(2)
def test_beside_torchs_own_kinds(stage: int) -> None:
    """Re-entrant outside, saved tensors outside, and both elsewhere; backward from an output that is no scalar."""

    class Mixed(Dropping):
        def forward(self, x: Tensor) -> Tensor:
            mine, away, (a, b, c) = ours(WORLD), ours(WORLD, "host"), self.blocks
            x = checkpoint(lambda y: mine(a, y), self.emb(x).clone(), use_reentrant=True)
            x = checkpoint(lambda y: mine(lambda z: mine(b, z), y), x, use_reentrant=False)
            return self.head(away(lambda y: plainly(c, y), x))

    def output(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out

    parity(Task(Mixed, same_rows(3), output), stage=stage, units=[Block])


@on_ranks(2)
def test_low_precision_tied_and_frozen_weights(stage: int) -> None:
    class Tied(Dropping):
        def __init__(self) -> None:
            super().__init__(ours(WORLD, "host"))
            self.blocks[2].a.weight = self.blocks[0].a.weight
            self.blocks[1].requires_grad_(False)

    task = Task(Tied, same_rows(3), micro=(True, True))
    tolerance = 0.0 if stage >= 2 else 0.01  # whole gradients start in bf16
    parity(task, stage=stage, units=[Block], precision="bf16", dtype=torch.bfloat16, tolerance=tolerance)
    parity(task, stage=stage, units=[Block])


@case("B37")
@on_ranks(2)
def test_compiled_blocks() -> None:
    x = torch.randn(4, 3)

    def compiled(call: Any) -> Net:
        net = Dropping(call)
        for block in net.blocks:
            block.compile(backend="eager")
        return net

    expected = gradients(plainly, x)
    for mine, theirs in zip(gradients(ours(WORLD, "host"), x, compiled), expected, strict=True):
        close("gradient", mine, theirs)


@case("B37")
@on_ranks(2)
def test_compiled_from_outside() -> None:
    """The call is not traced: it runs as it is, between the compiled parts."""
    x, held = torch.randn(4, 3), store()
    expected = gradients(plainly, x)
    held.reset()

    def compiled(call: Any) -> Any:
        return torch.compile(Dropping(call), backend="eager")

    for mine, theirs in zip(gradients(ours(WORLD, "host"), x, compiled), expected, strict=True):
        close("gradient", mine, theirs)
    assert held.bytes_at("host")[1]["activations"] >= 3 * 4 * 6 * 4 // 2


@on_ranks(2)
@kinds
def test_no_gradients_keep_nothing(partition: Any, offload: Any) -> None:
    net, held = Dropping(ours(partition, offload)), store()
    for tier in (held.arena, *held.tiers.values()):
        tier.reset_peaks()
    with torch.no_grad():
        net.eval()(torch.randn(4, 3))
    assert held.arena.peak["activations"] == 0
    assert held.bytes_at("host")[1]["activations"] == held.bytes_at("disk")[1]["activations"] == 0


@on_ranks(2)
@kinds
def test_exceptions_pass_through_and_leave_nothing(partition: Any, offload: Any) -> None:
    def fails(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ours(partition, offload)(fails, torch.randn(6, requires_grad=True) * 2)
    gc.collect()
    held = store()
    assert held.arena.now["activations"] == 0
    assert held.bytes_at("host")[0]["activations"] == held.bytes_at("disk")[0]["activations"] == 0


@on_ranks(2)
def test_inputs_changed_in_place_come_back_as_they_were(stage: int) -> None:
    def function(x: Tensor, table: Tensor) -> Tensor:
        table += 1
        return torch.tanh(x * table) * x

    x, table = torch.ones(6, requires_grad=True), torch.arange(6.0)
    torch.autograd.grad(ours(WORLD)(function, x * 2, table).sum(), x)
    expected = table.clone()  # + 1 by the call itself, not by the recomputation
    close("the user's own", expected, torch.arange(6.0) + 1)


@on_ranks(2)
@pytest.mark.parametrize("offload", ["host", "disk"])
def test_the_next_inputs_of_backward_come_ahead_of_need(offload: str) -> None:
    """While a block is recomputed, the inputs of the block before it are on their way."""
    calls: list[Any] = []
    under_way: list[list[int]] = []

    def function(x: Tensor) -> Tensor:
        alive = [(number, call()) for number, call in enumerate(calls) if call() is not None]
        under_way.append([number for number, call in alive if call.kept[0].slot is not None])
        return torch.tanh(x * x)

    x = torch.ones(8, requires_grad=True)
    h = x * 2
    for _ in range(3):
        h = ours(WORLD, offload)(function, h)
        calls.append(store().latest)
    under_way.clear()
    h.sum().backward()
    assert under_way == [[1], [0], []]


@on_ranks(2)
def test_calls_on_some_ranks_only_end_in_an_error() -> None:
    model, _ = zerodp.shard(Net(), stage=1)
    x = torch.ones(2, 3, requires_grad=True)
    ours(WORLD)(torch.tanh, x)  # makes the groups, on all ranks

    def step() -> None:
        out = model(x)
        if dist.get_rank() == 0:
            out = ours(WORLD)(torch.tanh, out)
        out.sum().backward()
        zerodp.full_grads(model)

    with pytest.raises(zerodp.RankMismatchError, match="would wait for ever"):
        step()


# ---- DTensors, meshes


@on_ranks(4)
def test_dims_of_a_mesh_and_dtensors() -> None:
    """Split over tp by name; what is sharded over tp stays as it is."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(mesh["dp"].get_local_rank())
    values = torch.randn(6, 4)

    def run(call: Any) -> list[Tensor]:
        whole = values.clone().requires_grad_()
        a = DTensor.from_local(whole * 1, mesh["tp"], [Replicate()], run_check=False)
        b = DTensor.from_local(whole[:, mesh["tp"].get_local_rank()] * 1, mesh["tp"], [Shard(0)], run_check=False)
        out = call(lambda a, b: torch.tanh(a * a) * a + b.redistribute(placements=[Replicate()]).sum(), a, b)
        return [out.to_local().detach(), *torch.autograd.grad(out.to_local().sum(), whole)]

    def named(function: Any, *args: Any) -> Any:
        out = zerodp.activation_checkpoint(function, *args, partition="tp")
        assert store().arena.now["activations"] == 6 * 4 * 4 // 2
        return out

    for mine, theirs in zip(run(named), run(plainly), strict=True):
        close("value", mine, theirs)
    partitions = list(store().partitions)
    assert tuple(dist.get_process_group_ranks(mesh.get_group("tp"))) in partitions


@on_ranks(2)
def test_wrong_options_are_refused() -> None:
    x, call = torch.ones(3, requires_grad=True), zerodp.activation_checkpoint
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"partition": mesh}, r"pass that slice of the mesh"),
        ({"partition": 3}, "expected a ProcessGroup"),
        ({"partition": "tp"}, "no mesh has a dim 'tp'"),
        ({"partition": dist.GroupMember.NON_GROUP_MEMBER}, "is not in this process group"),
        ({"offload": "hots"}, "did you mean 'host'"),
        ({"offload": zerodp.Offload(activations="disk", path="/nowhere")}, "no file can be made"),
    ]
    for options, text in wrong:
        with pytest.raises(zerodp.ZeroError, match=text):
            call(torch.tanh, x, **options)
    with pytest.raises(zerodp.ConfigError, match="no repeated blocks"):
        zerodp.apply_activation_checkpointing(nn.Linear(3, 3))
    with pytest.raises(zerodp.ConfigError, match="no module like"):
        zerodp.apply_activation_checkpointing(Net(), units=[nn.LSTM])


# ---- models of others


@on_ranks(2)
def test_a_transformer_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, use_cache=False
    )

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        out: Tensor = model(input_ids=tokens, labels=tokens).loss
        return out

    def tokens(step: int, micro: int, rank: int) -> Tensor:
        return torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(step))

    def build() -> nn.Module:
        model: nn.Module = transformers.LlamaForCausalLM(config)
        return zerodp.apply_activation_checkpointing(model, partition=dist.group.WORLD, offload="host")

    parity(Task(build, tokens, loss, steps=2), stage=3)
    model = build().train()
    model.config.use_cache = True
    with pytest.raises(zerodp.ConfigError, match="use_cache=False"):
        loss(model, tokens(0, 0, 0))


@on_ranks(2)
def test_copies_of_a_checkpointed_model_are_checkpointed() -> None:
    torch.manual_seed(0)
    model = zerodp.apply_activation_checkpointing(Net(8, 2), partition=dist.group.WORLD)
    twin = copy.deepcopy(model)
    x = torch.ones(4, 3)
    for each in (model, twin):
        squares(each, x).backward()
    all_close("gradients", *({n: p.grad for n, p in each.named_parameters()} for each in (model, twin)))
    loss = squares(twin, x)
    assert store().arena.now["activations"] == 2 * 4 * 8 * 4 // 2
    loss.backward()
