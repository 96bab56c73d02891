"""The planner's page in a real browser: its controls are moved, and what it then shows is what Python plans; also on a phone."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import zerodp
from zerodp.planning import page
from zerodp.planning.estimate import KINDS, amount
from zerodp.planning.models import Shape

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((path for path in map(shutil.which, NAMES) if path), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here to open the page in (apt install chromium)")

GPT3 = Shape(96, 12288, 96, 50257, 2048)
GIVEN: dict[str, Any] = {"world_size": 1024, "device_memory": "80GB", "batch": 2}
PHONE, DESK = 360, 1280  # pixels

# Runs in the outer document, whose frame holds the page; `frame` is the page's window.
OUTER = """\
<!DOCTYPE html><html><body style="margin:0"><iframe id="frame" style="border:0;width:{width}px;height:3000px" srcdoc="{page}"></iframe><pre id="answer"></pre>
<script>
window.addEventListener("load", () => {{
  const frame = document.getElementById("frame").contentWindow, page = frame.document;
  const errors = []; frame.addEventListener("error", event => errors.push(event.message));
  const controls = page.getElementById("controls").elements;
  function move(name, value) {{ controls[name].value = value; controls[name].dispatchEvent(new frame.Event("input", {{bubbles: true}})); }}
  function rows() {{ return [...page.querySelectorAll("#table tr")].slice(1).map(row => [...row.cells].map(cell => cell.textContent)); }}
  let answer;
  try {{ answer = (() => {{ {script} }})(); }} catch (error) {{ errors.push(String(error)); }}
  document.getElementById("answer").textContent = JSON.stringify({{errors: errors, answer: answer}});
}});
</script></body></html>
"""


def asked(plan: zerodp.Plan, script: str, folder: Path, width: int = DESK) -> Any:
    """What the body of a function `script` returns in the plan's page, in a window so wide; errors in the page fail."""
    assert BROWSER is not None
    path = folder / "outer.html"
    path.write_text(OUTER.format(width=width, page=html.escape(page.html(plan)), script=script), encoding="utf-8")
    command = [
        BROWSER,
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}",
    ]
    command += ["--no-sandbox"] if os.geteuid() == 0 else []
    command += ["--virtual-time-budget=5000", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    found = re.search(r'<pre id="answer">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    told = json.loads(html.unescape(found[1]))
    assert told["errors"] == []
    return told["answer"]


def table_of(plan: zerodp.Plan) -> list[list[str]]:
    """What the page's table should say."""
    stages = plan.estimates.values()
    rows = [["model states by the paper", *(amount(one.model_state_bytes) for one in stages)]]
    rows += [
        [kind, *(amount(one.kinds[kind]) for one in stages)] for kind in KINDS if any(one.kinds[kind] for one in stages)
    ]
    rows.append(["device", *(amount(one.device_bytes) for one in stages)])
    rows.append(["on the host", *(amount(sum(one.tiers.values())) for one in stages)])
    return rows


# (control, its new value, what that means for the plan), moved one after another.
MOVES: list[tuple[str, Any, dict[str, Any]]] = [
    ("ranks", 12, {"world_size": 4096}),
    ("ranks", 6, {"world_size": 64}),
    ("batch", 3, {"batch": 8}),
    ("sequence", 13, {"sequence": 8192}),
    ("checkpointing", "full", {"checkpointing": "full"}),
    ("checkpointing", "none", {"checkpointing": "none"}),
    ("offload", "optimizer", {"offload_optimizer": "host"}),
    ("offload", "optimizer and parameters", {"offload_optimizer": "host", "offload_params": "host"}),
]


def test_controls_show_what_python_plans(tmp_path: Path) -> None:
    """Each move on top of the earlier ones; then the stage's slider changes verdict and pictures."""
    start = zerodp.plan(GPT3, **GIVEN)
    moves = json.dumps([[name, str(value)] for name, value, _ in MOVES])
    script = f"""
      const seen = [rows()], outputs = [];
      for (const [name, value] of {moves}) {{ move(name, value); seen.push(rows()); }}
      for (const stage of [0, 1, 2, 3]) {{ move("stage", stage); outputs.push(["verdict", "step", "schedule"].map(id => page.getElementById(id).textContent)); }}
      return {{seen: seen, outputs: outputs, shown: page.querySelector("output").textContent, title: page.getElementById("title").textContent}};
    """
    told = asked(start, script, tmp_path)
    given = dict(GIVEN)
    plans = [start]
    for _, _, changes in MOVES:
        given.update(changes)
        plans.append(zerodp.plan(GPT3, **given))
    for number, (rows, plan) in enumerate(zip(told["seen"], plans, strict=True)):
        assert [row for row in rows if row[0] != "sent per step"] == table_of(plan), (
            MOVES[number - 1] if number else "at first"
        )
    assert told["shown"] == "64"
    assert told["title"] == start.model.name
    for stage, (verdict, step, schedule) in enumerate(told["outputs"]):
        needed = plans[-1].estimates[stage].device_bytes
        assert verdict == f"Stage {stage} on 64 ranks needs {amount(needed)} on each device, and does not fit 72.0 GB."
        assert "forward" in step
        assert ("gather (root)" in schedule) == (stage > 0)


@pytest.mark.parametrize("width", [320, PHONE, DESK])
def test_nothing_is_wider_than_the_window(width: int, tmp_path: Path) -> None:
    """Nothing to scroll sideways but the table inside its own frame, letters large enough, controls large enough for a finger."""
    script = """
      const wide = [...page.body.querySelectorAll("*")].filter(e => !e.closest(".wide") && e.getBoundingClientRect().right > frame.innerWidth + 0.5);
      const letters = [...page.querySelectorAll("svg text")].map(e => {
        const svg = e.closest("svg");
        return parseFloat(frame.getComputedStyle(e).fontSize) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
      });
      const outside = [...page.querySelectorAll("svg text")].filter(e => {
        const one = e.getBoundingClientRect(), all = e.closest("svg").getBoundingClientRect();
        return one.left < all.left - 1 || one.right > all.right + 1;
      });
      return {
        window: frame.innerWidth, document: page.documentElement.scrollWidth, wide: wide.map(e => e.tagName + e.textContent.slice(0, 30)),
        letters: Math.min(...letters), outside: outside.map(e => e.textContent),
        controls: Math.min(...[...page.querySelectorAll("input, select")].map(e => e.getBoundingClientRect().height)),
      };
    """
    told = asked(zerodp.plan(GPT3, **GIVEN), script, tmp_path, width)
    assert told["window"] == width
    assert told["document"] <= width
    assert told["wide"] == []
    assert told["outside"] == []
    assert told["letters"] >= 8.5  # pixels
    assert told["controls"] >= 28
