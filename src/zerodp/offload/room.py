"""Whether what will rest on host and disk has room there, seen before anything moves: the ranks of a machine share both."""

from __future__ import annotations

import os
import shutil
import socket
from typing import Any

from ..errors import StorageError


def report(folder: str, host_bytes: int, disk_bytes: int) -> list[Any]:
    """What the ranks tell each other: [machine, host bytes needed and free, folder's device, disk bytes needed and free, folder]."""
    disk_free, device = -1, -1
    if os.path.isdir(folder):
        disk_free, device = shutil.disk_usage(folder).free, os.stat(folder).st_dev
    return [socket.gethostname(), host_bytes, _memory_free(), device, disk_bytes, disk_free, folder]


def check_room(everyone: list[list[Any]]) -> StorageError | None:
    """Whether the ranks of each machine fit into its memory and folder together, by what all of them reported."""
    for machine in dict.fromkeys(row[0] for row in everyone):
        rows = [row for row in everyone if row[0] == machine]
        host, free = sum(row[1] for row in rows), min(row[2] for row in rows)
        if 0 <= free < host:
            return StorageError(
                f"offload: the states of {len(rows)} ranks on {machine} need {host:,} bytes of host memory, of which {free:,} are free; allow "
                "less by zerodp.Offload(host_bytes=...), which sends the rest to disk, or use more ranks"
            )
        for device in dict.fromkeys(row[3] for row in rows):
            these = [row for row in rows if row[3] == device]
            disk, free = sum(row[4] for row in these), min(row[5] for row in these)
            if 0 <= free < disk:
                return StorageError(
                    f"offload: the states of {len(these)} ranks on {machine} need {disk:,} bytes on disk in {these[0][6]!r}, where {free:,} are "
                    "free; make room, or choose another folder by zerodp.Offload(path=...)"
                )
    return None


def _memory_free() -> int:
    """Bytes of host memory that can be used, as far as the system tells; -1 where it does not."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return -1
