"""Hugging Face config files as shapes and units, read without transformers: GPT-2, Llama, Mixtral, T5, BERT and ViT families."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import Precision
from ..core.wrap import ROOT
from ..errors import ConfigError
from .models import Model, Shape, of_units

Units = list[tuple[str, int]]
Family = Callable[["Keys"], tuple[Shape, Units]]


class Keys:
    """The entries of a config, asked for by name, with an error that says which is missing."""

    def __init__(self, path: Path, entries: dict[str, Any]) -> None:
        self.path, self.entries = path, entries

    def number(self, name: str, default: int | None = None) -> int:
        value = self.entries.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"{self.path}: expected a whole number {name!r} in a {self.kind} config, got {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.entries.get(name, default))

    @property
    def kind(self) -> str:
        return str(self.entries.get("model_type", ""))

    @property
    def architecture(self) -> str:
        return str((self.entries.get("architectures") or [""])[0])


def linear(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + (outputs if bias else 0)


def stack(prefix: str, layers: int, numel: int) -> Units:
    return [(f"{prefix}.{index}", numel) for index in range(layers)]


def gpt2(keys: Keys) -> tuple[Shape, Units]:
    h, v, positions = keys.number("n_embd", 768), keys.number("vocab_size", 50257), keys.number("n_positions", 1024)
    layers, inner = keys.number("n_layer", 12), keys.number("n_inner", 4 * h)
    block = 4 * h + linear(h, 3 * h, True) + linear(h, h, True) + linear(h, inner, True) + linear(inner, h, True)
    head = 0 if keys.flag("tie_word_embeddings", True) else h * v
    units = [("(root)", (v + positions) * h + 2 * h + head), *stack("transformer.h", layers, block)]
    return Shape(layers, h, keys.number("n_head", 12), v, positions), units


def llama(keys: Keys) -> tuple[Shape, Units]:
    """Llama, Mistral and Qwen2, and Mixtral with its experts."""
    h, v, layers = keys.number("hidden_size"), keys.number("vocab_size"), keys.number("num_hidden_layers")
    heads = keys.number("num_attention_heads")
    head = keys.number("head_dim", h // heads)
    kv = keys.number("num_key_value_heads", heads)
    bias = keys.flag("attention_bias", False)
    qkv_bias = bias or keys.kind == "qwen2"
    attention = linear(h, heads * head, qkv_bias) + 2 * linear(h, kv * head, qkv_bias) + linear(heads * head, h, bias)
    mlp, experts = gated_mlp(keys), experts_of(keys)
    block = 2 * h + attention + (experts * (mlp + h) if experts else mlp)
    tied = keys.flag("tie_word_embeddings", False)
    outside = v * h * (1 if tied else 2) + h
    units = [("(root)", outside), *stack("model.layers", layers, block)]
    return Shape(layers, h, heads, v, keys.number("max_position_embeddings", 2048)), units


def gated_mlp(keys: Keys) -> int:
    h, inner, bias = keys.number("hidden_size"), keys.number("intermediate_size"), keys.flag("mlp_bias", False)
    return 2 * linear(h, inner, bias) + linear(inner, h, bias)


def experts_of(keys: Keys) -> int:
    """Of each block; 0 where there are none."""
    return keys.number("num_local_experts", 8) if keys.kind == "mixtral" else 0


def idle_numel(keys: Keys) -> int:
    """Of each block, the parameters that a token does not meet: those of the experts that it is not sent to."""
    experts = experts_of(keys)
    return max(experts - keys.number("num_experts_per_tok", 2), 0) * gated_mlp(keys) if experts else 0


def t5(keys: Keys) -> tuple[Shape, Units]:
    h, v, inner, layers = (keys.number(name) for name in ("d_model", "vocab_size", "d_ff", "num_layers"))
    decoders, heads = keys.number("num_decoder_layers", layers), keys.number("num_heads")
    width = heads * keys.number("d_kv")
    attention, gated = 4 * h * width + h, str(keys.entries.get("feed_forward_proj", "relu")).startswith("gated")
    mlp = (3 if gated else 2) * h * inner + h
    positions = keys.number("relative_attention_num_buckets", 32) * heads  # in the first layer of each stack
    head = 0 if keys.flag("tie_word_embeddings", True) else v * h
    encoder, decoder = (
        stack("encoder.block", layers, attention + mlp),
        stack("decoder.block", decoders, 2 * attention + mlp),
    )
    for blocks in (encoder, decoder):
        blocks[0] = (blocks[0][0], blocks[0][1] + positions)
    units = [("(root)", v * h + 2 * h + head), *encoder, *decoder]
    return Shape(layers + decoders, h, _dividing(heads, h), v, keys.number("n_positions", 512)), units


def _dividing(heads: int, h: int) -> int:
    """T5's heads may be wider together than the model; its activations are counted as if they were as wide."""
    return max(n for n in range(1, heads + 1) if h % n == 0)


def encoder_block(h: int, inner: int, qkv_bias: bool = True) -> int:
    return 3 * linear(h, h, qkv_bias) + linear(h, h, True) + linear(h, inner, True) + linear(inner, h, True) + 4 * h


def bert(keys: Keys) -> tuple[Shape, Units]:
    h, v, layers = (
        keys.number("hidden_size", 768),
        keys.number("vocab_size", 30522),
        keys.number("num_hidden_layers", 12),
    )
    positions, types = keys.number("max_position_embeddings", 512), keys.number("type_vocab_size", 2)
    if keys.architecture == "BertForMaskedLM":
        outside = linear(h, h, True) + 2 * h + v  # a transform, and the bias of a head tied to the embeddings
    else:
        outside = linear(h, h, True)  # the pooler
    units = [
        ("(root)", (v + positions + types) * h + 2 * h + outside),
        *stack("encoder.layer", layers, encoder_block(h, keys.number("intermediate_size", 3072))),
    ]
    return Shape(layers, h, keys.number("num_attention_heads", 12), v, positions), units


def vit(keys: Keys) -> tuple[Shape, Units]:
    h, layers = keys.number("hidden_size", 768), keys.number("num_hidden_layers", 12)
    patch, channels = keys.number("patch_size", 16), keys.number("num_channels", 3)
    tokens = (keys.number("image_size", 224) // patch) ** 2 + 1
    if keys.architecture == "ViTForImageClassification":
        outside = linear(h, len(keys.entries.get("id2label") or range(2)), True)
    else:
        outside = linear(h, h, True)  # the pooler
    root = linear(channels * patch * patch, h, True) + (tokens + 1) * h + 2 * h + outside
    block = encoder_block(h, keys.number("intermediate_size", 3072), keys.flag("qkv_bias", True))
    return Shape(layers, h, keys.number("num_attention_heads", 12), 0, tokens), [
        ("(root)", root),
        *stack("layers", layers, block),
    ]


FAMILIES: dict[str, Family] = {
    "gpt2": gpt2,
    "llama": llama,
    "mistral": llama,
    "qwen2": llama,
    "mixtral": llama,
    "t5": t5,
    "bert": bert,
    "vit": vit,
}


def of_config(path: str | os.PathLike[str], precision: Precision) -> Model:
    """The model that a `config.json`, or a folder with one, describes.

    Raises:
        ConfigError: no such file, no JSON object, a family that is not known here, or an entry that is missing.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        entries = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; expected a Hugging Face config.json") from None
    except ValueError:
        entries = None
    if not isinstance(entries, dict):
        raise ConfigError(f"{file}: not a JSON object; expected a Hugging Face config.json")
    keys = Keys(file, entries)
    family = FAMILIES.get(keys.kind)
    if family is None:
        raise ConfigError(
            f"{file}: model_type {keys.kind!r} is not known here; known are {', '.join(FAMILIES)}. Give the shape by numbers, or "
            "pass the module itself to zerodp.plan"
        )
    shape, units = family(keys)
    name = str(entries.get("_name_or_path") or keys.architecture or keys.kind)
    model, idle = of_units(name, units, precision, shape=shape), idle_numel(keys)
    if not idle:
        return model
    blocks = (unit if unit.name == ROOT else dataclasses.replace(unit, idle=idle) for unit in model.units)
    return dataclasses.replace(model, units=tuple(blocks))
