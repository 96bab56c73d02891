"""Every claim of the checklist has a proof that exists, and the page is the checklist's."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from tests.house.source import ROOT

OPEN: set[str] = set()  # claims whose proofs, or some of them, are on their way


@pytest.fixture(scope="module")
def checklist() -> ModuleType:
    spec = importlib.util.spec_from_file_location("checklist", ROOT / "bench" / "checklist.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["checklist"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_rows_are_complete(checklist: ModuleType) -> None:
    assert [row.name for row in checklist.rows()] == [f"S{number:02}" for number in range(1, 72)]


def test_every_claim_has_a_proof_that_exists(checklist: ModuleType) -> None:
    absent = checklist.missing(checklist.rows())
    without = {row.name for row in checklist.rows() if not row.proofs}
    assert without | {name.partition(":")[0] for name in absent} == OPEN, absent


def test_measurements_can_be_read(checklist: ModuleType) -> None:
    for row in checklist.rows():
        for measured in row.measured:
            holds, told = measured.judge()
            assert holds, f"{row.name}: {measured.holds} ({told})"


def test_the_page_is_current(checklist: ModuleType) -> None:
    page = checklist.TARGET.read_text(encoding="utf-8")
    assert page == checklist.render(checklist.rows(), checklist.recorded())


def test_what_is_wrong_is_found(checklist: ModuleType) -> None:
    absent = checklist.row_of(["S99 a claim", "  unit/test_nowhere.py::test_x", "  unit/test_papers.py::test_figure_9"])
    assert checklist.missing([absent]) == [
        "S99: tests/unit/test_nowhere.py::test_x",
        "S99: tests/unit/test_papers.py::test_figure_9",
    ]
    assert checklist.judge(checklist.row_of(["S99 a claim"]), {}) == "NO PROOF"
    assert not checklist.is_good(checklist.judge(absent, {}))
    one = checklist.row_of(["S99 a claim", "  unit/a.py::test_x"])
    assert checklist.judge(one, {"unit/a.py::test_x": {"passed": 3}}).startswith("passed 3 on ")
    assert checklist.judge(one, {"unit/a.py::test_x": {"passed": 3, "failure": 1}}).startswith(
        "FAILED: unit/a.py::test_x (1 failure"
    )
    slow = checklist.row_of(["S99 a claim", "  $ make bench | *-step-loopback-*.json | [summary/zerodp1/step_s] < 0"])
    assert checklist.judge(slow, {}).startswith("FAILED: [summary/zerodp1/step_s] < 0")
