"""`zerodp plan`: what each stage holds and sends, which to take, what fits; a table, JSON, or a page with sliders."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

from ..config import PRECISIONS
from ..errors import ConfigError
from ..planning.closed.states import MOMENTS
from ..planning.estimate import KINDS, amount
from ..planning.models import CUTS, Shape, short
from ..planning.page import html
from ..planning.plan import Plan, plan
from ..planning.setup import CHECKPOINTING, TIERS, Setup
from ..planning.timeline.machine import MACHINES
from .parser import Parser, UsageError, one_of, positive, precision, size, stage_number, whole

EPILOG = """\
The model is a count of parameters, a shape, or a Hugging Face config. Memory and bandwidth need a unit, such as 80GB or 25GB (per second).

  zerodp plan --params 7.5e9 --world-size 64
  zerodp plan --layers 96 --hidden 12288 --heads 96 --vocab 50257 --sequence 2048 --world-size 1024 --device-memory 80GB
  zerodp plan --config path/to/config.json --world-size 8 --device-memory 24GiB --html plan.html
  zerodp plan --config path/to/config.json --world-size 8 --batch 4 --sequence 512 --trace
  zerodp plan --layers 128 --hidden 25600 --heads 256 --vocab 50257 --sequence 1024 --world-size 1024 --checkpointing full --simulate
"""
SHAPE = ("layers", "hidden", "heads")


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="what each stage holds and sends, and which to take",
        description="Bytes per device and on the wire at each stage, from closed forms, a traced step, or the simulated engine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    fields = {f.name: f for f in dataclasses.fields(Setup)}

    def add(group: Any, name: str, kind: Any, text: str, metavar: str) -> None:
        default = fields[name].default if name in fields else None
        told = "" if default in (None, dataclasses.MISSING) else f" (default {default})"
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text + told)

    group = parser.add_argument_group("the model")
    add(group, "params", size, "parameters, such as 7.5e9 or 13B", "COUNT")
    add(group, "config", Path, "a Hugging Face config.json, or its folder", "PATH")
    add(group, "layers", whole(1), "layers of a GPT", "N")
    add(group, "hidden", whole(1), "its width", "N")
    add(group, "heads", whole(1), "its attention heads", "N")
    add(group, "vocab", whole(0), "its vocabulary", "N")
    add(group, "units", one_of(list(CUTS)), "what travels together: " + ", ".join(CUTS) + " (default block)", "CUT")
    group = parser.add_argument_group("the machines")
    group.add_argument("--world-size", type=whole(1), metavar="N", required=True, help="devices in all")
    add(group, "replicate", whole(1), "copies of the sharded states (hybrid mesh)", "N")
    add(group, "tensor_parallel", whole(1), "tensor parallel ranks", "N")
    group.add_argument("--sequence-parallel", action="store_true", help="with sequence parallelism")
    for name, text in (
        ("device_memory", "of each device"),
        ("host_memory", "of the host, for each device"),
        ("disk_memory", "on disk, for each device"),
        ("link_bandwidth", "of each device to the others, per second"),
        ("host_bandwidth", "of each device to its host, per second"),
    ):
        add(group, name, str, text, "BYTES")
    add(group, "device_flops", positive, "achievable FLOPs per second of a device", "RATE")
    add(group, "headroom", float, "part of the device memory to leave free", "PART")
    add(group, "links", str, f"simulate steps: a file of zerodp bench links, or one of {', '.join(MACHINES)}", "FILE")
    group = parser.add_argument_group("how to train")
    add(group, "precision", precision, "dtype of compute: " + ", ".join(PRECISIONS), "DTYPE")
    add(group, "optimizer", one_of(list(MOMENTS)), ", ".join(MOMENTS), "NAME")
    add(group, "bytes_per_parameter", whole(1), "the convention of the paper's figures: 16, 18 or 20 for Adam", "N")
    add(group, "batch", whole(1), "samples per device and backward pass", "N")
    add(group, "sequence", whole(1), "tokens of a sample", "N")
    add(group, "accumulate", whole(1), "backward passes per step", "N")
    add(group, "tokens", size, "tokens of the whole training, for its time", "COUNT")
    add(group, "checkpointing", one_of(CHECKPOINTING), "of activations: " + ", ".join(CHECKPOINTING), "KIND")
    group.add_argument(
        "--partition-activations", action="store_true", help="split checkpoints over tensor parallel ranks"
    )
    for name in ("offload_optimizer", "offload_params", "offload_activations"):
        add(group, name, one_of(TIERS), "where they rest: " + ", ".join(TIERS), "TIER")
    add(group, "prefetch", whole(0), "units to gather ahead", "N")
    add(group, "unsharded_bytes", str, "gathered bytes kept between uses in stage 3", "BYTES")
    add(group, "bucket_bytes", str, "most bytes in one collective", "BYTES")
    group.add_argument(
        "--stage", type=stage_number, metavar="STAGE", help="look at this stage (default: the recommended one)"
    )
    group = parser.add_argument_group("what to run, without memory")
    group.add_argument(
        "--trace",
        action="store_true",
        help="a step of the --config's own module, for its activations and FLOPs; needs transformers",
    )
    group.add_argument(
        "--simulate",
        action="store_true",
        help="steps of the engine, as the first and the last rank: memory, wire, collectives",
    )
    group = parser.add_argument_group("what to show")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument(
        "--html", type=Path, metavar="PATH", help="write a page with sliders and pictures, and print nothing else"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    given = {key: value for key, value in vars(arguments).items() if key not in ("command", "run")}
    as_json, page = given.pop("json", False), given.pop("html", None)
    if given.get("simulate") and "params" in given:
        raise UsageError("--simulate: a count of parameters is no module; give a shape or a --config")
    if given.get("trace") and "config" not in given:
        raise UsageError("--trace: runs the module of a --config; a shape's activations have closed forms")
    if "config" in given and "units" in given:
        raise UsageError("--units: cuts a count or a shape; a --config is planned by its layers")
    if given.pop("trace", False) or ("config" in given and given.get("simulate")):
        given["inputs"] = True
    try:
        found = plan(model_of(given), **given)
    except ConfigError as error:
        raise UsageError(as_option(str(error))) from None
    if page is not None:
        try:
            page.write_text(html(found), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--html {page}: {error.strerror}") from None
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    elif page is None:
        show(found)
    return 0


def model_of(given: dict[str, Any]) -> Any:
    """The model that the options name; takes them out of `given`.

    Raises:
        UsageError: none, or more than one.
    """
    params, config, vocabulary = given.pop("params", None), given.pop("config", None), given.pop("vocab", None)
    shape = {name: given.pop(name) for name in SHAPE if name in given}
    if sum((params is not None, config is not None, bool(shape))) != 1:
        raise UsageError("give one model: --params, --config, or --layers with --hidden and --heads")
    if vocabulary is not None and not shape:
        raise UsageError(
            "--vocab: is of a shape (--layers, --hidden, --heads); a count has none, and a --config has its own"
        )
    if params is not None or config is not None:
        return config if params is None else params
    missing = [name for name in SHAPE if name not in shape]
    if missing:
        raise UsageError(f"a shape needs --{', --'.join(SHAPE)}; missing: --{', --'.join(missing)}")
    return Shape(**shape, vocabulary=vocabulary or 0, sequence=given.get("sequence"))


def as_option(message: str) -> str:
    """The library's message in the words of the command line."""
    name, colon, rest = message.partition(":")
    known = {f.name for f in dataclasses.fields(Setup)} | {*SHAPE, "params"}
    return f"--{name.replace('_', '-')}{colon}{rest}" if name in known else message


def show(found: Plan) -> None:
    """A table with rich, where that is installed, and plain lines elsewhere."""
    if not importlib.util.find_spec("rich"):
        print(found)
        return
    from rich.console import Console
    from rich.table import Table

    console, estimates = Console(highlight=False), found.estimates
    title = f"{found.model.name} on {found.setup.world_size:,} devices, bytes per device"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("stage")
    for stage in estimates:
        table.add_column(f"{stage} *" if stage == found.chosen else str(stage), justify="right")

    def row(name: str, cells: list[str], style: str | None = None, end: bool = False) -> None:
        if any(cells):
            table.add_row(name, *cells, style=style, end_section=end)

    row("model states by the paper", [amount(one.model_state_bytes) for one in estimates.values()], end=True)
    for kind in KINDS:
        if any(one.kinds[kind] for one in estimates.values()):
            row(kind, [amount(one.kinds[kind]) for one in estimates.values()])
    row("device", [amount(one.device_bytes) for one in estimates.values()], "bold", end=True)
    for tier in ("host", "disk"):
        if any(one.tiers[tier] for one in estimates.values()):
            row(f"on {tier}", [amount(one.tiers[tier]) for one in estimates.values()])
    row("sent per step", [amount(one.sent_bytes) for one in estimates.values()])
    row("collectives per step", [f"{one.operations:,}" for one in estimates.values()])
    for part in ("compute", "wire", "host link"):
        seconds = [one.seconds.get(part) for one in estimates.values()]
        row(f"seconds of {part}", ["" if value is None else f"{value:.3g}" for value in seconds])
    for name, *cells in found.time_rows():
        row(name, cells)
    if found.fits is not None:
        row("fits", ["no" if one.problems else "yes" for one in estimates.values()], end=True)
        for name in ("parameters", "batch", "sequence"):
            most = [found.largest[stage].get(name) for stage in estimates]
            row(f"largest {name}", ["" if value is None else short(value) for value in most])
    console.print(table)
    console.print(
        f"[bold]Stage {found.recommended}[/bold]: {found.reason}."
        if found.fits is not False
        else f"[bold]{found.reason}[/bold]."
    )
    for one in found.simulated:
        console.print(str(one))
    for line in found.assumptions:
        console.print(f"  {line}", style="dim")
