"""A Hugging Face config as a module on the meta device, with inputs for one step; `transformers` makes it, where it is installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError

WITH_LABELS = ("LMHeadModel", "ForCausalLM", "ForConditionalGeneration", "ForMaskedLM")  # as many labels as tokens


def step_of_config(
    path: str | os.PathLike[str], batch: int, sequence: int | None
) -> tuple[nn.Module, dict[str, Tensor], None]:
    """(module, inputs by name, no loss of our own): the class that the config names.

    Raises:
        ConfigError: no `transformers`, no such file, or a config that it cannot make a module of.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; expected a Hugging Face config.json")
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "inputs=True: the package transformers makes the module of a config, and is not installed; pip install transformers, or pass the "
            "module itself"
        ) from None
    try:
        config = transformers.AutoConfig.from_pretrained(file)
        config.use_cache = False
        made = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(config) if made is None else made(config)
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        text = next(iter(str(error).splitlines()), "")
        raise ConfigError(f"{file}: transformers made no module of it ({type(error).__name__}: {text})") from None
    model.train()
    return model, _inputs(model, config, batch, sequence), None


def _inputs(model: Any, config: Any, batch: int, sequence: int | None) -> dict[str, Tensor]:
    name = type(model).__name__
    if model.main_input_name == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        inputs = {"pixel_values": torch.empty(batch, config.num_channels, height, width, device="meta")}
        if name.endswith("ForImageClassification"):
            inputs["labels"] = torch.zeros(batch, dtype=torch.long)
        return inputs
    length = sequence or getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if model.main_input_name != "input_ids" or length is None:
        raise ConfigError(
            f"inputs=True: {name} takes {model.main_input_name!r}, whose form its config does not say; build the module and give inputs="
        )
    ids = torch.zeros(batch, length, dtype=torch.long)
    if name.endswith(WITH_LABELS):
        return {"input_ids": ids, "labels": ids}
    return {"input_ids": ids, "decoder_input_ids": ids} if config.is_encoder_decoder else {"input_ids": ids}
