"""`zerodp train`: a GPT on text, on local worker processes or under torchrun. The quick start of the library.

Reads the options and settles everything that a user can get wrong before a process is started.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch

from ..config import DELAYED_AFTER, PLACES, PRECISIONS
from .parser import Parser, UsageError, one_of, positive, precision, size, stage_number, whole
from .training import launch, settings, worker
from .training.text import open_corpus

EPILOG = """\
Without --data the text is the Python standard library's own source. --params picks the shape of the model: the width is a
multiple of 64 and 32 to 128 times the depth, whatever comes nearest. Under torchrun, the ranks are torchrun's:

  zerodp train --stage 2 --precision bf16 --minutes 1
  zerodp train --resume runs/20260131-120000 --steps 1000
  torchrun --nproc-per-node 8 --max-restarts 3 -m zerodp.cli train --out runs/1b --params 1B --precision bf16 --batch 16

A run that torchrun restarts, and one that --resume goes on with, takes the newest whole checkpoint in its folder, on as many ranks
as there are then.
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "train",
        help="train a GPT on text, sharded over ranks",
        description="Train a GPT on text, sharded over ranks, and report what each rank holds.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # what is not given comes from --resume or from Settings
    )
    default = settings.Settings()

    def add(group: Any, name: str, kind: Any, text: str, metavar: str, shown: str | None = None) -> None:
        value = getattr(default, name.replace("-", "_"), None)
        shown = shown or (f"{value:,}" if isinstance(value, int) else str(value))
        group.add_argument(f"--{name}", type=kind, metavar=metavar, help=f"{text} (default {shown})")

    group = parser.add_argument_group("what to train")
    add(group, "data", str, "a text file, or a folder of them", "PATH", "the standard library")
    add(group, "params", size, "parameters of the model, such as 4M", "COUNT", "4M")
    add(group, "context", whole(2), "bytes that the model looks back at", "N")
    group = parser.add_argument_group("how to train")
    add(group, "steps", whole(1), "optimizer steps; the learning rate falls over all of them", "N")
    add(group, "minutes", positive, "stop after so long, ready to resume", "M", "no limit")
    add(group, "batch", whole(1), "windows of text per rank and backward pass", "N")
    add(group, "accumulate", whole(1), "backward passes per step", "N")
    add(group, "lr", positive, "highest learning rate", "RATE")
    add(group, "seed", whole(0), "of the weights and the order of the text", "N")
    group = parser.add_argument_group("how to shard")
    add(group, "stage", stage_number, "ZeRO stage: 0, 1, 2 or 3", "STAGE")
    add(group, "precision", precision, "dtype of compute: " + ", ".join(PRECISIONS), "DTYPE")
    add(group, "offload", one_of(PLACES), "where the optimizer's states rest: " + ", ".join(PLACES), "PLACE")
    group.add_argument(
        "--delayed-update",
        type=whole(1),
        nargs="?",
        const=DELAYED_AFTER,
        metavar="N",
        help=f"with --offload host or disk: after N steps ({DELAYED_AFTER}) the update runs beside the next pass (default never)",
    )
    add(group, "ranks", whole(1), "worker processes on this machine, unless torchrun started this one", "N")
    add(group, "threads", whole(1), "torch threads per rank", "N")
    add(group, "device", one_of(["auto", "cpu", "cuda"]), "auto: GPUs where each local rank has one", "NAME")
    group = parser.add_argument_group("what to keep")
    add(group, "out", Path, "folder of the run", "FOLDER", "runs/DATE-TIME")
    add(group, "resume", Path, "go on with the run in this folder, with its settings", "FOLDER", "a new run")
    add(group, "validate-every", whole(1), "steps between looks at held-out text", "N")
    add(group, "save-every", whole(1), "steps between saves, besides the one at the end", "N")
    add(group, "sample", whole(0), "bytes of text to generate at the end", "N")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Start the ranks, or be one of them."""
    given = {key: value for key, value in vars(arguments).items() if key not in ("command", "run", "out", "resume")}
    out, resume = getattr(arguments, "out", None), getattr(arguments, "resume", None)
    if resume is not None and out is not None:
        raise UsageError("--out and --resume exclude each other: a resumed run stays in its folder")
    under_torchrun = "RANK" in os.environ
    if under_torchrun and "ranks" in given:
        raise UsageError("--ranks: torchrun has started the ranks; leave it out")
    folder = resume or out or new_name()
    if restarted() and settings.exists(folder):
        resume = folder
    run_settings = settings.resolve(given, resume, int(os.environ["WORLD_SIZE"]) if under_torchrun else None)
    run_settings.places()
    check_device(run_settings.device, int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun else run_settings.ranks)
    digest = open_corpus(run_settings.data, run_settings.context).digest
    if resume is not None:
        settings.check_text(resume, digest)
    if not under_torchrun or os.environ["RANK"] == "0":
        new_folder(folder, empty=resume is None)
        settings.write(folder, run_settings, digest)
    if under_torchrun:
        return worker.run(run_settings, folder, resumes=resume is not None)
    launcher = launch.Launcher(worker.command(folder, resumes=resume is not None), folder)
    return launcher.run(run_settings.ranks, run_settings.threads)


def new_name() -> Path:
    """The folder of a run that was given none.

    Raises:
        UsageError: torchrun may restart the run, and has no name either by which it would find its folder again.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if name != "none":
        return Path("runs") / name
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        raise UsageError("--out: torchrun may restart this run, which then must find its folder; name one")
    return Path("runs") / time.strftime("%Y%m%d-%H%M%S")


def restarted() -> bool:
    """Whether torchrun has started the ranks again, after one was lost or came."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def check_device(device: str, local_ranks: int) -> None:
    """Each rank of this machine needs a GPU of its own."""
    if device == "cuda" and torch.cuda.device_count() < local_ranks:
        raise UsageError(
            f"--device cuda: {local_ranks} ranks on this machine, which has {torch.cuda.device_count()} GPUs"
        )


def new_folder(folder: Path, empty: bool) -> None:
    """Make the run's folder.

    Raises:
        UsageError: it cannot be made, or must be empty and is not.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if empty and any(folder.iterdir()):
            raise UsageError(f"--out {folder}: the folder is not empty; go on with the run in it by --resume {folder}")
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}") from None
