"""What a benchmark should have measured: its own replies walked offline, and how close the verifier's choices were.

The hidden states of the replies are captured with the same engine, once for all measurements, since loading a large
verifier costs more than anything else here.
"""

import math
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.benchmark import measurements
from eagle3.benchmark.measurements import Measured
from eagle3.common.errors import PreconditionError
from eagle3.common.log import duration, logger
from eagle3.common.options import EngineOptions, ModelOptions
from eagle3.common.stage import Stage

if TYPE_CHECKING:
    import torch

    from eagle3.drafter.teacher import TeacherHead
    from eagle3.drafter.verifier import Verifier
    from eagle3.states.store import Sample, StateStore
    from eagle3.training.acceptance import Acceptance

# Relative error of a hidden state in bf16, against float32: 0.6% on a tiny DeepSeek-V3, 1-3% on SmolLM2's last layer.
BF16_ERROR = 0.01
_SIGMAS = 3.0


def predict_runs(
    stage: Stage, model: ModelOptions, engine: EngineOptions, drafter: Path, runs: list[dict[str, Any]], *,
    baseline: str,
) -> None:
    """Set `predicted` and `difference` of runs with a drafter: the acceptance walked offline on their very replies.

    Where a greedy reply parts from the verifier's own, which the run named `baseline` has, `lossless.margins` says how
    close the two tokens were. What an earlier run predicted for these replies is kept.
    """
    directory = stage.directory
    missing = {run["name"]: run for run in runs if not measurements.prediction(directory, run)}
    measured = {name: measurements.measured_replies(directory, run, baseline) for name, run in missing.items()}
    measured = {name: group for name, group in measured.items() if group.replies}
    if measured:
        stage.check_stop()
        logger.info("predicting the acceptance of %s", ", ".join(measured))
        started = time.monotonic()
        found = predict_measurements(stage, model, engine, drafter, measured)
        for name, (walk, margins) in found.items():
            measurements.store_prediction(directory, missing[name], walk.to_dict(), margins)
        logger.info("predicted after %s", duration(time.monotonic() - started))
    for run in runs:
        if not measurements.use_prediction(directory, run):
            logger.warning("%s: no token ids, or only replies of one token: nothing to predict", run["name"])


def predict_measurements(
    stage: Stage, model: ModelOptions, engine: EngineOptions, drafter: Path, measured: dict[str, Measured]
) -> "dict[str, tuple[Acceptance, dict[str, dict[str, Any]]]]":
    """Capture the states of all replies, walk each measurement's with the exported drafter, judge what parted.

    Returns by measurement its acceptance and, by the id of each reply that parts from the verifier's own, its `margin`.
    A reply whose states cannot be captured is left out, and said. Raises PreconditionError when none can be.
    """
    import numpy as np

    from eagle3.drafter import network, teacher, verifier
    from eagle3.states.store import Sample, StateStore
    from eagle3.training import acceptance
    from eagle3.training.batches import TrainingSample

    facts = verifier.read(Path(model.path))
    sequences = {(tuple(prompt), tuple(reply)) for group in measured.values() for prompt, reply in group.replies}
    numbers = {sequence: k for k, sequence in enumerate(sorted(s for s in sequences if len(s[1]) > 1))}
    samples = {k: Sample(k, str(k), "", [*prompt, *reply], [0] * len(prompt) + [1] * len(reply))
               for (prompt, reply), k in numbers.items()}
    store = StateStore(stage.directory / ".predict_states")
    shutil.rmtree(store.directory, ignore_errors=True)
    checksums = capture_replies(stage, facts, model, engine, store, samples)

    drafting, head = network.load(drafter, facts), teacher.TeacherHead(facts)
    results = {}
    for name, group in measured.items():
        total, margins = acceptance.Acceptance(0, [0] * group.draft_tokens), {}
        for place, (prompt, reply) in enumerate(group.replies):
            k = numbers.get((tuple(prompt), tuple(reply)))
            if k is None or k not in checksums:
                continue
            mask = np.asarray(samples[k].loss_mask, dtype=bool)
            member = TrainingSample(k, checksums[k], mask)
            total.add(acceptance.predict(drafting, store, [[member]], len(mask), group.draft_tokens))
            if place in group.parted:
                index, other = group.parted[place]
                state = store.load(k)[0][len(prompt) + index - 1, -1]
                margins[group.ids[place]] = margin(head, state, other, reply[index])
        results[name] = (total, margins)
    shutil.rmtree(store.directory, ignore_errors=True)
    return results


def capture_replies(
    stage: Stage, facts: "Verifier", model: ModelOptions, engine: EngineOptions, store: "StateStore",
    samples: "dict[int, Sample]",
) -> dict[int, str]:
    """Capture the states of all samples into a store; return {number: checksum} of those that succeeded."""
    from eagle3.states.extraction import Capture, batches, resolve_dtype, settings_for

    longest = max(len(sample.input_ids) for sample in samples.values())
    settings = settings_for(facts, facts.layers(model.layers), model, engine, backend="vllm",
                            dtype=resolve_dtype("auto", engine), max_length=longest, batch_tokens=2048)
    entries: list[dict[str, Any]] = []
    with Capture(stage, engine, store, settings) as child:
        for batch in batches(list(samples.values()), settings.batch_tokens):
            stage.check_stop()
            entries += child.run(batch).entries
    failed = [entry["error"] for entry in entries if "error" in entry]
    if failed and len(failed) == len(samples):
        raise PreconditionError("no state of a measured reply could be captured, so nothing can be predicted",
                                where=store.directory, found=f"{len(failed)} replies, such as: {failed[0]}",
                                fix="mend what it names, or leave the prediction out with --no-predict")
    if failed:
        logger.warning("%d of %d replies are left out of the prediction, since their states could not be captured: %s",
                       len(failed), len(samples), failed[0])
    return {entry["i"]: entry["sha256"] for entry in entries if "error" not in entry}


def margin(head: "TeacherHead", state: "torch.Tensor", one: int, other: int) -> dict[str, Any]:
    """Say how close two tokens were for the verifier at a teacher state [H].

    The difference of two logits is (w_one - w_other) · h for a normed state h. A rounding error of relative size
    `BF16_ERROR` in h, of no particular direction, moves it by BF16_ERROR |h| |w_one - w_other| / sqrt(H) (one standard
    deviation); up to three of those are noise.

    Returns {tokens, margin, noise, within_noise}: margin is the absolute difference of the two logits.
    """
    normed, rows = head.normed(state[None])[0], head.rows([one, other])
    apart = rows[0] - rows[1]
    difference = abs(float(normed @ apart))
    noise = BF16_ERROR * float(normed.norm()) * float(apart.norm()) / math.sqrt(len(normed))
    return {"tokens": [one, other], "margin": difference, "noise": noise, "within_noise": difference <= _SIGMAS * noise}
