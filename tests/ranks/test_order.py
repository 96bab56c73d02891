"""One total order per pass: units used by some ranks only, in other orders, now and then, or from the middle of the model.

The routes are those that the order rule was designed on. Experts are units of their own, so a rank that does not use one
must still take part in its gather and give zeros to its reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import (
    Oracle,
    Task,
    agree_with,
    all_close,
    close,
    parity,
    rows,
    squares,
)
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net, toy_b

case = pytest.mark.case
Route = Callable[[int, int], Sequence[int]]  # (step, rank) -> experts in the order of use; a tuple = side by side
NUM_EXPERTS = 4


class Expert(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.lin = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x))


class Routed(nn.Module):
    """Takes (rows, experts to use)."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.emb = nn.Linear(3, width)
        self.experts = nn.ModuleList(Expert(width) for _ in range(NUM_EXPERTS))
        self.head = nn.Linear(width, 1)

    def forward(self, batch: tuple[Tensor, Sequence[int]]) -> Tensor:
        x, route = self.emb(batch[0]), batch[1]
        if isinstance(route, tuple):
            return self.head(x + sum((self.experts[i](x) for i in route), torch.zeros_like(x)))
        for index in route:
            x = x + self.experts[index](x)
        return self.head(x)


def subset(step: int, rank: int) -> list[int]:
    return [i for i in range(NUM_EXPERTS) if (i * 7 + step * 3 + rank * 5) % 3]


ROUTES: dict[str, Route] = {
    "all": lambda step, rank: [0, 1, 2, 3],
    "reversed use": lambda step, rank: [3, 1, 2, 0],
    "disjoint": lambda step, rank: [0, 2] if rank == 0 else [1, 3],
    "none on one": lambda step, rank: [] if rank else [0, 1, 2, 3],
    "changing": lambda step, rank: [(step + rank) % NUM_EXPERTS],
    "subset": subset,
    "parallel experts": lambda step, rank: tuple(subset(step, rank)),
    "parallel disjoint": lambda step, rank: (0, 2) if rank == 0 else (1, 3),
}
routes = pytest.mark.parametrize("route", ROUTES)


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    """Shows when a parameter is stepped that has no gradient on any rank."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def routed(route: Route, **settings: Any) -> Task:
    def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Sequence[int]]:
        return rows(3)(step, micro, rank), route(step + micro, rank)

    return Task(Routed, batch, squares, **{"optimizer": decaying, "steps": NUM_EXPERTS, **settings})


SOME, ALL = 400, 10**6  # bytes: two of the experts, and everything


@on_ranks(2)
@routes
def test_experts_with_whole_parameters(route: str) -> None:
    agree_with(routed(ROUTES[route]), *({"stage": stage, "units": [Expert]} for stage in (0, 1, 2)))


def sharded(prefetch: int, budget: int) -> dict[str, Any]:
    return {"stage": 3, "units": [Expert], "prefetch": prefetch, "unsharded_bytes": budget}


@on_ranks(2)
@routes
def test_experts_with_sharded_parameters(route: str) -> None:
    """Any prefetch, with nothing, two experts or everything kept."""
    both = [(0, 0), (0, SOME), (1, 0), (1, SOME), (1, ALL), (3, 0), (3, SOME)]
    agree_with(routed(ROUTES[route]), *(sharded(prefetch, budget) for prefetch, budget in both))


@on_ranks(3)
@routes
def test_experts_on_three_ranks(route: str) -> None:
    agree_with(routed(ROUTES[route]), {"stage": 1, "units": [Expert]}, sharded(1, 0), sharded(1, SOME))


class Mixture(nn.Module):
    """Sends each row to the expert that the row asks for; the experts are a part of the block's own unit."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, NUM_EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(NUM_EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weight, chosen = self.gate(h).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows_of = chosen == index
            if rows_of.any():
                out = out.index_put((rows_of,), expert(h[rows_of]) * weight[rows_of][:, None])
        return x + out


def mixtures() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), *(Mixture() for _ in range(3)), nn.Linear(6, 1))


@on_ranks(2, 3)
@pytest.mark.parametrize("micro", [(True,), (False, True)], ids=["synced", "no_sync"])
def test_experts_inside_a_block_chosen_by_the_data(micro: tuple[bool, ...]) -> None:
    """A rank may use more of a unit, or less, than in the step before; only the next unit's backward tells when it is done."""
    task = Task(
        mixtures, lambda step, part, rank: rows(3)(step, part, rank)[:3], steps=6, optimizer=decaying, micro=micro
    )
    agree_with(
        task,
        *({"stage": stage, "units": [Mixture]} for stage in range(4)),
        *({"stage": 3, "units": [Mixture], "prefetch": prefetch} for prefetch in (0, 3)),
    )


@on_ranks(2)
@routes
def test_experts_inside_the_only_unit(route: str) -> None:
    agree_with(routed(ROUTES[route]), {"stage": 2, "units": [Routed]}, {"stage": 3, "units": [Routed]})


@on_ranks(2)
@routes
@pytest.mark.parametrize("micro", [(True, True), (False, True)], ids=["synced", "no_sync"])
def test_experts_over_several_micro_batches(micro: tuple[bool, ...], route: str) -> None:
    """Every two of route, micro-batches and stage meet."""
    stages = range(4) if route in list(ROUTES)[::3] else (0, 3) if micro[0] else (1, 2)
    agree_with(routed(ROUTES[route], micro=micro, steps=3), *({"stage": s, "units": [Expert]} for s in stages))


@on_ranks(2)
@routes
def test_experts_with_a_budget_of_half_the_model_in_stages_by_pattern(route: str) -> None:
    stages = {"experts.[01]": 3, "experts.2": 2, "experts.3": 0, "*": 1}
    agree_with(routed(ROUTES[route]), {"stage": stages, "units": [Expert], "unsharded_bytes": SOME})


@on_ranks(2)
@routes
def test_late_gradients_are_reduced_by_the_step_itself(route: str) -> None:
    """A plain loop: nothing but step() looks at the gradients."""
    task = routed(ROUTES[route])
    expected = Oracle(task, 2).run(dist.get_rank())[-1].parameters
    for stage in range(4):
        model, optimizer = zerodp.shard(*task.build(0), stage=stage, units=[Expert])
        for step in range(task.steps):
            squares(model, task.batch(step, 0, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
        all_close(f"stage {stage}: parameter", dict(model.state_dict()), expected)


@on_ranks(2)
@routes
def test_experts_in_evaluation_between_steps(route: str) -> None:
    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        plain = not isinstance(model, zerodp.ShardedModule)
        with torch.no_grad():
            for batch in range(2):
                assert (
                    model((rows(3)(batch, 0, 0), ROUTES[route](step + batch, 0 if plain else dist.get_rank())))
                    .isfinite()
                    .all()
                )

    agree_with(routed(ROUTES[route], between=between, steps=3), *({"stage": s, "units": [Expert]} for s in range(4)))


@case("B44")
@on_ranks(2)
def test_gradient_of_an_expert_used_on_one_rank_is_half_of_that_ranks(stage: int) -> None:
    """The other rank gives zeros to the mean."""
    task = routed(lambda step, rank: [rank])
    gradients: list[dict[str, Tensor]] = []
    for rank in range(2):
        alone, _ = task.build(0)
        squares(alone, task.batch(0, 0, rank)).backward()
        gradients.append({name: p.grad / 2 for name, p in alone.named_parameters() if p.grad is not None})
    model, _ = zerodp.shard(*task.build(0), stage=stage, units=[Expert])
    squares(model, task.batch(0, 0, dist.get_rank())).backward()
    full = zerodp.full_grads(model)
    for rank in range(2):
        for kind in ("weight", "bias"):
            name = f"experts.{rank}.lin.{kind}"
            close(name, full[name], gradients[rank][name])
    assert not any(name.startswith(("experts.2", "experts.3")) for name in full)


class Repeats(nn.Module):
    """Calls its head as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 6), nn.Linear(6, 6)

    def forward(self, batch: tuple[Tensor, int]) -> Tensor:
        x, times = self.body(batch[0]), batch[1]
        for _ in range(times):
            x = torch.tanh(self.head(x))
        return x


REPEATED = Task(Repeats, lambda step, micro, rank: (rows(3)(step, micro, rank), 3 if rank else 1), steps=3)


@case("B45")
@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3, "unsharded_bytes": ALL}],
    ids=["zero0", "zero1", "zero2", "zero3 kept"],
)
def test_module_called_a_different_number_of_times(options: dict[str, Any]) -> None:
    """Right values wherever the head stays gathered; where it does not, see test_hangs."""
    parity(REPEATED, units=[nn.Linear], **options)


@case("B46")
@on_ranks(2)
@pytest.mark.parametrize(("stage", "prefetch"), [(0, 1), (1, 1), (2, 1), (3, 0), (3, 1), (3, 3)])
def test_layer_used_in_every_other_iteration(stage: int, prefetch: int) -> None:
    """On all ranks alike; and nothing is left in flight."""
    options = {"stage": stage, "units": [Expert], "prefetch": prefetch}
    agree_with(routed(lambda step, rank: [0, 1, 2, 3] if step % 2 else [0, 3], steps=4), options)
    task = routed(lambda step, rank: [0, 1, 2, 3] if step % 2 else [0, 3])
    model, optimizer = zerodp.shard(*task.build(0), **options)
    for step in range(4):
        squares(model, task.batch(step, 0, dist.get_rank())).backward()
        assert zerodp.stats(model).memory.now["unsharded"] == 0
        optimizer.step()
        optimizer.zero_grad()
        assert zerodp.stats(model).memory.now["buckets"] == 0


class Stochastic(Net):
    """Drops whole blocks by this rank's own coin."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for block in self.blocks:
            if not self.training or torch.rand(()) < 0.5:
                x = block(x)
        return self.head(x)


@on_ranks(2, 3)
def test_blocks_dropped_by_each_ranks_own_coin(world_size: int) -> None:
    task = Task(lambda: Stochastic(depth=5), rows(3), optimizer=decaying, steps=5)
    whole = [{"stage": stage, "units": [Block]} for stage in (0, 1, 2)]
    both = [(0, 0), (0, 700), (2, 700), (2, ALL)]
    agree_with(task, *whole, *({**sharded(prefetch, budget), "units": [Block]} for prefetch, budget in both))


@case("B47", "B49")
@on_ranks(2)
def test_unequal_numbers_of_forwards_inside_the_gathered_context(stage: int) -> None:
    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        if isinstance(model, zerodp.ShardedModule):
            with zerodp.full_params(model), torch.no_grad():
                for batch in range(2 + 3 * dist.get_rank()):
                    assert model(rows(3)(batch, 0, 0)).isfinite().all()

    parity(Task(Net, rows(3), between=between, steps=3), stage=stage, units=[Block])


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Net()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@case("B50")
@on_ranks(2)
@pytest.mark.parametrize("units", [None, [Block], ["body", "head"]], ids=["automatic", "blocks", "halves"])
def test_part_of_the_model_called_directly(units: Any, stage: int) -> None:
    """As generation does; the weights are sharded again afterwards, and training goes on."""

    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        net: Any = model
        with torch.no_grad():
            called = [net.body(x)] if units == ["body", "head"] else [net.body(x), net.body.blocks[1](torch.ones(1, 6))]
            outputs[isinstance(model, zerodp.ShardedModule)] += called
        if isinstance(model, zerodp.ShardedModule):
            assert zerodp.stats(model).memory.now["unsharded"] == 0

    outputs: dict[bool, list[Tensor]] = {True: [], False: []}
    x = rows(3)(0, 0, 0)
    parity(Task(Headed, rows(3), between=between, steps=3), stage=stage, units=units)
    for mine, expected in zip(outputs[True], outputs[False], strict=True):
        close("output", mine, expected)


@case("B50")
@on_ranks(2)
@pytest.mark.parametrize("stage", [3], ids="zero{}".format)
def test_module_inside_a_unit_called_directly_is_a_clear_error(stage: int) -> None:
    """Its own calls are not watched; the error names the unit and the way out, and does no harm."""

    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        net: Any = model
        if isinstance(model, zerodp.ShardedModule):
            with pytest.raises(zerodp.ShardedError, match=r"'body\.blocks\.1\.a\.weight'.*unit 'body'.*full_params"):
                net.body.blocks[1](torch.ones(1, 6))

    parity(Task(Headed, rows(3), between=between, steps=3), stage=stage, units=["body"])


@on_ranks(2)
def test_training_through_a_part_of_the_model(stage: int) -> None:
    """What the part does not reach has no gradient and is not stepped."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        net: Any = model
        return net.body(x).pow(2).mean()

    parity(Task(Headed, rows(3), loss, optimizer=decaying, steps=3), stage=stage, units=[Block])


@on_ranks(2)
def test_parts_and_the_whole_in_turn(stage: int) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, int]) -> Tensor:
        net: Any = model
        x, step = batch
        return (net.body(x) if step % 2 else net(x)).pow(2).mean()

    task = Task(Headed, lambda step, micro, rank: (rows(3)(step, micro, rank), step), loss, optimizer=decaying, steps=6)
    parity(task, stage=stage, units=[Block])


class EitherOrder(nn.Module):
    """Two layers of equal shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, batch: tuple[Tensor, bool]) -> Tensor:
        x, swapped = batch
        first, second = (self.b, self.a) if swapped else (self.a, self.b)
        return second(torch.tanh(first(x)))


@case("B52")
@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3, "unsharded_bytes": ALL}],
    ids=["zero0", "zero1", "zero2", "zero3 kept"],
)
def test_two_units_in_another_order_on_each_rank(options: dict[str, Any]) -> None:
    """Right values wherever they stay gathered, never those of the other; where they do not, see test_hangs."""
    task = Task(EitherOrder, lambda step, micro, rank: (rows(3)(step, micro, rank), rank == 1), steps=3)
    parity(task, units=[nn.Linear], **options)


@case("B54")
@on_ranks(2)
@pytest.mark.parametrize("bad_on", [0, 1])
def test_state_dict_that_one_rank_cannot_load(bad_on: int, stage: int) -> None:
    """The same error on all ranks, nothing changed, and the next steps are right."""

    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        if isinstance(model, zerodp.ShardedModule):
            state = {name: tensor * 2 for name, tensor in model.state_dict().items()}
            if dist.get_rank() == bad_on:
                state["2.weight"] = torch.ones(7)
            with pytest.raises(zerodp.CheckpointError, match=r"(?s)2\.weight.*\[7\].*\[1, 5\]"):
                model.load_state_dict(state)

    parity(Task(toy_b, rows(3), optimizer=decaying, between=between, steps=3), stage=stage)


@case("B56")
@on_ranks(2)
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_error_inside_the_gathered_context(write: bool, stage: int) -> None:
    """It passes through, and the next step is right."""

    def generate(model: nn.Module) -> None:
        with zerodp.full_params(model, write=write), torch.no_grad():
            model(torch.ones(1, 3))
            raise KeyError("generation")

    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        if isinstance(model, zerodp.ShardedModule):
            with pytest.raises(KeyError, match="generation"):
                generate(model)

    parity(Task(Net, rows(3), between=between, steps=3), stage=stage, units=[Block])
