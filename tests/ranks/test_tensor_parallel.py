"""Tensor parallelism by torch, ZeRO beside it: parameters that are DTensors are sharded by their local part.

The oracle is the plain model in one process. The tolerance is 1e-5: torch's tensor-parallel layers add up in another order. What
does not depend on them is compared bit for bit.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples.megatron_gpt import GPT, Block, next_token_loss, parallelize
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import zerodp
from tests import warm
from tests.house.source import ROOT
from tests.ranks.pool import Pool, on_ranks
from tests.ranks.test_plan import free
from zerodp.core import wrap
from zerodp.core.stages import STAGES
from zerodp.planning.estimate import estimate
from zerodp.planning.models import Model, of_plans
from zerodp.planning.recommend import STATE_SHARE
from zerodp.planning.setup import Setup

VOCABULARY, CONTEXT, STEPS = 30, 8, 3  # 30 rows do not divide by 4
SHAPES = [(2, 2), (4, 1), (1, 4)]
HYBRID = ("replicate", "shard", "tp")

Tensors = dict[str, Tensor]


def gpt(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(VOCABULARY, CONTEXT, width=16, depth=2, heads=4)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.003)


def batch(step: int, place: int) -> Tensor:
    """Of a data-parallel rank; all of its tensor group see it."""
    return torch.randint(VOCABULARY, (2, CONTEXT + 1), generator=torch.Generator().manual_seed(10 * step + place))


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("dp", "tp") if len(shape) == 2 else HYBRID
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class Run:
    """A model on a mesh of this shape, (dp, tp) or (replicate, shard, tp)."""

    def __init__(
        self, shape: tuple[int, ...], make: Callable[[Any], Any] = adamw, seed: int = 0, **options: Any
    ) -> None:
        mesh = mesh_of(shape)
        data = mesh["dp"] if len(shape) == 2 else mesh["replicate", "shard"]
        self.parts = data.size()
        self.place = dist.get_rank() // shape[-1]
        model = parallelize(gpt(seed), mesh["tp"])
        self.model, self.optimizer = zerodp.shard(model, make(model), mesh=data, **{"units": [Block], **options})

    def backward(self, step: int) -> float:
        with loss_parallel():
            loss = next_token_loss(self.model, batch(step, self.place))
            self.optimizer.backward(loss)
        return float(loss.detach().full_tensor())

    def step(self, step: int, max_norm: float = 1.0) -> tuple[float, float]:
        loss = self.backward(step)
        norm = self.optimizer.clip_grad_norm_(max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm


class Oracle:
    """The plain model in one process, with every data-parallel rank's batch in turn."""

    def __init__(self, parts: int, make: Callable[[Any], Any] = adamw) -> None:
        self.parts, self.model = parts, gpt()
        self.optimizer = make(self.model)

    def backward(self, step: int) -> list[float]:
        losses = []
        for place in range(self.parts):
            loss = next_token_loss(self.model, batch(step, place))
            (loss / self.parts).backward()
            losses.append(float(loss.detach()))
        return losses

    def step(self, step: int, max_norm: float = 1.0) -> tuple[list[float], float]:
        losses = self.backward(step)
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses, norm


def close(what: str, got: Tensors, expected: Tensors, tolerance: float = 1e-5) -> None:
    assert got.keys() == expected.keys(), f"{what}: {sorted(got.keys() ^ expected.keys())}"
    for name, value in expected.items():
        assert type(got[name]) is Tensor, f"{what}: {name} is a {type(got[name]).__name__}"
        assert got[name].shape == value.shape, f"{what}: {name}"
        assert got[name].dtype == value.dtype, f"{what}: {name}"
        difference = float((got[name] - value.detach()).abs().max())
        assert difference <= tolerance, f"{what}: {name} differs by {difference:.3g}"


def flattened(optimizer_state: dict[str, Any]) -> Tensors:
    return {f"{key} of {name}": v for name, state in optimizer_state["state"].items() for key, v in state.items()}


def plain_state(oracle: Oracle) -> Tensors:
    names = {id(p): name for name, p in oracle.model.named_parameters()}
    states = oracle.optimizer.state.items()
    return {f"{key} of {names[id(p)]}": v for p, state in states for key, v in state.items()}


# ---- training


def matches_the_plain_model(shape: tuple[int, ...], stage: int) -> None:
    run, steps = Run(shape, stage=stage), STEPS
    oracle = Oracle(run.parts)
    for step in range(steps - 1):
        loss, norm = run.step(step)
        losses, expected = oracle.step(step)
        assert abs(loss - losses[run.place]) < 1e-5
        assert abs(norm - expected) < 1e-5
    run.backward(steps - 1)
    oracle.backward(steps - 1)
    named = {name: p.grad for name, p in oracle.model.named_parameters() if p.grad is not None}
    close("gradient", zerodp.full_grads(run.model), named)
    run.optimizer.step()
    oracle.optimizer.step()
    close("parameter", run.model.state_dict(), oracle.model.state_dict())
    close("moment", flattened(run.optimizer.state_dict()), plain_state(oracle))


@on_ranks(4)
def test_training_matches_the_plain_model(stage: int) -> None:
    matches_the_plain_model((2, 2), stage)


@on_ranks(4)
@pytest.mark.parametrize("shape", [(4, 1), (1, 4)], ids=str)
def test_one_kind_of_parallelism_alone(shape: tuple[int, ...]) -> None:
    matches_the_plain_model(shape, stage=3)


@on_ranks(4)
@pytest.mark.parametrize(("shape", "stage"), [((2, 1, 2), 1), ((1, 2, 2), 3)], ids=str)
def test_hybrid_with_tensor_parallelism(shape: tuple[int, ...], stage: int) -> None:
    matches_the_plain_model(shape, stage)


@on_ranks(4)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_stages_are_equal_to_the_last_bit(dtype: torch.dtype | None) -> None:
    found = []
    precision = None if dtype is None else zerodp.Precision(dtype, grad_dtype=dtype)
    for stage in range(4):
        run = Run((2, 2), stage=stage, precision=precision)
        for step in range(2):
            run.step(step)
        found.append(run.model.state_dict())
    for stage, state in enumerate(found):
        close(f"stage {stage}", state, found[0], tolerance=0)


@on_ranks(4)
@pytest.mark.parametrize(("reentrant", "stage"), [(False, 3), (True, 2)])
def test_activation_checkpointing(reentrant: bool, stage: int) -> None:
    run, plain = Run((2, 2), stage=stage), Run((2, 2), stage=0)
    for block in run.model.blocks:
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=reentrant)
    for step in range(2):
        assert run.step(step) == plain.step(step)
    close("parameter", run.model.state_dict(), plain.model.state_dict(), tolerance=0)


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, 3], ids="zero{}".format)
def test_accumulation_with_and_without_sync(stage: int) -> None:
    run, oracle = Run((2, 2), stage=stage), Oracle(2)
    with run.model.no_sync():
        run.backward(0)
    for micro in (1, 2):
        run.backward(micro)
    for micro in range(3):
        oracle.backward(micro)
    named = {name: p.grad for name, p in oracle.model.named_parameters() if p.grad is not None}
    close("gradient", zerodp.full_grads(run.model), named)


@on_ranks(4)
def test_overflow_on_one_tensor_parallel_rank_skips_on_all() -> None:
    run = Run((2, 2), precision="fp16")
    before = run.model.state_dict()
    hook = None
    if dist.get_rank() == 3:  # nowhere else is there an infinity
        hook = run.model.blocks[0].mlp.up.weight.register_hook(lambda gradient: gradient * float("inf"))
    run.backward(0)
    run.optimizer.step()
    assert run.optimizer.last_step_skipped
    run.optimizer.zero_grad()
    close("skipped", run.model.state_dict(), before, tolerance=0)
    if hook is not None:
        hook.remove()
    run.step(1)
    assert not run.optimizer.last_step_skipped


@on_ranks(4)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_each_element_counts_once_in_the_norm(norm_type: float) -> None:
    run, oracle = Run((2, 2)), Oracle(2)
    run.backward(0)
    oracle.backward(0)
    got = run.optimizer.clip_grad_norm_(0.5, norm_type)
    assert abs(got / float(nn.utils.clip_grad_norm_(oracle.model.parameters(), 0.5, norm_type)) - 1) < 1e-5
    named = {name: p.grad for name, p in oracle.model.named_parameters() if p.grad is not None}
    close("clipped", zerodp.full_grads(run.model), named)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    """Its constructor makes state, DTensors where the parameters are."""
    return torch.optim.Adagrad(model.parameters(), lr=0.01, initial_accumulator_value=0.1)


@on_ranks(4)
def test_state_from_before_shard_is_taken() -> None:
    run, oracle = Run((2, 2), make=adagrad), Oracle(2, make=adagrad)
    for step in range(3):
        run.step(step)
        oracle.step(step)
    close("parameter", run.model.state_dict(), oracle.model.state_dict())
    close("state", flattened(run.optimizer.state_dict()), plain_state(oracle))


# ---- parameters as the user sees them

READS: dict[str, Callable[[Any], Any]] = {
    "to_local": lambda p: p.to_local(),
    "full_tensor": lambda p: p.full_tensor(),
    "redistribute": lambda p: p.redistribute(placements=[Replicate()]),
    "inner": lambda p: p._local_tensor,
    "sum": lambda p: p.sum(),
    "data": lambda p: p.data,
}


@on_ranks(4)
def test_hidden_dtensors_trap_every_use() -> None:
    run = Run((2, 2), stage=3)
    weight = run.model.blocks[0].mlp.up.weight
    for name, read in READS.items():
        with pytest.raises(zerodp.ShardedError, match=r"blocks\.0\.mlp\.up\.weight"):
            pytest.fail(f"{name} gave {read(weight)}")
    assert isinstance(weight, DTensor)
    assert isinstance(weight, nn.Parameter)
    assert weight.shape == (64, 16)
    assert weight.stride() == (16, 1)
    assert weight.is_contiguous()
    assert weight.placements == (Shard(0),)
    assert weight.device_mesh.size() == 2


@on_ranks(4)
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", [1, 3], ids="zero{}".format)
def test_gathered_it_is_the_dtensor_that_it_was(precision: str | None, stage: int) -> None:
    run, plain = Run((2, 2), stage=stage, precision=precision), dict(gpt().named_parameters())
    dtype = torch.float32 if precision is None else torch.bfloat16
    ids = {name: id(p) for name, p in run.model.named_parameters()}
    with zerodp.full_params(run.model):
        for name, p in run.model.named_parameters():
            assert id(p) == ids[name]
            assert type(p) is DTensor
            assert p.dtype == p.to_local().dtype == p._spec.tensor_meta.dtype == dtype
            assert torch.equal(p.full_tensor(), plain[name].detach().to(dtype)), name


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, 3], ids="zero{}".format)
def test_edits_of_rank_0_reach_everyone(stage: int) -> None:
    run, expected = Run((2, 2), stage=stage), gpt().state_dict()
    with zerodp.full_params(run.model, write=True), torch.no_grad():
        run.model.blocks[0].mlp.up.weight.mul_(2)
        run.model.blocks[1].mlp_norm.weight.fill_(1 + dist.get_rank())  # replicated over tp
    expected["blocks.0.mlp.up.weight"] *= 2
    expected["blocks.1.mlp_norm.weight"].fill_(1)
    close("written", run.model.state_dict(), expected, tolerance=0)
    with pytest.raises(zerodp.ShardedError, match="without write=True"), zerodp.full_params(run.model), torch.no_grad():
        run.model.blocks[0].mlp.up.weight.mul_(1 + (dist.get_rank() == 1))
    close("dropped", run.model.state_dict(), expected, tolerance=0)


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, 3], ids="zero{}".format)
def test_state_dicts_are_the_plain_models(stage: int) -> None:
    oracle, run = Oracle(2), Run((2, 2), stage=stage, seed=4)
    oracle.step(0)
    oracle.step(1)
    close("keys", run.model.state_dict(), gpt(4).state_dict(), tolerance=0)
    run.model.load_state_dict(oracle.model.state_dict())
    run.optimizer.load_state_dict(oracle.optimizer.state_dict())
    close("loaded", run.model.state_dict(), oracle.model.state_dict(), tolerance=0)
    close("moments", flattened(run.optimizer.state_dict()), plain_state(oracle), tolerance=0)
    full = zerodp.full_state_dict(run.model)
    assert full.keys() == (oracle.model.state_dict().keys() if dist.get_rank() == 0 else set())
    with pytest.raises(zerodp.CheckpointError, match="size mismatch"):
        run.model.load_state_dict({**full, "norm.weight": torch.zeros(3)}, strict=False)
    assert abs(run.step(2)[1] - oracle.step(2)[1]) < 1e-5
    close("trained", run.model.state_dict(), oracle.model.state_dict())


@on_ranks(4)
def test_unshard_gives_dtensors_back() -> None:
    run, oracle = Run((2, 2)), Oracle(2)
    run.step(0)
    oracle.step(0)
    model, optimizer = zerodp.unshard(run.model, run.optimizer)
    named = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    close("parameter", named, dict(oracle.model.named_parameters()))
    for p, state in optimizer.state.items():
        assert state["exp_avg"].placements == p.placements
    with loss_parallel():
        next_token_loss(model, batch(1, 0)).backward()
    optimizer.step()


@on_ranks(4)
def test_describe_and_stats_tell_of_it() -> None:
    run = Run((2, 2), stage=2)
    assert "2 data-parallel x 2 tensor-parallel" in zerodp.describe(run.model)
    assert "7 of them tensor-parallel parts" in zerodp.describe(run.model)
    run.step(0)
    zerodp.stats(run.model).reset()
    run.step(1)
    rows = {row.unit: row for row in zerodp.stats(run.model).comm if row.op == "redistribute"}
    # Partial gradients of what is replicated: two norms and two biases after row-parallel layers
    assert {name: row.count for name, row in rows.items()} == {"(root)": 2, "blocks.0": 4, "blocks.1": 4}


class Narrow(nn.Module):
    """Three columns over four ranks: the last one has none."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 3), nn.Linear(3, 2)
        self.plain = nn.Linear(2, 2)  # no DTensor, so every rank has it

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.plain(self.down(torch.tanh(self.up(x))))
        return out


@on_ranks(4)
@pytest.mark.parametrize("stage", [1, 3], ids="zero{}".format)
def test_empty_parts_and_plain_parameters(tmp_path: Path, stage: int) -> None:
    mesh = mesh_of((1, 4))
    torch.manual_seed(0)
    plain, model = Narrow(), Narrow()
    model.load_state_dict(plain.state_dict())
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
    if dist.get_rank() == 2:
        with torch.no_grad():
            model.plain.bias.fill_(9)  # rank 0's counts
    model, optimizer = zerodp.shard(model, adamw(model), mesh=mesh["dp"], stage=stage)
    oracle = adamw(plain)
    x = torch.linspace(-1, 1, 20).view(4, 5)
    for _ in range(3):
        for subject in (model, plain):
            subject(x).pow(2).mean().backward()
        expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
        assert abs(optimizer.clip_grad_norm_(0.1) - expected) < 1e-6
        for its in (optimizer, oracle):
            its.step()
            its.zero_grad()
    close("trained", model.state_dict(), plain.state_dict())
    state = model.state_dict()
    zerodp.save(tmp_path / "narrow", model, optimizer)
    with zerodp.full_params(model, write=True), torch.no_grad():
        for p in model.parameters():
            p.zero_()
    zerodp.load(tmp_path / "narrow", model, optimizer)
    close("loaded", model.state_dict(), state, tolerance=0)


# ---- checkpoints


def name_of(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def saved(shapes: list[tuple[int, ...]], folder: Path) -> dict[str, Tensors]:
    found = {}
    for shape in shapes:
        run = Run(shape, stage=3)
        run.step(0)
        run.step(1)
        zerodp.save(folder / name_of(shape), run.model, run.optimizer)
        found[name_of(shape)] = {**run.model.state_dict(), **flattened(run.optimizer.state_dict())}
    return found


def loaded(pairs: list[tuple[tuple[int, ...], str]], folder: Path) -> list[tuple[str, Tensors]]:
    found = []
    for shape, name in pairs:
        run = Run(shape, stage=1, seed=9)
        zerodp.load(folder / name, run.model, run.optimizer)
        found.append((name, {**run.model.state_dict(), **flattened(run.optimizer.state_dict())}))
    run.step(2)
    return found


def test_checkpoints_move_between_meshes(fresh_ranks: Pool, tmp_path: Path) -> None:
    """From the mesh that splits both ways to every other, and back."""
    ranks = fresh_ranks  # torch's caches of DTensors would bring meshes of earlier process groups back
    expected = {**ranks.run(1, saved, [(1, 1)], tmp_path)[0], **ranks.run(4, saved, SHAPES, tmp_path)[0]}
    pairs = [(shape, name) for shape in SHAPES for name in expected if (name == "2x2") != (shape == (2, 2))]
    for results in (
        ranks.run(4, loaded, pairs, tmp_path),
        ranks.run(1, loaded, [((1, 1), "2x2"), ((1, 1), "1x4")], tmp_path),
    ):
        for found in results:
            for name, values in found:
                close(f"from {name}", values, expected[name], tolerance=0)
    zerodp.export(tmp_path / "2x2", tmp_path / "exported")
    assert exported(tmp_path / "exported").keys() == set(gpt().state_dict()) - {"head.weight"}


def exported(folder: Path) -> Tensors:
    return dict(load_file(folder / "model.safetensors"))


@on_ranks(4)
def test_export_of_a_model(tmp_path: Path) -> None:
    run = Run((2, 2), stage=3)
    run.step(0)
    zerodp.export(run.model, tmp_path / "model")
    state = run.model.state_dict()
    for name, value in exported(tmp_path / "model").items():
        assert torch.equal(value, state[name]), name


@on_ranks(4)
def test_weights_from_safetensors(tmp_path: Path) -> None:
    """Each tensor-parallel rank takes its part, from the first data-parallel rank of its column."""
    if dist.get_rank() == 0:
        state = gpt(7).state_dict()
        del state["head.weight"]
        save_file(state, tmp_path / "model.safetensors")
    dist.barrier()
    run = Run((2, 2), weights=tmp_path)
    close("read", run.model.state_dict(), gpt(7).state_dict(), tolerance=0)


# ---- mistakes


def refuses(message: str, model: nn.Module, mesh: Any) -> None:
    """On every rank alike, and the model is as it was."""
    with pytest.raises(zerodp.ConfigError, match=message):
        zerodp.shard(model, mesh=mesh)
    assert not isinstance(model, zerodp.ShardedModule)


@on_ranks(4)
def test_meshes_that_do_not_fit_are_refused() -> None:
    mesh = mesh_of((2, 2))
    model = parallelize(gpt(), mesh["tp"])
    refuses("expected one dim, or two named", model, mesh)
    refuses("no part of the same mesh", model, None)
    refuses("no part of the same mesh", model, dist.group.WORLD)
    refuses(
        "share ranks with the DTensor parameters' dims", model, init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    )
    refuses("share ranks with the DTensor parameters' dims", model, mesh["tp"])
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    refuses("share ranks with the DTensor parameters' dims", parallelize(gpt(), hybrid["shard"]), hybrid)


@on_ranks(4)
def test_parameters_that_cannot_be_laid_out_are_refused() -> None:
    mesh = mesh_of((2, 2))

    def model_with(tensor: Tensor) -> nn.Module:
        model = parallelize(gpt(), mesh["tp"])
        model.norm.odd = nn.Parameter(tensor)
        return model

    partial = DTensor.from_local(torch.ones(3), mesh["tp"], [Partial()], run_check=False)
    refuses("'norm.odd' is a DTensor with placement Partial", model_with(partial), mesh["dp"])
    elsewhere = distribute_tensor(torch.ones(4), mesh, [Replicate(), Shard(0)])
    refuses("'norm.odd' is a DTensor over mesh dims", model_with(elsewhere), mesh["dp"])
    cut = DTensor.from_local(
        torch.ones(1 + mesh.get_local_rank("tp")), mesh["tp"], [Shard(0)], shape=torch.Size([3]), stride=(1,)
    )
    refuses("rank 0: 'norm.odd' is a DTensor whose local tensor has shape", model_with(cut), mesh["dp"])
    with torch.device("meta"):
        empty = parallelize_module(nn.Linear(4, 4), mesh["tp"], ColwiseParallel())
    refuses("is a DTensor on the meta device", empty, mesh["dp"])
    model = parallelize(gpt(), mesh["tp"])
    model.register_buffer("table", distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)]))
    refuses("buffer 'table' is a DTensor with placements", model, mesh["dp"])


@on_ranks(4)
def test_a_mistake_on_one_rank_is_told_to_all() -> None:
    """All four decide together, though the data travels between two and two."""
    mesh = mesh_of((2, 2))
    model = parallelize(gpt(), mesh["tp"])
    with pytest.raises(zerodp.ConfigError, match=r"^rank 3: .*no parameter is named like"):
        zerodp.shard(model, mesh=mesh["dp"], ignore=["nothing"] if dist.get_rank() == 3 else [])


# ---- compare, and the planner's choice


@on_ranks(4)
def test_compare_runs_a_split_model_beside_itself() -> None:
    mesh = mesh_of((2, 2))
    batches = [batch(step, mesh.get_local_rank("dp")) for step in range(2)]
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    made = lambda: parallelize(gpt(), mesh["tp"])  # noqa: E731
    with loss_parallel():
        good = zerodp.compare(made, sgd, batches, next_token_loss, stage=3, mesh=mesh["dp"], units=[Block])
        assert good, good
        assert good.steps == 2

        def wrong(model: nn.Module, tokens: Tensor) -> Tensor:
            return next_token_loss(model, tokens) * (2.0 if isinstance(model, zerodp.ShardedModule) else 1.0)

        bad = zerodp.compare(made, sgd, batches, wrong, stage=3, mesh=mesh["dp"], units=[Block])
    assert (bad.first_difference or "").startswith("loss in step 1")


@on_ranks(4)
def test_auto_counts_the_local_parts(stage: int) -> None:
    """Room for what each stage needs on one tensor-parallel rank of two, and not for the whole model's."""
    mesh = mesh_of((2, 2))

    def made() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128, bias=False)) for _ in range(6)))
        for part in model:
            parallelize_module(part, mesh["tp"], {"0": ColwiseParallel()})
        return model

    units = wrap.plan_units(made(), zerodp.Config(units=[nn.Linear]))
    known = Model("local", of_plans(units, None), exact=True)
    needed = estimate(known, Setup(2, precision=None, optimizer=2, exact=True), stage).device_bytes
    half = 6 * 128 * 64 * 4
    assert sum(unit.numel for unit in known.units) * 4 == half
    with free(needed / STATE_SHARE + 64 - half):
        model = made()
        model, _ = zerodp.shard(model, adamw(model), stage="auto", mesh=mesh["dp"], units=[nn.Linear])
    assert {unit.flats[0].residency for unit in model._zerodp.units} == {STAGES[stage]}


# ---- the example


def test_the_example_trains(tmp_path: Path) -> None:
    script = ROOT / "examples" / "megatron_gpt.py"
    assert len(script.read_text().splitlines()) < 200
    command = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    command += ["--tp", "2", "--steps", "21", "--context", "32", "--batch", "4", "--checkpoint"]
    command += ["--save", str(tmp_path / "last")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert losses[0] > 5.4  # a byte is one of 256
    assert losses[-1] < 4
    assert zerodp.latest(tmp_path) == tmp_path / "last"
