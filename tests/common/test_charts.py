"""Charts: their values are on hover and in a table, every text is escaped, bytes depend on the data alone."""

import math
import re

import pytest

from eagle3.common import charts

HOSTILE = '<b>"&'


def numbers_of(page, what):
    return [float(found) for found in re.findall(what, page)]


def test_a_line_has_its_points_spread_table_and_hover():
    page = charts.line_chart("speed", {"ours": [(1, 1.5, 1.25, 1.75), (8, 1.0)]}, "load", log_x=True, marks=True)
    assert page.count("<circle") == 2 and page.count("<polyline") == 1
    assert "<title>ours: 1.5 [1.25–1.75] at 1</title>" in page and "<td>1.5 [1.25–1.75]</td>" in page
    one, other = numbers_of(page, r'cx="([\d.]+)"')
    assert one < other
    spread = re.search(r'<line x1="([\d.]+)" x2="\1" y1="([\d.]+)" y2="([\d.]+)" stroke', page)
    middle = numbers_of(page, r'cy="([\d.]+)"')[0]
    assert float(spread[2]) > middle > float(spread[3])  # y grows downwards


def test_what_is_not_finite_or_not_there_is_not_drawn():
    assert charts.line_chart("t", {"a": [(1, math.nan)], "b": []}, "x") == ""
    assert charts.dot_chart("t", {"a": {"m": None}}, "x") == charts.bar_chart("t", {"a": {"m": 0}}, "x") == ""
    page = charts.line_chart("t", {"a": [(1, math.inf), (2, 1.0)]}, "x")
    assert page.count("<circle") == 1 and "inf" not in page


def test_many_points_are_means_and_their_table_is_short():
    page = charts.line_chart("t", {"a": [(k, k % 2) for k in range(10_000)]}, "x")
    assert 250 < page.count("<circle") <= 300 and 10 < page.count("<tr>") < 20 and len(page) < 100_000


def test_marks_of_a_row_stand_by_their_value():
    page = charts.dot_chart("t", {"row": {"p50": 1.0, "p95": 2.0}, "other": {"p50": 4.0}}, "s")
    first, last = numbers_of(page, r'<circle cx="([\d.]+)" cy="[\d.]+" r="5"[^>]*><title>')
    assert last - 8 == pytest.approx(4 * (first - 8), abs=0.5)
    assert "<title>row, p95: 2</title>" in page and "<td>–</td>" in page


def test_bars_stand_one_after_the_other():
    page = charts.bar_chart("t", {"row": {"a": 1.0, "b": 3.0}}, "x")
    (x1, w1), (x2, w2) = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="12"', page)
    assert float(x1) + float(w1) == pytest.approx(float(x2)) and float(w2) == pytest.approx(3 * float(w1), abs=0.3)


@pytest.mark.parametrize("page", [
    charts.line_chart(HOSTILE, {HOSTILE: [(1, 2.0)]}, HOSTILE),
    charts.dot_chart(HOSTILE, {HOSTILE: {HOSTILE: 1.0}}, HOSTILE),
    charts.bar_chart(HOSTILE, {HOSTILE: {HOSTILE: 1.0}}, HOSTILE)])
def test_every_text_is_escaped(page):
    assert HOSTILE[:3] not in page and HOSTILE[3:] not in page.replace('="&lt;', "") and "&lt;b&gt;&quot;&amp;" in page
