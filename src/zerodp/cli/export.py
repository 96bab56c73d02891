"""`zerodp export`: a checkpoint as a Hugging Face folder. One process, for checkpoints larger than memory too."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..checkpoint import export
from ..errors import CheckpointError, ConfigError
from .parser import Parser, UsageError


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "export",
        help="turn a checkpoint into safetensors",
        description="Write the weights of a checkpoint as a Hugging Face folder of safetensors files.",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="the folder that zerodp.save wrote")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    parser.add_argument("--max-shard", default="5GB", metavar="BYTES", help="most bytes in one file (default 5GB)")
    parser.add_json(": the files and their bytes")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        export(arguments.checkpoint, arguments.out, arguments.max_shard)
    except (ConfigError, CheckpointError) as error:
        raise UsageError(str(error)) from None
    files = {path.name: path.stat().st_size for path in sorted(arguments.out.iterdir())}
    if arguments.json:
        print(json.dumps({"path": str(arguments.out), "files": files}))
    else:
        print("\n".join([str(arguments.out), *(f"  {name}  {num_bytes:,} bytes" for name, num_bytes in files.items())]))
    return 0
