"""Three seams: collectives go through core/comm.py, large memory through core/arena.py; and one table knows the stages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.source import Module, modules

COLLECTIVE = re.compile(
    r"(^|\.)(dist|distributed|c10d)\.(_?all_|_?reduce_?|broadcast|gather|scatter|send|recv|isend|irecv|barrier|batch_isend|monitored)"
)
ALLOCATION = re.compile(
    r"^torch\.(empty|zeros|ones|full|empty_like|zeros_like|empty_strided)$|\.new_(empty|zeros|full)$"
)
EVERY_PASS = ("core.cache", "core.pager", "core.reducer", "core.runtime", "core.schedule")  # they run between two steps


@pytest.mark.parametrize("module", [m for m in modules() if m.name != "core.comm"], ids=lambda m: m.name or "zerodp")
def test_collectives_are_called_in_comm_only(module: Module) -> None:
    found = [f"{module.path.name}:{line} {name}" for line, name in module.calls() if COLLECTIVE.search(name)]
    assert not found


def test_the_search_for_collectives_finds_some() -> None:
    comm = next(m for m in modules("core") if m.name == "core.comm")
    assert any(COLLECTIVE.search(name) for _, name in comm.calls())


@pytest.mark.parametrize("module", [m for m in modules("core") if m.name in EVERY_PASS], ids=lambda m: m.name)
def test_passes_take_memory_from_the_arena_only(module: Module) -> None:
    """Full state dicts and the like may make tensors; what runs in every pass may not."""
    found = [f"{module.path.name}:{line} {name}" for line, name in module.calls() if ALLOCATION.search(name)]
    assert not found


def stage_numbers(module: Module) -> Iterator[str]:
    """Places where a stage is told apart by its number."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            named = any("stage" in name.lower() for side in sides for name in names_in(side))
            if named and any(has_number(side) for side in sides):
                yield f"{module.path.name}:{node.lineno} {ast.unparse(node)}"
        if isinstance(node, ast.Subscript) and "stage" in ast.unparse(node.value).lower() and has_number(node.slice):
            yield f"{module.path.name}:{node.lineno} {ast.unparse(node)}"


def names_in(node: ast.AST) -> list[str]:
    return [
        n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)
    ]


def has_number(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Constant) and type(n.value) is int for n in ast.walk(node))


@pytest.mark.parametrize("module", [m for m in modules() if m.name != "core.stages"], ids=lambda m: m.name or "zerodp")
def test_only_the_table_knows_stage_numbers(module: Module) -> None:
    assert not list(stage_numbers(module))


@pytest.mark.parametrize("text", ["if config.stage >= 2: ...", "x = stage in (1, 2)", "r = STAGES[0]"])
def test_the_search_for_stage_numbers_finds_them(text: str, tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text(text)
    assert list(stage_numbers(Module("example", path)))
