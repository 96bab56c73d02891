"""The optimizer's step over the host and the disk tier, beside the limits of this machine; and a run that fits nowhere else.

    python bench/offload.py                 all three parts, one process each, one thread of compute
    python bench/offload.py --parts host    the step on the host beside a bare fused AdamW over as many elements, and DeepSpeed's CPUAdam
    python bench/offload.py --parts disk    the step over the disk beside plain O_DIRECT requests of the same bytes
    python bench/offload.py --parts memory  model states of four times the host memory allowed, and what happens without offload

Rounds are interleaved, and a time is the best of its rounds: what the machine can do when nothing else disturbs it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launch
import report
import torch
from torch import nn

Step = Callable[[], float]
MIB = 2**20
ROOM = 160 * MIB  # for buffers, pages and the libraries, beyond the host memory allowed for states
BUILD_LIMIT_S = 400
PARTS = ("host", "disk", "memory")
TARGETS = {"host fp32": 0.8, "host bf16": 0.8, "disk": 0.8}


def layers(dim: int, count: int, device: str = "cpu") -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(dim, dim) for _ in range(count)))


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def zerodp_step(settings: dict[str, Any], precision: str, **offload: Any) -> tuple[Step, Callable[[], int]]:
    """(one training step, of which the optimizer's is timed; the bytes of the disk tier since that part began)."""
    import zerodp

    model: Any = layers(settings["dim"], settings["layers"])
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = zerodp.shard(model, optimizer, precision=precision, offload=zerodp.Offload(**offload))
    x = torch.randn(2, settings["dim"])

    def step() -> float:
        model(x).float().pow(2).mean().backward()
        zerodp.stats(model).reset()
        taken = timed(optimizer.step)
        optimizer.zero_grad()
        return taken

    def moved() -> int:
        ledgers = [ledger for ledger in model._zerodp.places.ledgers() if ledger.place == "disk"]
        return sum(ledger.fetched_bytes + ledger.written_bytes for ledger in ledgers)

    return step, moved


def plain_step(settings: dict[str, Any], make: Callable[[list[nn.Parameter]], Any]) -> Step:
    parameters = list(layers(settings["dim"], settings["layers"]).parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = make(parameters)
    return lambda: timed(optimizer.step)


def best(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Of interleaved rounds, after one to warm up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            times[name].append(step())
    return {name: min(taken[1:]) for name, taken in times.items()}


# ---- host


def host(settings: dict[str, Any]) -> dict[str, Any]:
    steps = {"bare fused AdamW": plain_step(settings, lambda p: torch.optim.AdamW(p, fused=True))}
    for precision in ("fp32", "bf16"):
        steps[f"host {precision}"], _ = zerodp_step(settings, precision, optimizer="host")
    note = ""
    if settings["deepspeed"]:
        try:
            steps["DeepSpeed CPUAdam"] = plain_step(settings, cpu_adam())
        except Exception as error:  # it compiles at first use, which needs a compiler and much else
            note = f"DeepSpeed's CPUAdam does not run here: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return {"seconds": best(steps, settings["rounds"]), "note": note}


def cpu_adam() -> Callable[[list[nn.Parameter]], Any]:
    """DeepSpeed's optimizer for the host. Its build waits for ever for one that was killed, so it is built aside, with a limit."""
    build = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
    with subprocess.Popen(
        [sys.executable, "-c", build], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            process.wait(BUILD_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise TimeoutError(f"its build took more than {BUILD_LIMIT_S} s; see ~/.cache/torch_extensions") from None
    made: Callable[[list[nn.Parameter]], Any] = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    return made


# ---- disk


def disk(settings: dict[str, Any]) -> dict[str, Any]:
    from zerodp.tiers.disk import IN_FLIGHT, REQUEST_BYTES
    from zerodp.tiers.measure import BOTH, Trial

    step, moved = zerodp_step(settings, "bf16", optimizer="disk", path=settings["folder"])
    trial = Trial(settings["folder"], settings["dim"] ** 2 * settings["layers"] * 16)
    times, rates, during, whole = [], [], 0, 0
    for _ in range(settings["rounds"] + 1):
        times.append(step())
        during = moved()
        whole = quiet(moved)  # the last writes run on after the step; they would disturb the plain requests
        rates.append(trial.rate(BOTH, REQUEST_BYTES, IN_FLIGHT, settings["seconds"]).bandwidth)
    direct = trial.file.direct
    trial.close()
    return {
        "seconds": {"disk": min(times[1:]), "plain requests": during / max(rates[1:])},
        "step_bytes": during,
        "cycle_bytes": whole,
        "plain_bytes_s": max(rates[1:]),
        "direct": direct,
    }


def quiet(moved: Callable[[], int]) -> int:
    """The bytes once no more come."""
    before = -1
    while (now := moved()) != before:
        before = now
        time.sleep(0.3)
    return now


# ---- memory


def memory(settings: dict[str, Any]) -> dict[str, Any]:
    """Train a model from the meta device under a limit on this process's memory."""
    import zerodp

    trained({**settings, "dim": 64, "layers": 2})  # what libraries load at first use is not counted
    before, limit = peak_bytes(), settings["limit"]
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + limit, resource.RLIM_INFINITY))
    try:
        model, losses = trained(settings)
    except (RuntimeError, MemoryError, zerodp.ZeroError) as error:
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    found = zerodp.stats(model).memory
    return {
        "resident": peak_bytes() - before,
        "host": sum(found.host.values()),
        "buffers": sum(found.host_peak.values()) - sum(found.host.values()) + found.total_peak,
        "disk": sum(found.disk.values()),
        "losses": losses,
    }


def trained(settings: dict[str, Any]) -> tuple[Any, list[float]]:
    """A model and the losses of its steps."""
    import zerodp

    offload = zerodp.Offload(**settings["offload"]) if settings["offload"] else None
    model: Any = layers(settings["dim"], settings["layers"], "meta")
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = zerodp.shard(model, optimizer, units=[nn.Linear], offload=offload)
    x, losses = torch.randn(2, settings["dim"]), []
    for _ in range(settings["steps"]):
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def peak_bytes() -> int:
    return status("VmHWM")


def data_bytes() -> int:
    return status("VmData")


def status(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


# ---- the whole


def measured(part: str, settings: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    return {"host": host, "disk": disk, "memory": memory}[part](settings)


def run(part: str, settings: dict[str, Any]) -> dict[str, Any]:
    env = {
        "MALLOC_ARENA_MAX": "2",
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }  # freed memory goes back to the system, and is not counted
    return launch.on_ranks(measured, part, settings, ranks=1, env=env)  # type: ignore[no-any-return]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    numel = args.dim * (args.dim + 1) * args.layers
    base = {
        "dim": args.dim,
        "layers": args.layers,
        "rounds": args.rounds,
        "folder": args.folder,
        "seconds": args.seconds,
    }
    content: dict[str, Any] = {"elements": numel}
    if "host" in args.parts:
        content["host"] = run("host", {**base, "deepspeed": args.deepspeed})
    if "disk" in args.parts:
        content["disk"] = run("disk", base)
    if "memory" in args.parts:
        states = 16 * numel
        allowed = states // 4
        offload = {"optimizer": "host", "params": "host", "host_bytes": allowed, "path": args.folder}
        common = {**base, "steps": 3}
        roomy = run("memory", {**common, "offload": offload, "limit": None})
        content["memory"] = {
            "states": states,
            "allowed": allowed,
            "offload": roomy,
            "offload, limited": run("memory", {**common, "offload": offload, "limit": allowed + ROOM}),
            "device, limited": run("memory", {**common, "offload": None, "limit": allowed + ROOM}),
            "device": run("memory", {**common, "offload": None, "limit": None}),
        }
    return content


def show(content: dict[str, Any]) -> list[list[str]]:
    """Rows of (what, figure, share of the limit, target)."""
    rows = []
    for part, limit in (("host", "bare fused AdamW"), ("disk", "plain requests")):
        seconds = content.get(part, {}).get("seconds", {})
        for name, taken in seconds.items():
            share = f"{seconds[limit] / taken:.2f}"
            rows.append([name, f"{1e3 * taken:.1f} ms", share, str(TARGETS.get(name, ""))])
        if content.get(part, {}).get("note"):
            rows.append([content[part]["note"], "", "", ""])
    for name, one in content.get("memory", {}).items():
        if isinstance(one, dict):
            text = one.get("failed") or f"{one['resident'] / MIB:.0f} MiB resident, {one['disk'] / MIB:.0f} MiB on disk"
            rows.append([f"memory: {name}", text, "", ""])
    return rows


def main() -> None:
    parser = report.parser_of("offload.py", __doc__, "'offload'", dim=1024, layers=32)
    told = f"of {', '.join(PARTS)} (default: all)"
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=told)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement of the disk alone")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--no-deepspeed", dest="deepspeed", action="store_false")
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"--parts: expected some of {', '.join(PARTS)}, got {unknown[0]!r}")
    content = measure(args)
    columns = ["what", "measured", "share of the limit", "at least"]
    report.table(f"Model states of {content['elements']:,} elements elsewhere", columns, show(content))
    report.save("offload", content, args.out)
    report.fill(args.page, "offload", report.markdown(columns, show(content)))


if __name__ == "__main__":
    main()
