"""A GPT of a trillion parameters "trained" for two steps as one rank of 1,024, on this machine: `python bench/trillion.py --write`.

The engine is the real one; tensors have no memory, and nothing is sent. `bench/planning.py` shows the newest result.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import report

import zerodp
from zerodp.planning.estimate import amount
from zerodp.planning.gpt import gpt_step
from zerodp.planning.models import CUTS, Shape
from zerodp.planning.setup import Setup
from zerodp.planning.simulated import simulate

SHAPE = Shape(128, 25600, 256, 50257, 1024)


def measure(shape: Shape, world_size: int, cut: str) -> dict[str, Any]:
    setup = Setup(world_size, checkpointing="full")
    begun = time.perf_counter()
    step = gpt_step(shape, 1, None, cut, setup.precision)
    seen = simulate(step, setup, 3, rank=world_size - 1)
    planned = zerodp.plan(shape, world_size=world_size, checkpointing="full", units=cut).estimates[3]
    return {
        "units": cut,
        "parameters": sum(p.numel() for p in step.model.parameters()),
        "seconds": time.perf_counter() - begun,
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "planned_bytes": planned.device_bytes,
        **seen.as_json(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=SHAPE.layers)
    parser.add_argument("--units", choices=list(CUTS), default="block", help="what travels together")
    parser.add_argument("--write", action="store_true", help="keep the result in bench/results")
    given = parser.parse_args()
    shape = Shape(given.layers, SHAPE.hidden, SHAPE.heads, SHAPE.vocabulary, SHAPE.sequence)
    found = measure(shape, given.world_size, given.units)
    print(
        f"{found['parameters'] / 1e9:,.0f}B parameters, rank {found['rank']} of {found['world_size']}, stage 3, units of a {found['units']}: "
        f"{amount(found['peak_bytes'])} at the most, in {found['peak_phase']} of {found['peak_unit']!r}; {found['launches']:,} collectives; "
        f"simulated in {found['seconds']:.0f} s with {amount(found['process_bytes'])} of memory"
    )
    if given.write:
        report.save(f"simulated-{given.units}", found)


if __name__ == "__main__":
    main()
