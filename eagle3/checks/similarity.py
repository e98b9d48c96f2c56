"""How like the traces the measured prompts and replies are: a few simple statistics of their token ids."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.common import files

Pair = tuple[list[int], list[int]]  # token ids of a prompt and of what was generated

_WHOLE_BYTES = 64 << 20  # a traces file up to this size is read whole
_SAMPLE_ROWS = 2000  # taken of a larger one, evenly spread
_EDGE = 3  # tokens of a prompt's beginning or end: enough for a turn's marker, role and line break
_HELD_OUT = 5  # every fifth trace is judged by the others, as the measured replies are


@dataclass(frozen=True)
class Mean:
    """A mean over replies and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, values: list[float]) -> "Mean":
        """Return the mean of some numbers, 0 of none."""
        count = max(1, len(values))
        mean = sum(values) / count
        variance = sum((value - mean) ** 2 for value in values) / max(1, count - 1)
        return cls(mean, (variance / count) ** 0.5)

    def below(self, other: "Mean", margin: float) -> bool:
        """Say whether it lies below another by more than a margin and three standard errors."""
        return other.value - self.value > max(margin, 3 * (self.error**2 + other.error**2) ** 0.5)


def edge_shares(measured: list[Pair], traces: list[Pair], *, end: bool) -> tuple[float, float]:
    """Return the shares (of measured prompts, of traces) that begin or end as some (other) trace's prompt does."""

    def edge(pair: Pair) -> tuple[int, ...]:
        return tuple(pair[0][-_EDGE:] if end else pair[0][:_EDGE])

    known = Counter(map(edge, traces))
    return (sum(edge(pair) in known for pair in measured) / max(1, len(measured)),
            sum(known[edge(pair)] > 1 for pair in traces) / max(1, len(traces)))


def coverage(replies: list[Pair], vocabulary: set[int]) -> Mean:
    """Return the share of generated tokens that a draft vocabulary holds: no other is ever accepted."""
    return Mean.of([sum(token in vocabulary for token in reply) / len(reply) for _, reply in replies])


def pair_shares(measured: list[Pair], traces: list[Pair]) -> tuple[Mean, Mean]:
    """Return the shares (in measured replies, in held-out traces) of neighbouring tokens that stand in other traces."""
    rest = [reply for k, (_, reply) in enumerate(traces) if k % _HELD_OUT]
    known = {pair for reply in rest for pair in zip(reply, reply[1:], strict=False)}

    def share(reply: list[int]) -> float:
        pairs = list(zip(reply, reply[1:], strict=False))
        return sum(pair in known for pair in pairs) / len(pairs)

    held_out = traces[::_HELD_OUT]
    return tuple(Mean.of([share(reply) for _, reply in rows if len(reply) > 1])
                 for rows in (measured, held_out))  # type: ignore[return-value]


def beyond(measured: list[Pair], traces: list[Pair]) -> tuple[float, int]:
    """Return (share of generated tokens that lie further along than any trace reaches, the longest trace)."""
    longest = max((len(prompt) + len(reply) for prompt, reply in traces), default=0)
    past = sum(min(len(reply), max(0, len(prompt) + len(reply) - longest)) for prompt, reply in measured)
    return past / max(1, sum(len(reply) for _, reply in measured)), longest


def sampled(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a traces file; of a very large one as many, evenly spread, as are read in seconds."""
    size = path.stat().st_size if path.is_file() else 0
    if size <= _WHOLE_BYTES:
        yield from (row for _, row in files.read_jsonl(path))
        return
    with open(path, "rb") as file:
        for k in range(_SAMPLE_ROWS):
            file.seek(size * k // _SAMPLE_ROWS)
            file.readline()  # the rest of a row
            line = file.readline()
            if line.endswith(b"\n"):
                yield json.loads(line)
