"""`zerodp compare`: the user's own model sharded and unsharded, side by side on ranks, and the first tensor that differs."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from typing import Any

import torch
import torch.distributed as dist

from ..compare import Comparison, compare
from .benching import ranks
from .parser import Parser, function, look_up, positive, whole

DIFFERENT = 1  # exit status
EPILOG = """\
MODEL, BATCHES, LOSS and OPTIMIZER are functions of yours, as module:function; modules are looked for in this folder too. BATCHES is called
with the rank and the number of ranks and gives that rank's batches, one per step and as many on every rank; LOSS takes the model and a batch.

  zerodp compare train:make_model train:batches train:loss
  zerodp compare train:make_model train:batches train:loss --optimizer train:make_optimizer --stage 2 --ranks 4 --json
  torchrun --nproc-per-node 2 -m zerodp.cli compare train:make_model train:batches train:loss

Exit status 1 means that something differs by more than the tolerance.
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "compare",
        help="train a model of yours sharded and unsharded, and compare",
        description="Train the same model sharded over ranks and unsharded, and name the first loss, gradient or parameter that differs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, text in (
        ("model", "builds the model"),
        ("batches", "gives the batches of a rank"),
        ("loss", "computes the loss"),
    ):
        parser.add_argument(name, type=function, metavar=name.upper(), help=f"module:function that {text}")
    parser.add_argument(
        "--optimizer",
        type=function,
        default="torch.optim:AdamW",
        metavar="OPTIMIZER",
        help="module:function that takes the parameters (default torch.optim:AdamW)",
    )
    parser.add_stage()
    parser.add_precision(None, "of the sharded side")
    parser.add_argument(
        "--steps", type=whole(1), metavar="N", help="steps at most (default: as many as there are batches)"
    )
    parser.add_argument(
        "--tolerance",
        type=positive,
        default=1e-6,
        metavar="X",
        help="largest difference that counts as equal (default 1e-6)",
    )
    ranks.add_options(parser)
    parser.add_json()
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    names = ("model", "batches", "loss", "optimizer", "stage", "precision", "steps", "tolerance")
    given = {name: getattr(arguments, name) for name in names}
    found = ranks.on_ranks(".compare.on_rank", arguments, given)
    if found is None:  # not the first rank
        return 0
    comparison = Comparison(**found)
    if arguments.json:
        finite = math.isfinite(comparison.largest)
        print(json.dumps({**found, "largest": comparison.largest if finite else None}))
    else:
        print(comparison)
    return 0 if comparison.equal else DIFFERENT


def on_rank(device: torch.device, given: dict[str, Any]) -> dict[str, Any]:
    """The comparison as one rank; a collective."""
    model, batches, loss, optimizer = (look_up(given[name]) for name in ("model", "batches", "loss", "optimizer"))
    mine = itertools.islice(batches(dist.get_rank(), dist.get_world_size()), given["steps"])
    options = {"stage": given["stage"], "precision": given["precision"]}
    return dataclasses.asdict(compare(model, optimizer, mine, loss, tolerance=given["tolerance"], **options))
