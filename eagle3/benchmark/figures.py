"""Figures of a load: times over requests and chunks, acceptance with its standard error, what several repeats give.

Times of a request with T tokens, whose first chunk brought f of them at t1 and whose last came at t2:

  first token     t1: from sending the request to its first chunk with tokens (the prompt's pass is in it)
  between tokens  (t2 - t1) / (T - f): where a chunk brings several tokens, as it does with a drafter, they share its
                  time (what others call TPOT)
  between chunks  the time from a chunk to the next one, pooled over all requests: how long a reader waits (what others
                  call ITL); with a drafter longer than the time between tokens
  whole request   to the end of the answer

Tokens/s per user is 1 / the time between tokens; in total, all tokens over the time of the whole load.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from eagle3.benchmark.streaming import Row
from eagle3.engines.counters import Counters

SUMMARY = ("mean", "median", "p95", "p99")
_CHUNK_IS_ROUND = 0.02  # by how much chunks may differ from counted rounds and still be taken for them
# What a cell is told of with its spread over the repeats; of distributions the medians.
SPREAD = ("tokens_per_s", "tokens_per_s_per_user", "joules_per_token")
DISTRIBUTIONS = ("latency_s", "s_per_token", "first_token_s", "between_tokens_s", "between_chunks_s")


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean, median, p95 and p99 of values, None without any; percentiles are interpolated."""
    if not values:
        return None
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {"mean": statistics.fmean(values), "median": statistics.median(values), "p95": cuts[94], "p99": cuts[98]}


def times(rows: Sequence[Row], counts: Sequence[int]) -> dict[str, Any]:
    """Return the distributions of a load's times, and tokens/s per user (median), as the head of this file says.

    Args:
        counts: tokens of each reply. What a server does not tell (it streams no chunks, or no counts) is None.
    """
    seconds = [row.ended - row.started for row in rows]
    streamed = [(row, count) for row, count in zip(rows, counts, strict=True) if row.times]
    told = [(row, count - row.tokens[0]) for row, count in streamed if -1 not in row.tokens and count > row.tokens[0]]
    between = summary([(row.times[-1] - row.times[0]) / left for row, left in told if len(row.times) > 1])
    chunks = [b - a for row, _ in streamed for a, b in zip(row.times, row.times[1:], strict=False)]
    pieces = sum(len(row.times) for row, _ in streamed)
    return {
        "latency_s": summary(seconds),
        "s_per_token": summary([s / max(1, count) for s, count in zip(seconds, counts, strict=True)]),
        "first_token_s": summary([row.times[0] for row, _ in streamed]),
        "between_tokens_s": between,
        "between_chunks_s": summary(chunks),
        "tokens_per_chunk": sum(count for _, count in streamed) / pieces if pieces else None,
        "tokens_per_s_per_user": 1 / between["median"] if between and between["median"] > 0 else None,
    }


# --- acceptance -------------------------------------------------------------------------------------------


def acceptance(counted: Counters | None, rounds: Sequence[tuple[int, int]] = ()) -> dict[str, Any] | None:
    """Return acceptance length with its standard error, by position (cumulative and conditional), and shares.

    Args:
        rounds: (rounds, tokens) of each reply, where they are known: then the error is that of a ratio of sums over
            replies, whose rounds are alike; else of rounds as if they were independent, which is too small.
    """
    if counted is None or counted.drafts == 0:
        return None
    length, positions = counted.acceptance_length(), counted.acceptance_by_position()
    assert length is not None
    error, basis = clustered_error(rounds), "replies"
    if error is None or not math.isclose(sum(count for count, _ in rounds), counted.drafts, rel_tol=_CHUNK_IS_ROUND):
        error, basis = length_error(length, positions, counted.drafts), "rounds"
    return {
        "length": length,
        "error": error,
        "error_from": basis,
        "by_position": positions,
        "conditional": conditional(positions),
        "drafts": counted.drafts,
        "draft_tokens": counted.draft_tokens,
        "accepted": counted.accepted,
        "used": counted.accepted / counted.draft_tokens if counted.draft_tokens else None,
    }


def conditional(by_position: Sequence[float]) -> list[float | None]:
    """Return for each position the share that accepts it of the rounds that accepted all before it."""
    before = [1.0, *by_position]
    return [share / last if last > 0 else None for share, last in zip(by_position, before, strict=False)]


def length_error(length: float, by_position: Sequence[float], rounds: float) -> float:
    """Return the standard error of an acceptance length if rounds were independent.

    For a accepted tokens of a round, E[a²] is the sum of (2k − 1) P(a ≥ k). Without shares by position, as if every
    position were as hard.
    """
    mean = length - 1.0
    square = sum((2 * k + 1) * share for k, share in enumerate(by_position))
    square = square if by_position else mean * (1 + 2 * mean)
    return (max(0.0, square - mean * mean) / max(rounds, 1.0)) ** 0.5


def clustered_error(rounds: Sequence[tuple[int, int]]) -> float | None:
    """Return the standard error of tokens over rounds, replies being what is independent; None for fewer than two.

    Linearised ratio of sums (Cochran, Sampling Techniques, 1977, 6.3): sqrt(n/(n-1) Σ(t_i − L r_i)²) / Σ r_i.
    """
    rounds = [pair for pair in rounds if pair[0] > 0]
    total = sum(count for count, _ in rounds)
    if len(rounds) < 2:
        return None
    ratio = sum(tokens for _, tokens in rounds) / total
    square = sum((tokens - ratio * count) ** 2 for count, tokens in rounds)
    return math.sqrt(len(rounds) / (len(rounds) - 1) * square) / total


def rounds_of(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Return (rounds, tokens of them) of each reply, a chunk taken for a round; the first comes from the prefill."""
    if any(-1 in row.tokens for row in rows):
        return []
    return [(len(row.tokens) - 1, sum(row.tokens[1:])) for row in rows if len(row.tokens) > 1]


# --- several measurements of one cell ---------------------------------------------------------------------


def pooled(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one cell of its repeats: medians with the spread (smallest, largest), acceptance pooled over all rounds.

    The first repeat gives what does not vary. `measurements` names them all.
    """
    cell = dict(measured[0])
    cell["measurements"] = [each["name"] for each in measured]
    cell["spread"] = {}
    for name in SPREAD:
        values = [each[name] for each in measured if each.get(name) is not None]
        if values:
            cell[name] = statistics.median(values)
            cell["spread"][name] = [min(values), max(values)]
    for name in DISTRIBUTIONS:
        each_of = [each[name] for each in measured if each.get(name)]
        if each_of:
            cell[name] = {key: statistics.median(part[key] for part in each_of) for key in each_of[0]}
            cell["spread"][name] = [min(part["median"] for part in each_of), max(part["median"] for part in each_of)]
    parts = [each["acceptance"] for each in measured if each.get("acceptance")]
    if len(parts) > 1:
        cell["acceptance"] = _pooled_acceptance(parts)
        lengths = [part["length"] for part in parts]
        cell["spread"]["acceptance_length"] = [min(lengths), max(lengths)]
    return cell


def _pooled_acceptance(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    depth = max(len(part["by_position"]) for part in parts)
    shares = [[part["drafts"] * share for share in part["by_position"]] + [0.0] * (depth - len(part["by_position"]))
              for part in parts]
    drafts, drafted, accepted = (sum(part[name] for part in parts) for name in ("drafts", "draft_tokens", "accepted"))
    total = Counters(drafts, drafted, accepted, tuple(map(sum, zip(*shares, strict=True))))
    whole = acceptance(total)
    assert whole is not None
    if all(part.get("error_from") == "replies" for part in parts):
        # At temperature 0 the repeats give the same replies, so that more of them make the length no surer.
        whole |= {"error": max(part["error"] for part in parts), "error_from": "replies"}
    return whole
