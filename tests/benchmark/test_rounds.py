"""Rounds over replies: counted for every draft-token count, pooled, with errors that are those of repetition."""

import random

import numpy as np
import pytest
from support.engine_walk import rounds as by_engine

from eagle3.benchmark import rounds
from eagle3.benchmark.rounds import Drafted, Rounds

P = (0.7, 0.5, 0.4)  # conditional acceptance


@pytest.mark.parametrize("seed", range(10))
def test_rounds_are_an_engines_for_every_count(seed):
    rng = random.Random(seed)
    ids = [rng.randrange(2) for _ in range(40)]
    drafts = {known: [rng.randrange(2) for _ in range(16)] for known in range(40)}
    right = [next((k for k, (a, b) in enumerate(zip(drafts[p + 1], ids[p + 2 :], strict=False)) if a != b),
                  min(16, 38 - p)) for p in range(39)]
    reply = Drafted(np.array(right), None, first=5)
    for count in range(1, 17):
        found = Rounds.of(reply.rounds(count)[1], None, count)
        assert (found.rounds, found.accepted) == by_engine(ids, 5, count, drafts.get)


def simulated(rng, count):
    """Return rounds with conditional acceptance P, each draft's probability drawn around it."""
    chances = np.clip(np.array(P) + rng.uniform(-0.3, 0.3, (count, 3)), 0, 1).astype(np.float32)
    accepted = np.cumprod(rng.uniform(size=(count, 3)) < chances, 1).sum(1)
    return Rounds.of(accepted, chances, 3)


def test_errors_are_those_of_repetition():
    rng = np.random.default_rng(0)
    many = [simulated(rng, 400) for _ in range(400)]
    truth = 1 + sum(np.cumprod(P))
    for told, lengths in ((many[0].summary()["standard_error"], [each.length for each in many]),
                          (many[0].expected()["standard_error"], [each.expected()["length"] for each in many])):
        assert np.mean(lengths) == pytest.approx(truth, abs=0.01)
        assert told == pytest.approx(np.std(lengths), rel=0.2)
    assert many[0].expected()["standard_error"] < 0.6 * many[0].summary()["standard_error"]


def test_a_part_without_probabilities_leaves_them_out_of_the_whole():
    rng = np.random.default_rng(1)
    whole = Rounds.pooled([simulated(rng, 5), simulated(rng, 7)])
    assert whole.rounds == 12 and whole.reached[0] == 12
    mixed = Rounds.pooled([simulated(rng, 5), Rounds(2, [1, 1, 0])])
    assert mixed.rounds == 7 and "expected" not in mixed.to_dict()
    assert Rounds.pooled([]).to_dict() == {"length": 1.0, "rounds": 0, "standard_error": 0.0, "by_position": []}


def test_a_reply_that_ends_first_asks_nothing_beyond():
    chances = np.array([[0.5, 0.5], [0.25, np.nan]], dtype=np.float32)
    found = Rounds.of(np.array([2, 1]), chances, 2)
    assert found.reached == [2, 1] and found.expected()["conditional"] == [0.375, 0.5]


def test_contexts_are_counted_from_what_a_round_knows():
    right = np.zeros(600, dtype=np.int64)
    figures = rounds.predicted([Drafted(right, None, first=126)], 1, 2)
    # rounds begin with 127 tokens known, then 128 and so on, up to one before the last of 601
    assert {name: group["1"]["rounds"] for name, group in figures["by_context"].items()} == {
        "0-127": 1, "128-511": 384, "512-2047": 89}
