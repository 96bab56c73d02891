"""The `zerodp` command: one file per subcommand, each of which adds its own parser."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .. import __version__
from . import bench, compare, export, inspect, plan, train
from .parser import Parser, UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (the process's own by default). The result is the exit status."""
    parser = Parser(prog="zerodp", description="ZeRO stages 0 to 3 for PyTorch as one mechanism.")
    parser.add_argument("--version", action="version", version=f"zerodp {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (train, plan, compare, bench, inspect, export):
        command.add_parser(commands)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except UsageError as error:
        commands.choices[arguments.command].error(str(error))
    except BrokenPipeError:  # whoever read the output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    return status
