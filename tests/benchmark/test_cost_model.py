"""The choice of a draft-token count, on machines whose true times are known and are not of the model's own form."""

import itertools
import random

import pytest

from eagle3.benchmark import cost_model
from eagle3.benchmark.cost_model import Cell

LOADS = (1, 2, 4, 8, 16, 32, 64, 128)
COUNTS = range(1, 11)


class Machine:
    """Times of a pass as a smooth roofline, attention beside it, and a drafter that is a part of the verifier."""

    def __init__(self, rng):
        self.read, self.token = 0.012, 0.012 / rng.uniform(30, 400)  # seconds; the knee is at 30 to 400 tokens
        self.attention, self.launch = rng.uniform(0, 2e-5), rng.uniform(1e-4, 1.5e-3)
        self.part, self.extra = rng.uniform(0.01, 0.1), rng.uniform(0, 2e-3)
        first, decay = rng.uniform(0.4, 0.9), rng.uniform(0.75, 1.0)
        conditional = [first * decay**k for k in COUNTS]
        self.lengths = {0: 1.0} | {k: 1 + sum(itertools.accumulate(conditional[:k], float.__mul__)) for k in COUNTS}

    def passing(self, tokens, share=1.0):
        return share * (self.read**4 + (self.token * tokens) ** 4) ** 0.25

    def rate(self, count, load):
        round_s = self.passing(load * (count + 1)) + self.attention * load * (1 + 0.1 * count)
        round_s += count * (self.launch + self.passing(load, self.part)) + self.extra * (count > 0)
        return load * self.lengths[count] / (round_s + 2e-5 * load * self.lengths[count])


def measured(machine, counts, loads, rng, noise=0.02):
    return [Cell(count, load, machine.rate(count, load) * rng.gauss(1, noise), machine.lengths[count])
            for count in counts for load in loads]


def test_the_choice_is_within_3_percent_of_the_true_best_in_9_of_10_cells():
    near, cells = 0, 0
    for seed in range(12):
        rng = random.Random(seed)
        machine = Machine(rng)
        model = cost_model.fit(measured(machine, (0, 1, 5), (1, 8, 64), rng))
        for load in LOADS:
            best = max(machine.rate(count, load) for count in machine.lengths)
            near += machine.rate(model.best(load, machine.lengths), load) >= 0.97 * best
            cells += 1
    print(f"{near} of {cells} cells within 3% of the true best")
    assert near >= 0.9 * cells


def test_a_constant_choice_does_not_pass_that_test():
    near = dict.fromkeys((0, *COUNTS), 0)
    for seed, load in itertools.product(range(12), LOADS):
        machine = Machine(random.Random(seed))
        best = max(machine.rate(count, load) for count in machine.lengths)
        for count in near:
            near[count] += machine.rate(count, load) >= 0.97 * best
    assert max(near.values()) < 0.7 * 12 * len(LOADS)


def test_prices_of_the_models_own_form_come_back():
    truth = cost_model.CostModel(0.01, 5e-5, 2e-4, 0.0, 1e-3, 1e-5, 0.0, knee=32)
    lengths = {0: 1.0, 1: 1.7, 3: 2.4, 5: 2.7}
    cells = [Cell(k, b, truth.rate(k, b, lengths[k]), lengths[k]) for k in lengths for b in (1, 2, 4, 8, 16, 32, 64)]
    found = cost_model.fit(cells)
    for cell in cells:
        rate = found.rate(cell.draft_tokens, cell.concurrency, cell.length)
        assert rate == pytest.approx(cell.tokens_per_s, rel=0.01)
    assert found.passing == pytest.approx(0.01, rel=0.1) and found.draft == pytest.approx(1e-3, rel=0.2)


def test_a_recommendation_names_counts_a_schedule_and_how_it_was_checked():
    machine = Machine(random.Random(4))
    cells = measured(machine, (0, 1, 3, 5, 10), LOADS, random.Random(0))
    found = cost_model.recommend(cells, machine.lengths)
    assert [row["concurrency"] for row in found["by_concurrency"]] == list(LOADS)
    few, many = found["by_concurrency"][0], found["by_concurrency"][-1]
    assert few["draft_tokens"] > many["draft_tokens"] and few["speedup"] > 1.2
    assert found["schedule"][0][0] == 1 and found["schedule"][-1][1] == LOADS[-1]
    assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(found["schedule"]))
    checked = found["checked"]
    assert checked["fitted"] == 9 and checked["unseen"] == 31 and checked["near"] >= 7 and checked["error"] < 0.1
    alone = [cell for cell in cells if cell.draft_tokens in (0, 3) and cell.concurrency in (1, 8)]
    assert cost_model.recommend(alone, machine.lengths)["checked"] is None


def test_a_drafter_that_never_pays_is_not_recommended():
    cells = [Cell(0, b, 100.0 * b, 1.0) for b in (1, 4, 16)] + [Cell(3, b, 60.0 * b, 1.1) for b in (1, 4, 16)]
    found = cost_model.recommend(cells, {1: 1.05, 3: 1.1})
    assert found["draft_tokens"] == 0 and not found["schedule_pays"]
    assert found["schedule"] == [[1, 16, 0]]
