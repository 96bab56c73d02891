"""The planner on numbers: models in all forms, what fits, what is recommended, and the page's JavaScript against Python."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from py_mini_racer import MiniRacer
from torch import nn

import zerodp
from tests.unit.test_traced import Pair
from zerodp.config import PIECE_BYTES, PRECISIONS
from zerodp.core.stages import STAGES
from zerodp.errors import ConfigError
from zerodp.planning import huggingface, page
from zerodp.planning.closed import symbols
from zerodp.planning.closed.device import INPUTS, device
from zerodp.planning.estimate import KINDS, amount, estimate
from zerodp.planning.models import Model, Shape, gpt_units, of_count, of_shape, of_units, short
from zerodp.planning.plan import model_of
from zerodp.planning.recommend import STATE_SHARE, choose_stages, largest, most_that_fit
from zerodp.planning.setup import Setup

BF16 = PRECISIONS["bf16"]
GPT3 = Shape(96, 12288, 96, 50257, 2048)

# ---- the contract's words


def test_the_contracts_example() -> None:
    found = zerodp.plan(7.5e9, world_size=64).as_json()
    states = {stage: row["model_state_bytes"] for stage, row in found["stages"].items()}
    assert states == {"0": 120_000_000_000, "1": 31_406_250_000, "2": 16_640_625_000, "3": 1_875_000_000}
    held = {stage: row["zerodp_state_bytes"] for stage, row in found["stages"].items()}
    assert held["0"] == 120_000_000_000
    assert held["3"] == 16 * 7_500_000_000 // 64  # 14 and 2 more for fp32 gradients
    wire = {stage: row["wire_elements"] for stage, row in found["stages"].items()}
    assert wire == {"0": 15e9, "1": 15e9, "2": 15e9, "3": 22.5e9}
    assert found["recommended"] == 2
    assert "no more communication than data parallelism" in found["reason"]
    assert json.loads(json.dumps(found)) == found


def test_gradients_in_16_bits_give_the_papers_bytes() -> None:
    low = zerodp.Precision(torch.bfloat16, grad_dtype=torch.bfloat16)
    for stage, one in zerodp.plan(7.5e9, world_size=64, precision=low).estimates.items():
        less = 2 * 7.5e9 / 64 if STAGES[stage].shards_parameters else 0  # no 16-bit shard rests beside the master
        assert one.zerodp_state_bytes == pytest.approx(one.model_state_bytes - less, rel=1e-12)


def test_kinds_add_up_and_the_plan_prints() -> None:
    found = zerodp.plan(GPT3, world_size=1024, device_memory="80GB", batch=1)
    for one in found.estimates.values():
        assert set(one.kinds) == set(KINDS)
        assert one.device_bytes == sum(one.kinds.values())
    assert found.reason in str(found)
    assert "activations" in str(found)


@pytest.mark.parametrize(
    ("count", "words"), [(7.5e9, "7.5B"), (1e12, "1T"), (350_000, "350k"), (12, "12"), (4e6, "4M")]
)
def test_counts_in_words(count: float, words: str) -> None:
    assert short(count) == words


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (1.875e9, "1.88 GB"),
        (31.40625e9, "31.4 GB"),
        (120e9, "120 GB"),
        (2048e12, "2,048 TB"),
        (999, "999 B"),
        (1500, "1.50 kB"),
    ],
)
def test_bytes_in_words(nbytes: float, words: str) -> None:
    assert amount(nbytes) == words


# ---- models


def test_a_shape_has_gpt3s_parameters() -> None:
    """175B by name: 12Lh² + 13Lh and the embeddings."""
    numel = of_shape(GPT3, BF16).numel
    assert numel == 12 * 96 * 12288**2 + 13 * 96 * 12288 + (50257 + 2048) * 12288 + 2 * 12288
    assert short(numel) == "174.6B"
    assert of_count(175e9, BF16).shape == Shape(96, 12288, 96)


def test_a_shape_is_a_real_gpts_size() -> None:
    import transformers

    config = transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=100, n_positions=32)
    with torch.device("meta"):
        real = transformers.GPT2LMHeadModel(config)
    assert sum(p.numel() for p in real.parameters()) == sum(n for _, n in gpt_units(Shape(3, 64, 4, 100, 32)))


FAMILIES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100, "n_positions": 32, "n_inner": 96},
    "LlamaForCausalLM": {
        "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
        "vocab_size": 99, "attention_bias": True, "mlp_bias": True,
    },
    "MistralForCausalLM": {
        "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 99, "head_dim": 32,
    },
    "Qwen2ForCausalLM": {
        "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 99, "tie_word_embeddings": True,
    },
    "MixtralForCausalLM": {
        "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 99, "num_local_experts": 4,
    },
    "T5ForConditionalGeneration": {
        "d_model": 64, "d_ff": 96, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "vocab_size": 99,
        "feed_forward_proj": "gated-gelu",
    },
    "BertModel": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 99},
    "BertForMaskedLM": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 99},
    "ViTModel": {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96, "image_size": 32, "patch_size": 8,
    },
    "ViTForImageClassification": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_labels": 7, "image_size": 32},
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_configs_have_the_parameters_of_the_real_models(name: str, tmp_path: Path) -> None:
    import transformers

    kind = getattr(transformers, name)
    config = kind.config_class(**FAMILIES[name], architectures=[name])
    with torch.device("meta"):
        real = kind(config)
    config.save_pretrained(tmp_path)
    found = huggingface.of_config(tmp_path, BF16)
    assert found.numel == sum(p.numel() for p in real.parameters())
    assert found.shape is not None
    largest_block = max(sum(p.numel() for p in block.parameters()) for block in blocks(real))
    assert max(unit.numel for unit in found.units if unit.name != "(root)") == largest_block


def test_a_token_is_computed_by_the_experts_that_it_is_sent_to(tmp_path: Path) -> None:
    """FLOPs and simulated steps follow num_experts_per_tok, memory does not."""
    entries = {"model_type": "mixtral", **FAMILIES["MixtralForCausalLM"]}
    steps = {}
    for used in (2, 4):
        (tmp_path / "config.json").write_text(json.dumps({**entries, "num_experts_per_tok": used}))
        steps[used] = zerodp.plan(tmp_path, world_size=2, sequence=64, links="dgx-2")
    few, all_of_them = steps[2], steps[4]
    idle = 2 * 2 * 3 * 64 * 112  # of 2 layers, 2 experts of 3 matrices
    assert all_of_them.model.active == all_of_them.model.numel == few.model.numel
    assert few.model.active == few.model.numel - idle
    assert few.estimates[3].kinds == all_of_them.estimates[3].kinds
    assert few.estimates[3].flops == 6 * 64 * few.model.active
    assert few.timelines[3].seconds < all_of_them.timelines[3].seconds


def blocks(model: nn.Module) -> list[nn.Module]:
    return [
        block for parts in model.modules() if isinstance(parts, nn.ModuleList) for block in parts if len(parts) > 0
    ][:99]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("not json", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ('{"model_type": "mamba"}', "model_type 'mamba' is not known here"),
        (
            '{"model_type": "llama", "hidden_size": 64}',
            "expected a whole number 'vocab_size' in a llama config, got None",
        ),
        ('{"model_type": "t5", "d_model": "64"}', "expected a whole number 'd_model' in a t5 config, got '64'"),
    ],
)
def test_configs_that_cannot_be_read(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        zerodp.plan(path, world_size=2)


def test_a_module_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)), nn.BatchNorm1d(1024))
    found = zerodp.plan(model, world_size=8, units=[nn.Linear])
    assert found.model.exact
    assert found.model.numel == sum(p.numel() for p in model.parameters())
    assert found.model.buffer_bytes == 2 * 1024 * 4 + 8
    assert [unit.name for unit in found.model.units] == ["(root)", "0", "1", "2", "3"]
    assert "not counted" in " ".join(found.assumptions)
    numel = found.model.numel
    for one in found.estimates.values():  # padding is the only difference to the forms on numbers
        plain = estimate(of_count(numel, BF16), found.setup, one.stage)
        assert plain.zerodp_state_bytes <= one.zerodp_state_bytes <= plain.zerodp_state_bytes * 1.02


def test_frozen_and_ignored_parameters_cost_less() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    model[0].requires_grad_(False)
    frozen = zerodp.plan(model, world_size=4, precision=None).estimates[3]
    assert frozen.kinds["optimizer"] == 3 * 64 * 64 * 8 / 4
    ignored = zerodp.plan(model, world_size=4, precision=None, ignore=["3.*"]).estimates[3]
    assert ignored.kinds["optimizer"] == (2 / 4 + 1) * 64 * 64 * 8


# ---- settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "world_size: expected a whole number of at least 1, got 0"),
        ({"world_size": 6, "replicate": 4}, "6 devices are not divisible by replicate 4 x tensor_parallel 1"),
        ({"optimizer": "adamm"}, "did you mean 'adam'?"),
        ({"optimizer": -1}, "optimizer: expected a whole number"),
        ({"bytes_per_parameter": 17}, "expected one of 16, 18, 20, got 17"),
        ({"device_memory": "80"}, '\'80\' has no unit; write "80GB" or "80GiB"'),
        ({"device_memory": "80XB"}, "device_memory: expected a number of bytes"),
        ({"device_memory": -5}, "device_memory: expected a whole number of at least 0, got -5"),
        ({"device_memory": 0}, "expected more than 0 bytes, got 0"),
        ({"headroom": 1.0}, "headroom: expected a part of at least 0 and below 1, got 1.0"),
        ({"checkpointing": "some"}, "checkpointing: expected one of none, selective, full, got 'some'"),
        ({"offload_params": "nvme"}, "offload_params: expected one of device, host, disk, got 'nvme'"),
        ({"offload_activations": "host"}, "it needs checkpointing=\"full\", got 'selective'"),
        ({"partition_activations": True, "checkpointing": "full"}, "tensor_parallel above 1, got 'full' and 1"),
        ({"stage": 4}, "stage: expected one of [0, 1, 2, 3]"),
        ({"stage": "auto"}, "stage: expected one of [0, 1, 2, 3], got 'auto'"),
        ({"batchsize": 3}, "unknown option 'batchsize'; did you mean 'batch'?"),
        ({"precision": "bf61"}, "did you mean 'bf16'?"),
        ({"sequence": -1}, "sequence: expected a whole number of at least 1, got -1"),
    ],
)
def test_wrong_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        zerodp.plan(1e9, **{"world_size": 8, **options})


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (1e9, {"ignore": ["head.*"]}, "ignore: names parameters of a module, got ['head.*'] without one"),
        (GPT3, {"loss": sum}, "loss: a step's loss is computed from the module's output"),
        (nn.Linear(2, 2), {"loss": sum}, "loss: a step's loss is computed from the module's output"),
        ("config", {"units": "linear"}, "units: a config file is planned by its layers, got 'linear'"),
        ("config", {"ignore": ["wte.*"]}, "ignore: names parameters of a module"),
        (1e9, {"units": ["blocks.*"]}, "units: without a module expected one of block, branch, linear"),
    ],
)
def test_nothing_given_does_nothing(model: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match=re.escape(message)):
        zerodp.plan(tmp_path if model == "config" else model, world_size=2, **options)


@pytest.mark.parametrize("wrong", [0, -5, float("nan"), float("inf"), True, None, [1]])
def test_wrong_models(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected a torch\.nn\.Module, a count of parameters"):
        zerodp.plan(wrong, world_size=8)


def test_tensor_parallelism_must_divide() -> None:
    with pytest.raises(ConfigError, match="5 ranks do not divide 96 heads"):
        zerodp.plan(GPT3, world_size=10, tensor_parallel=5)
    with pytest.raises(ConfigError, match="cannot be told from the whole"):
        zerodp.plan(nn.Linear(2, 2), world_size=2, tensor_parallel=2)
    with pytest.raises(ConfigError, match="7 heads do not divide"):
        Shape(1, 64, 7)


# ---- what fits, and what is recommended


def test_the_least_communication_that_fits() -> None:
    """1B parameters on 64 devices: what is recommended goes up as memory goes down."""
    sizes = {stage: one.device_bytes for stage, one in zerodp.plan(1e9, world_size=64).estimates.items()}
    for stage, nbytes in sizes.items():
        found = zerodp.plan(1e9, world_size=64, device_memory=int(nbytes) + 1, headroom=0)
        assert (found.recommended, found.fits) == (stage, True)
        assert amount(nbytes) in found.reason
    found = zerodp.plan(1e9, world_size=64, device_memory=int(sizes[3]) - 1, headroom=0)
    assert (found.recommended, found.fits) == (3, False)
    assert "does not fit at any stage" in found.reason
    assert "128 devices" in found.recommendation.remedies


def test_remedies_do_what_they_say() -> None:
    options = {"world_size": 64, "device_memory": "32GB", "sequence": 1024, "batch": 8}
    found = zerodp.plan(7.5e9, **options)
    assert "activation checkpointing" in found.recommendation.remedies
    assert zerodp.plan(7.5e9, **options, checkpointing="full").fits


def test_several_remedies_together() -> None:
    options: dict[str, Any] = {"world_size": 8, "device_memory": "80GB", "sequence": 4096, "batch": 4}
    found = zerodp.plan(65e9, **options)
    together = next(text for text in found.recommendation.remedies if " with " in text)
    assert together.startswith("activation checkpointing with a batch of 1")
    fields = {"checkpointing": "full", "batch": 1}
    if "optimizer on the host" in together:
        fields["offload_optimizer"] = "host"
    assert zerodp.plan(65e9, **{**options, **fields}).fits


def test_the_host_can_be_too_small() -> None:
    options: dict[str, Any] = {"world_size": 1, "device_memory": "32GB", "offload_optimizer": "host"}
    assert zerodp.plan(10e9, **options, host_memory="400GB").fits
    tight = zerodp.plan(10e9, **options, host_memory="64GB")
    assert tight.fits is False
    assert "host: 160 GB needed" in tight.estimates[3].problems[0]


def test_offload_leaves_the_papers_2m_on_the_device() -> None:
    """16-bit parameters only; 4M bytes cross the host link, whatever the number of ranks."""
    low = zerodp.Precision(torch.bfloat16, grad_dtype=torch.bfloat16)
    for ranks in (1, 16):
        found = zerodp.plan(10e9, world_size=ranks, precision=low, offload_optimizer="host").estimates[2]
        assert found.zerodp_state_bytes == pytest.approx(2 * 10e9, rel=1e-12)
        assert found.host_link_bytes * ranks == pytest.approx(4 * 10e9, rel=1e-12)
        assert found.tiers["host"] * ranks == pytest.approx(14 * 10e9, rel=1e-12)


def test_more_fits_at_higher_stages_and_on_more_devices() -> None:
    def most(world_size: int, **options: Any) -> dict[int, dict[str, int]]:
        given: dict[str, Any] = {"device_memory": "32GB", "sequence": 1024, "checkpointing": "full", **options}
        return zerodp.plan(7.5e9, world_size=world_size, **given).largest

    on_16, on_64, on_256 = most(16), most(64), most(256)
    for name in ("parameters", "batch", "sequence"):
        by_stage = [on_64[stage][name] for stage in STAGES]
        assert by_stage == sorted(by_stage)
        assert by_stage[3] > by_stage[0]
        assert on_256[3][name] > on_16[3][name]
    assert on_64[3]["sequence"] > most(64, checkpointing="selective")[3]["sequence"]


def test_papers_models_fit_as_they_did() -> None:
    """32 GB V100s, 16 bits, checkpoints: 13B at stage 2 on 128 devices; data parallelism alone takes 1.3B, not 2.5B."""
    options: dict[str, Any] = {"device_memory": "32GB", "sequence": 1024, "checkpointing": "full", "world_size": 128}
    options["headroom"] = 0
    assert not zerodp.plan(13e9, **options).estimates[2].problems
    assert not zerodp.plan(1.3e9, **options).estimates[0].problems
    assert zerodp.plan(2.5e9, **options).estimates[0].problems
    trillion = zerodp.plan(1e12, world_size=1024, headroom=0).estimates[3]
    assert trillion.model_state_bytes == pytest.approx(16e12 / 1024, rel=1e-12)


@given(st.integers(0, 5000), st.integers(1, 10_000))
def test_largest_is_good_and_nearly_the_most(most: int, limit: int) -> None:
    found = largest(lambda n: n <= most, limit)
    assert found <= min(most, limit)
    assert found >= min(most, limit) - max(found // 1000, 1) - 1


def test_largest_that_fits_does_fit() -> None:
    setup = Setup(64, device_memory=32 * 10**9, sequence=1024, checkpointing="full", batch=2)
    model = of_count(7.5e9, BF16)
    for stage in (1, 2, 3):
        for name, value in most_that_fit(model, setup, stage).items():
            one = of_count(max(value, 1), BF16) if name == "parameters" else model
            changed = setup if name == "parameters" else dataclasses.replace(setup, **{name: max(value, 1)})
            assert bool(estimate(one, changed, stage).problems) == (value == 0), (stage, name, value)


def test_the_largest_model_is_cut_as_the_units_say() -> None:
    """Smaller pages leave room for more, at the stage that has pages."""
    setup = Setup(64, device_memory=8 * 10**9)
    block, linear = (most_that_fit(of_count(1e9, BF16, cut=cut), setup, 3)["parameters"] for cut in ("block", "linear"))
    assert linear > block


def test_auto_stages_on_numbers() -> None:
    model = of_count(1e9, BF16)
    sizes = {stage: estimate(model, Setup(8), stage).device_bytes for stage in STAGES}
    for stage in (0, 1, 2):
        chosen, reason = choose_stages(model, Setup(8, device_memory=int(sizes[stage] / STATE_SHARE) + 1))
        assert set(chosen.values()) == {stage}
        assert f"stage {stage} needs" in reason
    between = int((sizes[2] + sizes[3]) / 2 / STATE_SHARE)
    chosen, reason = choose_stages(model, Setup(8, device_memory=between))
    assert set(chosen.values()) == {2, 3}
    assert f"stage 2 for {list(chosen.values()).count(2)} of {len(chosen)} units" in reason
    with pytest.raises(ConfigError, match="found no stage that fits: stage 3 needs"):
        choose_stages(model, Setup(8, device_memory=int(sizes[3]) - 1))


def test_auto_stages_know_what_is_offloaded() -> None:
    model = of_count(1e9, BF16)
    room = int(estimate(model, Setup(8), 1).device_bytes / STATE_SHARE)
    assert set(choose_stages(model, Setup(8, device_memory=room - 1))[0].values()) == {2}
    away = Setup(8, device_memory=room - 1, offload_optimizer="host")
    assert set(choose_stages(model, away)[0].values()) == {0}
    here = choose_stages(
        model, away, lambda one: one.device_bytes + one.tiers["host"]
    )  # where the host's memory is the device's
    assert set(here[0].values()) == {2}
    params = Setup(8, device_memory=10**15, offload_optimizer="host", offload_params="host")
    assert set(choose_stages(model, params)[0].values()) == {3}


def test_pages_that_are_kept_are_not_gathered_again() -> None:
    model = of_count(1e9, BF16)
    whole = 21 * 10**8  # a little more than all pages
    sent = {
        nbytes: estimate(model, Setup(8, unsharded_bytes=nbytes, accumulate=2), 3) for nbytes in (0, whole // 4, whole)
    }
    gathers = {nbytes: (one.sent_elements - 2e9 * 7 / 8) / 1e9 * 8 / 7 for nbytes, one in sent.items()}
    assert gathers[0] == pytest.approx(4)
    assert 1 < gathers[whole // 4] < 4
    assert gathers[whole] == pytest.approx(1)
    assert sent[0].operations > sent[whole // 4].operations > sent[whole].operations
    away = {
        nbytes: estimate(model, Setup(8, unsharded_bytes=nbytes, offload_params="host"), 3) for nbytes in (0, whole)
    }
    assert away[0].host_link_bytes == 2 * away[whole].host_link_bytes


def test_sums_on_their_way_off_an_accelerator_take_space() -> None:
    """One piece and what copies keep there; on the CPU, where sums are exact, only what goes to disk is copied."""
    model = of_units("units", [(f"unit {number}", 10**8) for number in range(8)], PRECISIONS["fp32"])

    def buckets(exact: bool, optimizer: str) -> float:
        setup = Setup(4, precision="fp32", exact=exact, offload_optimizer=optimizer)
        return estimate(model, setup, 2).kinds["buckets"]

    lands = 2 * 10**8  # bytes of two units' sums, which arrive in place where they rest on the device
    assert buckets(True, "host") == buckets(True, "device")
    assert buckets(True, "disk") == buckets(True, "device") + lands + PIECE_BYTES
    assert buckets(False, "host") == buckets(False, "device") + lands + PIECE_BYTES + 256 * 2**20


# ---- one source of formulas: the page computes what Python computes


@pytest.fixture(scope="module")
def engine() -> Iterator[MiniRacer]:
    """A browser's engine with the script of a page in it, but without a document."""
    with script_of(zerodp.plan(GPT3, world_size=1024, device_memory="80GB", checkpointing="full")) as context:
        yield context


@contextlib.contextmanager
def script_of(plan: zerodp.Plan) -> Iterator[MiniRacer]:
    script = re.search(r"<script>\n(.*?)</script>", page.html(plan), re.DOTALL)
    assert script is not None
    with contextlib.closing(MiniRacer()) as context:  # left open, its threads may outlive the interpreter
        context.eval(script[1])
        yield context


def models() -> list[Model]:
    return [of_count(7.5e9, BF16), of_count(1e12, PRECISIONS["fp32"]), of_shape(GPT3, BF16)]


SETUPS = [
    {},
    {"batch": 8, "sequence": 1024, "checkpointing": "none"},
    {"batch": 2, "sequence": 4096, "checkpointing": "full", "tensor_parallel": 8, "partition_activations": True},
    {"replicate": 4, "accumulate": 3, "exact": True, "prefetch": 3},
    {
        "offload_optimizer": "host",
        "offload_params": "disk",
        "offload_activations": "host",
        "checkpointing": "full",
        "sequence": 512,
    },
    {"world_size": 1, "unsharded_bytes": "2GB", "sequence_parallel": True},
    {"world_size": 8, "replicate": 8, "optimizer": "sgd", "bytes_per_parameter": 10},
    {"unsharded_bytes": "20GB", "accumulate": 2, "offload_optimizer": "host"},
    {"offload_optimizer": "disk", "exact": True, "bucket_bytes": "100MB"},
]


@pytest.mark.parametrize("options", SETUPS, ids=str)
def test_javascript_python_and_the_estimate_agree(options: dict[str, Any], engine: MiniRacer) -> None:
    """The formula in a browser's engine, the same in Python, and the estimate made unit by unit."""
    for model, (stage, residency) in itertools.product(models(), STAGES.items()):
        setup = Setup.of({"world_size": 64, "precision": "bf16", **options})
        if model.units[0].flats[0].compute == 4:
            setup = dataclasses.replace(setup, precision="fp32", bytes_per_parameter=None)
        given = {**page.inputs(model, setup), **{name: int(flag) for name, flag in vars(residency).items()}}
        python = device(*(given[name] for name in INPUTS))
        script = engine.eval(f"JSON.stringify(device({json.dumps(given)}))")
        assert json.loads(script) == pytest.approx(python, rel=1e-12)
        found = estimate(model, setup, stage)
        assert {kind: python[kind] for kind in KINDS} == pytest.approx(found.kinds, rel=1e-9, abs=1)
        assert python["model_states"] == pytest.approx(found.model_state_bytes, rel=1e-12)
        assert python["wire_elements"] == pytest.approx(found.wire_elements, rel=1e-12)
        assert python["sent_elements"] == pytest.approx(found.sent_elements, rel=1e-12)
        assert python["away"] == pytest.approx(sum(found.tiers.values()), rel=1e-12)


def test_a_traced_module_has_its_activations_in_the_page() -> None:
    """Those of both traces, at rest on the device and away from it; the verdict counts them."""
    model = nn.Sequential(*(Pair(256, 256) for _ in range(4)))
    given: dict[str, Any] = {"world_size": 4, "precision": "fp32", "inputs": torch.zeros(512, 256)}
    plan = zerodp.plan(model, device_memory="1GB", **given)
    state = {"ranks": 4, "stage": 2, "batch": 1, "sequence": 0, "checkpointing": "none", "offload": "nothing"}
    assert set(plan.model.traces) == {False, True}
    with script_of(plan) as engine:
        for kind in ("none", "selective", "full"):
            traced = plan.model.traces[kind == "full"]
            found = json.loads(
                engine.eval(f"JSON.stringify(figures({json.dumps({**state, 'checkpointing': kind})}, 2))")
            )
            assert found["activations"] == traced.peak_bytes > 0
            assert found["working"] == traced.peak_bytes - traced.saved_bytes
        assert engine.eval("verdict(initial())").endswith(" on each device, and fits 900 MB.")
    away = zerodp.plan(model, checkpointing="full", offload_activations="host", **given)
    with script_of(away) as engine:
        found = json.loads(engine.eval("JSON.stringify(figures(initial(), 2))"))
        assert found["activations"] == pytest.approx(away.estimates[2].kinds["activations"])
        assert found["away"] == away.estimates[2].tiers["host"] > 0


@pytest.mark.parametrize(
    ("memory", "verdict"),
    [
        ("1GB", ", besides activations, which are not known; 900 MB may be used."),
        ("1kB", "not known, and does not fit 900 B."),
    ],
)
def test_the_page_has_no_verdict_without_activations(memory: str, verdict: str) -> None:
    plan = zerodp.plan(nn.Linear(64, 64), world_size=4, device_memory=memory)
    with script_of(plan) as engine:
        assert engine.eval("verdict(initial())").endswith(verdict)


def test_the_page_needs_nothing_from_outside() -> None:
    text = page.html(zerodp.plan(7.5e9, world_size=64))
    assert not re.findall(r"(?:src|href|url|import)\s*[=(]\s*[\"']?(?:https?:)?//", text)
    assert "/*" not in text
    assert 'name="viewport"' in text


def test_names_in_the_page_are_text() -> None:
    plan = zerodp.plan(7.5e9, world_size=64)
    evil = dataclasses.replace(plan, model=dataclasses.replace(plan.model, name="</script><b>"))
    assert page.html(evil).count("</script>") == 1


@pytest.mark.parametrize("stage", STAGES)
def test_pictures_and_table_follow_the_state(stage: int, engine: MiniRacer) -> None:
    """Each picture is a well-formed drawing; bars say each stage's total; the table has the figures of Python's plan."""
    plan = zerodp.plan(GPT3, world_size=256, device_memory="80GB", checkpointing="selective", batch=4)
    state = json.dumps(
        {"ranks": 256, "stage": stage, "batch": 4, "sequence": 2048, "checkpointing": "selective", "offload": "nothing"}
    )
    for name in ("bars", "overStep", "schedule"):
        drawing = ET.fromstring(engine.eval(f"{name}({state})"))
        words = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
        assert words
        if name == "bars":
            assert all(amount(one.device_bytes) in words for one in plan.estimates.values() if one.device_bytes < 1e15)
    table = engine.eval(f"table({state})")
    for kind in ("parameters", "gradients", "optimizer", "activations"):
        row = re.search(rf"<tr><td>{kind}</td>(.*?)</tr>", table)
        assert row is not None
        assert re.findall(r">([^<]+)</td>", row[1]) == [amount(one.kinds[kind]) for one in plan.estimates.values()]
    gathers = sum(
        event[3].startswith("gather") for event in json.loads(engine.eval(f"JSON.stringify(events({state}))"))
    )
    assert gathers == {0: 0, 1: 6, 2: 6, 3: 12}[stage]
    assert "does not fit" in engine.eval(f"verdict({state})")


def test_controls_change_what_is_computed(engine: MiniRacer) -> None:
    state = {"ranks": 64, "stage": 3, "batch": 4, "sequence": 2048, "checkpointing": "none", "offload": "nothing"}

    def total(**changes: Any) -> float:
        return float(engine.eval(f"figures({json.dumps({**state, **changes})}, 3).total"))

    base = total()
    for changes in (
        {"ranks": 128},
        {"batch": 2},
        {"sequence": 1024},
        {"checkpointing": "full"},
        {"offload": "optimizer"},
    ):
        assert total(**changes) < base


def test_the_script_begins_with_the_plans_own_state(engine: MiniRacer) -> None:
    found = json.loads(engine.eval("JSON.stringify(initial())"))
    assert found == {
        "ranks": 1024,
        "stage": 3,
        "batch": 1,
        "sequence": 2048,
        "checkpointing": "full",
        "offload": "nothing",
    }


# ---- symbols


def test_a_formula_must_not_branch_on_a_symbol() -> None:
    with pytest.raises(TypeError, match=r"use choose\(condition"):
        symbols.javascript("wrong", lambda x: {"y": 1 if x else 2}, ["x"])


@given(a=st.integers(-50, 50), b=st.integers(1, 50))
def test_operators_mean_the_same_in_javascript(engine: MiniRacer, a: int, b: int) -> None:
    def formula(x: Any, y: Any) -> dict[str, Any]:
        return {
            "sums": x + 1 - y + (2 - x) + (3 + y),
            "products": 2 * x * y / 4 + 6 / y,
            "powers": y**2 + x**2,
            "choices": symbols.choose(symbols.differs(x, y), symbols.least(x, y), symbols.most(x, 7)),
            "ceilings": symbols.ceil(x / y),
            "constants": symbols.choose(True, x, y),
        }

    code = symbols.javascript("f", formula, ["x", "y"])
    found = json.loads(engine.eval(f"{code}; JSON.stringify(f({{x: {a}, y: {b}}}))"))
    assert found == pytest.approx(formula(a, b), rel=1e-15)


def test_model_of_takes_every_form(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert short(model_of(tmp_path, Setup(1)).numel) == "124.4M"
    assert model_of(str(tmp_path / "config.json"), Setup(1)).shape == Shape(12, 768, 12, 50257, 1024)
    assert model_of(10**6, Setup(1)).numel == 10**6
    assert model_of(GPT3, Setup(1)).shape == GPT3
    assert model_of(nn.Linear(2, 2), Setup(1)).numel == 6
