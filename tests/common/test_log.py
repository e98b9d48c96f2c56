"""Figures for people."""

import pytest

from eagle3.common import log


def test_the_rate_is_that_of_the_last_minutes_and_at_the_end_that_of_all(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(log.time, "monotonic", lambda: now[0])
    progress = log.Progress("states", 100_000, "tokens", already_done=50_000)
    for second in range(400):  # slow at first: 10 a second, then 100
        now[0] += 1
        progress.update(10 if second < 200 else 100)
    figures = progress.figures()
    assert figures["done"] == 50_000 + 2_000 + 20_000 and figures["rate"] == pytest.approx(100, rel=0.02)
    assert figures["eta_s"] == pytest.approx(280, rel=0.02)
    progress.close()
    assert progress.figures()["rate"] == pytest.approx(55, rel=0.01)


def test_figures_for_people():
    assert [log.duration(s) for s in (8, 187, 3720)] == ["8s", "3m07s", "1h02m"]
    assert [log.size(n) for n in (999, 1500, 547e9)] == ["999 B", "1.5 kB", "547.0 GB"]
