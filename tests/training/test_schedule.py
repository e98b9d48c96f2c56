"""The learning rate."""


import pytest

from eagle3.common.options import TrainSection
from eagle3.training.schedule import learning_rate


def test_the_learning_rate_rises_then_falls_to_its_floor():
    options = TrainSection(lr=1.0, warmup_ratio=0.1, min_lr_ratio=0.1)
    rates = [learning_rate(step, 100, options) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (k + 1) for k in range(10)])
    assert max(rates) == 1.0 and rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))
