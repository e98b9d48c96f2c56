"""The first line of a benchmark's report, from measurements alone."""

import pytest

from eagle3.benchmark import headline


def run(count, load, speedup=None, spread=None, length=2.0, **more):
    return {"server": "drafter" if count else "baseline", "draft_tokens": count, "concurrency": load,
            "temperature": 0.0, "prompts": "p", "spread": {"speedup": spread} if spread else {}, "speedup": speedup,
            "acceptance": {"length": length} if count and length else None} | more


def said(*runs, serving=()):
    return headline.lines({"runs": list(runs), "serving": list(serving)})


def advice(count, **more):
    return {"condition": {}, "draft_tokens": count, "scheduled": False} | more


ALONE = [run(0, 1), run(0, 24), run(0, 64)]


def test_it_tells_the_speed_up_how_far_it_pays_and_with_what():
    runs = [*ALONE, run(4, 1, 1.7), run(4, 24, 1.2), run(4, 64, 0.9)]
    assert said(*runs, serving=[advice(4)]) == [
        "1.7× at one request with 4 draft tokens, pays up to 24 in flight, not at 64; serve with 4 draft tokens."]
    assert said(*runs[:-1], run(4, 64, 1.1))[0].endswith(
        "pays up to 64 in flight, the most that was measured; serve with 4 draft tokens.")
    assert "by the cost model: it was not measured" in said(*runs, serving=[advice(2)])[0]
    assert "the verifier alone is better" in said(*runs, serving=[advice(0)])[0]
    assert "by requests in flight (below)" in said(*runs, serving=[advice(4, scheduled=True)])[0]


def test_what_does_not_pay_is_said_to():
    assert said(run(0, 1), run(4, 1, 0.7)) == [
        "Does not pay: 0.7× at one request with 4 draft tokens; serve without the drafter."]
    # A spread that reaches below 1 is no gain, whatever the median.
    assert said(run(0, 1), run(4, 1, 1.1, [0.95, 1.2]))[0].startswith("Does not pay: 1.1×")
    assert said(run(0, 1), run(4, 1, 1.02))[0].startswith("1.02×")
    assert "does not pay there, but at 8" in said(run(0, 1), run(0, 8), run(4, 1, 0.9), run(4, 8, 1.3))[0]


def test_the_best_measured_count_is_told_where_nothing_is_advised():
    assert said(run(0, 1), run(2, 1, 1.2), run(4, 1, 1.6), run(6, 1, 1.1))[0].startswith("1.6× at one request with 4")


@pytest.mark.parametrize(("runs", "why"), [
    ([run(4, 1)], "No speed-up can be told: the verifier alone was not measured. Acceptance length 2.00 with 4 draft"),
    ([run(0, 1), run(4, 1)], "No speed-up can be told: its sampling was another"),
    ([run(4, 1, length=None)], "Nor does the engine tell acceptance."),
    ([run(0, 1)], "Nothing was measured with a drafter."), ([], "Nothing was measured with a drafter.")])
def test_what_cannot_be_told_is_said(runs, why):
    assert why in said(*runs)[0]


def test_missing_combinations_and_several_conditions_are_told():
    hot = {"temperature": 1.0}
    told = said(run(0, 1), run(4, 1, 1.5), run(0, 1, **hot), run(4, 1, 1.1, **hot))
    assert [line.partition(":")[0] for line in told] == ["temperature 0", "temperature 1"]
    assert said(run(0, 1), run(4, 1, 1.5), run(4, 8))[-1].startswith("Partial: 3 of 4 combinations")
