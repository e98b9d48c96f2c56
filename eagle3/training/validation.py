"""What held-out samples say of a drafter: accuracies, and predicted acceptance for every draft-token count, by source
and by position in the context."""

from typing import Any

import torch

from eagle3.training import acceptance
from eagle3.training.acceptance import Acceptance
from eagle3.training.batches import Batch, TrainingSample

# Where in the context a round begins: the first token of each class.
_CONTEXT = (0, 1024, 2048, 4096, 8192)
_CONTEXT_NAMES = ("0-1k", "1-2k", "2-4k", "4-8k", "8k+")


class Tally:
    """Counts over the held-out samples of one process, or, pooled, of all.

    Attributes:
        served: draft-token counts that choose the best checkpoint; the largest is that of the shares by source and by
            context.
    """

    def __init__(self, samples: list[TrainingSample], steps: int, served: list[int]) -> None:
        """Take all held-out samples, of which each process adds its own; `steps` are drafted, at least max(served)."""
        self.served, self._largest = served, max(served)
        self._sources = sorted({sample.source for sample in samples})
        self._accuracy = torch.zeros(steps, 3, dtype=torch.float64)
        self._loss = torch.zeros(2, dtype=torch.float64)
        self._by_count = [Acceptance(0, [0] * (k + 1)) for k in range(steps)]
        self._by_source = [Acceptance(0, [0] * self._largest) for _ in self._sources]
        self._by_context = [Acceptance(0, [0] * self._largest) for _ in _CONTEXT]

    def add(self, batch: Batch, drafted: list[torch.Tensor], loss: float) -> None:
        """Count a batch (without states, on the CPU) by what was drafted at each step ([T] each)."""
        self._accuracy += acceptance.accuracy_counts(batch, drafted)
        self._loss += torch.tensor([loss, batch.supervised], dtype=torch.float64)
        for count, pooled in enumerate(self._by_count, start=1):
            rounds: list[acceptance.Round] | None = [] if count == self._largest else None
            pooled.add(acceptance.walk_batch(batch, batch.members, drafted, count, rounds))
            for sample, position, accepted in rounds or []:
                own = Acceptance(1, [int(k < accepted) for k in range(count)])
                self._by_source[self._sources.index(sample.source)].add(own)
                self._by_context[sum(position >= first for first in _CONTEXT) - 1].add(own)

    def pool(self, processes: Any) -> None:
        """Add up what all processes have counted."""
        everything = [*self._by_count, *self._by_source, *self._by_context]
        numbers = [torch.tensor([each.rounds, *each.accepted], dtype=torch.float64) for each in everything]
        flat = torch.cat([self._accuracy.flatten(), self._loss, *numbers])
        flat = processes.sum(flat.to(processes.device)).cpu()
        accuracy, self._loss, *numbers = flat.split([self._accuracy.numel(), 2, *map(len, numbers)])
        self._accuracy = accuracy.view(-1, 3)
        for each, found in zip(everything, numbers, strict=True):
            each.rounds, *each.accepted = found.long().tolist()

    def figures(self) -> dict[str, Any]:
        """Return the figures as JSON values: `acceptance` is that of the largest served count, `length` the mean
        predicted length over the served ones, `lengths` that of each count."""
        right, judged, given = (self._accuracy[:, column] for column in range(3))
        lengths = [each.length for each in self._by_count]
        return {
            "loss": float(self._loss[0] / self._loss[1].clamp(min=1)),
            "accuracy_by_step": (right / judged.clamp(min=1)).tolist(),
            "conditional_accuracy": (right / given.clamp(min=1)).tolist(),
            "acceptance": self._by_count[self._largest - 1].to_dict(),
            "length": sum(lengths[count - 1] for count in self.served) / len(self.served),
            "lengths": {str(count): length for count, length in enumerate(lengths, start=1)},
            "by_source": _lengths(self._sources, self._by_source) if any(self._sources) else {},
            "by_context": _lengths(_CONTEXT_NAMES, self._by_context),
        }


def _lengths(names: Any, counts: list[Acceptance]) -> dict[str, Any]:
    return {name: {"length": each.length, "rounds": each.rounds}
            for name, each in zip(names, counts, strict=True) if each.rounds}


def say(figures: dict[str, Any]) -> str:
    """Return the figures as a part of a log line."""
    at, accuracy, given = (figures[name] for name in ("acceptance", "accuracy_by_step", "conditional_accuracy"))
    shares = "".join(f"; {what}: " + ", ".join(f"{name} {each['length']:.3f}" for name, each in figures[key].items())
                     for key, what in (("by_source", "by source"), ("by_context", "by position in the context"))
                     if len(figures[key]) > 1)
    by_count = ", ".join(f"{count}: {length:.3f}" for count, length in figures["lengths"].items())
    return (f"validation loss {figures['loss']:.4f}, accuracy by step {percentages(accuracy)}, given the one before "
            f"{percentages(given)}; predicted acceptance length {at['length']:.3f} at {len(at['by_position'])} draft "
            f"tokens (by position {percentages(at['by_position'])}); by draft tokens {by_count}{shares}")


def percentages(values: list[float]) -> str:
    """Return shares as 38.0 / 15.7 / 6.4%."""
    return " / ".join(f"{100 * value:.1f}" for value in values) + "%"
