"""Pictures for the planner's page, as SVG text: what happened when in a step, and values over the steps of a run."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from .timeline.simulate import Timeline

WIDTH, LEFT, ROW = 640, 70, 30
COLOURS = {
    "forward": "#3b82c4", "backward": "#55a868", "idle": "#8a8f98", "reduce": "#8a8f98",
    "wait": "#d33", "gather": "#8e6bbf", "reduction": "#e0a030", "tensor": "#c45b84",
}  # fmt: skip
LINES = ("#3b82c4", "#e0a030", "#55a868", "#8e6bbf", "#c45b84", "#8a8f98", "#b5a642", "#1b9e9e", "#a05a2c")


def duration(seconds: float) -> str:
    """In words: 12.3 ms, 4.56 s, 3.2 days."""
    for scale, unit in ((86400.0, "days"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale * (2 if unit == "days" else 1) or unit == "us":
            return f"{seconds / scale:.3g} {unit}"
    raise AssertionError


def of_timeline(found: Timeline) -> str:
    """One row per lane; waits are red, and every box says what it is."""
    rows = ["compute", *dict.fromkeys(s.lane for s in found.spans if s.lane not in ("compute", "wait"))]
    scale = (WIDTH - LEFT - 4) / max(found.seconds, 1e-12)
    parts = [_text(0, ROW * place + 20, lane) for place, lane in enumerate(rows)]
    for span in found.spans:
        row = rows.index("compute" if span.lane == "wait" else span.lane)
        kind = {"compute": span.phase, "reduce": "reduction"}.get(span.lane, span.lane)
        told = f"{span.lane} {span.unit} {span.phase}".strip() + f", {duration(span.end - span.start)}"
        x, width = LEFT + span.start * scale, max((span.end - span.start) * scale, 0.4)
        parts.append(_rect(x, ROW * row + 6, width, 20, COLOURS.get(kind, "#8a8f98"), told))
    bottom = ROW * len(rows) + 18
    parts += [_text(LEFT, bottom, "0"), _text(WIDTH - 4, bottom, duration(found.seconds), "end")]
    return _svg(bottom + 6, parts)


def curves(values: Mapping[str, Sequence[tuple[float, float]]], unit: str = "", least: float | None = None) -> str:
    """Lines of (x, y), with names; `least` is where y begins, the smallest value unless given."""
    points = [point for line in values.values() for point in line]
    if not points:
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points) if least is None else least, max(y for _, y in points)
    across, up = (WIDTH - LEFT - 10) / max(right - left, 1e-12), 170 / max(high - low, 1e-12)
    parts = [_text(0, 20, f"{high:.4g} {unit}"), _text(0, 184, f"{low:.4g}")]
    for (name, line), colour, place in zip(values.items(), LINES, range(len(LINES)), strict=False):
        path = " ".join(f"{LEFT + (x - left) * across:.1f},{184 - (y - low) * up:.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        x, y = LEFT + place % 4 * 140, 226 + 18 * (place // 4)
        parts += [_rect(x, y - 10, 11, 11, colour, name), _text(x + 15, y, name)]
    parts += [_text(LEFT, 204, f"{left:g}"), _text(WIDTH - 10, 204, f"{right:g}", "end")]
    return _svg(238 + 18 * ((len(values) - 1) // 4), parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return (
        '<div class="wide"><table>' + row("th", head) + "".join(row("td", cells) for cells in rows) + "</table></div>"
    )


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def _rect(x: float, y: float, width: float, height: float, fill: str, told: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}">'
        f"<title>{html.escape(told)}</title></rect>"
    )


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'
