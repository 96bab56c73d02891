"""A slow network on one machine: a network namespace whose loopback is rate-limited.

Both directions of both ranks share the limit, since all of it is one loopback device.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator

SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class Unavailable(Exception):
    """A rate-limited loopback cannot be had here; the message says why in one line."""


UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def seconds(num_bytes: float, rate: str) -> float | None:
    """How long the limited device takes for so many bytes; None for a rate in a unit of tc's that is not known here."""
    found = re.fullmatch(r"([0-9.]+)([a-z]+)", rate.lower())
    return num_bytes * 8 / (float(found[1]) * UNITS[found[2]]) if found and found[2] in UNITS else None


@contextlib.contextmanager
def rate_limited(rate: str) -> Iterator[list[str]]:
    """Yields the command prefix that runs a program on a loopback of `rate` ("2gbit"); always cleans up."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool, path=SBIN) is None]
    if missing:
        raise Unavailable(f"{' and '.join(missing)} not found: install iproute2")
    name = f"zerodp-bench-{os.getpid()}"
    _run("ip", "netns", "add", name)
    inside = ["ip", "netns", "exec", name]
    try:
        _run(*inside, "ip", "link", "set", "lo", "up")
        limit = ("rate", rate, "burst", "4mb", "latency", "100ms")
        _run(*inside, "tc", "qdisc", "add", "dev", "lo", "root", "tbf", *limit)
        yield inside
    finally:
        _run("ip", "netns", "delete", name)


def _run(*command: str) -> None:
    done = subprocess.run(command, env={**os.environ, "PATH": SBIN}, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"`{' '.join(command)}` is not allowed or not possible here: {done.stderr.strip()}")
