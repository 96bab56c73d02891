"""Checkpoints of others and for others: FSDP2 and DCP, torch.save of a DDP run, Hugging Face folders, DeepSpeed's universal ones."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import zerodp
from tests.ranks.checkpoints import Run, step, values
from tests.ranks.oracle import all_close, copied, rows
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Net, toy_b
from zerodp.integrations.deepspeed import universal


def build(seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Net()
    head = list(model.head.parameters())
    body = [p for p in model.parameters() if all(p is not q for q in head)]
    return model, torch.optim.AdamW([{"params": head, "lr": 0.02}, {"params": body, "weight_decay": 0.2}], lr=0.01)


def losses(model: Any, optimizer: Any, steps: range) -> list[float]:
    """Of training on this rank's batches."""
    found = []
    for number in steps:
        loss = model(rows(3)(number, 0, dist.get_rank())).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def fsdp(seed: int = 0) -> tuple[Any, Any]:
    model, _ = build(seed)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    head = list(model.head.parameters())
    body = [p for p in model.parameters() if all(p is not q for q in head)]
    return model, torch.optim.AdamW([{"params": head, "lr": 0.02}, {"params": body, "weight_decay": 0.2}], lr=0.01)


# FSDP2 divides after its own reduce-scatter, so sums differ by rounding.
NEAR = 1e-5


@on_ranks(2)
def test_fsdp2_goes_on_from_here(stage: int, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")  # DCP's own
    model, optimizer = zerodp.shard(*build(), stage=stage)
    losses(model, optimizer, range(2))
    zerodp.save(tmp_path / "x", model, optimizer)
    expected = losses(model, optimizer, range(2, 5))
    other, other_optimizer = fsdp(seed=3)
    weights, state = get_state_dict(other, other_optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "x")
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=state)
    assert losses(other, other_optimizer, range(2, 5)) == pytest.approx(expected, rel=NEAR)


@on_ranks(2)
@pytest.mark.parametrize("names", [("model", "optimizer"), ("net", "optim")])
def test_going_on_from_fsdp2(names: tuple[str, str], tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    other, other_optimizer = fsdp()
    losses(other, other_optimizer, range(2))
    weights, state = get_state_dict(other, other_optimizer)
    dcp.save({names[0]: weights, names[1]: state, "epoch": 3}, checkpoint_id=tmp_path / "x")
    whole = {key: value.full_tensor() for key, value in weights.items()}
    expected = losses(other, other_optimizer, range(2, 5))
    model, optimizer = zerodp.shard(*build(seed=3))
    assert zerodp.load(tmp_path / "x", model, optimizer) == {}
    all_close("weights", dict(model.state_dict()), whole)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.01]
    assert losses(model, optimizer, range(2, 5)) == pytest.approx(expected, rel=NEAR)


@on_ranks(2)
def test_dcp_reads_all_of_it(tmp_path: Path) -> None:
    """Tied keys, a channels-last kernel, 0-dim and empty tensors, through DCP's own converter."""
    run = Run(3, 2)
    model, optimizer = run.build()
    step(model, optimizer, 0)
    zerodp.save(tmp_path / "x", model, optimizer, extra={"epoch": 3})
    expected, states = model.state_dict(), optimizer.state_dict()
    if dist.get_rank() == 0:
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path / "x", tmp_path / "x.pt")
        found = torch.load(tmp_path / "x.pt", weights_only=True)
        assert found["zerodp.extra.epoch"] == 3
        all_close("weights", found["model"], dict(expected))
        assert found["optimizer"]["param_groups"] == states["param_groups"]
        for name, state in states["state"].items():
            all_close(name, found["optimizer"]["state"][name], state)


@on_ranks(2)
def test_a_checkpoint_of_ddp(stage: int, tmp_path: Path) -> None:
    """torch.save of both state dicts, keys with DDP's and the compiler's prefixes; then on as DDP would."""
    plain, plain_optimizer = build()
    parallel = nn.parallel.DistributedDataParallel(plain)
    losses(parallel, plain_optimizer, range(2))
    state = {f"module._orig_mod.{key.removeprefix('module.')}": value for key, value in parallel.state_dict().items()}
    path = tmp_path / "x.pt"
    if dist.get_rank() == 0:
        torch.save({"model": state, "optimizer": plain_optimizer.state_dict(), "epoch": 3}, path)
        torch.save(plain.state_dict(), tmp_path / "bare.pt", _use_new_zipfile_serialization=False)
    dist.barrier()
    model, optimizer = zerodp.shard(*build(seed=3), stage=stage)
    zerodp.load(path, model, optimizer)
    all_close("weights", dict(model.state_dict()), dict(plain.state_dict()))
    assert losses(model, optimizer, range(2, 4)) == losses(parallel, plain_optimizer, range(2, 4))
    zerodp.load(tmp_path / "bare.pt", model)
    with pytest.raises(zerodp.CheckpointError, match="holds no optimizer state"):
        zerodp.load(tmp_path / "bare.pt", model, optimizer)


@on_ranks(2)
def test_a_torch_file_of_something_else(tmp_path: Path) -> None:
    model, optimizer = zerodp.shard(*build())
    if dist.get_rank() == 0:
        torch.save([torch.ones(3)], tmp_path / "list.pt")
        (tmp_path / "text.pt").write_text("not a file of torch")
    dist.barrier()
    with pytest.raises(zerodp.CheckpointError, match="holds a list"):
        zerodp.load(tmp_path / "list.pt", model, optimizer)
    with pytest.raises(zerodp.CheckpointError, match=r"text\.pt"):
        zerodp.load(tmp_path / "text.pt", model, optimizer)


def transformer() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=61, n_positions=8))


@on_ranks(2)
@pytest.mark.case("B142", "B146")
def test_hugging_face_and_back(tmp_path: Path) -> None:
    """A model and a checkpoint export alike, in several files and in one; `from_pretrained` and `load` read both."""
    warnings.simplefilter("ignore")
    from transformers import GPT2LMHeadModel

    model = transformer()
    model, optimizer = zerodp.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="bf16")
    tokens = torch.arange(8).view(1, 8)
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    expected = model.state_dict()
    zerodp.export(model, tmp_path / "parts", max_shard_bytes="12KB")
    zerodp.save(tmp_path / "x", model, optimizer)
    if dist.get_rank() == 0:
        zerodp.export(tmp_path / "x", tmp_path / "one")
        assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
        assert [path.name for path in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]
    dist.barrier()
    for name in ("parts", "one"):
        found = GPT2LMHeadModel.from_pretrained(tmp_path / name, local_files_only=True)
        all_close(name, dict(found.state_dict()), dict(expected))
        assert found.lm_head.weight is found.transformer.wte.weight
        other = transformer()
        nn.init.zeros_(other.lm_head.weight)
        other, _ = zerodp.shard(other, stage=1)
        zerodp.load(tmp_path / name, other)
        all_close(f"{name} loaded", dict(other.state_dict()), dict(expected))
    with pytest.raises(zerodp.ConfigError, match="exists already"):
        zerodp.export(model, tmp_path / "one")


@on_ranks(2)
def test_export_keeps_dtypes_and_reads_as_safetensors(tmp_path: Path) -> None:
    """Masters go back to the dtype from before `shard()`; sizes of all kinds lie aligned in one file."""
    from safetensors.torch import load_file

    model = nn.Sequential(nn.Linear(3, 5).bfloat16(), nn.BatchNorm1d(5), nn.Linear(5, 1).double())
    expected = copied(dict(model.state_dict()))
    model, _ = zerodp.shard(model)
    zerodp.save(tmp_path / "x", model)
    zerodp.export(model, tmp_path / "model")
    if dist.get_rank() == 0:
        zerodp.export(tmp_path / "x", tmp_path / "checkpoint")
        for name in ("model", "checkpoint"):
            found = load_file(tmp_path / name / "model.safetensors")
            all_close(name, found, expected)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "model", "x"]


def write_universal(folder: Path, model: nn.Module, states: dict[str, dict[str, Tensor]]) -> None:
    """As ds_to_universal.py lays it out."""
    for name, value in model.named_parameters():
        place = folder / "zero" / name
        os.makedirs(place)
        torch.save({"param": value.detach(), "cat_dim": 0}, place / "fp32.pt")
        for key in ("exp_avg", "exp_avg_sq"):
            torch.save({"param": states[name][key], "cat_dim": 0}, place / f"{key}.pt")
        torch.save(int(states[name]["step"]), place / "step.pt")


@on_ranks(2)
def test_deepspeed_universal(tmp_path: Path) -> None:
    """B140 too: the step counts on, so the next update is the uninterrupted one."""
    model, optimizer = zerodp.shard(*build())
    losses(model, optimizer, range(2))
    states = optimizer.state_dict()["state"]
    folder = tmp_path / "universal"
    plain, _ = build()
    plain.load_state_dict(model.state_dict())
    if dist.get_rank() == 0:
        write_universal(folder, plain, states)
    dist.barrier()
    expected = losses(model, optimizer, range(2, 4))
    other, other_optimizer = zerodp.shard(*build(seed=3))
    with pytest.raises(zerodp.CheckpointError, match=r"looks like a DeepSpeed universal checkpoint"):
        zerodp.load(folder, other, other_optimizer)
    zerodp.load(universal(folder), other, other_optimizer)
    assert losses(other, other_optimizer, range(2, 4)) == expected
    with pytest.raises(zerodp.CheckpointError, match="no folder 'zero'"):
        zerodp.load(universal(tmp_path), other, other_optimizer)


@on_ranks(2)
def test_state_from_before_shard_is_loaded_over(tmp_path: Path) -> None:
    """Adagrad makes its state when it is built."""
    torch.manual_seed(0)
    model = toy_b()
    model, optimizer = zerodp.shard(model, torch.optim.Adagrad(model.parameters(), lr=0.1))
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    zerodp.save(tmp_path / "x", model, optimizer)
    other = toy_b()
    other, other_optimizer = zerodp.shard(other, torch.optim.Adagrad(other.parameters(), lr=0.3))
    zerodp.load(tmp_path / "x", other, other_optimizer)
    got, expected = values(other, other_optimizer), values(model, optimizer)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[k], v) for k, v in expected.items() if isinstance(v, Tensor))
