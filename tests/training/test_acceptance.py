"""The walk over draft rounds counts as an engine does."""

import random

import pytest
from support.engine_walk import rounds

from eagle3.training import acceptance


@pytest.mark.parametrize("seed", range(20))
def test_the_walk_counts_as_an_engine_would(seed):
    rng = random.Random(seed)
    ids = [rng.randrange(3) for _ in range(40)]
    drafted = [[rng.randrange(3) for _ in range(39)] for _ in range(3)]
    result = acceptance.walk(ids, drafted, first_generated=5, draft_tokens=3)
    proposals = {t: [drafted[s][t - 1] for s in range(3)] for t in range(5, 40)}
    assert (result.rounds, result.accepted) == rounds(ids, 5, 3, proposals.get)
    assert result.length == pytest.approx(1 + sum(result.accepted) / result.rounds)


def test_a_perfect_and_a_useless_drafter():
    ids = list(range(10, 30))
    perfect = [[ids[min(p + 2 + s, 19)] for p in range(19)] for s in range(3)]
    assert acceptance.walk(ids, perfect, 3, 3).length == 4.0  # 16 tokens after the first in 4 full rounds
    assert acceptance.walk(ids, [[-1] * 19] * 3, 3, 3).by_position == [0.0, 0.0, 0.0]
