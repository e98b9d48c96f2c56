"""Which draft-token count to serve: what a round takes, fitted to measured cells, and what it brings.

With B requests in flight and K draft tokens, a round takes K passes of the drafter over B tokens and one pass of the
verifier over B (K + 1), and brings each request L(K) tokens, its acceptance length:

    tokens/s = B L / t,   t = pass + token n + beyond max(0, n - knee) + speculating [K > 0] + K (draft + draft_token B)
                              + reply_token B L,   n = B (K + 1)

A pass of few tokens takes as long as reading the weights, one of many as long as its products: hence the knee (the
roofline of Williams et al., 2009). `reply_token` is what a token costs beside rounds, such as its share of the prompt.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NEAR = 0.03  # rates closer than this to each other are the same
_TIE = 0.005  # of two counts so close in rate, the smaller one
_NOISE = 0.01  # what a measured rate is uncertain by, at least


@dataclass(frozen=True)
class Cell:
    """A measured rate: output tokens/s with so many draft tokens (0: the verifier alone) and requests in flight, and
    the acceptance length there (1 for the verifier alone)."""

    draft_tokens: int
    concurrency: int
    tokens_per_s: float
    length: float


@dataclass(frozen=True)
class CostModel:
    """Seconds of the formula above, each at least 0, and the knee in tokens."""

    passing: float = 0.0
    token: float = 0.0
    beyond: float = 0.0
    speculating: float = 0.0
    draft: float = 0.0
    draft_token: float = 0.0
    reply_token: float = 0.0
    knee: float = 0.0

    def rate(self, draft_tokens: int, concurrency: int, length: float) -> float:
        """Return the output tokens/s of a draft-token count whose acceptance length is `length`."""
        seconds = sum(weight * price for weight, price in zip(
            _row(draft_tokens, concurrency, length, self.knee), self._prices(), strict=True))
        return 1.0 / seconds if seconds else math.inf

    def _prices(self) -> tuple[float, ...]:
        return (self.passing, self.token, self.beyond, self.speculating, self.draft, self.draft_token, self.reply_token)

    def best(self, concurrency: int, lengths: Mapping[int, float]) -> int:
        """Return the draft-token count of `lengths` (its acceptance length by count; 0 with 1) with the highest rate;
        the smallest of those that are as good."""
        rates = {count: self.rate(count, concurrency, length) for count, length in lengths.items()}
        return min(count for count, rate in rates.items() if rate >= (1 - _TIE) * max(rates.values()))


def _row(draft_tokens: int, concurrency: int, length: float, knee: float) -> tuple[float, ...]:
    """Return what each price is multiplied with, for the seconds of one output token."""
    made, tokens = concurrency * length, concurrency * (draft_tokens + 1)
    return (1 / made, tokens / made, max(0.0, tokens - knee) / made, (draft_tokens > 0) / made, draft_tokens / made,
            draft_tokens * concurrency / made, 1.0)


def fit(cells: Sequence[Cell]) -> CostModel:
    """Return the model with the least relative errors, no price below 0.

    Least squares over every subset of prices and several knees; of those, the least AIC, so that few cells do not bear
    many prices. Raises ValueError without cells.
    """
    import numpy as np

    if not cells:
        raise ValueError("no cells")
    names = [name for name in CostModel.__dataclass_fields__ if name != "knee"]
    most = min(len(names), len(cells))
    tokens = sorted({cell.concurrency * (cell.draft_tokens + 1) for cell in cells})
    best: tuple[float, CostModel] = (math.inf, CostModel())
    for knee in tokens[:-1] or tokens:
        rows = np.array([[weight * cell.tokens_per_s for weight in
                          _row(cell.draft_tokens, cell.concurrency, cell.length, knee)] for cell in cells])
        for chosen in itertools.chain.from_iterable(itertools.combinations(range(len(names)), k)
                                                    for k in range(1, most + 1)):
            columns = rows[:, chosen]
            scale = np.linalg.norm(columns, axis=0)
            if not scale.all():
                continue
            prices = np.linalg.lstsq(columns / scale, np.ones(len(cells)), rcond=None)[0] / scale
            if (prices < 0).any():
                continue
            error = float(np.mean((columns @ prices - 1) ** 2)) + _NOISE**2
            criterion = len(cells) * math.log(error) + 2 * (len(chosen) + (2 in chosen))
            if criterion < best[0]:
                found = {names[k]: float(price) for k, price in zip(chosen, prices, strict=True)}
                best = (criterion, CostModel(**found, knee=float(knee)))
    return best[1]


def corners(cells: Iterable[Cell]) -> list[Cell]:
    """Return the few cells that a model is fitted to when it is to be checked on the others: fewest, middle and most
    requests in flight with no drafter and the fewest and most draft tokens."""
    cells = list(cells)
    counts, loads = (sorted({getattr(cell, name) for cell in cells}) for name in ("draft_tokens", "concurrency"))
    drafted = [count for count in counts if count]
    wanted = {0, *drafted[:1], *drafted[-1:]}
    places = {loads[0], loads[len(loads) // 2], loads[-1]} if loads else set()
    return [cell for cell in cells if cell.draft_tokens in wanted and cell.concurrency in places]


def check(cells: Sequence[Cell]) -> dict[str, Any] | None:
    """Return how a model that is fitted to the corners does on all cells; None when those are all that there is.

    `error` is the mean relative error of the rates it has not seen. For each number of requests in flight it chooses
    among the measured counts: `near` of `choices` have a measured rate within 3% of the best measured one.
    """
    seen = corners(cells)
    unseen = [cell for cell in cells if cell not in seen]
    if not unseen:
        return None
    model = fit(seen)
    errors = [abs(model.rate(cell.draft_tokens, cell.concurrency, cell.length) / cell.tokens_per_s - 1)
              for cell in unseen]
    near, loads = 0, sorted({cell.concurrency for cell in cells})
    for load in loads:
        there = {cell.draft_tokens: cell for cell in cells if cell.concurrency == load}
        chosen = model.best(load, {count: cell.length for count, cell in there.items()})
        most = max(cell.tokens_per_s for cell in there.values())
        near += there[chosen].tokens_per_s >= (1 - NEAR) * most
    return {"fitted": len(seen), "unseen": len(unseen), "error": sum(errors) / len(errors), "choices": len(loads),
            "near": near}


def recommend(cells: Sequence[Cell], lengths: Mapping[int, float]) -> dict[str, Any]:
    """Return what to serve, as JSON values.

    Args:
        cells: measured, the verifier alone among them. lengths: acceptance length by draft-token count.
    Returns:
        by_concurrency: for each measured one the best count, its rate and speed-up by the model, and whether that count
            was measured. draft_tokens: the one count that is best for all of these together (0: no drafter pays).
        schedule: [first, last, count] by requests in flight; schedule_pays: whether it is more than 3% above that one
            count anywhere. checked: see `check`.
    """
    model, known = fit(cells), {0: 1.0} | dict(lengths)
    loads: list[int] = sorted({cell.concurrency for cell in cells})
    measured = {(cell.draft_tokens, cell.concurrency) for cell in cells}
    rows: list[dict[str, Any]] = []
    for load in loads:
        count = model.best(load, known)
        rate = model.rate(count, load, known[count])
        rows.append({"concurrency": load, "draft_tokens": count, "tokens_per_s": rate,
                     "speedup": rate / model.rate(0, load, 1.0), "measured": (count, load) in measured})

    def shares(count: int) -> list[float]:
        return [model.rate(count, row["concurrency"], known[count]) / row["tokens_per_s"] for row in rows]

    single = max(sorted(known), key=lambda count: sum(shares(count)))
    schedule: list[list[int]] = []
    for load in range(1, loads[-1] + 1):
        count = model.best(load, known)
        if schedule and schedule[-1][2] == count:
            schedule[-1][1] = load
        else:
            schedule.append([load, load, count])
    pays = len(schedule) > 1 and min(shares(single)) < 1 - NEAR
    return {"by_concurrency": rows, "draft_tokens": single, "schedule": schedule, "schedule_pays": pays,
            "checked": check(cells)}
