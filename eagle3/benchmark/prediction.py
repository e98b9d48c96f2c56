"""What a benchmark should have measured: its own replies walked offline, and how close the verifier's choices were.

The hidden states of the replies are captured with the same engine, once for all measurements, since loading a large
verifier costs more than anything else here.
"""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3.benchmark.measurements import Measured
from eagle3.common.options import EngineOptions, ModelOptions
from eagle3.common.stage import Stage
from eagle3.drafter import network as drafters
from eagle3.drafter import verifier as verifiers
from eagle3.states.extraction import Capture, batches, resolve_dtype, settings_for
from eagle3.states.store import Sample, StateStore
from eagle3.training.acceptance import Acceptance, predict
from eagle3.training.batches import TrainingSample

# Relative error of a hidden state in bf16, against float32: 0.6% on a tiny DeepSeek-V3, 1-3% on SmolLM2's last layer.
BF16_ERROR = 0.01
_SIGMAS = 3.0


def predict_measurements(
    stage: Stage, model: ModelOptions, engine: EngineOptions, drafter: Path, measured: dict[str, Measured]
) -> dict[str, tuple[Acceptance, dict[str, dict[str, Any]]]]:
    """Capture the states of all replies, walk each measurement's with the exported drafter, judge what parted.

    Returns by measurement its acceptance and, by the id of each reply that parts from the verifier's own, its `margin`.
    """
    facts = verifiers.read(Path(model.path))
    sequences = {(tuple(prompt), tuple(reply)) for group in measured.values() for prompt, reply in group.replies}
    numbers = {sequence: k for k, sequence in enumerate(sorted(s for s in sequences if len(s[1]) > 1))}
    samples = {k: Sample(k, str(k), "", [*prompt, *reply], [0] * len(prompt) + [1] * len(reply))
               for (prompt, reply), k in numbers.items()}
    longest = max(len(sample.input_ids) for sample in samples.values())
    store = StateStore(stage.directory / ".predict_states")
    shutil.rmtree(store.directory, ignore_errors=True)
    entries: dict[int, dict[str, Any]] = {}
    settings = settings_for(facts, facts.layers(model.layers), model, engine, store, backend="vllm",
                            dtype=resolve_dtype("auto", engine), max_length=longest, batch_tokens=2048)
    with Capture(stage, engine, store, settings) as child:
        for batch in batches(list(samples.values()), settings.batch_tokens):
            stage.check_stop()
            entries |= {entry["i"]: entry for entry in child.run(batch)}

    network, head = drafters.load(drafter, facts), verifiers.TeacherHead(facts)
    results = {}
    for name, group in measured.items():
        total, margins = Acceptance(0, [0] * group.draft_tokens), {}
        for place, (prompt, reply) in enumerate(group.replies):
            k = numbers.get((tuple(prompt), tuple(reply)))
            if k is None:
                continue
            mask = np.asarray(samples[k].loss_mask, dtype=bool)
            member = TrainingSample(k, entries[k].get("sha256", ""), mask)
            total.add(predict(network, store, [[member]], len(mask), group.draft_tokens))
            if place in group.parted:
                index, other = group.parted[place]
                state = store.load(k)[0][len(prompt) + index - 1, -1]
                margins[group.ids[place]] = margin(head, state, other, reply[index])
        results[name] = (total, margins)
    shutil.rmtree(store.directory, ignore_errors=True)
    return results


def margin(head: verifiers.TeacherHead, state: torch.Tensor, one: int, other: int) -> dict[str, Any]:
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
