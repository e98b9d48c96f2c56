"""The schedule of a training run: which samples in which optimizer step, at which learning rate.

A function of the samples and the options, so a resumed run continues with the steps of an undisturbed one.
"""

import math

from eagle3.common.options import TrainSection
from eagle3.training.batches import TrainingSample, pack


class Schedule:
    """The steps of a run: which samples go into which batch of which optimizer step."""

    def __init__(self, samples: list[TrainingSample], options: TrainSection, batches_per_step: int) -> None:
        self._samples, self._options, self.batches_per_step = samples, options, batches_per_step
        self.steps_per_epoch: list[int] = []
        for epoch in range(options.epochs):
            left = (options.max_steps or math.inf) - sum(self.steps_per_epoch)
            if left > 0:
                self.steps_per_epoch.append(int(min(left, -(-len(self.packed(epoch)) // batches_per_step))))
        self.total_steps = sum(self.steps_per_epoch)

    def packed(self, epoch: int) -> list[list[TrainingSample]]:
        """Return the batches of an epoch in their order."""
        return pack(self._samples, self._options.batch_tokens, self._options.seed, epoch)

    def steps(self, epoch: int) -> list[list[list[TrainingSample]]]:
        """Return an epoch's optimizer steps, each a list of batches (the last step may have fewer)."""
        packed, size = self.packed(epoch), self.batches_per_step
        return [packed[step * size : (step + 1) * size] for step in range(self.steps_per_epoch[epoch])]


def supervised(members: list[TrainingSample], batch_tokens: int) -> int:
    """Return how many positions of a batch carry loss, without loading it."""
    return sum(int(sample.learned(batch_tokens).sum()) for sample in members)


def learning_rate(step: int, total: int, options: TrainSection) -> float:
    """Return the rate of optimizer step `step` (from 0): linear warm-up, then half a cosine to min_lr_ratio."""
    warmup = max(1, math.ceil(total * options.warmup_ratio))
    if step < warmup:
        return options.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    low = options.min_lr_ratio
    return options.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))
