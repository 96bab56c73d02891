"""Ranks that do different things, or end: a clear error on every rank, soon, and never a hang.

An error must come with the weights as they were, and leave a process that can go on with another model.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import Task, all_close, copied, parity, rows, squares
from tests.ranks.pool import forks, on_ranks
from tests.ranks.test_order import REPEATED, EitherOrder
from tests.ranks.toys import Block, Net
from zerodp.core import watch

case = pytest.mark.case
sharded = pytest.mark.parametrize("stage", [3], ids="zero{}".format)
TASK = Task(Net, rows(3))
SOON = 20.0  # seconds


def sharded_net(**options: Any) -> tuple[Any, Any]:
    return zerodp.shard(*TASK.build(0), units=[Block], **options)


def train_step(model: Any, optimizer: Any, step: int = 0) -> None:
    squares(model, TASK.batch(step, 0, dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluate(model: Any, count: int) -> None:
    with torch.no_grad():
        for _ in range(count):
            model(torch.ones(2, 3))


def shards(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Without a word to the other ranks."""
    segments = [segment for group in optimizer.param_groups for segment in group["params"]]
    return copied({str(index): segment for index, segment in enumerate(segments)})


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Inside, a wait is looked at sooner than it is in earnest, which changes nothing but the time a test takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "PATIENCE", 0.4)
        patch.setattr(watch, "INTERVAL", 0.1)
        yield


@contextlib.contextmanager
def refused(optimizer: torch.optim.Optimizer, match: str) -> Iterator[None]:
    """The block ends in this error; no weight has changed, and a new model can be trained."""
    before = shards(optimizer)
    began = time.monotonic()
    with impatient(), pytest.raises(zerodp.RankMismatchError, match=match):
        yield
    assert time.monotonic() - began < SOON
    all_close("weights", shards(optimizer), before)
    parity(Task(Net, rows(3), steps=1), units=[Block], tolerance=1e-6)


@case("B45")
@on_ranks(2, 3)
@sharded
def test_module_called_a_different_number_of_times(stage: int, world_size: int) -> None:
    model, optimizer = zerodp.shard(*REPEATED.build(0), stage=stage, units=[nn.Linear])
    with refused(optimizer, "rank 1 needs unit 'head' once more"):
        squares(model, REPEATED.batch(0, 0, dist.get_rank())).backward()
        optimizer.step()


@case("B47", "B49")
@on_ranks(2)
@sharded
@pytest.mark.parametrize("longer", [0, 1])
def test_unequal_numbers_of_evaluation_batches(longer: int, stage: int) -> None:
    model, optimizer = sharded_net(stage=stage)
    with refused(optimizer, rf"rank {longer} ended a forward pass.*full_params\(\)"):
        evaluate(model, 5 if dist.get_rank() == longer else 2)
        train_step(model, optimizer)


@case("B47")
@on_ranks(2)
@sharded
def test_evaluation_that_ends_the_program_at_different_lengths(stage: int) -> None:
    """The shorter rank goes on to its last collective, which the longer one never reaches."""
    model, optimizer = sharded_net(stage=stage)
    with refused(optimizer, r"rank 0 .*gathers or loads a state dict.*rank 1 waits for the gather.*Every rank must"):
        evaluate(model, 2 + dist.get_rank())
        model.state_dict()


@case("B48")
@on_ranks(2)
@pytest.mark.parametrize("postponed", [False, True], ids=["synced", "no_sync"])
def test_unequal_numbers_of_micro_batches(postponed: bool, stage: int) -> None:
    model, optimizer = sharded_net(stage=stage)
    with refused(optimizer, r"different things.*rank 0 .*; rank 1 .*Every rank must"):
        for micro in range(2 + dist.get_rank()):
            with model.no_sync() if postponed and micro == 0 else contextlib.nullcontext():
                squares(model, TASK.batch(0, micro, dist.get_rank())).backward()
        optimizer.step()


@on_ranks(2, 3)
def test_unequal_numbers_of_steps(stage: int, world_size: int) -> None:
    """One rank's loader is shorter; it goes on to the evaluation."""
    model, optimizer = sharded_net(stage=stage)
    train_step(model, optimizer)
    last = dist.get_rank() == world_size - 1
    with refused(optimizer, "rank 0 .*the model[;,].*the model without gradients|wait for different things"):
        if not last:
            train_step(model, optimizer, 1)
        evaluate(model, 1)
        model.state_dict()


@on_ranks(2)
def test_batch_that_one_rank_skips(stage: int) -> None:
    """An error in one rank's forward, which its loop catches to go on with the next batch."""

    def forward(model: Any, step: int) -> Tensor:
        x = TASK.batch(step, 0, dist.get_rank())
        return squares(model, x[:, :2] if (step, dist.get_rank()) == (1, 0) else x)

    model, optimizer = sharded_net(stage=stage)
    train_step(model, optimizer)
    with refused(optimizer, "different things.*Every rank must"):
        for step in (1, 2):
            with contextlib.suppress(RuntimeError) if dist.get_rank() == 0 and step == 1 else contextlib.nullcontext():
                forward(model, step).backward()
                optimizer.step()


@case("B52")
@on_ranks(2)
@sharded
def test_two_units_in_another_order_on_each_rank(stage: int) -> None:
    """In the first iteration, never with the values of the other unit."""
    task = Task(EitherOrder, lambda step, micro, rank: (rows(3)(step, micro, rank), rank == 1))
    model, optimizer = zerodp.shard(*task.build(0), stage=stage, units=[nn.Linear])
    with refused(optimizer, "needs unit '[ab]' once more"):
        squares(model, task.batch(0, 0, dist.get_rank())).backward()
        optimizer.step()


def gather(model: Any, optimizer: Any) -> None:
    with zerodp.full_params(model):
        pass


ALONE: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "state_dict": ("gathers or loads a state dict", lambda model, optimizer: model.state_dict()),
    "full_state_dict": ("gathers or loads a state dict", lambda model, optimizer: zerodp.full_state_dict(model)),
    "load_state_dict": ("gathers or loads a state dict", lambda model, optimizer: model.load_state_dict({})),
    "optimizer.state_dict": ("gathers or loads a state dict", lambda model, optimizer: optimizer.state_dict()),
    "full_params": ("gathers full parameters", gather),
    "full_grads": ("reads full gradients", lambda model, optimizer: zerodp.full_grads(model)),
    "clip": (r"called clip_grad_norm_\(\)", lambda model, optimizer: optimizer.clip_grad_norm_(1.0)),
    "step": (r"called optimizer\.step\(\)", lambda model, optimizer: optimizer.step()),
    "unshard": ("gathers or loads a state dict", lambda model, optimizer: zerodp.unshard(model, optimizer)),
}


@on_ranks(2)
@pytest.mark.parametrize("what", ["step", "clip"])
def test_settings_that_differ_between_ranks(what: str, stage: int) -> None:
    """A learning rate by the rank's own loss, say: parts of one parameter would be stepped in different ways."""
    model, optimizer = sharded_net(stage=stage)
    train_step(model, optimizer)
    squares(model, TASK.batch(1, 0, dist.get_rank())).backward()
    if what == "step":
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
    own = "lr=" if what == "step" else r"max_norm=[12]\.0, norm_type=2\.0"
    with refused(
        optimizer, f"rank {dist.get_rank()} called .* with .*{own}.*rank .* with|with other settings; rank 1 .*{own}"
    ):
        if what == "clip":
            optimizer.clip_grad_norm_(1.0 + dist.get_rank())
        optimizer.step()


@on_ranks(2)
def test_torchs_clip_over_the_optimizers_parameters_is_refused(stage: int) -> None:
    """It would take the norm of this rank's part. Clipping values is the same on parts, and works."""
    model, optimizer = sharded_net(stage=stage)
    squares(model, TASK.batch(0, 0, dist.get_rank())).backward()
    segments = optimizer.param_groups[0]["params"]
    with pytest.raises(zerodp.ShardedError, match=r"use optimizer\.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(segments, 1.0)
    nn.utils.clip_grad_value_(segments, 1e-3)
    assert max(float(grad.abs().max()) for _, _, grad in zerodp.local_shards(model, "gradients")) <= 1.001e-3
    optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("of", ["model", "optimizer"])
def test_state_dicts_that_differ_between_ranks(of: str, stage: int) -> None:
    """Each rank would keep its part of another one."""
    model, optimizer = sharded_net(stage=stage)
    train_step(model, optimizer)
    which = model if of == "model" else optimizer
    state = which.state_dict()
    if of == "model":
        changed = state["blocks.1.a.weight"]
    else:
        changed = state["state"]["blocks.1.a.weight"]["momentum_buffer"]
    original = changed.clone()
    if dist.get_rank() == 1:
        changed.add_(1.0)
    with pytest.raises(zerodp.RankMismatchError, match=r"another 'blocks.1.a.weight.*' on rank 1 than on rank 0"):
        which.load_state_dict(state)
    changed.copy_(original)
    which.load_state_dict(state)
    train_step(model, optimizer, 1)


@case("B53")
@on_ranks(2)
@pytest.mark.parametrize(
    ("call", "stage"), [*((call, 1) for call in ALONE), ("full_state_dict", 3), ("step", 3), ("full_grads", 0)]
)
def test_collective_that_one_rank_calls_alone(call: str, stage: int) -> None:
    """As in ``if rank == 0: save(model.state_dict())``: the error says who did what, and that all must."""
    model, optimizer = sharded_net(stage=stage)
    train_step(model, optimizer)
    says, function = ALONE[call]
    with refused(optimizer, f"different things.*rank 0 .*{says}.*; rank 1 .*Every rank must"):
        if dist.get_rank() == 0:
            function(model, optimizer)
        train_step(model, optimizer, 1)


@on_ranks(2)
@sharded
def test_model_that_broke_says_so_again(stage: int) -> None:
    """Instead of waiting for ranks that will not come."""
    model, optimizer = sharded_net(stage=stage)
    with refused(optimizer, "different things.*Every rank must"):
        evaluate(model, 1 + dist.get_rank())
        train_step(model, optimizer)
    for again in (lambda: evaluate(model, 1), model.state_dict, lambda: train_step(model, optimizer)):
        with pytest.raises(zerodp.ZeroError, match=r"no longer communicate, after: .*different things"):
            again()


@on_ranks(2)
@pytest.mark.parametrize(("where", "stage"), [("forward", 3), ("step", 1)])
def test_rank_that_is_merely_slow_is_no_error(where: str, stage: int) -> None:
    """The other one waits in a gather, or for the others to be at the step, where a wait is looked at as in earnest."""

    def late() -> None:
        if dist.get_rank() == 1:
            time.sleep(2 if where == "forward" else 3 * watch.PATIENCE)

    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        if isinstance(model, zerodp.ShardedModule) and step == 1:
            if where == "forward":
                slow: Any = model
                slow.blocks[1].register_forward_pre_hook(lambda module, args: late())
            else:
                late()

    with impatient() if where == "forward" else contextlib.nullcontext():
        parity(Task(Net, rows(3), steps=2, between=between), stage=stage, units=[Block])


@on_ranks(2)
def test_without_checks_right_programs_work(stage: int) -> None:
    parity(TASK, stage=stage, units=[Block], check=False)


# ---- ranks that end. These are processes of their own, with a store in the process of rank 0 as under torchrun.


def ends(how: str, rank: int, port: int, out: Path) -> None:
    """Train; after one step rank ``how[-1]`` ends or stops in this way. What the other meets is written to a file."""
    torch.set_num_threads(1)
    way, who = how.split()
    sys.stderr = open(out / f"stderr{rank}", "w")
    dist.init_process_group(
        "gloo",
        f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=4 if way == "sleeps" else 300),
    )
    model, optimizer = sharded_net(check=way != "sleeps")
    train_step(model, optimizer)
    before = shards(optimizer)
    (out / f"there{rank}").touch()
    if rank == int(who):
        wait_for(out / f"there{1 - rank}")  # what it has sent may be lost with it
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "sleeps":
            wait_for(out / "met")
        os._exit(0)
    began = time.monotonic()
    try:
        train_step(model, optimizer, 1)
    except zerodp.ZeroError as error:
        changed = any(not torch.equal(shards(optimizer)[name], piece) for name, piece in before.items())
        (out / "met").write_text(f"{time.monotonic() - began} {changed} {error}")
    os._exit(0)


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.05)


def on_processes(size: int, call: Callable[[int, int], tuple[Any, ...]]) -> None:
    """Runs ranks that may end in any way: `call` gives a rank's function and its arguments for a free port."""
    context = forks()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    calls = [call(rank, port) for rank in range(size)]
    processes = [context.Process(target=function, args=arguments) for function, *arguments in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
        process.join()


@pytest.mark.parametrize("how", ["exits 0", "exits 1", "killed 0", "killed 1", "sleeps 1"])
def test_rank_that_ends(how: str, tmp_path: Path) -> None:
    """Also without checks: no wait is longer than the process group's limit."""
    on_processes(2, lambda rank, port: (ends, how, rank, port, tmp_path))
    took, changed, message = (tmp_path / "met").read_text().split(maxsplit=2)
    assert float(took) < SOON
    assert changed == "False"
    assert "another rank ended or closed its connection, or the process group's time limit passed" in message
    assert f"rank {1 - int(how[-1])}: " in message


def ends_before_shard(rank: int, port: int, out: Path, over: str) -> None:
    """Rank 1 is killed before `shard()`; what rank 0 meets there is written to a file."""
    size = 3 if over == "part" else 2
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    mesh = dist.new_group([0, 1]) if over == "part" else None
    (out / f"there{rank}").touch()
    if rank == 1:
        wait_for(out / "there0")  # what it has sent may be lost with it
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        if rank == 0:
            sharded_net(mesh=dist.group.WORLD if over == "world" else mesh)
    except zerodp.ZeroError as error:
        (out / "met").write_text(f"{time.monotonic() - began} {error}")
    os._exit(0)


@pytest.mark.parametrize("over", ["no mesh", "world", "part"])
def test_rank_that_ends_before_shard(over: str, tmp_path: Path) -> None:
    """The time limit is torch's own, half an hour. In a part of the world of three the last rank is not asked."""
    on_processes(3 if over == "part" else 2, lambda rank, port: (ends_before_shard, rank, port, tmp_path, over))
    took, message = (tmp_path / "met").read_text().split(maxsplit=1)
    assert float(took) < SOON
    assert message.startswith("rank 0: another rank ended before it came to shard()")
