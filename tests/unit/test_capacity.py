"""How much host memory is free: the machine's, and what the limits of containers leave of it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch

from zerodp.errors import StorageError
from zerodp.offload import capacity
from zerodp.planning.automatic import free_bytes

GiB = 2**30


class System:
    """A machine's own files, as a process finds them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, groups: str) -> None:
        self.folder = folder
        monkeypatch.setattr(capacity, "PROC", str(folder / "proc"))
        monkeypatch.setattr(capacity, "CGROUPS", str(folder / "groups"))
        self.write("proc/meminfo", f"MemTotal: {32 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\n")
        self.write("proc/self/cgroup", groups)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def group(self, path: str, limit: str, used: int, cached: int) -> None:
        self.write(f"groups{path}/memory.max", f"{limit}\n")
        self.write(f"groups{path}/memory.current", f"{used}\n")
        self.write(f"groups{path}/memory.stat", f"anon {used - cached}\ninactive_file {cached}\nactive_file 0\n")


def test_without_limits_what_the_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(tmp_path, monkeypatch, "0::/\n")
    assert capacity.free_memory() == 8 * GiB
    system.group("", "max", 5 * GiB, 0)
    assert capacity.free_memory() == 8 * GiB


def test_a_containers_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of files are used, but free for the asking. Offloading and the planner hear the same."""
    System(tmp_path, monkeypatch, "0::/\n").group("", str(4 * GiB), 3 * GiB, GiB)
    assert capacity.free_memory() == free_bytes(torch.device("cpu")) == 2 * GiB
    said = capacity.report(str(tmp_path), 3 * GiB, 0)
    problem = capacity.check_capacity([said])
    assert isinstance(problem, StorageError)
    assert f"{3 * GiB:,} bytes of host memory, of which {2 * GiB:,} are free" in str(problem)
    assert socket.gethostname() in str(problem)
    assert capacity.check_capacity([capacity.report(str(tmp_path), GiB, 0)]) is None


def test_the_least_of_the_groups_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(tmp_path, monkeypatch, "1:name=systemd:/\n0::/jobs/mine\n")
    system.group("/jobs/mine", "max", GiB, 0)
    system.group("/jobs", str(6 * GiB), 3 * GiB, 0)
    system.group("", str(7 * GiB), GiB, 0)
    assert capacity.free_memory() == 3 * GiB
    system.group("/jobs/mine", str(GiB), 2 * GiB, 0)  # above its limit for a moment
    assert capacity.free_memory() == 0


def test_groups_of_the_first_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(tmp_path, monkeypatch, "4:cpu,cpuacct:/a\n3:memory:/on/the/host\n0::/\n")
    system.write("groups/memory/memory.limit_in_bytes", str(5 * GiB))
    system.write("groups/memory/memory.usage_in_bytes", str(3 * GiB))
    system.write(
        "groups/memory/memory.stat", f"cache {GiB}\ntotal_inactive_file {GiB // 2}\ntotal_active_file {GiB // 2}\n"
    )
    assert capacity.free_memory() == 3 * GiB


def test_nobody_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "PROC", str(tmp_path))

    def unknown(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", unknown)
    assert capacity.free_memory() == -1
    assert capacity.check_capacity([capacity.report(str(tmp_path), GiB, 0)]) is None
