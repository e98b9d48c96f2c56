"""Every page of the project in a real browser: nothing is cut off on a phone, a desk or paper, nothing complains."""

import random

import pytest
from support import browser
from support.bench_results import wide_results
from support.traces import put, row

from eagle3.benchmark import report, side_by_side
from eagle3.common import files
from eagle3.drafter import coverage
from eagle3.traces import data_report
from eagle3.training import curves

pytestmark = pytest.mark.skipif(browser.find() is None, reason="not run: no chromium")


@pytest.fixture
def all_pages(tmp_path):
    """{name: path} of one of each, at its widest."""
    files.write_json(tmp_path / "results.json", wide_results())
    found = {"benchmark": report.render(tmp_path)}
    results = report.load(tmp_path)
    traces = [row(f"{n}-{'long-name' * 9}", 5 + 40 * n, source=f"source-of-a-long-name-{n % 14}",
                  content="word" * 200 + str(n % 3), finish_reason="stop" if n % 2 else "length") for n in range(42)]
    data_report.write(put(tmp_path, traces, failures=[{"id": "f", "reason": "HTTP 400: " + "why" * 40}]))
    found["traces"] = tmp_path / "data_report.html"
    chance = random.Random(0)
    steps = [{"kind": "train", "step": step, "loss": 1 / step, "grad_norm": chance.random(), "lr": 1e-3 / step,
              "accuracy_by_step": [0.9 - 0.1 * k for k in range(7)]} for step in range(1, 1500)]
    steps.append({"kind": "validation", "step": 1499, "loss": 0.2, "accuracy_by_step": [0.6] * 7,
                  "lengths": {str(k): 1 + k / 4 for k in range(1, 17)}, "conditional_accuracy": [0.6] * 7,
                  "by_source": {"a-source-of-a-long-name" * 3: {"length": 1.5, "rounds": 7}}})
    sizes = [coverage.Size(size, 0.98, 0.97, size * 4096, 0.5, 12.0) for size in (1000, 2000, 4000, 32000, 163840)]
    for name, page in {"curves": curves.page(steps), "coverage": coverage.page(sizes, 32000, 12345678),
                       "comparison": side_by_side.page(results, results, ["processor"])}.items():
        found[name] = tmp_path / f"{name}.html"
        found[name].write_text(page, encoding="utf-8")
    return found


def test_nothing_overflows_and_nothing_complains(all_pages, tmp_path):
    found, console = browser.look_at(all_pages, tmp_path)
    assert console == []
    assert len(found) == 3 * len(all_pages) and all(each["title"] for each in found)
    assert [each for each in found if each["scroll"] > each["width"] or each["boxes"] or each["outside"]] == []


def test_the_browser_sees_what_overflows_and_what_complains(tmp_path):
    page = tmp_path / "bad.html"
    page.write_text('<!DOCTYPE html><html lang="en"><head><title>bad</title></head><body><p style="width: 900px">x</p>'
                    '<script>console.error("complaint")</script></body></html>', encoding="utf-8")
    found, console = browser.look_at({"bad": page}, tmp_path)
    assert [each["scroll"] > each["width"] for each in found] == [True, False, True]
    assert any("complaint" in line for line in console)
