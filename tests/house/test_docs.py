"""What the documents say is so: errors are explained, quotes are real, links lead somewhere, examples run."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

import zerodp
from tests import warm
from tests.house.source import ROOT, modules

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
ERRORS = sorted(name for name in zerodp.__all__ if name.endswith("Error"))


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.*)$", TROUBLESHOOTING, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_class_is_explained(name: str) -> None:
    raised = re.compile(rf"\b{name}\(")
    is_raised = any(raised.search(module.path.read_text()) for module in modules() if module.name != "errors")
    section = sections()[name]
    assert ("| message | cause | remedy |" in section) == is_raised


def quotes() -> list[str]:
    """What the tables give as the words of messages."""
    cells = re.findall(r"^\| (`.*?) \|", TROUBLESHOOTING, flags=re.MULTILINE)
    return [quote for cell in cells if "torch's own words" not in cell for quote in re.findall(r"`([^`]+)`", cell)]


def texts() -> str:
    """All text in the library's code; adjoining pieces of one message are joined, and values in it are left out."""
    found = []
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values))
    return "\n".join(found)


def test_quoted_messages_are_real() -> None:
    assert len(quotes()) > 40
    known = texts()
    assert not [quote for quote in quotes() if quote not in known]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", document.read_text())
    assert not [t for t in targets if "://" not in t and not (document.parent / t).exists()]


@pytest.mark.timeout(300)
def test_the_first_steps_run(tmp_path: Path) -> None:
    """The example of docs/index.md, started as it says."""
    script = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.DOTALL)
    assert script is not None
    (tmp_path / "script.py").write_text(script[1])
    command = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2" in done.stdout


def test_the_two_commands_are_targets() -> None:
    """What README calls by make is there."""
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / "README.md").read_text(), re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
