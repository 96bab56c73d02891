"""Several sharded models in one program: adversaries, pairs under one loss, teachers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import Tensors, all_close, close, momentum, rows
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, Net, toy_b

case = pytest.mark.case


def mean_gradients(models: dict[str, nn.Module], losses: list[Tensor]) -> Tensors:
    """Of plain models: each rank's loss in turn, divided and added up."""
    total: Tensors = {}
    for loss in losses:
        for model in models.values():
            model.zero_grad()
        (loss / len(losses)).backward()
        for key, model in models.items():
            for name, p in model.named_parameters():
                if p.grad is not None:
                    full = f"{key}.{name}"
                    total[full] = total[full] + p.grad if full in total else p.grad.clone()
    return total


def apply(model: nn.Module, optimizer: Any, gradients: Tensors, key: str) -> None:
    for name, p in model.named_parameters():
        p.grad = gradients.get(f"{key}.{name}")
    optimizer.step()
    optimizer.zero_grad()


@case("B119")
@on_ranks(2)
def test_adversaries(stage: int) -> None:
    """The generator's loss reaches the discriminator, which is zeroed before it trains; twice over."""
    generator, discriminator = nn.Linear(3, 3), toy_b()
    plain_g, plain_d = copy.deepcopy(generator), copy.deepcopy(discriminator)
    ours = [zerodp.shard(model, momentum(model), stage=stage) for model in (generator, discriminator)]
    (g, g_optimizer), (d, d_optimizer) = ours
    plain_optimizers = momentum(plain_g), momentum(plain_d)
    for step in range(2):
        z = [rows(3)(step, 0, rank) for rank in range(2)]
        real = [rows(3)(step, 1, rank) for rank in range(2)]
        before = {name: tensor.clone() for name, tensor in d.state_dict().items()}
        d(g(z[dist.get_rank()])).mean().backward()
        g_optimizer.step()
        g_optimizer.zero_grad()
        all_close("discriminator", dict(d.state_dict()), before)
        d_optimizer.zero_grad()
        with torch.no_grad():
            fake = g(z[dist.get_rank()])
        (d(fake).pow(2).mean() + (d(real[dist.get_rank()]) - 1).pow(2).mean()).backward()
        d_optimizer.step()
        d_optimizer.zero_grad()

        models: dict[str, nn.Module] = {"g": plain_g, "d": plain_d}
        apply(plain_g, plain_optimizers[0], mean_gradients(models, [plain_d(plain_g(x)).mean() for x in z]), "g")
        plain_d.zero_grad()
        with torch.no_grad():
            fakes = [plain_g(x) for x in z]
        losses = [plain_d(f).pow(2).mean() + (plain_d(x) - 1).pow(2).mean() for f, x in zip(fakes, real, strict=True)]
        apply(plain_d, plain_optimizers[1], mean_gradients({"d": plain_d}, losses), "d")
        all_close("generator", dict(g.state_dict()), dict(plain_g.state_dict()))
        all_close("discriminator", dict(d.state_dict()), dict(plain_d.state_dict()))


@case("B120")
@on_ranks(2)
@pytest.mark.parametrize("stages", [(3, 2), (0, 3), (1, 1), (3, 3)], ids=str)
def test_two_models_under_one_loss(stages: tuple[int, int]) -> None:
    def loss(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        hidden = first(x)
        return hidden.pow(2).mean() + second(hidden).pow(2).mean()

    plain = {"a": Net(), "b": toy_b()}
    optimizers = {key: momentum(model) for key, model in plain.items()}
    pairs = [copy.deepcopy(model) for model in plain.values()]
    (a, a_optimizer), (b, b_optimizer) = (
        zerodp.shard(m, momentum(m), stage=s) for m, s in zip(pairs, stages, strict=True)
    )
    for step in range(3):
        x = [rows(3)(step, 0, rank) for rank in range(2)]
        loss(a, b, x[dist.get_rank()]).backward()
        gradients = mean_gradients(plain, [loss(plain["a"], plain["b"], batch) for batch in x])
        for key, model, optimizer in (("a", a, a_optimizer), ("b", b, b_optimizer)):
            mine = {f"{key}.{name}": gradient for name, gradient in zerodp.full_grads(model).items()}
            all_close("gradient", mine, {name: g for name, g in gradients.items() if name.startswith(key)})
            optimizer.step()
            optimizer.zero_grad()
            apply(plain[key], optimizers[key], gradients, key)
            all_close("parameter", dict(model.state_dict()), dict(plain[key].state_dict()))


@case("B121")
@on_ranks(2)
@pytest.mark.parametrize("stage", [2, 3], ids="zero{}".format)
def test_teacher_without_an_optimizer(stage: int) -> None:
    teacher, student = Net(), Net()
    plain_teacher, plain_student = copy.deepcopy(teacher), copy.deepcopy(student)
    teacher.requires_grad_(False)
    teacher, none = zerodp.shard(teacher, stage=3, units=[Block])
    assert none is None
    student, optimizer = zerodp.shard(student, momentum(student), stage=stage, units=[Block])
    plain_optimizer = momentum(plain_student)
    for step in range(3):
        x = [rows(3)(step, 0, rank) for rank in range(2)]
        mine = x[dist.get_rank()]
        with torch.no_grad():
            target = teacher(mine)
        (student(mine) - target).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses = [(plain_student(batch) - plain_teacher(batch).detach()).pow(2).mean() for batch in x]
        apply(plain_student, plain_optimizer, mean_gradients({"s": plain_student}, losses), "s")
        all_close("student", dict(student.state_dict()), dict(plain_student.state_dict()))
    memory = zerodp.stats(teacher).memory
    for kind in ("gradients", "first_moment", "second_moment", "other_state", "buckets"):
        assert memory.peak[kind] == 0, kind
    assert memory.now["unsharded"] == 0


@on_ranks(2)
@pytest.mark.parametrize("stage", [2, 3], ids="zero{}".format)
def test_gradient_through_a_frozen_model(stage: int) -> None:
    """The student's loss runs through a sharded critic that is not trained."""
    student, critic = Net(), toy_b().requires_grad_(False)
    plain = copy.deepcopy(student)
    plain_critic = copy.deepcopy(critic)
    student, _ = zerodp.shard(student, momentum(student), stage=stage, units=[Block])
    critic, _ = zerodp.shard(critic, stage=3)
    x = [rows(3)(0, 0, rank) for rank in range(2)]
    critic(student(x[dist.get_rank()])).pow(2).mean().backward()
    expected = mean_gradients({"s": plain}, [plain_critic(plain(batch)).pow(2).mean() for batch in x])
    all_close("gradient", {f"s.{n}": g for n, g in zerodp.full_grads(student).items()}, expected)


@on_ranks(2)
def test_one_optimizer_for_one_model_of_two(stage: int) -> None:
    """A sharded and a plain model side by side; the plain one stays plain."""
    plain, model = nn.Linear(3, 3), toy_b()
    start = plain.weight.detach().clone()
    model, optimizer = zerodp.shard(model, momentum(model), stage=stage)
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    model(plain(torch.ones(2, 3))).sum().backward()
    own.step()
    optimizer.step()
    assert not torch.equal(plain.weight, start)
    close("bias", plain.bias.grad, plain.weight.grad[:, 0], 1e-6)
