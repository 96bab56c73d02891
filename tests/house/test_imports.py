"""Dependencies point one way, and importing the library is light."""

from __future__ import annotations

import fnmatch
import subprocess
import sys

import pytest

from tests.house.source import Module, modules

# What `shard(stage="auto")` plans with; the rest of the planner runs the engine.
PLANNING = (
    *("automatic", "closed", "estimate", "huggingface", "models", "recommend", "setup"),
    *("timeline", "timeline.machine", "timeline.rehearsal"),
)
# From the ground up. A module imports only from its own layer (without cycles) and from those below it.
LAYERS = [
    ("errors", "version", "core", "core.layout", "core.stages", "core.bits"),
    ("checks",),
    ("config",),
    (
        "core.mesh",
        "core.comm",
        "core.watch",
        "core.arena",
        "host_memory",
        "regions",
        "agreement",
        "edits",
        "guard",
        "tiers",
        "tiers.*",
    ),
    (
        "core.local",
        "core.parameter",
        "core.saved",
        "core.norms",
        "core.schedule",
        "elementwise",
        "core.unit",
        "core.wrap",
        "shardable",
        "offload",
        "offload.*",
    ),
    ("core.cache", "core.control", "core.lending", "core.reducer", "core.pager", "core.precision"),
    ("core.runtime",),
    ("core.access", "core.buffers", "core.optimizer", "core.optimizer_state", "core.module"),
    ("materialise", "checkpoint", "checkpoint.*", "residual", "residual.*"),
    ("planning", *(f"planning.{part}" for part in PLANNING), "planning.closed.*"),
    ("api", "asleep", "unsharding"),
    ("inspect", "compare"),
    ("planning.*",),
    ("", "integrations", "integrations.*"),
    ("cli", "cli.*"),
]
OPTIONAL = ("deepspeed", "matplotlib", "numpy", "rich", "safetensors", "transformers")


def layer(name: str) -> int | None:
    found = [n for n, patterns in enumerate(LAYERS) if any(fnmatch.fnmatchcase(name, p) for p in patterns)]
    return found[0] if found else None


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name or "zerodp")
def test_imports_point_down(module: Module) -> None:
    own = layer(module.name)
    assert own is not None, f"{module.name} stands in no layer: name it in LAYERS"
    upward = {name for name in module.imports() if (layer(name) or 0) > own}
    assert not upward, f"{module.name} imports {sorted(upward)}, which stand above it"


def test_no_cycles() -> None:
    waiting = {module.name: module.imports() for module in modules()}
    while ready := {name for name, needs in waiting.items() if not needs & waiting.keys()}:
        waiting = {name: needs for name, needs in waiting.items() if name not in ready}
    assert not waiting, f"these import each other: {sorted(waiting)}"


def test_importing_the_library_is_light() -> None:
    """Torch itself loads numpy where it is installed."""
    look = f"print([name for name in {OPTIONAL} if name in sys.modules])"
    code = f"import sys, torch; {look}; import zerodp; {look}"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    alone, with_zerodp = shown.stdout.splitlines()
    assert with_zerodp == alone
