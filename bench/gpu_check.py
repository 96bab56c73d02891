"""One script, under eight minutes on one GPU: is zerodp right, as lean as it says, and fast on NCCL?

`python bench/gpu_check.py`. Five parts, also written to bench/results/:

1. right: every stage against plain torch on a small GPT, in fp32 (equal to the last bit) and in bf16 (close);
2. memory: what the allocator holds at rest and at its peak, against what `zerodp.stats` says;
3. fragments: with sequences of varying lengths, what the arena and the allocator hold beyond what is in use;
4. speed: tokens per second on a GPT of about 1B parameters, against FSDP2 and plain torch, in bf16;
5. offload: with the optimizer on the host, speed beside plain torch, FSDP2 and DeepSpeed, the largest model, and what of the copies is hidden.

Without CUDA it runs on the CPU over gloo with a tiny model, which shows that the script works and nothing else.
The world is one rank, so what is measured is the library itself; a wire is `bench/run.py`'s subject.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # reproducible matrix products; read when CUDA starts

import gpu_offload
import report
import torch
import torch.distributed as dist
from model import GPT, loss_of
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zerodp

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
MIB = 2**20
Row = dict[str, Any]
Pair = tuple[torch.nn.Module, torch.optim.Optimizer]

SMALL = (
    {"vocab": 512, "dim": 256, "layers": 4, "heads": 4, "ctx": 128}
    if CUDA
    else {"dim": 32, "layers": 2, "heads": 2, "ctx": 16}
)
MEDIUM = {"vocab": 8192, "dim": 1024, "layers": 12, "heads": 16, "ctx": 512}
LARGE = {"vocab": 32768, "dim": 2048, "layers": 19, "heads": 16, "ctx": 1024} if CUDA else SMALL
BF16_TOLERANCE = 0.02  # of the loss, against fp32
REST_SLACK, PEAK_SLACK = 16 * MIB, 128 * MIB  # rounding and cached workspaces of the allocator and of cuBLAS


def build(shape: dict[str, int]) -> GPT:
    torch.manual_seed(0)
    with DEVICE:
        return GPT(**shape)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)


def plain(shape: dict[str, int]) -> Pair:
    model = build(shape)
    return model, adam(model)


def sharded(shape: dict[str, int], stage: int, precision: str, **options: Any) -> Pair:
    model = build(shape)
    return zerodp.shard(model, adam(model), stage=stage, precision=precision, **options)


def fsdp2(shape: dict[str, int]) -> Pair:
    model = build(shape)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))
    return model, adam(model)


def train(pair: Pair, steps: int, rows: int, shape: dict[str, int], autocast: bool = False) -> list[float]:
    """Losses of some steps on fixed random tokens."""
    model, optimizer = pair
    generator = torch.Generator().manual_seed(1)
    size = (rows, shape["ctx"] + 1)
    tokens = torch.randint(shape.get("vocab", 256), size, generator=generator).to(DEVICE)
    losses = []
    for _ in range(steps):
        with torch.autocast(DEVICE.type, torch.bfloat16) if autocast else contextlib.nullcontext():
            logits = model(tokens[:, :-1])
        loss = loss_of(logits, tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def clean() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# ---- 1. right


@contextlib.contextmanager
def reproducible() -> Iterator[None]:
    """Operators that give the same bits each time, so that a difference is a fault."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().float().cpu().clone() for name, value in model.state_dict().items()}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def check_right() -> list[Row]:
    """Five steps by each stage; the second plain run shows that the machine itself repeats its results."""
    steps, rows = 5, 2

    def run(pair: Pair) -> tuple[list[float], dict[str, torch.Tensor]]:
        losses = train(pair, steps, rows, SMALL)
        result = losses, values(pair[0])
        clean()
        return result

    found: list[Row] = []
    with reproducible():
        losses, weights = run(plain(SMALL))
        _, same = run(plain(SMALL))
        gap = largest_difference(same, weights)
        found.append({"what": "plain torch, a second time", "difference": gap, "allowed": 0.0, "ok": gap == 0.0})
        for stage in range(4):
            _, theirs = run(sharded(SMALL, stage, "fp32"))
            gap = largest_difference(theirs, weights)
            found.append({"what": f"stage {stage}, fp32, weights", "difference": gap, "allowed": 0.0, "ok": gap == 0.0})
        for stage in range(4):
            low, _ = run(sharded(SMALL, stage, "bf16"))
            gap = max(abs(a - b) / b for a, b in zip(low, losses, strict=True))
            ok = gap <= BF16_TOLERANCE
            found.append({"what": f"stage {stage}, bf16, loss", "difference": gap, "allowed": BF16_TOLERANCE, "ok": ok})
    return found


# ---- 2. memory


def check_memory() -> list[Row]:
    """The allocator's figures beside the library's own, in fp32 so that plain torch's activations are the same."""
    if not CUDA:
        print("skipped: the CPU's allocator keeps no statistics to compare with zerodp.stats")
        return []
    rows = 4
    before = torch.cuda.memory_allocated()
    pair = plain(MEDIUM)
    train(pair, 2, rows, MEDIUM)
    numel = sum(p.numel() for p in pair[0].parameters())
    torch.cuda.reset_peak_memory_stats()
    train(pair, 1, rows, MEDIUM)
    activations = (
        torch.cuda.max_memory_allocated() - before - 16 * numel
    )  # at most: plain torch's states are 16 bytes each
    del pair
    clean()
    return [_memory_of(stage, rows, activations) for stage in range(4)]


def _memory_of(stage: int, rows: int, activations: int) -> Row:
    before = torch.cuda.memory_allocated()
    pair = sharded(MEDIUM, stage, "fp32")
    train(pair, 2, rows, MEDIUM)
    torch.cuda.reset_peak_memory_stats()
    zerodp.stats(pair[0]).reset()
    train(pair, 1, rows, MEDIUM)
    memory = zerodp.stats(pair[0]).memory
    rest, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    row = {
        "stage": stage,
        "rest": rest,
        "rest_by_stats": memory.total_now,
        "peak": peak,
        "peak_by_stats": memory.total_peak,
        "activations": activations,
        # idle slots are the allocator's but nobody's states, so they are in the peak's slack and not in rest_by_stats
        "ok": abs(rest - memory.total_now) <= REST_SLACK + (memory.total_peak - memory.total_now)
        and peak <= memory.total_peak + activations + PEAK_SLACK,
    }
    del pair
    clean()
    return row


# ---- 3. fragments


def check_fragments(steps: int = 30) -> list[Row]:
    """Blocks checkpointed to the host, sequences of varying lengths after the longest."""
    return [_fragments_of(stage, 2 if CUDA else 1, steps if CUDA else 4) for stage in (2, 3)]


def _fragments_of(stage: int, rows: int, steps: int) -> Row:
    shape = MEDIUM if CUDA else SMALL
    pair = sharded(shape, stage, "bf16", checkpoint_activations=True, offload=zerodp.Offload(activations="host"))
    train(pair, 12, rows, shape)  # a block that holes have made too small grows from step to step
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    before = zerodp.stats(pair[0]).memory
    lengths = torch.randint(1, shape["ctx"] + 1, (steps,), generator=torch.Generator().manual_seed(2))
    for length in lengths.tolist():
        train(pair, 1, rows, {**shape, "ctx": length})
    after = zerodp.stats(pair[0]).memory
    found = torch.cuda.memory_stats() if CUDA else {}
    row = {
        "stage": stage,
        "reserved": after.reserved,
        "allocations": after.allocations - before.allocations,
        "allocator_reserved": found.get("reserved_bytes.all.peak"),
        "allocator_active": found.get("active_bytes.all.peak"),
        "ok": (after.reserved, after.allocations) == (before.reserved, before.allocations),
    }
    del pair
    clean()
    return row


# ---- 4. speed


def check_speed(shape: dict[str, int], rows: int, steps: int) -> list[Row]:
    """Tokens per second by each method in turn, each in a clean allocator."""
    methods: list[tuple[str, Callable[[], Pair], bool]] = [
        ("plain torch, autocast", lambda: plain(shape), True),
        ("FSDP2", lambda: fsdp2(shape), False),
        *((f"zerodp stage {s}", lambda s=s: sharded(shape, s, "bf16"), False) for s in (3, 2, 1, 0)),
    ]
    return [_speed_of(label, make, autocast, shape, rows, steps) for label, make, autocast in methods]


def _speed_of(
    label: str, make: Callable[[], Pair], autocast: bool, shape: dict[str, int], rows: int, steps: int
) -> Row:
    clean()
    try:
        pair = make()
        train(pair, 3, rows, shape, autocast)
        synchronize()
        start = time.perf_counter()
        losses = train(pair, steps, rows, shape, autocast)
        synchronize()
        seconds = time.perf_counter() - start
    except torch.cuda.OutOfMemoryError:
        return {"what": label, "tokens_s": None, "peak": None, "loss": None}
    peak = torch.cuda.max_memory_allocated() if CUDA else None
    return {"what": label, "tokens_s": steps * rows * shape["ctx"] / seconds, "peak": peak, "loss": losses[-1]}


def fitting(shape: dict[str, int], rows: int) -> dict[str, int]:
    """The shape with as many layers as this GPU has room for, at 20 bytes for a parameter and 40 for an activation."""
    if not CUDA:
        return shape
    free, _ = torch.cuda.mem_get_info()
    dim, ctx, vocab = shape["dim"], shape["ctx"], shape["vocab"]
    fixed = 20 * 2 * vocab * dim + 16 * rows * ctx * vocab
    per_layer = 20 * 12 * dim * dim + 40 * rows * ctx * dim
    return {**shape, "layers": max(1, min(shape["layers"], int((0.85 * free - fixed) // per_layer)))}


# ---- the whole


def show(right: list[Row], memory: list[Row], fragments: list[Row], speed: list[Row]) -> None:
    verdict = {True: "ok", False: "WRONG"}
    rows = [[r["what"], f"{r['difference']:.2e}", f"{r['allowed']:.2e}", verdict[r["ok"]]] for r in right]
    report.table("Against plain torch", ["what", "largest difference", "allowed", ""], rows)
    keys = ("rest", "rest_by_stats", "peak", "peak_by_stats", "activations")
    rows = [[f"stage {r['stage']}", *(f"{r[key] / MIB:.0f}" for key in keys), verdict[r["ok"]]] for r in memory]
    columns = ["MiB", "at rest", "by stats", "peak", "by stats", "activations, at most", ""]
    report.table("Allocator against zerodp.stats", columns, rows)
    keys = ("reserved", "allocator_reserved", "allocator_active")
    rows = [
        [
            f"stage {r['stage']}",
            str(r["allocations"]),
            *("" if r[key] is None else f"{r[key] / MIB:.1f}" for key in keys),
            verdict[r["ok"]],
        ]
        for r in fragments
    ]
    columns = ["MiB", "allocations after the longest", "arena", "allocator, reserved", "of it active", ""]
    report.table("Varying sequence lengths", columns, rows)
    rows = [
        [
            r["what"],
            "out of memory" if r["tokens_s"] is None else f"{r['tokens_s']:,.0f}",
            "" if r["peak"] is None else f"{r['peak'] / MIB:,.0f}",
            "" if r["loss"] is None else f"{r['loss']:.3f}",
        ]
        for r in speed
    ]
    report.table("Speed in bf16", ["method", "tokens/s", "peak MiB", "loss"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser_of("gpu_check.py", __doc__)
    parser.add_argument("--rows", type=int, default=8 if CUDA else 2, help="sequences in a batch of the speed test")
    parser.add_argument("--steps", type=int, default=10 if CUDA else 2, help="steps that count in the speed test")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    if CUDA:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if CUDA else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    right, memory, fragments = check_right(), check_memory(), check_fragments()
    shape = fitting(LARGE, args.rows)
    speed = check_speed(shape, args.rows, args.steps)
    offload = gpu_offload.check_offload(build, adam, shape, args.rows, args.steps, clean)
    show(right, memory, fragments, speed)
    for table in gpu_offload.rows_of(offload):
        report.table(*table)
    seconds = time.perf_counter() - start
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(**shape).parameters())
    print(f"{parameters / 1e6:,.1f}M parameters in the speed test; {seconds:.0f} s in all")
    content = {
        "seconds": seconds,
        "parameters": parameters,
        "shape": shape,
        "right": right,
        "memory": memory,
        "fragments": fragments,
        "speed": speed,
        "offload": offload,
    }
    report.save(f"gpu-check-{DEVICE.type}", content, args.out)
    dist.destroy_process_group()
    return 0 if all(row["ok"] for row in (*right, *memory, *fragments)) else 1


if __name__ == "__main__":
    sys.exit(main())
