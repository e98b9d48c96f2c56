"""The story of a training run: epochs, validation, checkpoints, resume, the manifest's figures."""

import signal
import time
from pathlib import Path
from typing import Any

from eagle3.common import files, log
from eagle3.common.errors import Interrupted
from eagle3.common.log import logger
from eagle3.common.stage import Stage
from eagle3.drafter import verifier
from eagle3.drafter.network import norms_of
from eagle3.training import checkpoints
from eagle3.training.batches import TrainingSample
from eagle3.training.schedule import Schedule, learning_rate, supervised
from eagle3.training.trainer import Throughput, Trainer

POOR = 0.15  # accuracy of a drafter that does not fit what it is fed, however good it is elsewhere


class Loop:
    """One training run in one process of the group; the first process alone writes."""

    def __init__(self, stage: Stage, facts: verifier.Verifier, trainer: Trainer, schedule: Schedule,
                 held_out: list[TrainingSample], layers: list[int]) -> None:
        """Take what is trained on what; `layers` are those of the states, which each checkpoint records."""
        self.stage, self.facts, self.trainer, self.schedule, self.held_out = stage, facts, trainer, schedule, held_out
        self.options = trainer.options
        self.root = stage.directory / "checkpoints"
        self.first = trainer.processes.rank == 0
        self.norms = norms_of(trainer.model)
        self.counters: dict[str, Any] = {"step": 0, "epoch": 0, "epoch_end": False, "best": None,
                                         "validation": None, "total_steps": schedule.total_steps, "layers": layers,
                                         "norms": self.norms}
        self.layers = layers
        self.rows: list[dict[str, Any]] = []
        self.metrics = stage.directory / "metrics.jsonl"

    def run(self) -> None:
        """Resume, then train epoch by epoch."""
        self.resume()
        if self.options.init_from and self.counters["step"] == 0 and self.held_out:
            self.measure_start()
        total = self.schedule.total_steps
        progress = self.stage.progress("training", total, "steps", self.counters["step"]) if self.first else None
        self.saved_at = time.monotonic()
        for epoch in range(self.counters["epoch"], self.options.epochs):
            self.stop_if_asked()
            self.epoch(epoch, progress)
        if progress:
            progress.close()

    def resume(self) -> None:
        """Load the newest complete checkpoint and drop metrics past it."""
        self.root.mkdir(parents=True, exist_ok=True)
        newest = checkpoints.newest(self.root) if self.first else None
        newest = self.trainer.processes.from_first(newest)  # reading every checksum once is enough
        if newest is not None:
            self.counters = checkpoints.load(newest, self.trainer.model, self.trainer.optimizer)
            # a checkpoint of an older version does not say
            self.counters |= {"layers": self.layers, "norms": self.norms}
            logger.info("resuming at step %d of %d from %s", self.counters["step"], self.schedule.total_steps, newest)
        if self.first:
            rows = files.read_jsonl(self.metrics) if newest else ()
            # Metrics precede their checkpoint: killed between the two, an epoch's last step is validated once more.
            end = self.counters["step"], self.counters["epoch_end"]
            kept = [row for _, row in rows if (row["step"], row["kind"] == "validation") <= end]
            files.write_bytes(self.metrics, b"".join(files.encode_line(row) for row in kept))
            if newest:  # the run before may have been killed between its checkpoint and the links to it
                self.link(newest)

    def measure_start(self) -> None:
        """Validate the drafter that training begins from, as step 0: what it is worth, and whether it fits."""
        result = self.counters["start"] = self.validate(0)
        if result["accuracy_by_step"][0] < POOR:
            logger.warning(
                "the drafter of --init-from predicts %.1f%% of next tokens, a good one 60 to 80%%: its layers, "
                "its verifier or its RoPE may not be these (%s)", 100 * result["accuracy_by_step"][0],
                self.options.init_from)

    def validate(self, epoch: int) -> dict[str, Any]:
        """Return the figures of the held-out samples after `epoch` epochs, logged and kept for the metrics."""
        single = self.trainer.processes.world == 1
        result = self.trainer.validate(self.held_out, self.stage.check_stop if single else None)
        self.rows.append({"kind": "validation", "step": self.counters["step"], "epoch": epoch, **result})
        logger.info(
            "%s: validation loss %.4f, accuracy by step %s, predicted acceptance length %.3f (by position %s)",
            f"epoch {epoch}" if epoch else "before training", result["loss"],
            percentages(result["accuracy_by_step"]), result["acceptance"]["length"],
            percentages(result["acceptance"]["by_position"]))
        return result

    def epoch(self, epoch: int, progress: log.Progress | None) -> None:
        """Train the steps of one epoch that are not done, then validate and save."""
        steps = self.schedule.steps(epoch)
        begin = self.counters["step"] - sum(self.schedule.steps_per_epoch[:epoch])
        loader = self.trainer.loader(self.trainer.mine(steps[begin:]))
        stream, rate = iter(loader), Throughput()
        try:
            for members in steps[begin:]:
                batches = [next(stream) for _ in range(self.options.accumulation)]
                total_supervised = sum(supervised(batch, self.options.batch_tokens) for batch in members)
                lr = learning_rate(self.counters["step"], self.schedule.total_steps, self.options)
                figures = self.trainer.step(batches, total_supervised, lr)
                self.counters |= {"step": self.counters["step"] + 1, "epoch": epoch, "epoch_end": False}
                tokens = sum(min(s.length, self.options.batch_tokens) for batch in members for s in batch)
                self.record(figures, rate.add(tokens), progress)
                self.save_if_due()
        finally:
            loader.close()
        self.end_epoch(epoch)

    def record(self, figures: dict[str, float], tokens_per_s: float, progress: log.Progress | None) -> None:
        """Keep the step's metrics (no times in them: a resumed run writes the same file) and show progress."""
        step = self.counters["step"]
        self.rows.append({"kind": "train", "step": step, "epoch": self.counters["epoch"], **figures})
        if progress is None:
            return
        note = f"loss {figures['loss']:.4f}, lr {figures['lr']:.2e}, {tokens_per_s:,.0f} tok/s"
        progress.update(1, note=note)
        if step % self.options.log_every_steps == 0:
            logger.info("step %d/%d (%.0f%%) %s, grad norm %.3f", step, self.schedule.total_steps,
                        100 * step / self.schedule.total_steps, note, figures["grad_norm"])

    def save_if_due(self) -> None:
        """Save in the middle of an epoch when it is time, or when a signal asks to stop."""
        stop = self.trainer.processes.any(self.stage.signal is not None)
        every = self.options.save_every_steps
        due = bool(every) and self.counters["step"] % (every or 1) == 0
        late = time.monotonic() - self.saved_at > 60 * self.options.save_every_min
        if stop or due or self.trainer.processes.any(late):
            self.save()
        if stop:
            self.trainer.processes.any(False)  # they meet when the first has written: one that ends before looks failed
            raise Interrupted(self.stage.signal or signal.SIGTERM)

    def stop_if_asked(self) -> None:
        """Stop where everything is saved, in all processes when one has got a signal."""
        if self.trainer.processes.any(self.stage.signal is not None):
            raise Interrupted(self.stage.signal or signal.SIGTERM)

    def end_epoch(self, epoch: int) -> None:
        """Validate, remember the best, save; a validation that a signal stops is done anew by the next run."""
        if self.held_out:
            try:
                result = self.counters["validation"] = self.validate(epoch + 1)
            except Interrupted:
                self.save()
                raise
        self.counters |= {"epoch": epoch + 1, "epoch_end": True}
        if self.held_out:
            best = self.counters["best"]
            if best is None or result["acceptance"]["length"] > best["acceptance"]["length"]:
                self.counters["best"] = result | {"step": self.counters["step"]}
        else:
            self.counters["best"] = {"step": self.counters["step"]}
        self.save()

    def save(self) -> None:
        """Write a checkpoint and the metrics up to it; links and pruning follow the complete checkpoint."""
        self.saved_at = time.monotonic()
        if self.first:
            with files.Appender(self.metrics) as appender:
                appender.append(self.rows)
        folder = checkpoints.save(self.root, self.counters["step"], self.trainer.model, self.facts,
                                 self.trainer.optimizer, self.counters, writes=self.first)
        if self.first:
            self.link(folder)
        self.rows = []

    def link(self, folder: Path) -> None:
        """Point `last`, and `best` if it is that, to a complete checkpoint; remove what nothing needs."""
        checkpoints.point_to(self.root, "last", folder)
        best = self.counters["best"]
        if best and best["step"] == self.counters["step"]:
            checkpoints.point_to(self.root, "best", folder)
        checkpoints.prune(self.root, self.options.keep_checkpoints)

    def complete(self, training_samples: int) -> None:
        """Write the manifest of a finished run."""
        best = self.counters["best"]
        outputs = {name: files.followed(self.root / name) / "model.safetensors" for name in ("best", "last")}
        outputs["metrics"] = self.metrics
        self.stage.complete(
            counts={"expected": self.schedule.total_steps, "done": self.counters["step"],
                    "training_samples": training_samples, "validation_samples": len(self.held_out)},
            outputs=outputs,
            best=best,
            last=self.counters["validation"],
            start=self.counters.get("start"),
        )
        if "acceptance" in best:
            logger.info("best checkpoint: step %d, predicted acceptance length %.3f at %d draft tokens",
                        best["step"], best["acceptance"]["length"], self.options.draft_tokens)
        start = self.counters.get("start")
        if start and best["acceptance"]["length"] <= start["acceptance"]["length"]:
            logger.warning("no checkpoint beats the drafter that training began from (acceptance length %.3f): "
                           "try a lower --lr, or more samples", start["acceptance"]["length"])


def percentages(values: list[float]) -> str:
    """Return shares as 38.0 / 15.7 / 6.4%."""
    return " / ".join(f"{100 * value:.1f}" for value in values) + "%"
