"""The subcommands of `zerodp bench`: each module has `add_parser(group)`, which sets `run`, and is named in MEASUREMENTS."""

from __future__ import annotations

from . import disk, links, tune

MEASUREMENTS = (links, disk, tune)
