"""`zerodp bench links`: latency and bandwidth of this library's collectives, and rates of compute, as `zerodp plan --links` takes them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from ...config import PRECISIONS
from ...planning.timeline.calibrate import calibrate
from ...planning.timeline.machine import Link, Machine, of_json
from ..parser import Parser, UsageError, positive
from . import ranks

EPILOG = """\
  zerodp bench links --ranks 2 --out links.json
  torchrun --nproc-per-node 8 -m zerodp.cli bench links --precision bf16 --out links.json
  zerodp plan --layers 24 --hidden 2048 --heads 16 --vocab 50257 --sequence 1024 --world-size 8 --links links.json
"""


def add_parser(group: argparse._SubParsersAction[Parser]) -> None:
    parser = group.add_parser(
        "links",
        help="latency and bandwidth between the ranks, and rates of compute",
        description="Measure what a collective costs by its size, and how fast a rank computes and copies while all do.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ranks.add_options(parser)
    parser.add_precision("fp32", "dtype on the wire and of compute")
    parser.add_argument(
        "--seconds",
        type=positive,
        default=0.1,
        metavar="S",
        help="for each single measurement, of about twenty (default 0.1)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a file for zerodp plan --links")
    parser.add_json(", the file's content")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.out is not None and not arguments.out.resolve().parent.is_dir():
        raise UsageError(f"--out {arguments.out}: there is no folder {arguments.out.resolve().parent}")
    found = ranks.on_ranks("links.measure", arguments, {"precision": arguments.precision, "seconds": arguments.seconds})
    if found is None:
        return 0
    text = json.dumps(found, indent=2)
    if arguments.out is not None:
        try:
            arguments.out.write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--out {arguments.out}: {error.strerror}") from None
    print(text if arguments.json else table(of_json(found)))
    return 0


def measure(device: torch.device, settings: dict[str, Any]) -> dict[str, Any]:
    """On every rank."""
    return calibrate(device, PRECISIONS[settings["precision"]].param_dtype, settings["seconds"]).as_json()


def table(machine: Machine) -> str:
    """The figures in words, one line each."""
    lines = [machine.name]
    for where, links in (("", machine.inside), (" across nodes", machine.across)):
        sender = "node" if where else "rank"
        lines += [f"  {link.op.replace('_', '-') + where:28} {_link(link, sender)}" for link in links if link.ranks > 1]
    lines += [
        f"  {'small message':28} {machine.message_seconds * 1e6:8.0f} us",
        *(f"  {f'product of {work:.1e} FLOPs':28} {rate / 1e9:8.1f} GFLOP/s" for work, rate in machine.compute),
        f"  {'memory, read and written':28} {machine.memory_bandwidth / 1e9:8.1f} GB/s",
        f"  {'compute beside a transfer':28} {machine.shared_rate:8.0%} of its rate alone",
    ]
    return "\n".join(lines)


def _link(link: Link, sender: str) -> str:
    return (
        f"{link.latency * 1e6:8.0f} us and {link.bandwidth / 1e9:6.2f} GB/s that a {sender} sends, {link.ranks} ranks"
    )
