"""The curves of a training run as one page, drawn again while it trains: from metrics.jsonl alone."""

import time
from pathlib import Path
from typing import Any

from eagle3.common import files, pages
from eagle3.common.charts import Point, Series, line_chart

PAGE = "curves.html"
_EVERY_S = 60.0


class Curves:
    """The page of a run's metrics.jsonl, beside it."""

    def __init__(self, metrics: Path) -> None:
        self._metrics, self._drawn_at = metrics, float("-inf")

    def draw(self, *, due: bool = False) -> None:
        """Write the page, if it is `due` or the last one is a while old."""
        if due or time.monotonic() - self._drawn_at > _EVERY_S:
            rows = [row for _, row in files.read_jsonl(self._metrics)]
            files.write_bytes(self._metrics.parent / PAGE, page(rows).encode())
            self._drawn_at = time.monotonic()


def page(rows: list[dict[str, Any]]) -> pages.Html:
    """Return the page of a run's metrics. No times are in it: a resumed run draws the same."""
    steps = [row for row in rows if row["kind"] == "train"]
    held_out = [row for row in rows if row["kind"] == "validation"]
    last = steps[-1]["step"] if steps else 0
    skipped = [row for row in steps if row.get("skipped")]
    charts: dict[str, tuple[Series, bool]] = {
        "Loss": ({"training": _points(steps, "loss"), "held out": _points(held_out, "loss")}, False),
        "Accuracy by TTT step, held out": (_by_place(held_out, "accuracy_by_step", "step"), True),
        "Accuracy given that the one before was right, held out": (
            _by_place(held_out, "conditional_accuracy", "step"), True),
        "Accuracy by TTT step, training": (_by_place(steps, "accuracy_by_step", "step"), False),
        "Predicted acceptance length by draft tokens": (_lengths(held_out), True),
        "Gradient norm": ({"before clipping": _points(steps, "grad_norm")}, False),
        "Learning rate": ({"rate": _points(steps, "lr")}, False),
    }
    parts = [pages.lead(f"Step {last:,}, {len(held_out)} validations, {len(skipped)} skipped steps.")]
    parts += [line_chart(title, series, "optimizer step", marks=marks) for title, (series, marks) in charts.items()]
    if held_out:
        parts += [pages.heading("Predicted acceptance length of the last validation"), _last(held_out[-1])]
    if skipped:
        parts += [pages.heading("Skipped steps"), pages.table(
            ["step", "why", "samples"], [[f"{row['step']:,}", row["skipped"], ", ".join(map(str, row["samples"]))]
                                         for row in skipped[-50:]])]
    return pages.document("Training", *parts)


def _points(rows: list[dict[str, Any]], name: str) -> list[Point]:
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def _by_place(rows: list[dict[str, Any]], name: str, label: str) -> Series:
    series: Series = {}
    for row in rows:
        for place, value in enumerate(row.get(name) or [], start=1):
            series.setdefault(f"{label} {place}", []).append((row["step"], value))
    return series


def _lengths(rows: list[dict[str, Any]]) -> Series:
    series: Series = {}
    for row in rows:
        for count, value in (row.get("lengths") or {}).items():
            series.setdefault(f"{count} draft tokens", []).append((row["step"], value))
    return series


def _last(row: dict[str, Any]) -> pages.Html:
    lines = [[f"{count} draft tokens", f"{length:.3f}", ""] for count, length in (row.get("lengths") or {}).items()]
    for key, what in (("by_source", "source"), ("by_context", "context")):
        lines += [[f"{what} {name}", f"{each['length']:.3f}", f"{each['rounds']:,}"]
                  for name, each in (row.get(key) or {}).items()]
    return pages.table(["", "length", "rounds"], lines)
