"""What each rank holds: the papers' formulas, counted by stats and checked against the tensors that live."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import adamw, close, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net, toy_b
from zerodp.core.watch import WATCH

case = pytest.mark.case
sharded_stages = pytest.mark.parametrize("stage", [1, 2, 3], ids="zero{}".format)
MODEL_STATES = ("parameters", "gradients", "master", "first_moment", "second_moment")


def aligned(layers: int = 4, width: int = 64) -> nn.Sequential:
    """Every weight a multiple of 64 elements for each of up to four ranks: no padding at all."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def live_bytes() -> int:
    """Of the memory of all tensors that Python can reach; storages that lie in one another count once."""
    gc.collect()
    limit = time.monotonic() + 1
    while WATCH.lent() and time.monotonic() < limit:  # messages that the backend's threads have not let go of
        time.sleep(0.001)
    storages = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at every object touches deprecated ones
        for found in gc.get_objects():
            if isinstance(found, Tensor) and type(found) in (Tensor, nn.Parameter):
                storage = found.untyped_storage()
                storages[storage._cdata] = (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
    total = end = 0
    for start, stop in sorted(storages.values()):
        total += max(stop - max(start, end), 0)
        end = max(end, stop)
    return total


def baseline() -> int:
    """Live bytes before a test. What earlier tests left under way when they dropped their models ends with the next shard()."""
    gc.collect()
    zerodp.shard(nn.Linear(1, 1))
    return live_bytes()


def bytes_of(model: nn.Module, kinds: tuple[str, ...] = MODEL_STATES) -> int:
    now = zerodp.stats(model).memory.now
    return sum(now[kind] for kind in kinds)


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("kept", ["low", "default"])
def test_model_states_follow_the_formulas(kept: str, stage: int, world_size: int) -> None:
    """16, 4 + 12/N, 2 + 14/N and 14/N bytes per parameter with 16-bit gradients; 2/N more where sharded ones are fp32."""
    grad_dtype = torch.bfloat16 if kept == "low" else None
    model = aligned()
    numel = sum(p.numel() for p in model.parameters())
    precision = zerodp.Precision(torch.bfloat16, grad_dtype=grad_dtype)
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[nn.Linear], precision=precision)
    for _ in range(2):
        optimizer.zero_grad()
        squares(model, torch.ones(2, 64)).backward()
        optimizer.step()
    n = world_size
    expected = {0: 16 * numel, 1: 4 * numel + 12 * numel // n, 2: 2 * numel + 14 * numel // n, 3: 14 * numel // n}[
        stage
    ]
    extra = 2 * numel // n if kept == "default" and stage >= 2 else 0
    assert bytes_of(model) == expected + extra
    assert bytes_of(model, ("master", "first_moment", "second_moment")) == 12 * numel // (n if stage else 1)


@on_ranks(2, 4)
def test_model_states_in_fp32(stage: int, world_size: int) -> None:
    """4 values per parameter, without a master: 4, 2 + 2/N, 1 + 3/N, 4/N."""
    model = aligned()
    numel = sum(p.numel() for p in model.parameters())
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[nn.Linear])
    squares(model, torch.ones(2, 64)).backward()
    optimizer.step()
    n = world_size
    values = {0: 4 * numel, 1: 2 * numel + 2 * numel // n, 2: numel + 3 * numel // n, 3: 4 * numel // n}[stage]
    assert bytes_of(model) == 4 * values
    assert zerodp.stats(model).memory.now["master"] == 0


@on_ranks(2)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_ledger_agrees_with_the_tensors_that_live(precision: str | None, stage: int) -> None:
    before = baseline()
    model = aligned(layers=6, width=128)
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[nn.Linear], precision=precision)
    for _ in range(2):
        optimizer.zero_grad()
        squares(model, torch.ones(2, 128)).backward()
        optimizer.step()
    counted = zerodp.stats(model).memory.total_now
    grown = live_bytes() - before
    spare = 2 * 128 * 128 * 4 * 3  # slots that the arena keeps for the next pass: at most three of one unit
    assert counted <= grown <= counted + spare + 8192


@case("B57")
@on_ranks(2)
def test_forward_in_grad_mode_keeps_one_unit_at_most() -> None:
    model, _ = zerodp.shard(aligned(width=256), stage=3, units=[nn.Linear], prefetch=0)
    one = 256 * 256 * 4
    before = live_bytes()
    zerodp.stats(model).reset()
    loss = squares(model, torch.ones(2, 256))
    memory = zerodp.stats(model).memory
    assert memory.peak["unsharded"] == one
    assert memory.now["unsharded"] == 0
    assert live_bytes() - before <= one + 20 * 2 * 256 * 4
    loss.backward()
    assert zerodp.stats(model).memory.now["unsharded"] == 0


@case("B58")
@on_ranks(2, 3)
def test_only_shards_are_left_after_the_loop(world_size: int) -> None:
    model = toy_b()
    model, optimizer = zerodp.shard(model, adamw(model), stage=3, units=[nn.Linear])
    for step in range(3):
        squares(model, rows(3)(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    now = zerodp.stats(model).memory.now
    padded = -(-128 // (64 * world_size)) * 64  # each layer: two parameters of at most 64 elements, cut for the ranks
    assert now["parameters"] == 2 * padded * 4
    assert now["unsharded"] == now["gradients"] == now["buckets"] == 0


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


@case("B59")
@on_ranks(2)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_output_without_a_gradient(prefetch: int) -> None:
    model = Pair()
    model, optimizer = zerodp.shard(model, adamw(model), stage=3, units=[nn.Linear], prefetch=prefetch)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(3):
        model(torch.ones(2, 3))[0].sum().backward()
        assert zerodp.stats(model).memory.now["unsharded"] == 0
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    close("b", state["b.weight"], before["b.weight"])
    assert not torch.equal(state["a.weight"], before["a.weight"])


def most_alive(model: nn.Module, phase: str) -> int:
    alive, most = set(), 0
    for event in zerodp.stats(model).trace:
        if event.kind == "gather":
            alive.add(event.unit)
            if event.phase == phase:
                most = max(most, len(alive))
        elif event.kind == "free":
            alive.discard(event.unit)
    assert not alive
    return most


@case("B60")
@on_ranks(2)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_frozen_units_do_not_pile_up(prefetch: int) -> None:
    """Two at once in backward, one more for each unit of prefetch."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    for index in (1, 3, 5):
        model[index].requires_grad_(False)
    model, _ = zerodp.shard(model, stage=3, units=[nn.Linear], prefetch=prefetch)
    for _ in range(3):
        zerodp.stats(model).reset()
        squares(model, torch.ones(2, 8)).backward()
        assert most_alive(model, "backward") <= 2 + prefetch
        assert most_alive(model, "forward") <= 1 + prefetch
        assert zerodp.stats(model).memory.now["unsharded"] == 0


@case("B66")
@on_ranks(2)
def test_stage_3_peaks_below_stage_2() -> None:
    peaks = {}
    for stage in range(4):
        model = aligned(layers=8)
        model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[nn.Linear])
        for _ in range(3):
            squares(model, torch.ones(2, 64)).backward()
            optimizer.step()
            optimizer.zero_grad()
        zerodp.stats(model).reset()
        squares(model, torch.ones(2, 64)).backward()
        optimizer.step()
        peaks[stage] = zerodp.stats(model).memory.total_peak
    assert peaks[3] < peaks[2] < peaks[1] < peaks[0]


@case("B67")
@on_ranks(2)
@sharded_stages
def test_frozen_weights_cost_no_optimizer_memory(stage: int) -> None:
    """Nine tenths of the elements are frozen."""
    model = nn.Sequential(
        nn.Linear(64, 576, bias=False).requires_grad_(False), nn.ReLU(), nn.Linear(576, 64, bias=False)
    )
    model[2] = nn.Sequential(nn.Linear(576, 64, bias=False).requires_grad_(False), nn.Linear(64, 128, bias=False))
    trainable = 64 * 128
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[nn.Linear])
    for _ in range(2):
        optimizer.zero_grad()
        squares(model, torch.ones(2, 64)).backward()
        optimizer.step()
    memory = zerodp.stats(model).memory
    assert memory.now["first_moment"] + memory.now["second_moment"] == 2 * trainable // 2 * 4
    assert memory.now["gradients"] == trainable * 4 // (1 if stage == 1 else 2)
    assert memory.peak["buckets"] <= 2 * trainable * 4


@on_ranks(2)
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 10])
def test_unsharded_budget_is_kept_to(budget: int) -> None:
    """In units of one layer: beyond those in use or in flight never more than the budget."""
    layers, one = 6, 64 * 64 * 4
    model = aligned(layers)
    options: dict[str, Any] = {"units": [nn.Linear], "prefetch": 1, "unsharded_bytes": budget * one}
    model, optimizer = zerodp.shard(model, adamw(model), stage=3, **options)
    for _ in range(3):
        squares(model, torch.ones(2, 64)).backward()
        assert zerodp.stats(model).memory.now["unsharded"] <= budget * one
        optimizer.step()
        optimizer.zero_grad()
    assert zerodp.stats(model).memory.peak["unsharded"] <= (budget + 2) * one


@on_ranks(2)
@pytest.mark.parametrize(
    ("precision", "stage", "steps"),
    [("bf16", 0, 60), ("bf16", 1, 60), ("bf16", 2, 60), ("bf16", 3, 200), (None, 1, 60), (None, 3, 60)],
)
def test_constant_over_200_steps(precision: str | None, stage: int, steps: int) -> None:
    """Those of 60 in the other stages: what grows in every step shows at any number of them."""
    model = Net(depth=1)
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[Block], precision=precision)
    seen = []
    for step in range(steps):
        squares(model, rows(3)(step % 7, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (5, steps - 1):
            seen.append((zerodp.stats(model).memory, live_bytes()))
    (first, first_live), (last, last_live) = seen
    assert (last.now, last.peak, last.total_peak) == (first.now, first.peak, first.total_peak)
    assert abs(last_live - first_live) < 1024  # a control message may be under way


@on_ranks(2)
def test_nothing_is_left_when_model_and_optimizer_go(stage: int) -> None:
    before = baseline()
    model = aligned()
    model, optimizer = zerodp.shard(model, adamw(model), stage=stage, units=[nn.Linear])
    squares(model, torch.ones(2, 64)).backward()
    optimizer.step()
    del model, optimizer
    assert abs(baseline() - before) < 1024


class Counted(torch.autograd.Function):
    """Saves what it returns, as tanh, relu and softmax do."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        out = torch.tanh(x)
        context.save_for_backward(out)
        Counted.alive.add(context)
        return out

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:
        (out,) = context.saved_tensors
        return grad * (1 - out * out)


@on_ranks(2)
@pytest.mark.parametrize("used", [0, 1])
def test_graph_that_nobody_goes_back_through_is_let_go(used: int, stage: int) -> None:
    """All of it, as that of a generator in the step of its discriminator, or the part that belongs to an output without a loss."""

    class Heads(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            for block in self.blocks:
                x = Counted.apply(block(self.emb(x) if block is self.blocks[0] else x))
            return Counted.apply(self.head(x)), Counted.apply(x)

    model, _ = zerodp.shard(Heads(), stage=stage, units=[Block])
    for _ in range(3):
        outputs = model(torch.ones(2, 3))
        if used:
            outputs[used].sum().backward()
        del outputs
        model.zero_grad()
    assert len(Counted.alive) == 0


@on_ranks(2)
def test_page_that_the_user_still_sees_is_reported() -> None:
    """A view of a gathered weight that outlives its use pins the page; the memory is there and named, not corrupted."""

    class Leaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.lin.weight.detach()
            return self.lin(x)

    model, _ = zerodp.shard(Leaks(), stage=3, units=[nn.Linear])
    model(torch.ones(1, 8))
    close("kept", model.kept.clone(), model.state_dict()["lin.weight"])
    assert "lin" in zerodp.describe(model).partition("pinned")[2]
    model.kept = None
    model(torch.ones(1, 8))
    model.kept = None
    assert "pinned" not in zerodp.describe(model)
