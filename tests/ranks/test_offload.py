"""Model states on other tiers: the same bits as on the device, whatever rests where."""

from __future__ import annotations

import contextlib
import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import Task, adamw, all_close, close, copied, named, rows, run, same, squares
from tests.ranks.pool import on_ranks
from tests.ranks.test_exact import everything, two_groups
from tests.ranks.test_optimizers import ELEMENTWISE
from tests.ranks.toys import Block, Lion, Net
from zerodp import Offload, Precision

case = pytest.mark.case
PLACES = ("host", "disk")

# optimizer, micro-batches (whether each is synchronised), most norm
TRAININGS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], tuple[bool, ...], float | None]] = {
    "AdamW, clipped": (adamw, (True,), 0.5),
    "AdamW fused, two backwards, clipped": (ELEMENTWISE["AdamW fused"], (True, True), 0.05),
    "SGD, no_sync": (ELEMENTWISE["nesterov"], (False, True), None),
    "Adagrad": (ELEMENTWISE["Adagrad"], (True,), None),
    "Adam, three states": (ELEMENTWISE["Adam"], (True,), None),
    "Lion": (lambda model: Lion(model.parameters()), (True,), None),
}


def blocks(**options: Any) -> dict[str, Any]:
    """Several units, each in several pieces."""
    return {"units": [Block], "bucket_bytes": 700, **options}


@on_ranks(2)
def test_the_same_bits(stage: int) -> None:
    """Each training with one place here and with the other in the next stage."""
    same_bits(stage, list(TRAININGS))


@on_ranks(3)
def test_the_same_bits_on_three_ranks() -> None:
    same_bits(3, list(TRAININGS)[:3])


def same_bits(stage: int, trainings: list[str]) -> None:
    for number, (optimizer, micro, max_norm) in enumerate(TRAININGS[name] for name in trainings):
        task = Task(Net, rows(3), optimizer=optimizer, micro=micro, max_norm=max_norm)
        reference = run(task, **blocks(stage=stage))
        place = PLACES[(number + stage) % 2]
        same(run(task, **blocks(stage=stage, offload=Offload(optimizer=place))), reference)


@on_ranks(2)
def test_low_precision(stage: int) -> None:
    for precision, micro, max_norm in (
        (Precision(torch.bfloat16), (True,), 0.5),
        (Precision(torch.float16, init_scale=2**9), (True, False, True), 0.5),
        (Precision(torch.bfloat16, grad_dtype=torch.bfloat16), (True, True), None),
    ):
        task = Task(Net, rows(3), optimizer=adamw, micro=micro, max_norm=max_norm)
        options = blocks(stage=stage, precision=precision)
        reference = run(task, **options)
        for place in PLACES:
            same(run(task, offload=Offload(optimizer=place), **options), reference)


@on_ranks(2)
def test_while_everything_changes() -> None:
    """Rates, frozen parts, and a group that joins late."""
    task = Task(Net, rows(3), optimizer=two_groups, steps=7, micro=(False, True), between=everything)
    for stage in (1, 3):
        reference = run(task, **blocks(stage=stage))
        for place in PLACES:
            same(run(task, **blocks(stage=stage, offload=Offload(optimizer=place))), reference)


# ---- every way to look at states, and to change them


class Story:
    """A model in training, and what was seen of it."""

    def __init__(self, offload: Offload, optimizer: Any = adamw, **options: Any) -> None:
        torch.manual_seed(0)
        model = Net()
        self.model, self.optimizer = zerodp.shard(model, optimizer(model), offload=offload, **blocks(**options))
        self.steps, self.seen = 0, list[dict[str, Tensor]]()

    def backward(self) -> None:
        loss = squares(self.model, rows(3)(self.steps, 0, dist.get_rank()))
        self.optimizer.backward(loss)
        self.steps += 1

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def look(self) -> None:
        self.seen.append(copied(self.model.state_dict()))
        state = self.optimizer.state_dict()["state"]
        self.seen.append({f"{name}.{key}": value.clone() for name, of in state.items() for key, value in of.items()})

    def equals(self, other: Story) -> None:
        assert len(self.seen) == len(other.seen)
        for number, (mine, theirs) in enumerate(zip(self.seen, other.seen, strict=True)):
            all_close(f"look {number}:", mine, theirs)


def told(offload: Offload, **options: Any) -> Story:
    story = Story(offload, **options)
    model, optimizer = story.model, story.optimizer
    story.step()
    story.look()
    for name, _, part in zerodp.local_shards(model):
        if "bias" in name:
            part.mul_(1.5)
    story.backward()
    for _, _, part in zerodp.local_shards(model, "gradients"):
        part.mul_(0.5)
    story.seen.append(zerodp.full_grads(model))
    norms = [optimizer.clip_grad_norm_(0.1), optimizer.clip_grad_norm_(0.05)]
    story.seen += [{"norms": torch.tensor(norms)}, zerodp.full_grads(model)]
    story.backward()  # on top of what was clipped
    story.seen.append(zerodp.full_grads(model))
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    story.look()
    with zerodp.full_params(model, write=True), torch.no_grad():
        model.head.weight.add_(0.125)
        model.blocks[1].a.bias[0] = 1.0
    story.step()
    story.look()
    model.load_state_dict(
        {name: value * 1.25 if "a.weight" in name else value for name, value in model.state_dict().items()}
    )
    state = optimizer.state_dict()
    for of in state["state"].values():
        of["exp_avg"].mul_(0.5)
    optimizer.load_state_dict(state)
    story.look()
    story.step()
    story.seen.append(zerodp.full_state_dict(model, rank0_only=False))
    with zerodp.full_params(model):
        story.seen.append(copied(dict(model.named_parameters())))
    model, optimizer = zerodp.unshard(model, optimizer)
    story.seen.append(copied(dict(model.named_parameters())))
    story.seen += [copied(of) for of in optimizer.state_dict()["state"].values()]
    return story


@on_ranks(2)
def test_every_way_to_look_at_states(stage: int) -> None:
    for number, precision in enumerate(("fp32", "bf16")):
        reference = told(Offload(), stage=stage, precision=precision)
        place = PLACES[(number + stage) % 2]
        told(Offload(optimizer=place), stage=stage, precision=precision).equals(reference)


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """A folder that all ranks see; rank 0 makes and removes it."""
    names: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    yield names[0]
    zerodp.latest(names[0])  # waits for saves
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(names[0])


@case("B156")
@on_ranks(2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_from_any_tier_to_any_other(asynchronous: bool) -> None:
    device, host, disk = (Offload(optimizer=place) for place in ("device", "host", "disk"))
    with shared_folder() as folder:
        for number, (source, target) in enumerate([(device, disk), (disk, host), (host, device), (disk, disk)]):
            first = Story(source, stage=3, precision="bf16")
            first.step()
            zerodp.save(f"{folder}/{number}", first.model, first.optimizer, asynchronous=asynchronous)
            first.step()
            second = Story(target, stage=3, precision="bf16")
            second.step()  # has states of its own
            zerodp.load(f"{folder}/{number}", second.model, second.optimizer)
            second.steps = 1
            second.step()
            first.look()
            second.look()
            second.equals(first)


@on_ranks(2)
def test_what_is_on_disk_is_never_seen(stage: int) -> None:
    """Nor taken for something else: an error names it, and says what to do."""
    story = Story(Offload(optimizer="disk"), stage=stage)
    story.step()
    segment = next(one for one in story.optimizer.param_groups[0]["params"] if one.numel())
    for use in (lambda: segment + 1, lambda: segment.data, lambda: segment.zero_(), lambda: segment.tolist()):
        with pytest.raises(
            zerodp.ShardedError, match=r"this rank's part of the master of parameter '.*' rests on disk"
        ):
            use()
    moment = story.optimizer.state[segment]["exp_avg"]
    assert (moment.shape, moment.dtype) == (segment.shape, segment.dtype)
    with pytest.raises(
        zerodp.ShardedError, match=r"optimizer state 'exp_avg' of parameter '.*' rests on disk and was used by 'mul'"
    ):
        moment * 2
    if stage >= 2:
        story.backward()
        with pytest.raises(zerodp.ShardedError, match=r"gradient of unit '.*' rests on disk.*local_shards"):
            segment.grad.add_(1)


# ---- several places at once, and parameters


SPLITS: dict[str, Offload] = {
    "half on the host": Offload(optimizer="host", fraction=0.5),
    "a third on disk": Offload(optimizer="disk", fraction=0.34),
    "host, then disk": Offload(optimizer="host", host_bytes=9000),
    "device, host and disk": Offload(optimizer="host", fraction=0.7, host_bytes=5000),
}
PARAMETERS: dict[str, Offload] = {
    "parameters on the host": Offload(params="host"),
    "parameters on disk": Offload(params="disk"),
    "both on the host": Offload(optimizer="host", params="host"),
    "both on disk": Offload(optimizer="disk", params="disk"),
    "host and disk": Offload(optimizer="disk", params="host", fraction=0.6),
    "as much as fits on the host": Offload(optimizer="host", params="host", host_bytes=4000),
}


def places_of(model: nn.Module) -> set[str]:
    runtime: Any = model._zerodp
    return {home.place for flat in runtime.flats() for home in flat.homes}


@on_ranks(2)
@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (3, "fp32")])
def test_several_places(stage: int, precision: str) -> None:
    options = {"stage": stage, "precision": precision}
    reference = told(Offload(), **options)
    expected = {
        "half on the host": {"device", "host"},
        "a third on disk": {"device", "disk"},
        "host, then disk": {"host", "disk"},
    }
    for split, offload in SPLITS.items():
        with named(split):
            told(offload, **options).equals(reference)
            assert places_of(Story(offload, stage=3).model) == expected.get(split, {"device", "host", "disk"})


@on_ranks(2)
def test_parameters_elsewhere() -> None:
    reference = told(Offload(), stage=3)
    task = Task(Net, rows(3), optimizer=two_groups, steps=7, micro=(False, True), between=everything)
    options = blocks(stage=3, precision="bf16", prefetch=2)
    records = run(task, **options)
    for number, (split, offload) in enumerate(PARAMETERS.items()):
        with named(split):
            told(offload, stage=3).equals(reference)
            if number % 2:  # on disk, alone and with the rest, and where only some fits
                same(run(task, offload=offload, **options), records)


@on_ranks(2)
def test_a_mapping_of_stages_with_parameters_elsewhere() -> None:
    stages = {"blocks.*": 3, "*": 1}
    reference = told(Offload(), stage=stages)
    told(Offload(optimizer="host", params="disk"), stage=stages).equals(reference)


@on_ranks(2)
def test_parameters_that_thaw() -> None:
    """They get a master where they rest."""

    def thaw(step: int, model: nn.Module, optimizer: Any) -> None:
        model.blocks.requires_grad_(step > 0)

    def half_frozen() -> nn.Module:
        model = Net().bfloat16()
        model.blocks.requires_grad_(False)
        return model

    task = Task(half_frozen, lambda *where: rows(3)(*where).bfloat16(), optimizer=adamw, steps=3, between=thaw)
    reference = run(task, **blocks(stage=3))
    for place in PLACES:
        same(run(task, **blocks(stage=3, offload=Offload(optimizer=place, params=place))), reference)


@on_ranks(2)
def test_a_model_without_optimizer() -> None:
    """Its parameters may rest elsewhere, in their own dtype."""
    torch.manual_seed(0)
    plain = Net()
    x = rows(3)(0, 0, 0)
    expected = plain(x)
    for place in ("host", "disk"):
        torch.manual_seed(0)
        model, _ = zerodp.shard(Net().requires_grad_(False), stage=3, units=[Block], offload=Offload(params=place))
        close("output", model(x), expected)
        assert zerodp.stats(model).memory.now["parameters"] == 0


# ---- the delayed update


DELAYED: dict[str, dict[str, Any]] = {
    "host": {"optimizer": "host"},
    "disk": {"optimizer": "disk"},
    "host and disk": {"optimizer": "host", "host_bytes": 9000},
}


def delayed(place: str, steps: int, warm_up: int, looks: bool, **options: Any) -> list[dict[str, Tensor]]:
    """What each forward computed with, and at the end the masters."""
    torch.manual_seed(0)
    model = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer = zerodp.shard(
        model, optimizer, **blocks(offload=Offload(delayed_update=warm_up, **DELAYED[place]), **options)
    )
    seen = []
    for step in range(steps):
        with zerodp.full_params(model):
            seen.append(copied(dict(model.named_parameters())))
        for micro in range(2):
            squares(model, rows(3)(step, micro, dist.get_rank())).backward()
        optimizer.step()
        scheduler.step()
        if looks:  # which changes nothing
            optimizer.state_dict()
            zerodp.full_grads(model)
            assert zerodp.stats(model).memory.host.get("master") or place == "disk"
            model.state_dict()
            list(zerodp.local_shards(model))
        optimizer.zero_grad()
    return [*seen, copied(model.state_dict())]


def delayed_oracle(steps: int, warm_up: int) -> list[dict[str, Tensor]]:
    """Plain torch: one model that forward computes with, and one that the optimizer steps."""
    torch.manual_seed(0)
    master = Net()
    used = copy.deepcopy(master)
    optimizer = torch.optim.AdamW(master.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    seen = []
    for step in range(steps):
        seen.append(copied(dict(used.named_parameters())))
        total: dict[str, Tensor] = {}
        for micro in range(2):
            for rank in range(dist.get_world_size()):
                (squares(used, rows(3)(step, micro, rank)) / dist.get_world_size()).backward()
                for name, p in used.named_parameters():
                    total.setdefault(f"{micro}.{name}", torch.zeros_like(p)).add_(p.grad)
                    p.grad = None
        if step >= warm_up:
            used.load_state_dict(master.state_dict())
        for name, p in master.named_parameters():
            p.grad = total[f"0.{name}"] + total[f"1.{name}"]
        optimizer.step()
        scheduler.step()
        if step < warm_up:
            used.load_state_dict(master.state_dict())
    return [*seen, copied(master.state_dict())]


@on_ranks(2)
def test_a_delayed_update_is_one_step_behind(stage: int) -> None:
    """And nothing else: equal to plain torch, bitwise, whoever looks at the states in between. Every stage, and every place, is
    looked at and left alone."""
    expected = delayed_oracle(4, 2)
    for index, place in enumerate(DELAYED):
        found = delayed(place, 4, 2, looks=(stage + index) % 2 == 1, stage=stage)
        with named(place):
            for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
                all_close(f"step {number}:", mine, theirs)


@on_ranks(2)
def test_a_delayed_update_is_the_same_on_every_tier(stage: int) -> None:
    """Also of gradients that are cast, scaled, clipped, added up or thrown away, and with parameters elsewhere. The host, and in
    turn each of the other places, so that every stage and every precision meets all three."""
    host, *others = DELAYED.values()
    for number, (precision, micro, max_norm) in enumerate(
        (
            (Precision(torch.bfloat16), (True,), 0.5),
            (Precision(torch.bfloat16, grad_dtype=torch.bfloat16), (False, True), 0.05),
            (Precision(torch.float16, grad_dtype=torch.float16, init_scale=2**9), (True, True), None),
        )
    ):
        task = Task(Net, rows(3), optimizer=adamw, micro=micro, max_norm=max_norm, steps=4)
        options = blocks(stage=stage, precision=precision)
        first = run(task, offload=Offload(delayed_update=1, **host), **options)
        other = Offload(delayed_update=1, **others[(stage + number) % 2])
        same(run(task, offload=other, **options), first)
        if stage == 3:
            offload = Offload(optimizer="disk", params="disk", delayed_update=1)
            same(run(task, offload=offload, **options), first)


@on_ranks(2)
def test_a_delayed_update_ends_before_states_change(stage: int) -> None:
    """Edits, loads and the way back to plain torch come on top of it."""
    reference, *others = (
        Story(offload, stage=stage)
        for offload in (Offload(), *(Offload(delayed_update=1, **where) for where in DELAYED.values()))
    )
    for story in (reference, *others):
        story.step()
        story.step()  # the first one's runs beside what comes
        with zerodp.full_params(story.model, write=True), torch.no_grad():
            story.model.head.weight.add_(0.5)
        story.look()
        story.step()
        story.model.load_state_dict(story.model.state_dict())
        story.step()
        story.optimizer.load_state_dict(story.optimizer.state_dict())
        story.look()
        plain, _ = zerodp.unshard(story.model, story.optimizer)
        story.seen.append(copied(plain.state_dict()))
    for place, story in zip(DELAYED, others, strict=True):
        with named(place):
            story.equals(reference)


@on_ranks(2)
@pytest.mark.parametrize("place", PLACES)
def test_a_delayed_update_with_fraction_and_skipped_steps(place: str) -> None:
    """What stays on the device is not delayed; a step that is skipped for an overflow still brings the last one's update."""
    precision = Precision(torch.float16, init_scale=2.0**8)
    offload = Offload(optimizer=place, delayed_update=1, fraction=0.5)
    story = Story(offload, stage=2, precision=precision)
    story.step()
    story.step()
    with zerodp.full_params(story.model):
        before = copied(dict(story.model.named_parameters()))
    bad = rows(3)(0, 0, dist.get_rank()) * (float("inf") if dist.get_rank() == dist.get_world_size() - 1 else 1.0)
    story.optimizer.backward(squares(story.model, bad))
    story.optimizer.step()
    story.optimizer.zero_grad()
    assert story.optimizer.last_step_skipped
    with zerodp.full_params(story.model):
        after = copied(dict(story.model.named_parameters()))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert changed < set(before)  # the others were updated at once, before this step
    all_close("published:", after, {name: value.half() for name, value in story.model.state_dict().items()})
