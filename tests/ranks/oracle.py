"""What right means: plain torch in one process, and the comparison of a sharded run with it.

The oracle takes each rank's batch in turn through the same model, divides the loss by the number of ranks, adds the
gradients up in rank order and makes one optimizer step. Every rank has its own buffers and its own random state.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import zerodp

Tensors = dict[str, Tensor]


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def momentum(model: nn.Module) -> Optimizer:
    """Unlike Adam it shows a gradient that is wrong by a factor."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def rows(width: int, count: int = 4) -> Callable[[int, int, int], Tensor]:
    """Batches of random rows, another for every step, micro-batch and rank."""

    def batch(step: int, micro: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1 + step * 100 + micro * 10 + rank)
        return torch.randn(count, width, generator=generator)

    return batch


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).pow(2).mean()


def nothing(step: int, model: nn.Module, optimizer: Optimizer) -> None:
    pass


@dataclass
class Task:
    """A training run, described so that both sides can make it.

    batch: of (step, micro-batch, rank).
    loss: one loss, or several that are computed first and then each put through its own backward.
    steps: the first has no moments and records the order, the second uses both.
    micro: per micro-batch of a step, whether its backward is synchronised (False = under ``no_sync``).
    between: called before every step, with both sides' own model and optimizer.
    brief: record the losses of every step, and the rest only at the last, where whatever went wrong before still shows;
        False tells the step as well, and takes twice as long.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Any]
    loss: Callable[[nn.Module, Any], Tensor | Sequence[Tensor]] = squares
    optimizer: Callable[[nn.Module], Optimizer] = momentum
    steps: int = 2
    micro: Sequence[bool] = (True,)
    max_norm: float | None = None
    between: Callable[[int, nn.Module, Any], None] = nothing
    reduction: str = "mean"
    seed: int = 0
    brief: bool = True

    def build(self, rank: int) -> tuple[nn.Module, Optimizer]:
        """The same model everywhere, and from here on each rank's own random numbers."""
        seed = (
            torch.default_generator.manual_seed
        )  # the CPU's alone: torch.manual_seed writes its stack down for each kind of device
        seed(self.seed)
        model = self.model()
        optimizer = self.optimizer(model)
        seed(1000 + rank)
        return model, optimizer

    def recorded(self, step: int) -> bool:
        return not self.brief or step == self.steps - 1

    def losses(self, model: nn.Module, batch: Any) -> list[Tensor]:
        loss = self.loss(model, batch)
        return [loss] if isinstance(loss, Tensor) else list(loss)


@dataclass
class Record:
    """One step as one rank sees it: its losses, the reduced gradients (before clipping), the norm, and what came out."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: Tensors = field(default_factory=dict)
    norm: float | None = None
    parameters: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)


class Subject(Protocol):
    """Whatever trains a model over the ranks: zerodp here, another library where the oracle itself is tested."""

    model: nn.Module
    optimizer: Any

    def no_sync(self) -> contextlib.AbstractContextManager[Any]: ...
    def backward(self, loss: Tensor) -> None: ...
    def gradients(self) -> Tensors: ...
    def clip(self, max_norm: float) -> float: ...
    def parameters(self) -> Tensors: ...
    def buffers(self) -> Tensors: ...


class Zero:
    """zerodp as a subject."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, **options: Any):
        self.model, self.optimizer = zerodp.shard(model, optimizer, **options)
        precision = options.get("precision")
        self.scaled = torch.float16 == getattr(precision, "param_dtype", torch.float16 if precision == "fp16" else None)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return self.model.no_sync()

    def backward(self, loss: Tensor) -> None:
        if self.scaled:
            self.optimizer.backward(loss)
        else:
            loss.backward(ones(loss))

    def gradients(self) -> Tensors:
        return zerodp.full_grads(self.model)

    def clip(self, max_norm: float) -> float:
        return self.optimizer.clip_grad_norm_(max_norm)

    def parameters(self) -> Tensors:
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return {name: tensor for name, tensor in self.model.state_dict().items() if name in names}

    def buffers(self) -> Tensors:
        return dict(self.model.named_buffers())


def train(task: Task, wrap: Callable[[nn.Module, Optimizer], Subject]) -> list[Record]:
    """This rank's part of a distributed run."""
    rank = dist.get_rank()
    subject = wrap(*task.build(rank))
    records = []
    for step in range(task.steps):
        record = Record()
        task.between(step, subject.model, subject.optimizer)
        for micro, synced in enumerate(task.micro):
            with contextlib.nullcontext() if synced else subject.no_sync():
                losses = task.losses(subject.model, task.batch(step, micro, rank))
                for loss in losses:
                    subject.backward(loss)
            record.losses += [loss.detach().clone() for loss in losses]
        if task.recorded(step):
            record.gradients = copied(subject.gradients())
        if task.max_norm is not None:
            record.norm = subject.clip(task.max_norm)
        subject.optimizer.step()
        subject.optimizer.zero_grad()
        if task.recorded(step):
            record.parameters = copied(subject.parameters())
            record.buffers = copied(subject.buffers())
        records.append(record)
    return records


class RankState:
    """What one rank has for itself in the oracle: buffers, random state, and gradients not yet added to the others'."""

    def __init__(self, model: nn.Module, rank: int):
        self.buffers = copied(dict(model.named_buffers()))
        self.random = torch.Generator().manual_seed(1000 + rank).get_state()
        self.pending: Tensors = {}

    @contextlib.contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        torch.set_rng_state(self.random)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(self.buffers[name])
        yield
        self.random = torch.get_rng_state()
        self.buffers = copied(dict(model.named_buffers()))


class Oracle:
    """Plain torch. With ``dtype`` the model computes in it, from an fp32 master that the optimizer updates."""

    def __init__(self, task: Task, world_size: int, dtype: torch.dtype | None = None):
        self.task, self.world_size, self.dtype = task, world_size, dtype
        self.master, self.optimizer = task.build(0)
        self.model = self.master if dtype is None else low_precision(self.master, dtype)
        self.ranks = [RankState(self.model, rank) for rank in range(world_size)]
        self.gradients: Tensors = {}

    def micro_batch(self, step: int, micro: int, synced: bool) -> list[list[Tensor]]:
        """Forward and backward of every rank; the losses by rank."""
        losses: list[list[Tensor]] = []
        arrived: list[list[Tensors]] = []
        for rank, state in enumerate(self.ranks):
            with state.swapped_in(self.model):
                mine = self.task.losses(self.model, self.task.batch(step, micro, rank))
                losses.append([loss.detach().clone() for loss in mine])
                arrived.append([self.backward(loss) for loss in mine])
        for per_rank in zip(*arrived, strict=True):
            for state, gradients in zip(self.ranks, per_rank, strict=True):
                add(state.pending, gradients)  # a second one, and so the sum, in fp32
            if synced:
                self.reduce()
        return losses

    def backward(self, loss: Tensor) -> Tensors:
        """This loss's own gradients."""
        divided = self.dtype is None and self.task.reduction == "mean"
        (loss / self.world_size if divided else loss).backward(ones(loss))
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        for parameter in self.model.parameters():
            parameter.grad = None
        return gradients

    def reduce(self) -> None:
        """Add the ranks' gradients, in rank order and in fp32, then add the sum to what earlier backwards left."""
        total: Tensors = {}
        for state in self.ranks:
            add(total, {name: promoted(gradient) for name, gradient in state.pending.items()})
            state.pending = {}
        if (
            self.dtype is not None and self.task.reduction == "mean"
        ):  # low precision: divided where fp32 keeps every bit
            total = {name: gradient / self.world_size for name, gradient in total.items()}
        add(self.gradients, total)

    def step(self) -> None:
        """One step of the optimizer on the gradients that are there, and on no others."""
        for name, parameter in self.master.named_parameters():
            parameter.grad = self.gradients.get(name)
        self.optimizer.step()
        self.master.zero_grad()  # what goes on adding up is kept here, and given again
        given = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        ungiven = {
            name for name, p in self.master.named_parameters() if id(p) not in given
        }  # add up for ever, as in torch
        self.gradients = {name: gradient for name, gradient in self.gradients.items() if name in ungiven}
        if self.model is not self.master:
            with torch.no_grad():
                for mine, master in zip(self.model.parameters(), self.master.parameters(), strict=True):
                    mine.copy_(master)

    def clip(self, max_norm: float) -> float:
        norm = total_norm(self.gradients.values())
        if norm > max_norm:
            for gradient in self.gradients.values():
                gradient.mul_(max_norm / norm)
        return norm

    def run(self, rank: int) -> list[Record]:
        """The whole task, recorded as ``rank`` would see it."""
        records = []
        for step in range(self.task.steps):
            record = Record()
            self.task.between(step, self.master, self.optimizer)
            for mine, master in zip(self.model.parameters(), self.master.parameters(), strict=True):
                mine.requires_grad_(master.requires_grad)
            for micro, synced in enumerate(self.task.micro):
                record.losses += self.micro_batch(step, micro, synced)[rank]
            if self.task.recorded(step):
                record.gradients = copied(self.gradients)
            if self.task.max_norm is not None:
                record.norm = self.clip(self.task.max_norm)
            self.step()
            if self.task.recorded(step):
                record.parameters = copied(dict(self.master.named_parameters(remove_duplicate=False)))
                record.buffers = copied(self.ranks[rank].buffers)
            records.append(record)
        return records


def parity(task: Task, *, tolerance: float = 0.0, dtype: torch.dtype | None = None, **options: Any) -> list[Record]:
    """Run the task under zerodp with these options, demand the oracle's result at every step, and return the records.

    ``tolerance`` 0 means bitwise. ``dtype`` is the oracle's compute dtype, where ``options`` ask for a low precision.
    """
    return agree(task, lambda model, optimizer: Zero(model, optimizer, **options), tolerance, dtype)


def run(task: Task, **options: Any) -> list[Record]:
    """The task under zerodp, without the oracle."""
    return train(task, lambda model, optimizer: Zero(model, optimizer, **options))


def agree(
    task: Task,
    wrap: Callable[[nn.Module, Optimizer], Subject],
    tolerance: float = 0.0,
    dtype: torch.dtype | None = None,
) -> list[Record]:
    """Demand that this subject trains as the oracle does."""
    records = train(task, wrap)
    if dtype is not None:  # kept in either dtype, by stage: the values are compared
        for record in records:
            record.gradients = {name: promoted(gradient) for name, gradient in record.gradients.items()}
    expected = Oracle(task, dist.get_world_size(), dtype).run(dist.get_rank())
    same(records, expected, tolerance)
    return records


@contextlib.contextmanager
def named(case: Any) -> Iterator[None]:
    """A failure inside is of this one of several cases."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"with {case}: {error}") from error


def agree_with(task: Task, *options: dict[str, Any]) -> None:
    """Every one of these options gives the oracle's result: bitwise on two ranks, where a sum has one order only."""
    expected = Oracle(task, dist.get_world_size()).run(dist.get_rank())
    tolerance = 0.0 if dist.get_world_size() <= 2 else 1e-6
    for one in options:
        with named(one):
            same(train(task, lambda model, optimizer, one=one: Zero(model, optimizer, **one)), expected, tolerance)


def same(records: list[Record], expected: list[Record], tolerance: float = 0.0) -> None:
    """Compare step by step, in the order in which an error would spread."""
    assert len(records) == len(expected)
    for step, (mine, theirs) in enumerate(zip(records, expected, strict=True)):
        where = f"step {step}:"
        assert len(mine.losses) == len(theirs.losses), where
        for index, (loss, wanted) in enumerate(zip(mine.losses, theirs.losses, strict=True)):
            close(f"{where} loss {index}", loss, wanted, tolerance)
        all_close(f"{where} gradient", mine.gradients, theirs.gradients, tolerance)
        if theirs.norm is not None:
            assert mine.norm is not None, where
            assert abs(mine.norm - theirs.norm) <= 1e-6 * max(theirs.norm, 1), f"{where} norm {mine.norm} {theirs.norm}"
        all_close(f"{where} parameter", mine.parameters, theirs.parameters, tolerance)
        all_close(f"{where} buffer", mine.buffers, theirs.buffers, tolerance)


def all_close(what: str, mine: Tensors, expected: Tensors, tolerance: float = 0.0) -> None:
    assert set(mine) == set(expected), (
        f"{what}: only here {set(mine) - set(expected)}, only there {set(expected) - set(mine)}"
    )
    for name, tensor in expected.items():
        close(f"{what} {name!r}", mine[name], tensor, tolerance)


def close(what: str, mine: Tensor, expected: Tensor, tolerance: float = 0.0) -> None:
    assert mine.shape == expected.shape, f"{what}: shape {tuple(mine.shape)}, expected {tuple(expected.shape)}"
    assert mine.dtype == expected.dtype, f"{what}: dtype {mine.dtype}, expected {expected.dtype}"
    if torch.equal(mine, expected):
        return
    wide = torch.complex128 if expected.is_complex() else torch.float64
    error = (mine.to(wide) - expected.to(wide)).abs().max().item()
    assert tolerance > 0, f"{what}: not the same bits, largest difference {error:.3g}\n{mine}\n{expected}"
    assert error <= tolerance, f"{what}: off by {error:.3g}, more than {tolerance:g}\n{mine}\n{expected}"


def low_precision(master: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy that computes in ``dtype``, inputs included; buffers stay as they are."""
    model = copy.deepcopy(master)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    model.register_forward_pre_hook(lambda module, args: tuple(lowered(arg, dtype) for arg in args))
    return model


def lowered(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def ones(loss: Tensor) -> Tensor | None:
    """What backward starts from: needed where the user's loss is no scalar."""
    return torch.ones_like(loss) if loss.dim() else None


def promoted(gradient: Tensor) -> Tensor:
    return gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient


def total_norm(gradients: Any, p: float = 2.0) -> float:
    flat = torch.cat([gradient.double().flatten() for gradient in gradients])
    return torch.linalg.vector_norm(flat, p).item()


def add(total: Tensors, gradients: Tensors) -> None:
    for name, gradient in gradients.items():
        total[name] = promoted(total[name]) + promoted(gradient) if name in total else gradient


def copied(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
