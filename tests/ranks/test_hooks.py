"""The user's own code around training: hooks of all kinds, autocast, GradScaler, closures, inference mode, exceptions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerodp
from tests.ranks.oracle import Task, adamw, all_close, close, copied, momentum, parity, rows, squares
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block, CheckpointedNet, Net

Register = Callable[[nn.Module], Any]
MADE = ("before", "after")
made = pytest.mark.parametrize("made", MADE)
layouts = pytest.mark.parametrize("units", [None, [Block]], ids=["whole", "blocks"])


def hooked(register: Register, made: str, model: Callable[[], nn.Module] = Net, **settings: Any) -> Task:
    """A task whose model gets the user's hooks when it is built, or once it is sharded."""

    def build() -> nn.Module:
        net = model()
        if made == "before":
            register(net)
        return net

    def between(step: int, net: nn.Module, optimizer: Any) -> None:
        if made == "after" and step == 0:
            register(net)

    return Task(build, rows(3), between=between, **settings)


# ---- hooks on parameters


def double(model: nn.Module) -> None:
    """By the value that the hook returns."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)


def halve(p: Any) -> None:
    p.grad *= 0.5


def clip(p: Any) -> None:
    p.grad.clamp_(-0.01, 0.01)


def zero(p: Any) -> None:
    p.grad.zero_()


def forget(p: Any) -> None:
    p.grad = None


def scale_in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)


def replace(model: nn.Module) -> None:
    """By a gradient of one's own, from its sign: no linear function of it."""

    def signed(p: Any) -> None:
        p.grad = p.grad.sign() * 0.25

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(signed)


def drop(model: nn.Module) -> None:
    """As if the parameter had got no gradient: it is not stepped, and not decayed."""
    net: Any = model
    net.blocks[1].a.weight.register_post_accumulate_grad_hook(forget)


def several(model: nn.Module) -> None:
    """In the order in which they were registered, and post-accumulate ones last."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
        parameter.register_hook(lambda gradient: gradient + 0.005)
        parameter.register_hook(lambda gradient: gradient * 4)


def removed(model: nn.Module) -> None:
    for parameter in model.parameters():
        handles = [
            parameter.register_hook(lambda gradient: gradient * 8),
            parameter.register_post_accumulate_grad_hook(zero),
        ]
        parameter.register_hook(lambda gradient: gradient * 2)
        for handle in handles:
            handle.remove()


PARAMETER_HOOKS = {hook.__name__: hook for hook in (double, scale_in_place, replace, drop, several, removed)}


@on_ranks(2)
@pytest.mark.parametrize("hook", PARAMETER_HOOKS)
def test_what_parameter_hooks_change_counts(hook: str, stage: int) -> None:
    """They see this rank's own gradient, so a sum is what both sides can be compared by. Every two of hook, time and stage meet."""
    made = MADE[(list(PARAMETER_HOOKS).index(hook) + stage) % 2]
    task = hooked(PARAMETER_HOOKS[hook], made, optimizer=adamw, micro=(True, False, True), reduction="sum", steps=2)
    parity(task, stage=stage, units=[Block], reduction="sum")


@on_ranks(2)
@layouts
@pytest.mark.parametrize("kind", ["tensor", "post-accumulate"])
def test_parameter_hooks_fire_once_per_backward_on_the_full_own_gradient(kind: str, units: Any, stage: int) -> None:
    """Every two of kind, layout, time and stage meet."""
    made = MADE[((kind == "tensor") + (units is None) + stage) % 2]
    seen: dict[str, list[Tensor]] = {}

    def record(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if kind == "tensor":
                parameter.register_hook(lambda gradient, name=name: seen.setdefault(name, []).append(gradient.clone()))
            else:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: seen.setdefault(name, []).append(p.grad.clone())
                )

    task = hooked(record, made)
    plain, _ = task.build(0)
    squares(plain, rows(3)(0, 0, dist.get_rank())).backward()
    own = {name: p.grad for name, p in plain.named_parameters()}
    seen.clear()
    model, optimizer = zerodp.shard(*task.build(0), stage=stage, units=units)
    if made == "after":
        record(model)
    for _ in range(2):
        squares(model, rows(3)(0, 0, dist.get_rank())).backward()
    assert set(seen) == set(own)
    for name, gradients in seen.items():
        assert len(gradients) == 2, name
        for gradient in gradients:
            close(name, gradient, own[name])
    optimizer.step()


class Tied(Net):
    """Three uses of one weight."""

    def __init__(self) -> None:
        super().__init__(width=3)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + nn.functional.linear(x, self.emb.weight)


@on_ranks(2)
@made
def test_hook_of_a_tied_weight_fires_once(made: str, stage: int) -> None:
    calls: list[str] = []

    def register(model: nn.Module) -> None:
        net: Any = model
        net.emb.weight.register_hook(lambda gradient: calls.append("tensor"))
        net.emb.weight.register_post_accumulate_grad_hook(lambda p: calls.append("post"))

    task = hooked(register, made, model=Tied)
    model, optimizer = zerodp.shard(*task.build(0), stage=stage, units=[Block])
    task.between(0, model, optimizer)
    squares(model, rows(3)(0, 0, 0)).backward()
    assert calls == ["tensor", "post"]


@on_ranks(2)
@made
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
def test_parameter_hooks_under_checkpointing(reentrant: bool, made: str, stage: int) -> None:
    parity(hooked(double, made, model=lambda: CheckpointedNet(reentrant)), stage=stage, units=[Block])


@on_ranks(2)
def test_hooks_see_unscaled_shapes_in_low_precision(stage: int) -> None:
    """Gradients in the compute dtype, full in shape; what is written into them counts."""
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    shapes: list[Any] = []

    def fill(p: Any) -> None:
        p.grad.fill_(dist.get_rank() + 1.0)

    model[0].weight.register_post_accumulate_grad_hook(fill)
    model[1].weight.register_hook(lambda gradient: shapes.append((gradient.dtype, tuple(gradient.shape))))
    model, _ = zerodp.shard(model, momentum(model), stage=stage, precision="bf16")
    model(torch.ones(1, 4)).sum().backward()
    assert shapes == [(torch.bfloat16, (2, 3))]
    close("mean of 1 and 2", zerodp.full_grads(model)["0.weight"].float(), torch.full((3, 4), 1.5))


# ---- hooks on modules


def on_forward(model: nn.Module) -> None:
    """Of the root, of units, and of what is inside them; with and without keywords."""
    net: Any = model
    net.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    net.register_forward_hook(lambda module, args, output: output + 1)
    net.blocks[0].register_forward_pre_hook(lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
    net.blocks[1].register_forward_hook(lambda module, args, output: output * 0.5, prepend=True)
    net.blocks[1].a.register_forward_hook(lambda module, args, output: output.relu())
    net.head.register_forward_hook(lambda module, args, kwargs, output: output * 3, with_kwargs=True, always_call=True)


def on_backward(model: nn.Module) -> None:
    net: Any = model
    net.blocks[0].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
    net.blocks[1].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 0.5,))
    net.blocks[2].b.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0].clamp(-0.1, 0.1),))
    net.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 4,))


def reads_weights(model: nn.Module) -> None:
    """Of its own module, and of one that is not here."""
    net: Any = model
    net.blocks[0].register_forward_hook(lambda module, args, output: output * module.a.weight.norm())
    net.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] + net.blocks[2].b.bias.sum(),))
    net.blocks[2].register_forward_hook(lambda module, args, output: output + net.head.weight.mean())


def with_input_gradient(model: nn.Module, x: Tensor) -> Tensor:
    """Full backward hooks want inputs that have a gradient."""
    return squares(model, x.clone().requires_grad_())


MODULE_HOOKS = {hook.__name__: hook for hook in (on_forward, on_backward, reads_weights)}


@on_ranks(2)
@layouts
@pytest.mark.parametrize("hook", MODULE_HOOKS)
def test_what_module_hooks_change_counts(hook: str, units: Any, stage: int) -> None:
    """Every two of hook, layout, time and stage meet."""
    made = MADE[(list(MODULE_HOOKS).index(hook) + (units is None) + stage) % 2]
    task = hooked(MODULE_HOOKS[hook], made, loss=with_input_gradient, reduction="sum")
    parity(task, stage=stage, units=units, reduction="sum")


@on_ranks(2)
@made
def test_module_hooks_fire_as_often_as_in_plain_torch(made: str, stage: int) -> None:
    calls: list[str] = []
    note = calls.append

    def register(model: nn.Module) -> None:
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda module, args, name=name: note(f"{name} before"))
            module.register_forward_hook(lambda module, args, output, name=name: note(f"{name} after"))
            module.register_full_backward_hook(lambda module, inputs, outputs, name=name: note(f"{name} back"))

    task = hooked(register, made)
    plain = Net()
    register(plain)
    squares(plain, rows(3)(0, 0, 0).requires_grad_()).backward()
    expected = list(calls)
    model, optimizer = zerodp.shard(*task.build(0), stage=stage, units=[Block])
    task.between(0, model, optimizer)
    calls.clear()
    squares(model, rows(3)(0, 0, 0).requires_grad_()).backward()
    assert calls == expected


@on_ranks(2)
def test_hooks_on_every_module_of_the_process(stage: int) -> None:
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 2 if isinstance(module, nn.Linear) else None
    )
    try:
        parity(Task(Net, rows(3)), stage=stage, units=[Block])
    finally:
        handle.remove()


@on_ranks(2)
def test_hooks_on_activations_and_on_accumulation_of_several(stage: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        out.register_hook(lambda gradient: gradient * 2)
        return out.pow(2).mean()

    parity(Task(Net, rows(3), loss, micro=(True, True)), stage=stage, units=[Block])


# ---- autocast and GradScaler


def autocast_outside(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    assert out.dtype == torch.bfloat16
    return out.float().pow(2).mean()


class AutocastNet(Net):
    """Autocast inside, and blocks recomputed under it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.emb(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
        return self.head(x.float())


AUTOCAST = {
    "outside": Task(Net, rows(3), autocast_outside, optimizer=adamw, micro=(True, False, True)),
    "inside": Task(AutocastNet, rows(3), optimizer=adamw),
}


@on_ranks(2)
@layouts
@pytest.mark.parametrize("where", AUTOCAST)
def test_autocast(where: str, units: Any, stage: int) -> None:
    parity(AUTOCAST[where], stage=stage, units=units)
    assert torch.is_autocast_cache_enabled()


@on_ranks(2)
@pytest.mark.parametrize("max_norm", [None, 0.05], ids=["", "clipped"])
def test_grad_scaler_with_an_overflow_on_one_rank(max_norm: float | None, stage: int) -> None:
    """All ranks skip that step and halve the scale; the others are those of plain training, as scales are powers of two."""
    task = Task(Net, rows(3), steps=4, optimizer=adamw)
    plain, reference = task.build(0)
    for step in (0, 2, 3):
        for rank in range(2):
            (squares(plain, task.batch(step, 0, rank)) / 2).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        reference.step()
        reference.zero_grad()
    model, optimizer = zerodp.shard(*task.build(0), stage=stage, units=[Block])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for step in range(task.steps):
        x = task.batch(step, 0, dist.get_rank())
        if step == 1 and dist.get_rank() == 1:
            x[0, 0] = float("inf")
        scaler.scale(squares(model, x)).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    assert optimizer.skipped_steps == 1
    all_close("parameter", dict(model.state_dict()), dict(plain.state_dict()), 0.0 if max_norm is None else 1e-6)


# ---- closures, double backward, evaluation


@on_ranks(2)
@layouts
def test_closures(units: Any, stage: int) -> None:
    task = Task(Net, rows(3))
    plain, reference = task.build(0)
    model, optimizer = zerodp.shard(*task.build(0), stage=stage, units=units)

    def closure(net: nn.Module, its: Any, step: int, ranks: list[int], divisor: int) -> Callable[[], Tensor]:
        def evaluate() -> Tensor:
            its.zero_grad()
            for rank in ranks:
                loss = squares(net, task.batch(step, 0, rank)) / divisor
                loss.backward()
            return loss

        return evaluate

    for step in range(3):
        loss = optimizer.step(closure(model, optimizer, step, [dist.get_rank()], 1))
        reference.step(closure(plain, reference, step, [0, 1], 2))
        assert loss.isfinite()
    all_close("parameter", dict(model.state_dict()), dict(plain.state_dict()))


class Smooth(Net):
    """Its gradients are penalised through two orders."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            energy = super().forward(x).pow(2).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


@on_ranks(2)
@layouts
def test_double_backward_with_a_gradient_inside_forward(units: Any, stage: int) -> None:
    """An energy whose force is what the model gives, as in molecular dynamics."""
    parity(Task(Smooth, rows(3), micro=(True, True)), stage=stage, units=units)


@on_ranks(2)
def test_gradients_that_are_left_to_the_user(stage: int) -> None:
    """autograd.grad by inputs or activations changes no parameter's gradient."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x)
        (by_input,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        return (out * by_input.detach()).pow(2).mean()

    parity(Task(Net, rows(3), loss), stage=stage, units=[Block])


@contextlib.contextmanager
def evaluating(model: nn.Module, how: str) -> Iterator[None]:
    model.eval()
    with torch.inference_mode() if how == "inference_mode" else torch.no_grad():
        yield
    model.train()


@on_ranks(2)
@layouts
@pytest.mark.parametrize("how", ["inference_mode", "no_grad"])
def test_evaluation_between_training_steps(how: str, units: Any, stage: int) -> None:
    """Also before the first; what evaluation brings here is no inference tensor to training. Every two of these meet."""
    first = ((how == "no_grad") + (units is None) + stage) % 2
    outputs: dict[bool, list[Tensor]] = {True: [], False: []}

    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        if step >= first:
            with evaluating(model, how):
                outputs[isinstance(model, zerodp.ShardedModule)] += [model(rows(3)(step, 0, 0))]

    options = {"unsharded_bytes": 700} if stage == 3 else {}
    parity(Task(Net, rows(3), between=between, steps=3), stage=stage, units=units, **options)
    for mine, expected in zip(outputs[True], outputs[False], strict=True):
        close("output", mine, expected)


# ---- exceptions


class Trips(Net):
    """Raises in the middle of forward, or of backward, when told."""

    def __init__(self) -> None:
        super().__init__()
        self.trip = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1 and self.trip == "forward":
                raise ArithmeticError("in forward")
            if index == 1 and self.trip == "backward":
                x.register_hook(fail)
        return self.head(x)


def fail(gradient: Tensor) -> None:
    raise ArithmeticError("in backward")


@on_ranks(2)
@layouts
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exceptions_pass_through_and_training_goes_on(where: str, units: Any, stage: int) -> None:
    """On all ranks alike; the half-finished gradients are zeroed, as they must be in plain torch. In the first step or later:
    every two of that, place, layout and stage meet."""
    first = ((where == "forward") + (units is None) + stage) % 2

    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        if step >= first:
            net: Any = model
            net.trip = where
            with pytest.raises(ArithmeticError, match=f"in {where}"):
                squares(model, torch.ones(2, 3)).backward()
            net.trip = ""
            optimizer.zero_grad()
        if isinstance(model, zerodp.ShardedModule):
            now = zerodp.stats(model).memory.now
            assert (now["unsharded"], now["buckets"]) == (0, 0)

    parity(Task(Trips, rows(3), between=between, steps=3), stage=stage, units=units)


@on_ranks(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exceptions_leave_weights_readable(where: str, stage: int) -> None:
    model, optimizer = Task(Trips, rows(3)).build(0)
    start = copied(dict(model.state_dict()))
    model, optimizer = zerodp.shard(model, optimizer, stage=stage, units=[Block])
    model.trip = where
    with pytest.raises(ArithmeticError):
        squares(model, torch.ones(2, 3)).backward()
    all_close("weight", dict(model.state_dict()), start)
    with zerodp.full_params(model):
        all_close("weight", copied(dict(model.named_parameters())), start)
    if stage == 3:
        with pytest.raises(zerodp.ShardedError, match="outside forward and backward"):
            model.head.weight.sum()
