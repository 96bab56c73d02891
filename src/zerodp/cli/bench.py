"""`zerodp bench`: short measurements on this machine, each a subcommand with a file of its own in `benching/`."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

from .benching import MEASUREMENTS
from .parser import Parser, UsageError

EPILOG = """\
Started alone, a measurement runs on local processes over gloo; under torchrun its ranks are torchrun's.
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "bench", help="measure this machine", description="Short measurements on this machine.", epilog=EPILOG
    )
    group = parser.add_subparsers(dest="measurement", metavar="WHAT", required=True)
    for measurement in MEASUREMENTS:
        measurement.add_parser(group)
    for one in group.choices.values():
        one.set_defaults(run=functools.partial(_run, one, one.get_default("run")))


def _run(parser: Parser, run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Wrong usage is told by the subcommand's own name."""
    try:
        return run(arguments)
    except UsageError as error:
        parser.error(str(error))
