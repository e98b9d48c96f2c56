"""The story of a training run: epochs, validation, checkpoints, resume, the manifest's figures."""

import math
import signal
import time
from pathlib import Path
from typing import Any

from eagle3.common import files, log
from eagle3.common.errors import FailureLimitError, Interrupted, StageError
from eagle3.common.log import logger
from eagle3.common.stage import Stage
from eagle3.drafter import verifier
from eagle3.drafter.network import norms_of
from eagle3.states.store import capture_again
from eagle3.training import checkpoints, spikes, validation
from eagle3.training.batches import Batch, TrainingSample
from eagle3.training.curves import Curves
from eagle3.training.schedule import Schedule, learning_rate, supervised
from eagle3.training.speed import Speed, operations, say
from eagle3.training.tracking import Tracker
from eagle3.training.trainer import Trainer

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
        self.layers, self.metrics = layers, stage.directory / "metrics.jsonl"
        self.before_skipped: tuple[dict[str, Any], int] | None = None  # counters, number of rows
        self.speed = Speed(trainer.processes.device, trainer.processes.world, trainer.bf16)
        self.curves = Curves(self.metrics)
        self.tracker = Tracker(self.options.track if self.first else [], stage.directory)
        self.rows: list[dict[str, Any]] = []

    def run(self) -> None:
        """Resume, then train epoch by epoch."""
        self.resume()
        if self.options.init_from and self.counters["step"] == 0 and self.held_out:
            self.measure_start()
        total = self.schedule.total_steps
        progress = self.stage.progress("training", total, "steps", self.counters["step"]) if self.first else None
        self.saved_at = time.monotonic()
        for epoch in range(self.counters["epoch"], len(self.schedule.steps_per_epoch)):
            self.stop_if_asked()
            self.epoch(epoch, progress)
        if progress:
            progress.close()
        self.tracker.close()

    def resume(self) -> None:
        """Load the newest complete checkpoint and drop metrics past it."""
        self.root.mkdir(parents=True, exist_ok=True)
        newest = checkpoints.newest(self.root) if self.first else None
        newest = self.trainer.processes.from_first(newest)  # reading every checksum once is enough
        if newest is not None:
            self.counters = checkpoints.load(newest, self.trainer.model, self.trainer.optimizer)
            # a checkpoint of an older version does not say
            self.counters |= {"layers": self.layers, "norms": self.norms}
            self.trainer.left_out = {*self.counters.get("left_out", [])}
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
        self.leave_out_damaged([self.held_out])
        self.rows.append({"kind": "validation", "step": self.counters["step"], "epoch": epoch, **result})
        logger.info("%s: %s", f"epoch {epoch}" if epoch else "before training", validation.say(result))
        if self.first:
            self.tracker.log(self.rows[-1])
        return result

    def epoch(self, epoch: int, progress: log.Progress | None) -> None:
        """Train the steps of one epoch that are not done, then validate and save."""
        steps = self.schedule.steps(epoch)
        begin = self.counters["step"] - sum(self.schedule.steps_per_epoch[:epoch])
        loader = self.trainer.loader(self.trainer.mine(steps[begin:]))
        stream = iter(loader)
        self.speed.pause()
        try:
            for members in steps[begin:]:
                batches = self.speed.next_of(stream, self.options.accumulation)
                self.leave_out_damaged(self.trainer.mine([members]))
                self.step(epoch, members, batches, progress)
                self.save_if_due()
        finally:
            loader.close()
        self.end_epoch(epoch)

    def step(self, epoch: int, members: list[list[TrainingSample]], batches: list[Batch | None],
             progress: log.Progress | None) -> None:
        """Do one optimizer step, or skip it; `members` are the batches of all processes, `batches` this one's."""
        kept = [[each for each in batch if each.i not in self.trainer.left_out] for batch in members]
        total_supervised = sum(supervised(batch, self.options.batch_tokens) for batch in kept)
        lr = learning_rate(self.counters["step"], self.schedule.total_steps, self.options)
        limit = spikes.limit(self.counters.get("gradient_norms", []), self.options.spike_factor)
        counted = (self.counters["step"] + 1) % self.options.log_every_steps == 0
        figures = self.trainer.step(batches, total_supervised, lr, limit, counted=counted)
        why = spikes.reason(figures["loss"], figures["grad_norm"], limit)
        if why and not self.counters.get("skipped_in_a_row"):
            self.before_skipped = dict(self.counters), len(self.rows)
        self.counters |= {"step": self.counters["step"] + 1, "epoch": epoch, "epoch_end": False}
        spikes.remember(self.counters, figures["grad_norm"], why)
        if why:
            figures |= self.skipped(why, [sample.i for batch in kept for sample in batch])
        flops = sum(operations(self.trainer.model, batch, self.options.ttt_steps) for batch in batches) \
            if self.speed.peak else 0
        self.speed.add(sum(min(s.length, self.options.batch_tokens) for batch in kept for s in batch), flops)
        self.record(figures, progress)
        if self.counters["skipped_in_a_row"] >= self.options.max_skipped_in_a_row:
            self.give_up()

    def skipped(self, why: str, numbers: list[int]) -> dict[str, Any]:
        """Name a skipped step's samples; return what its metrics say."""
        if self.first:
            logger.warning("step %d is skipped, number %d in all and %d in a row: %s; its samples: %s",
                           self.counters["step"], self.counters["skipped_steps"], self.counters["skipped_in_a_row"],
                           why, named(numbers))
        return {"skipped": why, "samples": numbers}

    def give_up(self) -> None:
        """Stop a run that skips one step after another, with a checkpoint of what it was before them.

        Raises StageError.
        """
        last = self.rows[-1]
        if self.before_skipped:  # they are in no checkpoint yet, and have changed nothing
            self.counters, rows = self.before_skipped
            self.rows = self.rows[:rows]
            self.save()
        raise StageError(
            f"{self.options.max_skipped_in_a_row} steps in a row were skipped", where=f"step {last['step']}, samples "
            + named(last["samples"]), found=last["skipped"], expected="a finite loss, and a gradient norm at most "
            f"{self.options.spike_factor:g} times the usual (--spike-factor)",
            fix=f"the weights before them are {self.root / 'last'}, step {self.counters['step']}; look at the samples, "
            "or train with a lower --lr and another --out; --max-skipped-in-a-row lets the same run go on longer")

    def leave_out_damaged(self, batches: list[list[TrainingSample] | None]) -> None:
        """Leave out, in all processes, what is damaged in loaded batches; FailureLimitError when that is too much."""
        found = self.trainer.newly_damaged(batches)
        if not found:
            return
        store, out = self.trainer.store, {*self.trainer.left_out, *found}
        for number, reason in found.items() if self.first else ():
            logger.error("sample %d is left out: %s (%s)", number, store.path(number), reason)
        if len(out) > self.options.max_failures:
            if self.rows:  # else it is what the newest checkpoint has
                self.save()
            raise FailureLimitError(
                f"{len(out)} samples have damaged states", where=store.directory,
                expected=f"at most {self.options.max_failures} (--max-failures)",
                found="\n".join(f"{store.path(number)}: {reason}" for number, reason in list(found.items())[:10]),
                fix=capture_again([store.path(number) for number in sorted(out)]))
        self.trainer.left_out = out
        self.counters["left_out"] = sorted(out)

    def record(self, figures: dict[str, Any], progress: log.Progress | None) -> None:
        """Keep the step's metrics and show progress. All but `speed` is the same in a resumed run."""
        step, total = self.counters["step"], self.schedule.total_steps
        speed = self.speed.figures(total - step)
        finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value
                  for name, value in figures.items()}
        self.rows.append({"kind": "train", "step": step, "epoch": self.counters["epoch"], **finite, "speed": speed})
        if progress is None:
            return
        self.tracker.log(self.rows[-1])
        progress.update(1, note=f"loss {figures['loss']:.4f}, {speed['tokens_per_s']:,.0f} tok/s")
        if step % self.options.log_every_steps == 0:
            shares = (validation.percentages(figures[name]) for name in ("accuracy_by_step", "conditional_accuracy"))
            logger.info("step %d/%d (%.0f%%) loss %.4f, accuracy by step %s, given the one before %s, lr %.2e, grad "
                        "norm %.3f, %s", step, total, 100 * step / total, figures["loss"], *shares, figures["lr"],
                        figures["grad_norm"], say(speed))

    def save_if_due(self) -> None:
        """Save in the middle of an epoch when it is time, or when a signal asks to stop."""
        stop = self.trainer.processes.any(self.stage.signal is not None)
        due = any(every and self.counters["step"] % every == 0
                  for every in (self.options.save_every_steps, self.options.keep_every))
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
            if best is None or served_length(result) > served_length(best):
                self.counters["best"] = result | {"step": self.counters["step"]}
        else:
            self.counters["best"] = {"step": self.counters["step"]}
        self.save()

    def save(self) -> None:
        """Write a checkpoint and the metrics up to it; links and pruning follow the complete checkpoint."""
        self.saved_at, self.before_skipped = time.monotonic(), None
        if self.first:
            with files.Appender(self.metrics) as appender:
                appender.append(self.rows)
        folder = checkpoints.save(self.root, self.counters["step"], self.trainer.model, self.facts,
                                 self.trainer.optimizer, self.counters, writes=self.first)
        if self.first:
            self.link(folder)
            self.curves.draw()
        self.rows = []
        self.speed.pause()

    def link(self, folder: Path) -> None:
        """Point `last`, and `best` if it is that, to a complete checkpoint; remove what nothing needs."""
        checkpoints.point_to(self.root, "last", folder)
        best = self.counters["best"]
        if best and best["step"] == self.counters["step"]:
            checkpoints.point_to(self.root, "best", folder)
        checkpoints.prune(self.root, self.options.keep_checkpoints, self.options.keep_every)

    def complete(self, training_samples: int, **counts: int) -> None:
        """Write the manifest of a finished run; `counts` are more of its counts."""
        best, left_out = self.counters["best"], self.counters.get("left_out", [])
        outputs = {name: files.followed(self.root / name) / "model.safetensors" for name in ("best", "last")}
        self.curves.draw(due=True)
        self.stage.complete(
            counts={"expected": self.schedule.total_steps, "done": self.counters["step"],
                    "training_samples": training_samples, "validation_samples": len({s.i for s in self.held_out}),
                    "skipped_steps": self.counters.get("skipped_steps", 0), "left_out": len(left_out), **counts},
            outputs=outputs,
            draft_tokens=self.trainer.served,
            left_out=left_out,
            best=best,
            last=self.counters["validation"],
            start=self.counters.get("start"),
        )
        if "acceptance" in best:
            logger.info("best checkpoint: step %d, predicted acceptance length %.3f at %s draft tokens",
                        best["step"], served_length(best), " and ".join(map(str, self.trainer.served)))
        if skipped := self.counters.get("skipped_steps"):
            logger.warning("%d steps were skipped; %s names their samples", skipped, self.metrics)
        if left_out:
            logger.warning("%d samples were left out, their states are damaged: %s", len(left_out),
                           capture_again([self.trainer.store.path(number) for number in left_out]))
        start = self.counters.get("start")
        if start and served_length(best) <= served_length(start):
            logger.warning("no checkpoint beats the drafter that training began from (acceptance length %.3f): "
                           "try a lower --lr, or more samples", served_length(start))


def served_length(result: dict[str, Any]) -> float:
    """Return what chooses the best checkpoint: the predicted length, a mean over the served draft-token counts.
    Results of older versions have one count."""
    return result.get("length", result["acceptance"]["length"])  # type: ignore[no-any-return]


def named(numbers: list[int]) -> str:
    """Return sample numbers for a message."""
    return ", ".join(map(str, numbers[:20])) + f" and {len(numbers) - 20} more" * (len(numbers) > 20)
