"""Speculation counters: how many draft rounds an engine ran and how many draft tokens it accepted.

Acceptance length = 1 + accepted / drafts: each round yields its accepted draft tokens and one token of the
verifier. It is pooled over all rounds, never averaged over requests, and taken from counter differences, so
that warm-up and other people's requests before the measurement do not count.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from eagle3.common.errors import PreconditionError
from eagle3.engines.servers import NO_ANSWER, Server, get

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'position="(\d+)"')
_VLLM = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class Counters:
    """Totals since the server started, or the difference of two such totals.

    Attributes:
        drafts: draft rounds. draft_tokens: tokens proposed in them. accepted: tokens of these accepted.
        by_position: accepted tokens at draft position 0, 1, …; empty when the engine does not tell.
    """

    drafts: float
    draft_tokens: float
    accepted: float
    by_position: tuple[float, ...] = ()

    def acceptance_length(self) -> float | None:
        """Return mean tokens per round, the bonus token included; None without any round."""
        return 1 + self.accepted / self.drafts if self.drafts > 0 else None

    def acceptance_by_position(self) -> list[float]:
        """Return for each position the share of rounds that accepted it (and so all before it)."""
        return [count / self.drafts for count in self.by_position] if self.drafts > 0 else []


def read(server: Server) -> Counters | None:
    """Return vLLM's counters since its start; None when the server does not have them."""
    return parse(_page(server))


def read_total(server: Server, name: str) -> float | None:
    """Return the sum of one counter of the server over its labels; None when it does not have it."""
    return total(_page(server), name)


def parse(metrics: str) -> Counters | None:
    """Return the counters in a Prometheus page, summed over engines; None when one is missing."""
    positions: dict[int, float] = {}
    for name, labels, value in _samples(metrics):
        if name == f"{_VLLM}accepted_tokens_per_pos_total" and (position := _POSITION.search(labels)):
            positions[int(position[1])] = positions.get(int(position[1]), 0.0) + value
    drafts, draft_tokens, accepted = (
        total(metrics, f"{_VLLM}{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if drafts is None or draft_tokens is None or accepted is None:
        return None
    return Counters(drafts, draft_tokens, accepted, tuple(positions[i] for i in sorted(positions)))


def total(metrics: str, name: str) -> float | None:
    """Return the sum of a counter over its labels in a Prometheus page; None when it is missing."""
    values = [value for found, _, value in _samples(metrics) if found == name]
    return math.fsum(values) if values else None


def difference(before: Counters | None, after: Counters | None) -> Counters | None:
    """Return what was counted between two readings; None when either is missing.

    Raises PreconditionError when a counter went down: the server was restarted in between.
    """
    if before is None or after is None:
        return None
    at_start = before.by_position + (0.0,) * (len(after.by_position) - len(before.by_position))
    result = Counters(
        after.drafts - before.drafts,
        after.draft_tokens - before.draft_tokens,
        after.accepted - before.accepted,
        tuple(new - old for new, old in zip(after.by_position, at_start, strict=False)),
    )
    if min(result.drafts, result.draft_tokens, result.accepted, *result.by_position) < 0:
        raise PreconditionError(
            "the server's counters went down: it was restarted during the measurement",
            where="/metrics",
            expected=f"at least {before.drafts:.0f} drafts, {before.accepted:.0f} accepted",
            found=f"{after.drafts:.0f} drafts, {after.accepted:.0f} accepted",
            fix="measure again on a server that stays up",
        )
    return result


# Names in SGLang's meta_info, the newest first: from 0.5.12, 0.5.11, 0.5.10 and before.
_PROPOSED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
_ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
_HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")


def from_meta_info(replies: Iterable[dict[str, Any] | None]) -> Counters | None:
    """Return the counters that SGLang puts into each reply's meta_info; None when they are missing or no numbers.

    The first token of a reply comes from the prefill, each other one from a round: where no name tells what was
    accepted, it is the tokens that are left. A reply of one token has no round and no counters.

    The histogram counts the rounds that accepted exactly n draft tokens, so position i was accepted in the
    rounds with n > i. The positions are told only if every reply has one.
    """
    drafts = draft_tokens = accepted = 0.0
    histogram: list[float] = []
    complete = True
    try:
        for meta in replies:
            if meta and "spec_verify_ct" not in meta and meta.get("completion_tokens", 2) <= 1:
                continue
            if not meta or "spec_verify_ct" not in meta:
                return None
            rounds = _number(meta["spec_verify_ct"])
            drafts += rounds
            told = _first(meta, _ACCEPTED)
            accepted += max(0.0, _number(meta["completion_tokens"]) - 1 - rounds) if told is None else _number(told)
            draft_tokens += _number(_first(meta, _PROPOSED) or 0)
            counts = _first(meta, _HISTOGRAM) or []
            complete = complete and bool(counts)
            histogram += [0.0] * (len(counts) - len(histogram))
            for n, count in enumerate(counts):
                histogram[n] += _number(count)
    except (TypeError, ValueError, KeyError):
        return None
    positions = tuple(math.fsum(histogram[i + 1 :]) for i in range(len(histogram) - 1)) if complete else ()
    return Counters(drafts, draft_tokens, accepted, positions) if drafts > 0 else None


def _first(meta: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((meta[name] for name in names if meta.get(name) is not None), None)


def _number(value: Any) -> float:
    """Return a count; ValueError or TypeError when it is none."""
    if isinstance(value, str | bool) or not math.isfinite(value) or value < 0:
        raise ValueError("not a count")
    return float(value)


def _page(server: Server) -> str:
    """Return the Prometheus page, empty when the server does not serve one."""
    try:
        return get(f"{server.root_url}/metrics")
    except NO_ANSWER:
        return ""


def _samples(metrics: str) -> Iterable[tuple[str, str, float]]:
    for line in metrics.splitlines():
        if (match := _SAMPLE.match(line)) and not line.startswith("#"):
            try:
                value = float(match[3])
            except ValueError:
                continue
            if math.isfinite(value):
                yield match[1], match[2] or "", value
