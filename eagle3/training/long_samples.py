"""Texts longer than a batch: in chunks, cut, or left out; never without a word."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from eagle3.common.errors import PreconditionError
from eagle3.training.batches import TrainingSample

LONG = ("long_samples", "long_chunks", "long_lost_positions")  # counts in the manifest


@dataclass
class Fitted:
    """Samples of which each fits into a batch, and what became of those that did not.

    Attributes:
        long_samples: texts that were longer than a batch. long_chunks: what they became.
        long_lost_positions: of their positions that carry loss, how many no longer do.
    """

    samples: list[TrainingSample] = field(default_factory=list)
    long_samples: int = 0
    long_chunks: int = 0
    long_lost_positions: int = 0

    def say(self, how: str) -> str:
        """Return what became of the long texts, "" if there are none."""
        if not self.long_samples:
            return ""
        done = {"chunk": f"in {self.long_chunks:,} chunks at their true positions, without the context before each",
                "truncate": f"cut; {self.long_lost_positions:,} positions with loss lie behind the cut",
                "drop": f"left out, with {self.long_lost_positions:,} positions with loss"}[how]
        return f"{self.long_samples:,} texts are longer than a batch: {done} (--long-samples {how})"


def fit(samples: list[TrainingSample], batch_tokens: int, how: str, steps: int) -> Fitted:
    """Return samples of at most `batch_tokens` positions each.

    Args:
        how: chunk, truncate or drop; what is done with longer ones.
        steps: TTT steps. A chunk reads as many tokens ahead into the next: every step of every position that carries
            loss in the text carries it in a chunk, and only the context before a chunk is missing from it.
    Raises:
        PreconditionError: nothing is left.
    """
    divide: Callable[[TrainingSample, int, int], list[TrainingSample]]
    divide = {"chunk": _chunks, "truncate": _cut, "drop": lambda *_: []}[how]
    result = Fitted()
    for sample in samples:
        if sample.length <= batch_tokens:
            result.samples.append(sample)
            continue
        parts = [part for part in divide(sample, batch_tokens, steps) if part.learned().any()]
        result.long_samples += 1
        result.long_chunks += len(parts)
        result.long_lost_positions += int(sample.learned().sum()) - sum(int(part.learned().sum()) for part in parts)
        result.samples += parts
    if not result.samples:
        raise PreconditionError("no sample is left", where=f"--long-samples {how}", found=result.say(how),
                                expected=f"texts that carry loss within {batch_tokens:,} tokens (--batch-tokens)",
                                fix="give --long-samples chunk, or a larger --batch-tokens")
    return result


def _chunks(sample: TrainingSample, batch_tokens: int, steps: int) -> list[TrainingSample]:
    own = max(batch_tokens - steps, (batch_tokens + 1) // 2)
    starts = np.arange(0, sample.length, own).tolist()
    if len(starts) > 1 and sample.length - starts[-2] <= batch_tokens:  # the last but one reads to the end anyway
        starts.pop()
    last = starts[-1]
    return [replace(sample, loss_mask=sample.loss_mask[start : start + batch_tokens + 1], start=start,
                    own=None if start == last else own) for start in starts]


def _cut(sample: TrainingSample, batch_tokens: int, _: int) -> list[TrainingSample]:
    return [replace(sample, loss_mask=sample.loss_mask[: batch_tokens + 1])]
