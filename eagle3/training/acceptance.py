"""Predicted acceptance: recorded verifier output walked in draft rounds, as an engine would.

Adding up accuracies by step overstates acceptance, because rounds start where drafting has just failed. So the
walk does what the engine does: from the last known token draft k tokens, accept the longest correct prefix,
take one token from the verifier, go on from there. Valid where an engine emits a draft exactly when it accepts it:
docs/low-acceptance.md. The replies of a benchmark are walked by eagle3/training/drafting.py and
eagle3/benchmark/rounds.py, for all draft-token counts at once.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from eagle3.training.batches import Batch, TrainingSample


@dataclass
class Acceptance:
    """Counts over draft rounds, pooled over sequences.

    Attributes:
        rounds: draft rounds walked.
        accepted: accepted[k] is how many rounds accepted at least k + 1 draft tokens.
    """

    rounds: int = 0
    accepted: list[int] = field(default_factory=list)

    @property
    def length(self) -> float:
        """Tokens per round, the verifier's own token included: 1 + accepted / rounds."""
        return 1.0 + sum(self.accepted) / self.rounds if self.rounds else 1.0

    @property
    def by_position(self) -> list[float]:
        """Share of rounds in which draft position k was accepted (cumulative, as engines count)."""
        return [count / self.rounds if self.rounds else 0.0 for count in self.accepted]

    def add(self, other: "Acceptance") -> None:
        """Pool with another count."""
        if not self.accepted:
            self.accepted = [0] * len(other.accepted)
        self.rounds += other.rounds
        self.accepted = [a + b for a, b in zip(self.accepted, other.accepted, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {"length": self.length, "by_position": self.by_position, "rounds": self.rounds}


Round = tuple[TrainingSample, int, int]  # of which sample, the last known token in the text, tokens accepted


def walk(ids: list[int], drafted: list[list[int]], first_generated: int, draft_tokens: int,
         seen: list[tuple[int, int]] | None = None) -> Acceptance:
    """Walk one sequence in draft rounds.

    Args:
        ids: tokens of the sequence [T], the prompt first.
        drafted: drafted[s][p] is the target id predicted at TTT step s from shifted position p, that is, for
            token p + 2 + s given the true tokens before it (as long as a round is accepted, they are what the
            drafter has drafted itself).
        first_generated: index of the first generated token, which the verifier makes without a draft.
        draft_tokens: k, tokens drafted a round.
        seen: gets (index of the last known token, tokens accepted) of each round.
    """
    result = Acceptance(0, [0] * draft_tokens)
    known = first_generated  # index of the last token that is known
    while known < len(ids) - 1:
        result.rounds += 1
        count = 0
        while count < draft_tokens and known + 1 + count < len(ids):
            if drafted[count][known - 1] != ids[known + 1 + count]:
                break
            result.accepted[count] += 1
            count += 1
        if seen is not None:
            seen.append((known, count))
        known += count + 1
    return result


def walk_batch(
    batch: Batch, members: list[TrainingSample], drafted: list[torch.Tensor], draft_tokens: int,
    rounds: list[Round] | None = None,
) -> Acceptance:
    """Return the pooled acceptance of a batch's sequences: each stretch of generated tokens is walked by itself.

    Args:
        drafted: drafted[s] is [T] int64, what `ttt.draft` gives.
        rounds: gets each round.
    """
    total = Acceptance(0, [0] * draft_tokens)
    start = 0
    for sample, length in zip(members, batch.lengths, strict=True):
        span = slice(start, start + length)
        sequence = [-1, *batch.ids[span].tolist()]  # token 0 is read at no position and is never predicted
        rows = [step[span].tolist() for step in drafted]
        for first, stop in stretches(sample.loss_mask[: min(length, sample.own or length) + 1]):
            seen: list[tuple[int, int]] | None = None if rounds is None else []
            total.add(walk(sequence[:stop], rows, max(1, first), draft_tokens, seen))
            if rounds is not None:
                rounds += [(sample, sample.start + known, count) for known, count in seen or []]
        start += length
    return total


def stretches(mask: np.ndarray) -> list[tuple[int, int]]:
    """Return (first, stop) of each run of True in a mask."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(first), int(stop)) for first, stop in edges.reshape(-1, 2)]


def accuracy_counts(batch: Batch, drafted: list[torch.Tensor]) -> torch.Tensor:
    """Return [steps, 3] counts: correct at this and all earlier steps, judged positions, of those correct until then.

    A token outside the draft vocabulary is a miss. Position p at step s is judged against token p + 2 + s.
    """
    counts = torch.zeros(len(drafted), 3, dtype=torch.float64)
    correct = batch.mask.clone()
    for step, tokens in enumerate(drafted):
        positions = batch.rows[batch.judged[step][0]]
        before = correct[positions]
        right = before & (tokens[positions] == batch.ids[positions + step + 1])
        correct = torch.zeros_like(correct).index_fill_(0, positions[right], True)
        counts[step] = torch.tensor([int(right.sum()), len(positions), int(before.sum())])
    return counts
