"""Figures for people."""


from eagle3.common import log


def test_figures_for_people():
    assert [log.duration(s) for s in (8, 187, 3720)] == ["8s", "3m07s", "1h02m"]
    assert [log.size(n) for n in (999, 1500, 547e9)] == ["999 B", "1.5 kB", "547.0 GB"]
