"""What a step is estimated to take, beside what an H200 took (docs/speed.md)."""

import pytest

from eagle3.training.memory import Step, too_large

H, F, D, V = 7168, 18432, 32000, 163840
LAYER = 3 * H * H + 7 * H * H + 3 * H * F  # fc, and of the layer q, k and v (of 2H), o, and the MLP
FROZEN = Step(H, H, H, F, D, LAYER, V * H + 2 * D * H)
TRAINED = Step(H, H, H, F, D, LAYER + D * H, V * H + D * H)


@pytest.mark.parametrize(("step", "measured"), [(FROZEN, 27.9), (TRAINED, 31.7)])
def test_the_estimate_is_within_a_tenth_of_what_was_measured(step, measured):
    assert step.peak(8192, 3) / 1e9 == pytest.approx(measured, rel=0.1)


def test_long_texts_fit_on_an_h200_and_recomputing_takes_much_less():
    h200 = 141e9
    assert not too_large(TRAINED.peak(32768, 3), h200)
    assert too_large(TRAINED.peak(81920, 3), h200) and not too_large(TRAINED.peak(81920, 3, recompute=True), h200)
    whole, again = (FROZEN.peak(65536, 3, recompute=recompute) - FROZEN.fixed() for recompute in (False, True))
    assert again < 0.65 * whole


def test_moments_in_bf16_leave_a_recomputed_step_below_24_gb():
    assert FROZEN.peak(8192, 3, moments=4, recompute=True) < 24e9
    assert FROZEN.peak(8192, 3) - FROZEN.peak(8192, 3, moments=4) == 4 * LAYER
