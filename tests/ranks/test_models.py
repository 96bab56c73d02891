"""Real models, of transformers (small, with random weights) and of torch, at every stage, equal to plain torch to the last bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import zerodp
from tests.ranks.oracle import Oracle, Task, Zero, adamw, close, parity, rows, same, train
from tests.ranks.pool import on_ranks

VOCAB, WIDTH, LAYERS, HEADS, HIDDEN, LENGTH = 96, 32, 2, 4, 48, 12
SIZES = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def tokens(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1 + step * 100 + micro * 10 + rank)
    return torch.randint(3, VOCAB, (2, LENGTH), generator=generator)


def images(step: int, micro: int, rank: int) -> Tensor:
    return rows(3 * 8 * 8, 4)(step, micro, rank).view(4, 3, 8, 8)


def language_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def image_loss(model: nn.Module, pixels: Tensor) -> Tensor:
    logits = model(pixels)
    logits = logits if isinstance(logits, Tensor) else logits.logits
    return nn.functional.cross_entropy(logits, torch.arange(4) % logits.shape[1])


def gpt2() -> nn.Module:
    """Tied embeddings, dropout, and weights stored transposed."""
    sizes = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **SPECIAL))


def llama(**settings: Any) -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, **SPECIAL, intermediate_size=HIDDEN, num_key_value_heads=2, **settings)
    return transformers.LlamaForCausalLM(config)


def mixtral(**settings: Any) -> nn.Module:
    sizes = {"intermediate_size": HIDDEN, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 1}
    config = transformers.MixtralConfig(**SIZES, **SPECIAL, **sizes, output_router_logits=True, **settings)
    return transformers.MixtralForCausalLM(config)


def t5() -> nn.Module:
    """Encoder, decoder and head share one embedding; the relative positions are a table of the first block alone."""
    sizes = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 8, "d_ff": HIDDEN, "num_layers": LAYERS, "num_heads": HEADS}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(**SIZES, intermediate_size=HIDDEN, max_position_embeddings=LENGTH)
    return transformers.BertForMaskedLM(config)


def vit() -> nn.Module:
    sizes = {k: v for k, v in SIZES.items() if k != "vocab_size"}
    config = transformers.ViTConfig(**sizes, intermediate_size=HIDDEN, image_size=8, patch_size=4, num_labels=3)
    return transformers.ViTForImageClassification(config)


class Residual(nn.Module):
    def __init__(self, width: int, out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.short = nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(inner)) + self.short(x))


def resnet() -> nn.Module:
    """Every rank has its own running statistics."""
    blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1))
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 16)
        self.rnn = nn.LSTM(16, 12, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(24, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.emb(ids))[0])


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def encoder(dropout: float = 0.1) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout, batch_first=True)
    body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), body, nn.Linear(WIDTH, VOCAB))


def language(model: Callable[[], nn.Module]) -> Task:
    return Task(model, tokens, language_loss, optimizer=adamw, steps=5, brief=False)


MODELS = {
    "gpt2": language(gpt2),
    "llama": language(llama),
    "mixtral": language(mixtral),
    "t5": language(t5),
    "bert": language(bert),
    "vit": Task(vit, images, image_loss, optimizer=adamw, steps=5, brief=False),
    "resnet": Task(resnet, images, image_loss, optimizer=adamw, steps=5, brief=False),
    "lstm": Task(Recurrent, tokens, next_token_loss, optimizer=adamw, steps=5, brief=False),
    "encoder": Task(encoder, tokens, next_token_loss, optimizer=adamw, steps=5, brief=False),
}


@on_ranks(2)
@pytest.mark.parametrize("model", MODELS)
def test_five_steps_at_every_stage(model: str) -> None:
    """With the automatic units, of which a stack of blocks gives several."""
    task = MODELS[model]
    expected = Oracle(task, 2).run(dist.get_rank())
    for stage in range(4):
        same(train(task, lambda net, optimizer, stage=stage: Zero(net, optimizer, stage=stage)), expected)
    net, _ = zerodp.shard(*task.build(0))
    assert zerodp.describe(net).count("parameters") - 1 >= (1 if model == "lstm" else LAYERS)


@on_ranks(3)
@pytest.mark.parametrize("model", ["gpt2", "resnet"])
def test_three_ranks(model: str) -> None:
    """Sums, unlike means, have no rounding of 1/3 in them: again to the last bit."""
    task = dataclasses.replace(MODELS[model], reduction="sum")
    for stage in (1, 3):
        parity(task, stage=stage, reduction="sum")


class Expert(nn.Module):
    """One expert of Mixtral as a module of its own, so that it can be a unit."""

    def __init__(self, config: Any):
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


class Experts(nn.Module):
    """In place of the stacked weights: only experts that a token of this rank goes to are called."""

    def __init__(self, config: Any):
        super().__init__()
        self.each = nn.ModuleList(Expert(config) for _ in range(config.num_local_experts))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            token, place = torch.where(chosen == index)
            out = out.index_add(0, token, self.each[index](x[token]) * weights[token, place, None])
        return out


def mixtral_in_modules() -> nn.Module:
    model: Any = mixtral()
    for layer in model.model.layers:
        layer.mlp.experts = Experts(model.config)
    return model


def few_tokens(step: int, micro: int, rank: int) -> Tensor:
    """So few that a rank leaves some of the experts out, each rank others."""
    return tokens(step, micro, rank)[:1, : 2 + (step + rank) % 2]


CACHED = {"prefetch": 3, "unsharded_bytes": 50_000}


@on_ranks(2, 3)
@pytest.mark.parametrize(("stage", "options"), [(0, {}), (1, {}), (2, {}), (3, {}), (3, CACHED)])
def test_mixtral_whose_ranks_use_other_experts(options: dict[str, Any], stage: int, world_size: int) -> None:
    task = Task(mixtral_in_modules, few_tokens, language_loss, optimizer=adamw, reduction="sum")
    called: set[tuple[int, str]] = set()
    units = [Expert, transformers.models.mixtral.modeling_mixtral.MixtralDecoderLayer]

    def between(step: int, model: nn.Module, optimizer: Any) -> None:
        if step == 0 and isinstance(model, zerodp.ShardedModule):
            for name, module in model.named_modules():
                if isinstance(module, Expert):
                    module.register_forward_hook(lambda *_, name=name: called.add((len(steps), name)))
        if isinstance(model, zerodp.ShardedModule):
            steps.append(step)

    steps: list[int] = []
    task.between = between
    parity(task, stage=stage, units=units, reduction="sum", **options)
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, called)
    assert any(everyone[0] != other for other in everyone[1:])


@on_ranks(2)
def test_generation(stage: int) -> None:
    """Of other lengths on every rank, which needs the gathered context; and as the plain model does it."""
    net, _ = MODELS["llama"].build(0)
    plain: Any = net.eval()
    ids = tokens(0, 0, dist.get_rank())[:1, :4]
    length = 3 + 4 * dist.get_rank()
    expected = plain.generate(ids, max_new_tokens=length, do_sample=False)
    model, _ = zerodp.shard(net, stage=stage)
    with zerodp.full_params(model):
        assert torch.equal(model.generate(ids, max_new_tokens=length, do_sample=False), expected)


@on_ranks(2)
def test_encoder_fast_path_in_evaluation(stage: int) -> None:
    """It looks at the first layer's weights before that layer is called."""
    plain = MODELS["encoder"].build(0)[0].eval()
    model, _ = zerodp.shard(MODELS["encoder"].build(0)[0].eval(), stage=stage)
    ids = tokens(0, 0, 0)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            close("evaluation", model(ids), plain(ids))


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
def test_gradient_checkpointing_of_transformers(reentrant: bool, stage: int) -> None:
    def build() -> nn.Module:
        model: Any = llama()
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model

    parity(Task(build, tokens, language_loss, optimizer=adamw), stage=stage)


@on_ranks(2)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_pretrained_models_are_saved_from_the_full_state_dict(model: str, stage: int, tmp_path: Any) -> None:
    task = MODELS[model]
    net, optimizer = zerodp.shard(*task.build(0), stage=stage)
    language_loss(net, tokens(0, 0, dist.get_rank())).backward()
    optimizer.step()
    state = zerodp.full_state_dict(net)
    if dist.get_rank() == 0:
        fresh: Any = task.build(1)[0]
        fresh.load_state_dict(state, strict=True)
        fresh.save_pretrained(tmp_path)
        loaded = type(fresh).from_pretrained(tmp_path)
        for name, tensor in loaded.state_dict().items():
            close(name, tensor, state[name])
