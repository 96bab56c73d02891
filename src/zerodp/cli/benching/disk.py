"""`zerodp bench disk`: what the disk of a folder gives, what of it `Offload(..., "disk")` uses, and what a step would take."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from typing import Any

from ...checks import bytes_of
from ...config import PRECISIONS
from ...core.stages import STAGES
from ...errors import ConfigError, StorageError
from ...planning.closed.states import MOMENTS
from ...planning.estimate import amount
from ...planning.models import unit_specs
from ...tiers.disk import BUFFER_BYTES, IN_FLIGHT, REQUEST_BYTES
from ...tiers.measure import BOTH, READ, WRITE, Rate, measure
from ..parser import Parser, UsageError, one_of, positive, size, whole

EPILOG = """\
  zerodp bench disk /nvme
  zerodp bench disk /nvme --params 7.5e9 --optimizer adamw --ranks 4
"""
REQUESTS = (64 * 2**10, 2**20, REQUEST_BYTES, 4 * REQUEST_BYTES)
NUMBERS = (1, IN_FLIGHT, 4 * IN_FLIGHT)


def add_parser(group: argparse._SubParsersAction[Parser]) -> None:
    parser = group.add_parser(
        "disk",
        help="what a folder's disk gives, and what a step that offloads to it would take",
        description="Read and write a nameless file in FOLDER, with several sizes and numbers of requests.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", nargs="?", default=tempfile.gettempdir(), metavar="FOLDER", help="(default %(default)s)"
    )
    parser.add_argument("--size", default="512MiB", metavar="BYTES", help="of the file (default %(default)s)")
    parser.add_argument(
        "--seconds",
        type=positive,
        default=0.25,
        metavar="S",
        help="for each of about thirty measurements (default %(default)s)",
    )
    parser.add_argument(
        "--params", type=size, metavar="COUNT", help="parameters, such as 7.5e9, for the time of a step"
    )
    names = ", ".join(MOMENTS)
    parser.add_argument(
        "--optimizer",
        type=one_of(list(MOMENTS)),
        default="adamw",
        metavar="NAME",
        help=f"{names} (default %(default)s)",
    )
    parser.add_precision("bf16")
    parser.add_stage("ZeRO stage: which of the states a rank has a part of")
    parser.add_argument(
        "--ranks",
        type=whole(1),
        default=1,
        metavar="N",
        help="ranks in all, over which the states are split (default 1)",
    )
    parser.add_argument("--sharing", type=whole(1), metavar="N", help="of them, how many share this disk (default all)")
    parser.add_json()
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    sharing = arguments.sharing or arguments.ranks
    if sharing > arguments.ranks:
        raise UsageError(f"--sharing {sharing}: there are {arguments.ranks} ranks")
    try:
        nbytes = bytes_of("--size", arguments.size)
        if nbytes < max(REQUESTS):
            raise UsageError(f"--size {arguments.size}: expected at least {amount(max(REQUESTS))}")
        rates = measure(arguments.folder, nbytes, REQUESTS, NUMBERS, arguments.seconds)
    except (ConfigError, StorageError) as error:
        raise UsageError(str(error)) from None
    found = report(arguments.folder, rates)
    if arguments.params is not None:
        found["step"] = step(arguments, sharing, found["both"])
    print(json.dumps(found, indent=2) if arguments.json else text(found, rates))
    return 0


def report(folder: str, rates: Sequence[Rate]) -> dict[str, Any]:
    """Bandwidths in bytes per second: the best ones, those of the settings that the disk tier has, and all."""
    direct = rates[0].direct
    main = [rate for rate in rates if rate.direct == direct]
    best = {
        what: max((rate for rate in main if rate.what == what), key=lambda rate: rate.bandwidth)
        for what in (READ, WRITE)
    }
    own = {
        rate.what: rate.bandwidth
        for rate in main
        if (rate.request_bytes, rate.in_flight) == (REQUEST_BYTES, IN_FLIGHT) and rate.what in best
    }
    return {
        "folder": folder,
        "direct": direct,
        "best": {what: dataclasses.asdict(rate) for what, rate in best.items()},
        "tier": {"request_bytes": REQUEST_BYTES, "in_flight": IN_FLIGHT, "buffer_bytes": BUFFER_BYTES, **own},
        "both": next(rate.bandwidth for rate in rates if rate.what == BOTH),
        "rates": [dataclasses.asdict(rate) for rate in rates],
    }


def step(arguments: argparse.Namespace, sharing: int, bandwidth: float) -> dict[str, Any]:
    """Bytes of one step, of all ranks that share the disk, and its seconds when the disk is what it waits for.

    The optimizer's: the master and the moments, and the gradients where the stage shards them, read and written once. The
    parameters', where the stage shards them: read by forward and backward, written by the step.
    """
    residency, precision = STAGES[arguments.stage], PRECISIONS[arguments.precision]
    (flat,) = unit_specs([("model", arguments.params)], precision)[0].flats
    part = arguments.params * sharing / (arguments.ranks if residency.shards_optimizer else 1)
    states = flat.rest * (1 + MOMENTS[arguments.optimizer]) + (flat.gradient if residency.shards_gradients else 0)
    rows = [("optimizer", states, states)]
    if residency.shards_parameters:
        rows.append(("params", 2 * flat.compute, flat.compute))
    result = {}
    for name, reads, writes in rows:
        result[name] = {
            "resting_bytes": round(part * writes),
            "read_bytes": round(part * reads),
            "written_bytes": round(part * writes),
            "seconds": part * (reads + writes) / bandwidth,
        }
    return result


def text(found: dict[str, Any], rates: Sequence[Rate]) -> str:
    past = (
        "past the page cache"
        if found["direct"]
        else "through the page cache, which the file system does not let us pass"
    )
    lines = [f"{found['folder']}: {past}", f"  {'':6} {'request':>9} {'in flight':>9} {'speed':>12}"]
    for rate in rates:
        through = "  through the page cache" if found["direct"] and not rate.direct else ""
        lines.append(
            f"  {rate.what:6} {_binary(rate.request_bytes):>9} {rate.in_flight:>9} {amount(rate.bandwidth) + '/s':>12}{through}"
        )
    tier = found["tier"]
    shares = [f"{tier[what] / found['best'][what]['bandwidth']:.0%} of the best {what} speed" for what in (READ, WRITE)]
    lines += [
        f"zerodp.Offload(..., path={found['folder']!r}): requests of {_binary(tier['request_bytes'])}, {tier['in_flight']} reads and "
        f"{tier['in_flight']} writes in flight: {' and '.join(shares)}",
        f"  {_binary(tier['buffer_bytes'])} of host memory per rank, or four of the largest pieces if that is more",
    ]
    for name, one in found.get("step", {}).items():
        lines.append(
            f'step with {name}="disk": {amount(one["read_bytes"])} read and {amount(one["written_bytes"])} written, '
            f"{one['seconds']:.3g} s at {amount(found['both'])}/s; {amount(one['resting_bytes'])} on the disk, "
            f"{amount(1000 * one['written_bytes'])} written in 1,000 steps"
        )
    return "\n".join(lines)


def _binary(nbytes: int) -> str:
    return f"{nbytes // 2**20} MiB" if nbytes >= 2**20 else f"{nbytes // 2**10} KiB"
