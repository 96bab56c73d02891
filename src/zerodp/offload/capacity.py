"""Whether what will rest on host and disk has room there, seen before anything moves: the ranks of a machine share both."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from ..errors import StorageError

PROC, CGROUPS = "/proc", "/sys/fs/cgroup"
# By the controllers in /proc/self/cgroup, of version 2 and 1: folder of the groups, files of limit and use, entries of pages of files.
NAMES = {
    "": ("", "memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": (
        "/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}


def report(folder: str, host_bytes: int, disk_bytes: int) -> list[Any]:
    """What the ranks tell each other: [machine, host bytes needed and free, folder's device, disk bytes needed and free, folder]."""
    disk_free, device = -1, -1
    if os.path.isdir(folder):
        disk_free, device = shutil.disk_usage(folder).free, os.stat(folder).st_dev
    return [socket.gethostname(), host_bytes, free_memory(), device, disk_bytes, disk_free, folder]


def check_capacity(everyone: list[list[Any]]) -> StorageError | None:
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


def free_memory() -> int:
    """Bytes of host memory that can be used, of the machine and within the limits of this process's control groups; -1 where nobody tells."""
    try:
        free = _numbers(f"{PROC}/meminfo")["MemAvailable"] * 1024
    except (OSError, KeyError):
        try:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except ValueError:
            return -1
    return min([free, *_free_in_groups()])


def _free_in_groups() -> Iterator[int]:
    """Of each control group that this process is in and that has a limit, a container's as well as those around it."""
    try:
        with open(f"{PROC}/self/cgroup") as file:
            rows = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return
    for _, controllers, path in rows:
        if controllers in NAMES:
            folder, limit, used, cached = NAMES[controllers]
            # In a container the path may be the host's name for what is the root here: then only the last one exists.
            for group in [path, *(str(above) for above in PurePosixPath(path).parents)]:
                where = f"{CGROUPS}{folder}/{group}"
                with contextlib.suppress(OSError, KeyError, ValueError):  # no limit is the word "max"
                    most, now = (int(_read(f"{where}/{name}")) for name in (limit, used))
                    files = _numbers(f"{where}/memory.stat")
                    # Pages of files count as used, and go when somebody needs the memory.
                    yield max(most - now + sum(files[kind] for kind in cached), 0)


def _read(name: str) -> str:
    with open(name) as file:
        return file.read()


def _numbers(name: str) -> dict[str, int]:
    """A file of lines with a name and a number."""
    rows = (line.replace(":", " ").split() for line in _read(name).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
