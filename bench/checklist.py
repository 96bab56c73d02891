"""Every claim about ZeRO that this library answers for, and its proof: `make checklist` runs them all and writes docs/checklist.md.

The claims and the names of their proofs are in `checklist.txt`. A row fails where it has no proof, where a named test does
not exist, does not run or fails, or where a measurement in `bench/results/` is missing or says otherwise.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROWS = Path(__file__).with_name("checklist.txt")
RESULTS = Path(__file__).with_name("results")
TARGET = ROOT / "docs" / "checklist.md"
HEAD = """\
# The checklist

<!-- Made by `make checklist`; edit bench/checklist.txt. -->

What the papers and their readers say of ZeRO, and what proves it of this library. `make checklist` runs the proofs and writes this page;
`python bench/checklist.py S12 S13` runs those of some rows. A measurement is the newest one in `bench/results/`; the others are tests.

| row | claim | proof | result |
| --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Measured:
    """A comparison over the newest file of results with such a name: values of it stand in brackets, as in [a/b] < 2 * [a/c]."""

    command: str
    pattern: str
    holds: str

    def __str__(self) -> str:
        return f"`{self.command}`: {self.holds}"

    def judge(self) -> tuple[bool, str]:
        files = sorted(RESULTS.glob(self.pattern))
        if not files:
            return False, f"no file {self.pattern}"
        content = json.loads(files[-1].read_text())
        text = re.sub(r"\[([^\]]+)\]", lambda path: repr(value_at(content, path[1])), self.holds)
        if re.fullmatch(r"[-+*/<>=.()e\d ]+", text) is None:
            raise ValueError(f"{self.holds}: expected numbers, operators and a comparison, got {text}")
        return bool(eval(text)), f"measured {content['date'][:10]}"


@dataclass(frozen=True)
class Row:
    """tests: node ids below `tests/`, of all parameters."""

    name: str
    claim: str
    tests: tuple[str, ...]
    measured: tuple[Measured, ...]

    @property
    def proofs(self) -> list[str]:
        return [*(f"`{test}`" for test in self.tests), *map(str, self.measured)]


def value_at(content: Any, path: str) -> float:
    for key in path.split("/"):
        content = content[key]
    return float(content)


def rows() -> list[Row]:
    """A row is a paragraph: its name and claim, then a proof to a line."""
    paragraphs = ROWS.read_text(encoding="utf-8").strip().split("\n\n")
    return [row_of(paragraph.splitlines()) for paragraph in paragraphs if not paragraph.startswith("#")]


def row_of(lines: Sequence[str]) -> Row:
    name, _, claim = lines[0].partition(" ")
    proofs = [line.strip() for line in lines[1:]]
    measured = [Measured(*(part.strip() for part in line[1:].split("|"))) for line in proofs if line.startswith("$")]
    return Row(name, claim.strip(), tuple(line for line in proofs if not line.startswith("$")), tuple(measured))


def missing(chosen: Iterable[Row]) -> list[str]:
    """Tests that are named and not there, by reading the files only."""
    found = []
    for row in chosen:
        for test in row.tests:
            path, _, name = test.partition("::")
            if name not in functions(ROOT / "tests" / path):
                found.append(f"{row.name}: tests/{test}")
    return found


def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8") if file.exists() else "")
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


# ---- running


def run(tests: Sequence[str], workers: int) -> dict[str, Counter[str]]:
    """All of them in one run of pytest: by test, how many of its parameters passed, failed or were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--numprocesses={workers}", "--dist=loadfile"]
        command += ["--no-loadscope-reorder", f"--junitxml={report}", *(f"tests/{test}" for test in tests)]
        subprocess.run(command, cwd=ROOT, check=False)
        return outcomes(report) if report.exists() else {}


def outcomes(report: Path) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for case in ET.parse(report).iter("testcase"):
        path = case.attrib["classname"].removeprefix("tests.").replace(".", "/") + ".py"
        bad = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        found.setdefault(f"{path}::{case.attrib['name'].partition('[')[0]}", Counter())[bad] += 1
    return found


def judge(row: Row, found: Mapping[str, Counter[str]]) -> str:
    """The result in words; good where it begins with "passed" or "measured"."""
    if not row.proofs:
        return "NO PROOF"
    for test in row.tests:
        outcome = found.get(test, Counter())
        if set(outcome) != {"passed"}:
            told = ", ".join(f"{count} {what}" for what, count in sorted(outcome.items())) or "did not run"
            return f"FAILED: {test} ({told})"
    verdicts = [measured.judge() for measured in row.measured]
    for measured, (holds, told) in zip(row.measured, verdicts, strict=True):
        if not holds:
            return f"FAILED: {measured.holds} ({told})"
    passed = sum(found[test]["passed"] for test in row.tests)
    words = [f"passed {passed} on {datetime.date.today()}"] if passed else []
    return "; ".join([*words, *dict.fromkeys(told for _, told in verdicts)])


def is_good(result: str) -> bool:
    return result.startswith(("passed", "measured"))


# ---- the page


def render(all_rows: Iterable[Row], results: Mapping[str, str]) -> str:
    lines = [
        f"| {row.name} | {row.claim} | {'<br>'.join(row.proofs)} | {results.get(row.name, 'NOT RUN')} |\n"
        for row in all_rows
    ]
    return HEAD + "".join(lines)


def recorded() -> dict[str, str]:
    """The results on the page, of rows whose claim and proofs are still the same."""
    if not TARGET.exists():
        return {}
    cells = [line.strip("| \n").split(" | ") for line in TARGET.read_text(encoding="utf-8").splitlines()]
    page = {row[0]: (row[1:3], row[3]) for row in cells if len(row) == 4}
    return {
        row.name: page[row.name][1]
        for row in rows()
        if row.name in page and page[row.name][0] == [row.claim, "<br>".join(row.proofs)]
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows to run, such as S12 (default: all)")
    parser.add_argument(
        "--list", action="store_true", help="show rows and proofs and check that the tests exist; run none"
    )
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="test processes (default 2)")
    given = parser.parse_args(argv)
    everything = rows()
    chosen = [row for row in everything if not given.rows or row.name in given.rows]
    if unknown := set(given.rows) - {row.name for row in everything}:
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    absent = missing(chosen)
    if given.list:
        for row in chosen:
            print(f"{row.name} {row.claim}", *(f"    {proof}" for proof in row.proofs or ["NO PROOF"]), sep="\n")
        print(*(f"no such test: {name}" for name in absent), sep="\n", end="")
        return int(bool(absent) or not all(row.proofs for row in chosen))
    named = sorted({test for row in chosen for test in row.tests} - {name.partition(": tests/")[2] for name in absent})
    found = run(named, given.workers) if named else {}
    results = {row.name: judge(row, found) for row in chosen}
    TARGET.write_text(render(everything, {**recorded(), **results}), encoding="utf-8")
    for row in chosen:
        print(f"{row.name}  {results[row.name]:40}  {row.claim}")
    bad = [name for name, result in results.items() if not is_good(result)]
    print(f"{len(chosen) - len(bad)} of {len(chosen)} rows proved" + (f"; not: {', '.join(bad)}" if bad else ""))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
