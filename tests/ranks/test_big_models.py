"""Models without values: built on the meta device and initialised, or read from safetensors files, unit by unit."""

from __future__ import annotations

import ctypes
import gc
import json
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from bench.model import GPT
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import adamw, all_close, close, copied, rows
from tests.ranks.pool import on_ranks
from tests.ranks.test_models import Residual, gpt2, llama
from tests.ranks.toys import Block, Net, ToyA


def mixed() -> nn.Module:
    """Modules of all kinds in one sequence, some too small to be units."""
    return nn.Sequential(
        nn.Embedding(40, 12, padding_idx=3),
        nn.Linear(12, 12),
        nn.LayerNorm(12),
        nn.MultiheadAttention(12, 2),
        nn.LSTM(12, 6),
        nn.Sequential(nn.Linear(12, 24, dtype=torch.float64), nn.PReLU()),
        nn.BatchNorm1d(12),
    )


class Applied(Net):
    """Initialised by a method that is applied to all its modules after construction, with tied weights."""

    def __init__(self) -> None:
        super().__init__(width=8)
        self.out = nn.Linear(3, 8, bias=False)
        self.out.weight = self.emb.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.1)


class Tied(nn.Module):
    """The second module's own weights were drawn and thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(self.emb(ids))))
        return out


def gpt() -> nn.Module:
    return GPT(vocab=50, dim=16, layers=3, heads=2, ctx=8)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixed": mixed,
    "net": Net,
    "applied": Applied,
    "tied": Tied,
    "gpt": gpt,
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), Residual(8, 16, 2), nn.Flatten(), nn.Linear(16, 3)),
    "gpt2": gpt2,
    "llama": llama,
}


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def everything(model: nn.Module) -> dict[str, Tensor]:
    """State dict and non-persistent buffers."""
    return {**copied(dict(model.state_dict())), **copied(dict(model.named_buffers()))}


@on_ranks(2)
@pytest.mark.parametrize("model", MODELS)
def test_values_are_those_of_an_ordinary_construction(model: str) -> None:
    """To the last bit, at every stage, the random state after it too; whatever the seeds of other ranks."""
    torch.manual_seed(5)
    expected = everything(MODELS[model]())
    torch.manual_seed(5 + dist.get_rank())
    MODELS[model]()
    state = torch.get_rng_state()
    for stage in range(4):
        torch.manual_seed(5 + dist.get_rank())
        net = on_meta(MODELS[model])
        names = {id(p): name for name, p in net.named_parameters()}
        net, _ = zerodp.shard(net, stage=stage)
        assert torch.equal(torch.get_rng_state(), state)
        assert {id(p): name for name, p in net.named_parameters()} == names
        all_close(f"stage {stage}", everything(net), expected)


def trained(make: Callable[[Callable[[], nn.Module]], Any], stage: int) -> dict[str, Tensor]:
    """Two steps of a net with hooks that were registered before it was sharded, and back to a plain one."""
    torch.manual_seed(7)
    net = make(Applied)
    optimizer = adamw(net)
    calls: list[str] = []
    net.emb.weight.register_hook(lambda g: calls.append("gradient") or g * 2)
    net.head.bias.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    net.emb.weight.tag, watched = "kept", weakref.ref(net.emb.weight)
    net, optimizer = zerodp.shard(net, optimizer, stage=stage, units=[Block], precision="bf16")
    assert watched() is net.emb.weight is net.out.weight
    assert net.emb.weight.tag == "kept"
    for step in range(2):
        net(rows(3)(step, 0, dist.get_rank())).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sorted(calls) == ["accumulated"] * 2 + ["gradient"] * 2
    net, optimizer = zerodp.unshard(net, optimizer)
    assert type(net) is Applied
    assert all(type(p) is nn.Parameter for p in net.parameters())
    return everything(net)


@on_ranks(3)
def test_training_goes_on_as_from_real_values(stage: int) -> None:
    """With an optimizer over parameters that had no values, hooks on them, and parameters in two places."""
    all_close("trained", trained(on_meta, stage), trained(lambda make: make(), stage))


@on_ranks(2)
def test_part_of_a_model_on_the_meta_device(stage: int) -> None:
    """What has values keeps them, also inside a module that is initialised."""
    torch.manual_seed(1)
    net: Any = Net()
    head, bias = copied(dict(net.head.named_parameters())), nn.Parameter(torch.full((6,), 3.0))
    net.emb = on_meta(lambda: nn.Linear(3, 6))
    net.emb.bias = bias
    torch.manual_seed(9)
    expected = nn.Linear(3, 6).weight.detach()
    torch.manual_seed(9)
    net, _ = zerodp.shard(net, stage=stage, units=[Block], ignore=["*.bias"])
    state = net.state_dict()
    close("made", state["emb.weight"], expected)
    close("kept", state["emb.bias"], torch.full((6,), 3.0))
    all_close("kept", {key: state[f"head.{key}"] for key in head}, head)


# ---- what cannot be given values


class Masked(nn.Module):
    """A buffer that only the constructor writes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("mask", torch.ones(3), persistent=False)


class Reset(Masked):
    """The same with a method for it, which puts a new tensor in its place."""

    def reset_parameters(self) -> None:
        self.mask = torch.arange(3.0)


class Broken(nn.Linear):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            raise KeyError("no size")


class Attribute(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.scale = torch.ones(3)


WRONG: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "parameter": (lambda: nn.Sequential(nn.Linear(4, 4), ToyA()), r"'1\.w': on the meta device, and no module's reset"),
    "buffer": (lambda: nn.Sequential(Masked()), r"'0\.mask': on the meta device, and no module's reset"),
    "attribute": (lambda: nn.Sequential(Attribute()), r"'0\.scale': a plain attribute on the meta device"),
    "method": (lambda: nn.Sequential(Broken(3, 3)), r"reset_parameters\(\) of '0' failed .*KeyError: 'no size'"),
    "units": (
        lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
        r"_reset_parameters\(\) of 'the model': it writes 'encoder.layers.0.self_attn.in_proj_weight', which is in another unit",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", WRONG)
def test_what_has_no_values_is_named_before_anything_moves(kind: str) -> None:
    """On every rank, though one of them has all its values. The model and the random state are as they were."""
    make, message = WRONG[kind]
    net = make() if dist.get_rank() == 1 and kind != "method" else on_meta(make)
    tensors = [(id(t), t.device) for t in (*net.parameters(), *net.buffers())]
    state = torch.get_rng_state()
    with pytest.raises(zerodp.ConfigError, match=message):
        zerodp.shard(net)
    assert [(id(t), t.device) for t in (*net.parameters(), *net.buffers())] == tensors
    assert torch.equal(torch.get_rng_state(), state)
    assert not isinstance(net, zerodp.ShardedModule)


@on_ranks(2)
def test_buffers_are_rebuilt_by_reset_parameters() -> None:
    net, _ = zerodp.shard(on_meta(Reset))
    close("mask", net.mask, torch.arange(3.0))


@on_ranks(2)
def test_initialisers_that_reach_into_other_units_run_where_all_is_one_unit() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Transformer(8, 2, 1, 1, 16, batch_first=True))

    torch.manual_seed(2)
    expected = everything(make())
    torch.manual_seed(2)
    net, _ = zerodp.shard(on_meta(make), units=[nn.Transformer])
    all_close("values", everything(net), expected)


@on_ranks(2)
def test_optimizers_with_state_from_the_start_need_values() -> None:
    net = on_meta(lambda: nn.Linear(3, 3))
    with pytest.raises(zerodp.ConfigError, match="Adagrad made state on the meta device"):
        zerodp.shard(net, torch.optim.Adagrad(net.parameters()))


# ---- weights


def saved(model: nn.Module, path: Path, **changes: Any) -> str:
    """The model's state dict in a safetensors file of rank 0's, with some tensors changed or (None) left out."""
    state = {k: v.detach().clone() for k, v in model.state_dict().items() if k not in changes}
    state.update({k: v for k, v in changes.items() if v is not None})
    if dist.get_rank() == 0:
        safetensors.torch.save_file(state, path)
    return shared(str(path))


def shared(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


@on_ranks(2)
@pytest.mark.parametrize("make", ["mixed", "applied", "convolutions"])
def test_weights_of_a_file(make: str, stage: int, tmp_path: Path) -> None:
    """For a model with and without values. Only rank 0 has the file; other dtypes are cast."""
    torch.manual_seed(4 + dist.get_rank())
    real = MODELS[make]()
    first = next(iter(real.state_dict()))
    wide = {first: real.state_dict()[first].double()}
    path = saved(real, tmp_path / "some.safetensors", **wide)
    expected = shared({k: v.clone() for k, v in real.state_dict().items()})
    for net in (on_meta(MODELS[make]), MODELS[make]()):
        net, _ = zerodp.shard(net, stage=stage, weights=path)
        all_close("values", copied(dict(net.state_dict())), expected)


@on_ranks(2)
@pytest.mark.parametrize("size", ["50GB", "20KB"])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_weights_of_a_hugging_face_folder(make: Callable[[], Any], size: str, tmp_path: Path) -> None:
    """In one file or several; what it leaves out because it is tied, or computes anew, is there."""
    folder = shared(str(tmp_path))
    torch.manual_seed(4)
    real = make()
    if dist.get_rank() == 0:
        real.save_pretrained(folder, max_shard_size=size)
        assert (len(list(Path(folder).glob("*.safetensors"))) > 2) == (size == "20KB")
    net, _ = zerodp.shard(on_meta(make), weights=folder)
    all_close("values", everything(net), everything(real))


@on_ranks(2)
def test_weights_of_a_model_without_its_head(tmp_path: Path) -> None:
    """As the folders of base models are: names lack the prefix."""
    real = gpt2()
    path = saved(real.transformer, tmp_path / "base.safetensors")
    expected = shared(everything(real))
    net, _ = zerodp.shard(on_meta(gpt2), weights=path)
    all_close("values", everything(net), expected)


@on_ranks(2)
@pytest.mark.parametrize("real", [False, True], ids=["meta", "real"])
def test_weights_that_do_not_fit_are_listed(real: bool, tmp_path: Path) -> None:
    changes = {"emb.bias": None, "head.weight": torch.ones(2, 6), "extra": torch.ones(1)}
    path = saved(Net(), tmp_path / "some.safetensors", **changes)
    net = Net() if real else on_meta(Net)
    with pytest.raises(zerodp.CheckpointError) as caught:
        zerodp.shard(net, weights=path)
    text = str(caught.value)
    assert (
        "missing: 'emb.bias'. not in the model: 'extra'. of another shape: 'head.weight' is (2, 6), the model's (3, 6)"
        in text
    )
    assert all(p.is_meta != real for p in net.parameters())


def no_file(folder: Path) -> Path:
    return folder / "nothing.safetensors"


def no_safetensors(folder: Path) -> Path:
    (folder / "some.safetensors").write_bytes(b"12345678")
    return folder / "some.safetensors"


def empty_folder(folder: Path) -> Path:
    return folder


def wrong_index(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"a": 1}))
    return folder


def part_missing(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    return folder


UNREADABLE = {
    no_file: "there is no .*nothing.safetensors on rank 0",
    no_safetensors: "some.safetensors cannot be read as a safetensors file",
    empty_folder: "has neither model.safetensors nor model.safetensors.index.json",
    wrong_index: "is no index of safetensors files",
    part_missing: "model-1.safetensors cannot be read as a safetensors file",
}


@on_ranks(2)
@pytest.mark.parametrize("make", UNREADABLE)
def test_weights_that_cannot_be_read(make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = shared(str(make(tmp_path)) if dist.get_rank() == 0 else "")
    with pytest.raises(zerodp.CheckpointError, match=UNREADABLE[make]):
        zerodp.shard(on_meta(Net), weights=path)


@on_ranks(2)
def test_weights_need_their_package(tmp_path: Path) -> None:
    """Only rank 0 reads, every rank says so."""
    path = saved(Net(), tmp_path / "some.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "safetensors", None)
        with pytest.raises(zerodp.ConfigError, match=re.escape("pip install 'zerodp[hf]'")):
            zerodp.shard(on_meta(Net), weights=path)


# ---- memory


def status(field: str) -> int:
    """Of this process, in bytes: VmRSS is what is in memory, VmHWM the most that was."""
    return next(
        int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if field in line
    )


@pytest.mark.usefixtures("fresh_ranks")
@on_ranks(4)
@pytest.mark.parametrize("source", ["initialised", "weights"])
def test_memory_stays_within_the_shard_and_two_units(source: str, tmp_path: Path) -> None:
    """Of 64 MB in 8 units; the slack is half a unit. Every rank's own process is measured, by the kernel."""
    unit, layers = 1024 * 2048 * 4, 8
    ctypes.CDLL(None).mallopt(-3, 2**20)  # what is freed leaves the process, and is not there for the next measurement

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 2048, bias=False) for _ in range(layers)))

    def options(model: nn.Module, name: str) -> dict[str, Any]:
        return {"weights": saved(model, tmp_path / name)} if source == "weights" else {}

    zerodp.shard(on_meta(lambda: nn.Linear(4, 4)), **options(nn.Linear(4, 4), "small"))  # imports and groups
    chosen = options(make(), "large")
    net = on_meta(make)
    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    net, _ = zerodp.shard(net, **chosen)
    used = status("VmHWM") - before
    shard = layers * unit // 4
    assert zerodp.stats(net).memory.now["parameters"] == shard
    assert shard // 2 < used < shard + 2 * unit + unit // 2, f"{used / 2**20:.1f} MiB"
