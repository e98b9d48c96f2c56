"""Draft rounds over recorded replies, for every draft-token count at once, and what comes of them.

Which drafts are right from which position on does not depend on how many are drafted, so one pass of the drafter over
the replies (eagle3/training/drafting.py) gives the rounds of every count.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eagle3.benchmark.figures import length_error

if TYPE_CHECKING:
    import numpy as np

# Edges of the classes by position in the context, in tokens: each four times as wide as the one before.
_CONTEXTS = (0, 128, 512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True)
class Drafted:
    """A reply with what was drafted from every position.

    Attributes:
        right: [P] int, how many drafts of position p, from the first on, are the reply's own tokens. Position p knows
            the tokens up to p + 1, as in eagle3/training/batches.py; P is one less than the sequence's tokens.
        probabilities: [P, depth] float32, the verifier's probability of each draft, NaN where nothing was drafted;
            None where it is not known under which distribution the reply was sampled.
        first: index of the reply's first token in the sequence. source: name of the prompt set.
    """

    right: "np.ndarray"
    probabilities: "np.ndarray | None"
    first: int
    source: str = ""

    def rounds(self, draft_tokens: int) -> tuple["np.ndarray", "np.ndarray"]:
        """Return the positions [R] at which rounds of so many drafts begin, and how many each accepts [R].

        The verifier makes the first token without a draft. A round accepts the longest correct prefix and adds one
        token of the verifier's; the next one begins after that.
        """
        import numpy as np

        right, starts, counts = self.right.tolist(), [], []
        place = self.first - 1  # where the last known token is the reply's first
        while place < len(right) - 1:  # nothing follows the last token
            count = min(right[place], draft_tokens)
            starts.append(place)
            counts.append(count)
            place += count + 1
        return np.array(starts, dtype=np.int64), np.array(counts, dtype=np.int64)


@dataclass
class Rounds:
    """Rounds of one draft-token count, pooled.

    Attributes:
        accepted: accepted[k] is how many rounds accepted at least k + 1 drafts.
        reached, sums, squares: for each position the drafts that rounds came to there, and the sums of the verifier's
            probability of these and of its square; empty where it is not known.
    """

    rounds: int = 0
    accepted: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)

    @staticmethod
    def of(counts: "np.ndarray", probabilities: "np.ndarray | None", draft_tokens: int) -> "Rounds":
        """Return the rounds that accepted `counts` [R], whose drafts had these probabilities [R, depth]."""
        import numpy as np

        result = Rounds(len(counts), [int((counts > k).sum()) for k in range(draft_tokens)])
        if probabilities is not None:
            for k in range(draft_tokens):
                asked = probabilities[counts >= k, k].astype(np.float64)
                asked = asked[~np.isnan(asked)]  # the reply may end first
                result.reached.append(len(asked))
                result.sums.append(float(asked.sum()))
                result.squares.append(float((asked * asked).sum()))
        return result

    @staticmethod
    def pooled(parts: Iterable["Rounds"]) -> "Rounds":
        """Return the sum of rounds of one draft-token count; without probabilities where a part has none."""
        parts = [part for part in parts if part.rounds]

        def added(name: str) -> list:
            columns = [getattr(part, name) for part in parts]
            return [sum(column) for column in zip(*columns, strict=True)] if all(columns) else []

        return Rounds(sum(part.rounds for part in parts), *map(added, ("accepted", "reached", "sums", "squares")))

    @property
    def by_position(self) -> list[float]:
        """Share of rounds that accepted each position and all before it (cumulative, as engines count)."""
        return [count / max(1, self.rounds) for count in self.accepted]

    @property
    def length(self) -> float:
        """Tokens a round, the verifier's own included."""
        return 1.0 + sum(self.by_position)

    def summary(self) -> dict[str, float]:
        """Return length, rounds and standard error."""
        return {"length": self.length, "rounds": self.rounds,
                "standard_error": length_error(self.length, self.by_position, self.rounds)}

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values, `expected` by the verifier's probabilities where they are known."""
        expected = {"expected": self.expected()} if any(self.reached) else {}
        return self.summary() | {"by_position": self.by_position} | expected

    def expected(self) -> dict[str, Any]:
        """Return the acceptance by the verifier's probabilities instead of by the tokens that it happened to draw.

        A round that comes to position k accepts there with the probability p of the draft, so c_k, the mean of p over
        such rounds, is the conditional acceptance; its noise lacks that of drawing the token (Rao-Blackwell). The
        length is 1 + the sum of c_1 ... c_k over k; its standard error comes from those of the c_k by its derivatives,
        as if drafts were independent.
        """
        conditional = [total / max(1, count) for total, count in zip(self.sums, self.reached, strict=True)]
        shares, product = [], 1.0
        for chance in conditional:
            product *= chance
            shares.append(product)
        variance = 0.0
        for k, (chance, count, square) in enumerate(zip(conditional, self.reached, self.squares, strict=True)):
            if count and chance:
                slope = sum(shares[k:]) / chance
                variance += slope**2 * max(0.0, square / count - chance**2) / count
        return {"length": 1.0 + sum(shares), "standard_error": variance**0.5, "conditional": conditional}


def predicted(replies: list[Drafted], draft_tokens: int, depth: int) -> dict[str, Any]:
    """Return what rounds over these replies give, as JSON values.

    The figures of `draft_tokens` stand outside; `by_draft_tokens` has those of 1 to `depth`, `by_source` and
    `by_context` their lengths by prompt set and by the tokens in the context where a round begins.
    """
    import numpy as np

    found: dict[int, Rounds] = {}
    sources: dict[str, dict[str, Any]] = {}
    contexts: dict[str, dict[str, Any]] = {}
    for count in range(1, depth + 1):
        parts: dict[tuple[str, int], list[Rounds]] = {}
        for reply in replies:
            starts, accepted = reply.rounds(count)
            classes = np.searchsorted(_CONTEXTS, starts + 2, side="right") - 1  # it knows the tokens up to start + 1
            for place in np.unique(classes):
                inside = classes == place
                chances = None if reply.probabilities is None else reply.probabilities[starts[inside]]
                rounds = Rounds.of(accepted[inside], chances, count)
                parts.setdefault((reply.source, int(place)), []).append(rounds)
        found[count] = Rounds.pooled(rounds for group in parts.values() for rounds in group)
        for source in sorted({source for source, _ in parts if source}):
            pooled = Rounds.pooled(part for (name, _), group in parts.items() if name == source for part in group)
            sources.setdefault(source, {})[str(count)] = pooled.summary()
        for place in sorted({place for _, place in parts}):
            pooled = Rounds.pooled(part for (_, where), group in parts.items() if where == place for part in group)
            contexts.setdefault(_context(place), {})[str(count)] = pooled.summary()
    return found[draft_tokens].to_dict() | {
        "by_draft_tokens": {str(count): rounds.to_dict() for count, rounds in found.items()},
        "by_source": sources, "by_context": contexts}


def _context(place: int) -> str:
    """Return the name of a class by context: "128-511"."""
    return f"{_CONTEXTS[place]}-{_CONTEXTS[place + 1] - 1}" if place + 1 < len(_CONTEXTS) else f"{_CONTEXTS[place]}-"
