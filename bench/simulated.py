"""What the papers saw, simulated, as a block of docs/step-time.md: `python bench/simulated.py --page docs/step-time.md`. Nothing is measured."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import report

import zerodp
from zerodp.planning.picture import duration
from zerodp.planning.timeline import scenarios


def growing() -> str:
    grown, fixed = (list(scenarios.growing_batch(grows=grows)) for grows in (True, False))
    rows = [
        [str(count), str(batch), f"{rate / 1e12:.1f}", str(fixed_batch), f"{fixed_rate / 1e12:.1f}"]
        for (count, batch, rate), (_, fixed_batch, fixed_rate) in zip(grown, fixed, strict=True)
    ]
    columns = ["devices", "batch that fits", "TFLOPS per device", "fixed batch", "TFLOPS per device"]
    return (
        "60B parameters at stage 2, 16 tensor parallel ranks, 32 GB each (ZeRO, Figure 3). More devices leave more room for the batch, "
        "and a larger batch keeps a device busier: speed grows faster than the number of devices. With the batch fixed it does not.\n\n"
        + report.markdown(columns, rows)
    )


def slowing() -> str:
    rows = [
        [f"{factor:.3g}", f"{second:.2f}", f"{third:.2f}", f"{third / second:.2f}"]
        for factor, second, third in scenarios.slowing_links()
    ]
    return (
        "8B parameters, 64 devices, 2 samples each, as the links get slower. Stage 3 sends half as much again, which shows once compute "
        "no longer hides it.\n\n" + report.markdown(["links at", "stage 2, s", "stage 3, s", "ratio"], rows)
    )


def prefetching() -> str:
    rows = [
        [str(batch), f"{without:.2f}", f"{ahead:.2f}", f"{without / ahead:.2f}"]
        for batch, without, ahead in scenarios.prefetching()
    ]
    return (
        "8B parameters at stage 3, 64 devices (as ZeRO-Infinity's Figure 6d): what prefetch gains falls with the batch.\n\n"
        + report.markdown(["samples per device", "no prefetch, s", "one unit ahead, s", "gain"], rows)
    )


def trillion() -> str:
    year = 365 * 86400
    by_flops = zerodp.plan(1e12, world_size=1024, sequence=1024, tokens=300e9, device_flops=40e12).training_seconds(3)
    options = {"tensor_parallel": 16, "checkpointing": "full", "batch": 8, "sequence": 1024}
    simulated = zerodp.plan(1e12, world_size=1024, tokens=300e9, links="dgx-2", **options).training_seconds(3)
    assert by_flops is not None
    assert simulated is not None
    return (
        f"1T parameters on 1024 V100, 300B tokens: {duration(by_flops)} ({by_flops / year:.1f} years) at 40 TFLOPS on each device, "
        f"{duration(simulated)} ({simulated / year:.1f} years) by simulated steps with 16 tensor parallel ranks and checkpointing."
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = report.parser_of("simulated.py", __doc__, "'simulated'", saves=False).parse_args(argv)
    text = "\n\n".join([growing(), slowing(), prefetching(), trillion()])
    print(text)
    report.fill(args.page, "simulated", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
