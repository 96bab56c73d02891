"""The library's own files, parsed: what the tests of the house read."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "zerodp"


@dataclass(frozen=True, order=True)
class Module:
    """A file of the library under its dotted name inside it, as in `core.comm`; a package's `__init__` has the package's."""

    name: str
    path: Path

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @property
    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    def imports(self, of_types: bool = False) -> set[str]:
        """The library's modules that this one imports; those for type checkers only if `of_types`."""
        skipped = {id(n) for block in ast.walk(self.tree) if _for_types(block) for n in ast.walk(block)}
        nodes = (n for n in ast.walk(self.tree) if of_types or id(n) not in skipped)
        found = {name for node in nodes for name in self._imported(node)}
        return {known for known in map(nearest, found) if known is not None} - {self.name}

    def _imported(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "zerodp"]
            yield from (name.removeprefix("zerodp").removeprefix(".") for name in names)
        elif isinstance(node, ast.ImportFrom):
            base = self._absolute(node)
            if base is not None:
                yield from (".".join(filter(None, (base, alias.name))) for alias in node.names)

    def _absolute(self, node: ast.ImportFrom) -> str | None:
        """What is imported from, inside the library; None where that is another library."""
        if node.level == 0:
            module = node.module or ""
            inside = module == "zerodp" or module.startswith("zerodp.")
            return module.removeprefix("zerodp").removeprefix(".") if inside else None
        folder = self.path.parent.relative_to(PACKAGE).parts
        parts = folder[: len(folder) + 1 - node.level]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def calls(self) -> Iterator[tuple[int, str]]:
        """(line, dotted name of what is called)."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield node.lineno, ast.unparse(node.func)

    def code_lines(self) -> int:
        """Lines that do something: no blank ones, comments or docstrings."""
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts: set[int] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, documented) and ast.get_docstring(node) is not None:
                texts.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        lines = enumerate(self.lines, start=1)
        return sum(bool(line.strip()) and not line.strip().startswith("#") and n not in texts for n, line in lines)


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@functools.cache
def modules(inside: str = "") -> list[Module]:
    """All modules of the library, or of one of its folders."""
    found = []
    for path in sorted((PACKAGE / inside).rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found.append(Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def nearest(name: str) -> str | None:
    """The module that `name`, a module or something in one, stands in; "" is the library's own `__init__`."""
    names = {module.name for module in modules()}
    parts = name.split(".") if name else []
    for end in range(len(parts), -1, -1):
        if ".".join(parts[:end]) in names:
            return ".".join(parts[:end])
    return None
