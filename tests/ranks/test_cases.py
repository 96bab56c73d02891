"""Every public bug report that the engine answers for has a test with its label."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPORTS = {
    "accumulation": "B01 B02 B03 B04 B06 B07 B08 B09 B10",
    "clipping": "B12 B13 B14 B15 B16 B17 B18",
    "stage and world-size parity": "B19 B20 B21 B22 B23 B24 B25",
    "loss scaling and precision": "B27 B28 B29 B30 B31 B34 B35",
    "activation checkpointing": "B37 B38 B39 B40 B41 B43",
    "hangs and order": "B44 B45 B46 B47 B48 B49 B50 B52 B53 B56",
    "memory": "B57 B58 B59 B60 B66 B67 B68",
    "tied weights": "B70 B71 B72 B73",
    "frozen and adapters": "B74 B75 B76 B78 B79 B82",
    "used or read elsewhere": "B83 B84 B85 B86 B87 B88 B89 B90 B91 B92",
    "odd parameters": "B94 B95 B96 B98 B99 B100 B101 B102",
    "buffers and recurrent layers": "B103 B104 B105 B106 B107",
    "compile and keys": "B108 B109",
    "several forwards, backwards, models": "B111 B112 B113 B114 B116 B117 B118 B119 B120 B121 B122 B123 B124 B125 B126",
    "optimizers": "B127 B129 B130 B131 B134 B135 B136",
    "checkpoints": "B137 B138 B140 B141 B142 B143 B144 B145 B146 B147 B148 B150",
    "NVMe and CPU tiers": "B152 B153 B154 B155 B156",
    "configuration": "B157 B158 B159 B160",
    "changing the model after wrapping": "B161 B162 B163",
}


@pytest.mark.parametrize("topic", REPORTS)
def test_every_report_has_a_test(topic: str) -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    labelled = {
        label
        for labels in re.findall(r"^@(?:pytest\.mark\.)?case\(([^)]*)\)", text, re.M)
        for label in re.findall(r"B\d+", labels)
    }
    assert set(REPORTS[topic].split()) <= labelled
