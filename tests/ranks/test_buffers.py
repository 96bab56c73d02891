"""Buffers are each rank's own; checkpoints hold rank 0's. RNN weights, which torch keeps in a list of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import Task, adamw, all_close, close, parity, rows
from tests.ranks.pool import on_ranks
from tests.ranks.toys import Block

case = pytest.mark.case


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.lin = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.norm(x))


@case("B103")
@on_ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_running_statistics_stay_fp32_and_local(precision: str, stage: int) -> None:
    model, _ = zerodp.shard(Normed(), stage=stage, precision=precision)
    rank = dist.get_rank()
    model(torch.full((4, 3), rank + 1.0))
    assert model.norm.running_mean.dtype == torch.float32
    close("mean", model.norm.running_mean, torch.full((3,), 0.1 * (rank + 1)), 1e-6)
    assert model.norm.num_batches_tracked.dtype == torch.int64
    assert model.norm.num_batches_tracked.item() == 1


@case("B104")
@on_ranks(2)
def test_checkpoints_hold_rank_0s_buffers(stage: int) -> None:
    model, _ = zerodp.shard(Normed(), stage=stage)
    model(torch.full((4, 3), dist.get_rank() + 1.0))
    expected = torch.full((3,), 0.1)
    for state in (model.state_dict(), zerodp.full_state_dict(model, rank0_only=False)):
        close("saved", state["norm.running_mean"], expected, 1e-6)
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fresh, _ = zerodp.shard(Normed(), stage=stage)
    fresh.load_state_dict(saved)
    close("loaded", fresh.norm.running_mean, expected, 1e-6)
    close("own", model.norm.running_mean, torch.full((3,), 0.1 * (dist.get_rank() + 1)), 1e-6)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("dropped", torch.ones(3), persistent=False)
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * self.kept + self.dropped


@case("B105")
@on_ranks(2)
def test_keys_are_those_of_the_plain_model(stage: int) -> None:
    plain = nn.Sequential(Buffered(), nn.BatchNorm1d(3))
    model, _ = zerodp.shard(nn.Sequential(Buffered(), nn.BatchNorm1d(3)), stage=stage, units=[Buffered])
    for state in (model.state_dict(), zerodp.full_state_dict(model, rank0_only=False)):
        assert list(state) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)


class FixedKernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", torch.linspace(-1, 1, 9).view(1, 1, 3, 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.lin = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(torch.nn.functional.conv2d(x, self.kernel).flatten(1))


@case("B106")
@on_ranks(2)
def test_buffer_dtype(stage: int) -> None:
    precision = zerodp.Precision(torch.bfloat16, buffer_dtype=torch.bfloat16)
    model, _ = zerodp.shard(FixedKernel(), stage=stage, precision=precision)
    out = model(torch.ones(2, 1, 4, 4))
    assert out.dtype == model.kernel.dtype == torch.bfloat16
    assert model.count.dtype == torch.int64
    state = model.state_dict()
    assert state["kernel"].dtype == torch.float32
    model.load_state_dict(state)
    assert model.kernel.dtype == torch.bfloat16


@on_ranks(2, 3)
def test_batchnorm_training_matches(stage: int, world_size: int) -> None:
    task = Task(Normed, rows(3), micro=(True, True))
    parity(task, stage=stage, tolerance=0.0 if world_size == 2 else 1e-6)


@on_ranks(2)
def test_buffers_replaced_in_forward(stage: int) -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 3)
            self.register_buffer("last", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            out = self.lin(x) + self.last
            self.last = x.mean(0).detach()
            return out

    parity(Task(Replaces, rows(3)), stage=stage)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2)
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.unsqueeze(0))[0])


@case("B107")
@on_ranks(2)
@pytest.mark.parametrize("units", [None, [nn.LSTM]], ids=["whole", "lstm"])
def test_lstm(units: Any, stage: int) -> None:
    task = Task(Recurrent, rows(4), optimizer=adamw)
    parity(task, stage=stage, units=units)
    model, optimizer = task.build(0)
    model, optimizer = zerodp.shard(model, optimizer, stage=stage, units=units)
    expected = model.state_dict()
    lstm = model.lstm
    assert all(
        weight is getattr(lstm, name) for weight, name in zip(lstm._flat_weights, lstm._flat_weights_names, strict=True)
    )
    model, _ = zerodp.unshard(model, optimizer)
    model.lstm.flatten_parameters()
    twin = copy.deepcopy(model)
    assert all(
        weight is getattr(twin.lstm, name)
        for weight, name in zip(twin.lstm._flat_weights, lstm._flat_weights_names, strict=True)
    )
    all_close("export", dict(twin.state_dict()), dict(expected))
    assert torch.equal(twin(torch.ones(2, 4)), model(torch.ones(2, 4)))


@on_ranks(2)
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_other_recurrent_layers_with_padded_sequences(kind: Any, stage: int) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kind(3, 5, batch_first=True, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x.view(2, 2, 3), torch.tensor([2, 1]), batch_first=True)
            return self.rnn(packed)[0].data

    parity(Task(Packed, rows(3)), stage=stage, units=[kind])


@on_ranks(2)
def test_transformer_encoder_in_training_and_evaluation(stage: int) -> None:
    """In evaluation it looks at its first layer's weights for a fast path."""

    def model() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        return nn.TransformerEncoder(layer, 2)

    task = Task(model, lambda step, micro, rank: rows(8, 6)(step, micro, rank).view(2, 3, 8))
    parity(task, stage=stage, units=[nn.TransformerEncoderLayer])
    plain = task.build(0)[0].eval()
    sharded, _ = zerodp.shard(task.build(0)[0], stage=stage, units=[nn.TransformerEncoderLayer])
    sharded.eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        close("evaluation", sharded(x), plain(x))


@on_ranks(2)
def test_custom_extra_state(stage: int) -> None:
    class Counting(Block):
        seen = 3

        def get_extra_state(self) -> Any:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    model, _ = zerodp.shard(nn.Sequential(Counting(3)), stage=stage)
    state = model.state_dict()
    assert state["0._extra_state"] == {"seen": 3}
    model[0].seen = 9
    model.load_state_dict(state)
    assert model[0].seen == 3
