"""docs/planning.md, made from the planner: `python bench/planning.py` prints it, `--write` puts it in its place."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import predicted
import report

import zerodp
from zerodp.core.stages import STAGES
from zerodp.planning.closed import infinity, states
from zerodp.planning.estimate import amount
from zerodp.planning.gpt import gpt_step
from zerodp.planning.models import CUTS, Shape, short
from zerodp.planning.setup import Setup
from zerodp.planning.simulated import simulate

TARGET = Path(__file__).parents[1] / "docs" / "planning.md"
ADAM = states.policy(2, 2)
GPT3 = Shape(96, 12288, 96, 50257, 2048)
TRILLION = Shape(128, 25600, 256, 50257, 1024)

# (what it is, model, options)
MACHINES: list[tuple[str, Any, dict[str, Any]]] = [
    ("GPT-3 175B on 400 V100 with 32 GB", GPT3, {"world_size": 400, "device_memory": "32GB", "checkpointing": "full"}),
    (
        "GPT-3 175B on 400 V100 with 32 GB, 16 of them tensor parallel",
        GPT3,
        {
            "world_size": 400,
            "device_memory": "32GB",
            "tensor_parallel": 16,
            "checkpointing": "full",
            "partition_activations": True,
        },
    ),
    ("GPT-3 175B on 128 A100 with 80 GB", GPT3, {"world_size": 128, "device_memory": "80GB", "checkpointing": "full"}),
    ("1T on 1024 V100 with 32 GB", TRILLION, {"world_size": 1024, "device_memory": "32GB", "checkpointing": "full"}),
    (
        "1T on one DGX-2 (16 V100, 1.5 TB of host memory, 28 TB of disk), states on disk",
        TRILLION,
        {
            "world_size": 16,
            "device_memory": "32GB",
            "host_memory": "93GB",
            "disk_memory": "1750GB",
            "checkpointing": "full",
            "offload_optimizer": "disk",
            "offload_params": "disk",
            "offload_activations": "host",
        },
    ),
]

HEAD = """\
# Planning

<!-- Made by `python bench/planning.py --write`; edit that file. -->

`zerodp plan` says what each stage holds on a device and sends in a step, which stage to take, and what would fit. It needs no
devices, and no memory for what it plans.

```
zerodp plan --params 7.5e9 --world-size 64
zerodp plan --layers 96 --hidden 12288 --heads 96 --vocab 50257 --sequence 2048 --world-size 1024 --device-memory 80GB
zerodp plan --config path/to/config.json --world-size 8 --device-memory 24GiB --html plan.html
zerodp plan --config path/to/config.json --world-size 8 --batch 4 --sequence 512 --trace
zerodp plan --layers 96 --hidden 12288 --heads 96 --vocab 50257 --sequence 2048 --world-size 1024 --stage 3 --simulate
```

`--json` prints one object. `--html PATH` writes a page with sliders for ranks, stage, batch, sequence, checkpointing and offload; it
computes the same formulas in the browser and loads nothing from outside. A module has no closed form of its activations: the page has those of its trace, for the batch and
sequence that were traced, and without a trace it does not say that anything fits. In Python, `zerodp.plan(model_or_parameter_count, world_size=...)`
takes a module too, also one on the meta device, and then counts the padding of its real units.

## What is counted

| kind | what it is |
|---|---|
| parameters, gradients, optimizer | what rests on the device, as [stages](stages.md) says; the optimizer's part has the fp32 master and the moments |
| unsharded | gathered pages: the unit in use and those ahead of it, and the root |
| buckets | gradients that fill and travel, with the space to receive and sum them; the casts of the optimizer's step |
| activations | of a transformer by Korthikanti et al. (2022), where shape and sequence are known; `selective` leaves out the attention scores, as fused attention does |
| buffers | of the module |

The first line of every plan is the paper's own formula. Its bytes per parameter are a convention, which is printed: with 16 bits and
Adam 16 (ZeRO), 18 (fp32 gradients) or 20 (ZeRO-Infinity, both); `--bytes-per-parameter` chooses. What this library holds is counted apart, from
its own dtypes. For a module the tests hold states, traffic and workspace to the measured bytes on one, two and four ranks, without tolerance.
Not in the closed forms: the activations of a model that is no transformer (trace it), gradients on their way into a bucket, workspaces of
kernels, and fragmentation, for which `--headroom` (a tenth of the device) is left free. Offload is counted by ZeRO-Offload's placement: master, moments and sharded gradients away, a 16-bit
shard here.

## How long

`--links FILE`, from `zerodp bench links`, adds a simulated step: its time, and how much of it is waiting for the wire. `--tokens` adds the time of a whole
training. See [how long a step takes](step-time.md).

## Which stage

The least communication that fits: stages are tried from 0 to 3. Stages 0 to 2 send the same, so the lowest of them that fits is
taken; stage 3 sends half as much again. Without `--device-memory` it is the stage that holds least among those that send least. Where nothing
fits, the plan says what would: checkpointing, a smaller batch, smaller units, offload, more devices.

Units are whole blocks by default. A page, its bucket and the one ahead are as large as a unit, so very wide models need smaller ones:
`--units branch` plans for attention and MLP apart, `--units linear` for single linear layers. For a module `units=` is what
`zerodp.shard` takes, and the plan names the patterns to pass.

`zerodp.shard(model, optimizer, stage="auto")` asks the same for the memory that is free on the device, the least of all ranks. It does not know
the batch, so states and pages in use may take 63 % of it (ZeRO measured that 63 to 82 % of what the states alone allow can be used). Between stages
2 and 3 it keeps the largest units gathered as long as there is room. It logs its choice under the logger `zerodp`, at level INFO.
"""


STEPS = """\
## A module's own step

```python
plan = zerodp.plan(model, world_size=64, inputs=(x,), loss=lambda output: F.cross_entropy(output, y))
print(plan.trace.saved_bytes, plan.trace.peak_bytes, plan.trace.peak_unit, plan.trace.peak_phase, plan.trace.flops)
```

With `inputs` one forward and backward pass runs on fake tensors, which have shapes and no memory, on a copy of the module that has none either;
the module is not touched and may be on the meta device. `inputs` are those of one rank: a tuple, or a mapping of arguments by name. Their values do not matter, but
whole numbers (token ids, masks) keep theirs if they have any. Without `loss` it is the output's own `loss`, the output if it is a scalar, or its mean. A step that
depends on values of activations (experts that are routed, a loop until convergence) is refused with the unit where that happens.

`plan.trace` has the bytes that autograd keeps, each storage once and without parameters, the most bytes at one time with unit and phase, and
FLOPs, all per unit in `plan.trace.units`. The estimates of all stages use them. `checkpointing="full"` puts the repeated blocks under
`zerodp.apply_activation_checkpointing` first; checkpointing of the module's own is seen as it is. Call `model.train()` or `model.eval()` as for the
real step. For a config file, `inputs=True` (`--trace`) lets `transformers` make the module.

The tests hold the kept bytes and the peak of GPT-2, Llama, T5, ViT and a ResNet, with and without checkpointing, within 5 % of what torch's
CPU allocator reports; for transformers they are equal, or differ by less than 1 %. A table of kernels that need space while they run (convolutions on
the CPU) is in `planning/recorder.py`.

## Ranks that are not there

`simulate=True` (`--simulate`) runs the engine itself, its schedule, layouts, ledgers and counts, as the first and the last of the ranks, on fake
tensors and over groups that send nothing. No process group is needed or touched. `plan.simulated` has for each of the two: bytes by kind, the most
bytes at one time with unit and phase, collectives, elements and bytes sent, and the events of the step in order. On two and four ranks the ledgers,
the traffic and the events are those of a real run on gloo, to the last byte; at 64, 1,024 and 4,096 ranks states, pages, buckets and traffic are
those of the closed forms. It takes memory for Python's objects only, and about half a second for a block.

Tensor parallelism and offload are not simulated. 16-bit floats with a loss scale are counted as bfloat16, which takes as much. The optimizer is
fused Adam or a stand-in with as many values per parameter, so the step's own temporaries of other implementations are not seen.
"""


def figure_1() -> str:
    lines = ["## The paper's example", "", "7.5B parameters on 64 devices, mixed-precision Adam (ZeRO, Figure 1).", ""]
    plan = zerodp.plan(7.5e9, world_size=64)
    lines += ["| stage | by the paper | held here | elements sent, by the paper | sent here |", "|---|---|---|---|---|"]
    for stage, one in plan.estimates.items():
        lines.append(
            f"| {stage} | {amount(one.model_state_bytes)} | {amount(one.zerodp_state_bytes)} | {short(one.wire_elements)} | {short(one.sent_elements)} |"
        )
    return "\n".join(lines)


def table_1() -> str:
    lines = ["## Bytes per device as devices are added", "", "GB of model states by the paper (ZeRO, Table 1).", ""]
    sizes, sharded = (7.5e9, 128e9, 1e12), [stage for stage, row in STAGES.items() if row.shards_optimizer]
    heads = [f"{short(numel)}, stage {stage}" for numel in sizes for stage in sharded]
    lines += ["| devices | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for ranks in (1, 4, 16, 64, 256, 1024):
        cells = [states.paper_bytes(n, ranks, STAGES[stage], ADAM) / 1e9 for n in sizes for stage in sharded]
        lines.append(f"| {ranks} | " + " | ".join(f"{cell:,.2f}".rstrip("0").rstrip(".") for cell in cells) + " |")
    return "\n".join(lines)


def simulated() -> str:
    """The closed forms beside the simulated engine, and the newest results of bench/trillion.py."""
    lines = ["### Closed forms and the engine", "", "GPT of 12 layers, width 768, on 1,024 ranks: the last rank.", ""]
    lines += ["| stage | planned | simulated | where | collectives | sent |", "|---|---|---|---|---|---|"]
    shape = Shape(12, 768, 12, 50257, 1024)
    estimates, setup = zerodp.plan(shape, world_size=1024).estimates, Setup(1024)
    step = gpt_step(shape, 1, None, "block", setup.precision)
    for stage in STAGES:
        one = simulate(step, setup, stage, rank=1023)  # what `zerodp plan --simulate` does, for the first rank as well
        where = f"{one.peak_phase} of {one.peak_unit}"
        lines.append(
            f"| {stage} | {amount(estimates[stage].device_bytes)} | {amount(one.peak_bytes)} | {where} | {one.launches:,} | {amount(one.wire_bytes)} |"
        )
    lines += ["", "### A trillion parameters", ""]
    lines += [
        "One rank of 1,024 at stage 3, one sample of 1,024 tokens, blocks checkpointed; made by `python bench/trillion.py --write`.",
        "",
    ]
    lines += [
        "| units | parameters | planned | simulated | unsharded | buckets | activations | collectives | took | in memory |",
        "|---" * 10 + "|",
    ]
    for cut in CUTS:
        if one := report.newest(f"simulated-{cut}"):
            sizes = (
                one["planned_bytes"],
                one["peak_bytes"],
                one["peak"]["unsharded"],
                one["peak"]["buckets"],
                one["activations_bytes"],
            )
            lines.append(
                f"| {cut} | {short(one['parameters'])} | {' | '.join(map(amount, sizes))} | {one['launches']:,} | {one['seconds']:.0f} s | "
                f"{amount(one['process_bytes'])} |"
            )
    return "\n".join(lines)


def machines() -> str:
    lines = [
        "## Large models on the papers' machines",
        "",
        "One sample per device, activations checkpointed; bytes per device.",
        "",
    ]
    lines += ["| | stage 1 | stage 2 | stage 3 | host | disk | recommended |", "|---|---|---|---|---|---|---|"]
    for name, model, options in MACHINES:
        plan = zerodp.plan(model, **options)
        found = [amount(one.device_bytes) for stage, one in plan.estimates.items() if STAGES[stage].shards_optimizer]
        tiers = plan.estimates[plan.recommended].tiers
        verdict = (
            f"stage {plan.recommended}"
            if plan.fits
            else "does not fit; "
            + (
                "would with " + " or ".join(plan.recommendation.remedies)
                if plan.recommendation.remedies
                else "no single way out"
            )
        )
        away = [amount(tiers[tier]) if tiers[tier] else "" for tier in ("host", "disk")]
        lines.append(f"| {name} | {' | '.join(found)} | {' | '.join(away)} | {verdict} |")
    return "\n".join(lines)


def bandwidths() -> str:
    lines = [
        "## Bandwidth that keeps a device busy",
        "",
        "ZeRO-Infinity's efficiency at 70 TFLOPS, without overlap, 1024 tokens.",
        "",
    ]
    lines += ["| what moves | where | efficiency |", "|---|---|---|"]
    for what, where, intensity, gigabytes in (
        ("parameters and gradients", "1 sample, 70 GB/s", infinity.intensity_of_parameters(1, 1024), 70),
        ("optimizer states", "2 samples, 1.5 TB/s", infinity.intensity_of_optimizer(2, 1024), 1500),
        ("activation checkpoints", "width 2K, 2 GB/s", infinity.intensity_of_checkpoints(2048), 2),
        ("activation checkpoints", "width 8K, 1 GB/s", infinity.intensity_of_checkpoints(8192), 1),
    ):
        lines.append(f"| {what} | {where} | {infinity.efficiency(intensity, gigabytes * 1e9):.1%} |")
    return "\n".join(lines)


def measured() -> str:
    """What runs of `zerodp train` predicted and measured, from the newest results of predicted.py."""
    found = report.newest(predicted.NAME)
    if found is None:
        return ""
    return "\n".join(
        [
            "## Predicted and measured",
            "",
            f"Each run of `zerodp train` ends with this comparison. Here on {found['cpu']}, {found['cores']} cores, {found['date'][:10]}: a GPT of "
            f"{found['parameters']} parameters in fp32 on {found['ranks']} gloo ranks (`python bench/predicted.py`). Bytes are those of one rank; "
            "the step is simulated from a recording and links measured at the start of the run, see [step time](step-time.md).",
            "",
            predicted.table(found),
        ]
    )


def document() -> str:
    parts = [HEAD.rstrip(), STEPS.rstrip(), simulated(), figure_1(), table_1(), machines(), bandwidths()]
    return "\n\n".join([*parts, *([measured()] if measured() else [])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {TARGET.name} instead of printing it")
    if parser.parse_args().write:
        TARGET.write_text(document(), encoding="utf-8")
    else:
        print(document(), end="")


if __name__ == "__main__":
    main()
