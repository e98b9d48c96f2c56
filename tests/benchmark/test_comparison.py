"""What comes of comparing measurements: speed-ups and their spread, drift, what a control says."""

from pathlib import Path

import pytest

from eagle3.benchmark import comparison
from eagle3.benchmark.matrix import AGAIN, BASELINE, CONTROL, DRAFTER, Matrix, ServerKind


def run(server, rate, draft_tokens=0, repeat=1, concurrency=1, acceptance=None, at="1", **more):
    return {"name": f"{server}-{draft_tokens}_c{concurrency}_r{repeat}", "server": server, "draft_tokens": draft_tokens,
            "concurrency": concurrency, "temperature": 0.0, "prompts": "p", "repeat": repeat, "tokens_per_s": rate,
            "acceptance": acceptance, "measured_at": at} | more


def accepted(first, second=0.0, drafts=1000.0, error=0.01):
    total = drafts * (first + second)
    return {"length": 1 + first + second, "by_position": [first, second], "drafts": drafts, "accepted": total,
            "draft_tokens": 2 * drafts, "error": error, "error_from": "replies"}


def test_a_speed_up_is_one_of_medians_with_the_spread_of_both_sides():
    runs = [run(BASELINE, 100.0), run(BASELINE, 104.0, repeat=2), run(AGAIN, 90.0), run(DRAFTER, 150.0, 3),
            run(DRAFTER, 160.0, 3, repeat=2), run(DRAFTER, 500.0, 3, concurrency=8)]
    cells = comparison.cells(runs)
    assert [cell["server"] for cell in cells] == [BASELINE, AGAIN, DRAFTER, DRAFTER]
    assert cells[2]["speedup"] == pytest.approx(155 / 100)
    assert cells[2]["spread"]["speedup"] == pytest.approx([150 / 104, 160 / 90])
    assert "speedup" not in cells[3]  # nothing was measured under its load
    once = comparison.cells([run(BASELINE, 100.0), run(DRAFTER, 150.0, 3)])[1]
    assert once["speedup"] == 1.5 and "speedup" not in once["spread"]


def test_repeats_of_other_seeds_were_sampled_alike():
    def sampled(seed):
        return {"sampling": {"sent": {"temperature": 0.7, "seed": seed}, "server_defaults": {}}}

    cells = comparison.cells([run(BASELINE, 100.0, **sampled(0)), run(BASELINE, 110.0, repeat=2, **sampled(1)),
                              run(DRAFTER, 210.0, 3, **sampled(0))])
    assert cells[1]["speedup"] == 2.0


def test_drift_is_that_of_the_last_end_and_much_is_warned_of(monkeypatch):
    said = []
    monkeypatch.setattr(comparison.logger, "warning", lambda text, *values: said.append(text % values))
    runs = [run(BASELINE, 100.0), run(AGAIN, 50.0, at="2"), run(AGAIN, 98.0, at="3"),
            run(BASELINE, 10.0, concurrency=2), run(AGAIN, 9.0, concurrency=2, at="2")]
    assert [each["change"] for each in comparison.drift(runs)] == pytest.approx([-0.02, -0.1])
    assert len(said) == 1 and "-10.0%" in said[0] and "2 in flight" in said[0]
    assert comparison.drift([run(BASELINE, 100.0)]) == []


@pytest.mark.parametrize(("ours", "theirs", "answer"), [
    (accepted(0.1), accepted(0.15), "integration"),
    (accepted(0.15), accepted(0.7, 0.5), "training"),
    (accepted(0.6, 0.3), accepted(0.7, 0.5), "training"),
    (accepted(0.69, 0.49), accepted(0.7, 0.5), "sound"),
    (accepted(0.7, 0.5), accepted(0.1), "control"),
    (accepted(0.6, 0.3, error=0.2), accepted(0.7, 0.5, error=0.2), "sound"),  # no surer than that
])
def test_a_control_tells_a_fault_of_the_engine_from_one_of_the_training(ours, theirs, answer):
    cells = [run(DRAFTER, 1.0, 2, acceptance=ours), run(CONTROL, 1.0, 2, acceptance=theirs),
             run(DRAFTER, 1.0, 4, acceptance=accepted(0.0))]  # without its like: not compared
    verdict = comparison.verdict(cells, Path("runs/x/06_bench"), "published")
    assert verdict["answer"] == answer and verdict["cells"] == 1
    assert ("doctor --explain runs/x/06_bench" in verdict["text"]) == (answer in ("integration", "training"))
    assert f"{ours['length']:.3f}" in verdict["text"]


def test_no_verdict_without_a_common_measurement():
    assert comparison.verdict([run(DRAFTER, 1.0, 2, acceptance=accepted(0.5))], Path("x"), "c") is None


def test_runs_stand_in_the_order_of_their_servers():
    plan = Matrix([ServerKind(BASELINE), ServerKind(DRAFTER, 5), ServerKind(AGAIN)], [1], [0.0], {"p": "i"}, 1)
    runs = [run(AGAIN, 1.0), run(DRAFTER, 1.0, 3), run(DRAFTER, 1.0, 5), run(BASELINE, 1.0, concurrency=8),
            run(BASELINE, 1.0)]
    found = [(each["server"], each["draft_tokens"], each["concurrency"]) for each in comparison.in_order(runs, plan)]
    assert found == [(BASELINE, 0, 1), (BASELINE, 0, 8), (DRAFTER, 5, 1), (AGAIN, 0, 1), (DRAFTER, 3, 1)]
