"""The library stays readable in one sitting, its public names are the contract's, and every place has its type."""

from __future__ import annotations

import re

import pytest

import zerodp
from tests.house.source import PACKAGE, ROOT, Module, modules

FILE_LINES = 400
CORE_CODE_LINES = 3_770  # blank lines, comments and docstrings apart

# The contract's public names; each later part of the library adds its own here.
PUBLIC = {
    "CheckpointError",
    "Comparison",
    "Config",
    "ConfigError",
    "Offload",
    "Plan",
    "Precision",
    "RankMismatchError",
    "ShardedError",
    "ShardedModule",
    "ShardedOptimizer",
    "Stats",
    "StorageError",
    "TiledLinear",
    "ZeroError",
    "activation_checkpoint",
    "apply_activation_checkpointing",
    "compare",
    "describe",
    "export",
    "full_grads",
    "full_params",
    "full_state_dict",
    "latest",
    "load",
    "local_shards",
    "save",
    "plan",
    "shard",
    "sleep",
    "stats",
    "tile_linears",
    "unshard",
    "untile_linears",
    "wake",
}


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name or "zerodp")
def test_files_are_short_and_say_what_they_own(module: Module) -> None:
    assert len(module.lines) <= FILE_LINES
    assert module.lines[0].startswith(('"""', '"')), "the first lines say what the file owns"


def test_the_core_reads_in_one_sitting() -> None:
    lines = {module.name: module.code_lines() for module in modules("core")}
    assert sum(lines.values()) <= CORE_CODE_LINES, lines


def test_public_names() -> None:
    assert set(zerodp.__all__) == PUBLIC
    assert all(hasattr(zerodp, name) for name in PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names_have_docstrings(name: str) -> None:
    text = getattr(zerodp, name).__doc__
    assert text
    assert len(text.split()) > 3


def test_the_package_needs_torch_only() -> None:
    """Of what is installed with it; it is free software, and DeepSpeed, FairScale and the like are no part of it."""
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^dependencies = \["torch>=[\d.]+"\]$', project, re.MULTILINE)
    assert 'license = "Apache-2.0"' in project
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_the_package_is_typed_and_has_one_version() -> None:
    assert (PACKAGE / "py.typed").exists()
    assert f"## {zerodp.__version__}" in (ROOT / "CHANGELOG.md").read_text()
