"""What a benchmark should have measured: its own replies walked offline, and how close the verifier's choices were.

The hidden states of the replies are captured with the same engine, once for all measurements, since loading a large
verifier costs more than anything else here. The drafter then walks them on the GPU with the most free memory, where
there is one, in bfloat16, once for all draft-token counts.
"""

import math
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.benchmark import measurements, rounds
from eagle3.benchmark.measurements import Measured
from eagle3.common.errors import PreconditionError
from eagle3.common.log import duration, logger
from eagle3.common.options import EngineOptions, ModelOptions
from eagle3.common.stage import Stage
from eagle3.engines import speculation

if TYPE_CHECKING:
    import torch

    from eagle3.drafter.teacher import TeacherHead
    from eagle3.drafter.verifier import Verifier
    from eagle3.states.store import Sample, StateStore
    from eagle3.training.batches import TrainingSample
    from eagle3.training.drafting import Sampling

DEPTH = 16  # draft-token counts that are predicted: 1 to this
# Relative error of a hidden state in bf16, against float32: 0.6% on a tiny DeepSeek-V3, 1-3% on SmolLM2's last layer.
BF16_ERROR = 0.01
_SIGMAS = 3.0
_BATCH_TOKENS = {"cuda": 16384, "cpu": 2048}
# What has to be off for temperature, top-k and top-p to be all that shapes the verifier's distribution.
_NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}

Sequence = tuple[tuple[int, ...], tuple[int, ...]]  # prompt, reply
Margins = dict[str, dict[str, Any]]


def predict_runs(
    stage: Stage, model: ModelOptions, engine: EngineOptions, drafter: Path, runs: list[dict[str, Any]], *,
    sources: dict[str, str] | None = None,
) -> None:
    """Set `predicted` and `difference` of runs with a drafter: the acceptance walked offline on their very replies.

    A run whose server accepts in a way that cannot be walked gets the reason as `not_predicted`. Where a greedy reply
    parts from the verifier's own, which the run has that `baseline` names, `lossless.margins` says how close the two
    tokens were. What an earlier run predicted for these replies is kept. `sources` are those of prompts by their id.
    """
    directory = stage.directory
    runs = [run for run in runs if _can_be_walked(run)]
    missing = {run["name"]: run for run in runs if not measurements.prediction(directory, run)}
    measured = {name: measurements.measured_replies(directory, run, run.get("baseline"))
                for name, run in missing.items()}
    measured = {name: group for name, group in measured.items() if group.replies}
    if measured:
        stage.check_stop()
        logger.info("predicting the acceptance of %s", ", ".join(measured))
        started = time.monotonic()
        found = predict_measurements(stage, model, engine, drafter, measured, sources or {})
        for name, (walked, margins) in found.items():
            measurements.store_prediction(directory, missing[name], walked, margins)
        logger.info("predicted after %s", duration(time.monotonic() - started))
    for run in runs:
        if not measurements.use_prediction(directory, run):
            logger.warning("%s: no token ids, or only replies of one token: nothing to predict", run["name"])


def _can_be_walked(run: dict[str, Any]) -> bool:
    """Say whether a run's rounds can be walked over its replies; note why not."""
    engine, sampling = run.get("engine") or {}, (run.get("sampling") or {}).get("sent") or {}
    sampled = float(sampling.get("temperature", 1.0)) if sampling else 0.0  # older runs: predicted for greedy ones only
    reason = speculation.refusal(engine.get("kind", "vllm"), engine.get("speculation") or {}, sampled)
    if reason:
        logger.warning("%s: the acceptance is not predicted: %s", run["name"], reason)
        run["not_predicted"] = reason
    return not reason


def predict_measurements(
    stage: Stage, model: ModelOptions, engine: EngineOptions, drafter: Path, measured: dict[str, Measured],
    sources: dict[str, str],
) -> dict[str, tuple[dict[str, Any], Margins]]:
    """Capture the states of all replies, walk each measurement's with the exported drafter, judge what parted.

    Returns by measurement what `rounds.predicted` does and, by the id of each reply that parts from the verifier's own,
    its `margin`. A reply whose states cannot be captured is left out, and said. Raises PreconditionError when none can
    be.
    """
    from eagle3.drafter import verifier
    from eagle3.states.store import Sample, StateStore

    facts = verifier.read(Path(model.path))
    sequences = {(tuple(prompt), tuple(reply)) for group in measured.values() for prompt, reply in group.replies}
    numbers = {sequence: k for k, sequence in enumerate(sorted(s for s in sequences if len(s[1]) > 1))}
    samples = {k: Sample(k, str(k), "", [*prompt, *reply], [0] * len(prompt) + [1] * len(reply))
               for (prompt, reply), k in numbers.items()}
    store = StateStore(stage.directory / ".predict_states")
    shutil.rmtree(store.directory, ignore_errors=True)
    checksums = capture_replies(stage, facts, model, engine, store, samples)
    replies = Replies(store, numbers, samples, checksums)
    depth = max(DEPTH, *(group.draft_tokens for group in measured.values()))
    results = _walk_somewhere(stage, facts, drafter, replies, measured, sources, depth)
    shutil.rmtree(store.directory, ignore_errors=True)
    return results


@dataclass
class Replies:
    """Captured replies: their number by (prompt, reply), and what the store holds by number (checksums: only those that
    were captured)."""

    store: "StateStore"
    numbers: dict[Sequence, int]
    samples: "dict[int, Sample]"
    checksums: dict[int, str] = field(default_factory=dict)

    def number(self, prompt: list[int], reply: list[int]) -> int | None:
        """Return the number of a reply whose states are there."""
        number = self.numbers.get((tuple(prompt), tuple(reply)))
        return number if number in self.checksums else None

    def training_samples(self, numbers: set[int]) -> "list[TrainingSample]":
        """Return the samples of these numbers, in order."""
        import numpy as np

        from eagle3.training.batches import TrainingSample

        return [TrainingSample(k, self.checksums[k], np.asarray(self.samples[k].loss_mask, dtype=bool))
                for k in sorted(numbers)]


def _walk_somewhere(
    stage: Stage, facts: "Verifier", drafter: Path, replies: Replies, measured: dict[str, Measured],
    sources: dict[str, str], depth: int,
) -> dict[str, tuple[dict[str, Any], Margins]]:
    """Walk on the GPU with the most free memory, on the CPU where there is none or that is too little."""
    import torch

    if torch.cuda.is_available():
        free = [torch.cuda.mem_get_info(k)[0] for k in range(torch.cuda.device_count())]
        device = torch.device("cuda", free.index(max(free)))
        try:
            return walk(stage, facts, drafter, replies, measured, sources, depth, device)
        except torch.OutOfMemoryError:
            logger.warning("%s has too little free memory (%.0f GB) to walk the replies there; the CPU does it, which "
                           "takes longer", device, max(free) / 1e9)
        finally:
            torch.cuda.empty_cache()
    return walk(stage, facts, drafter, replies, measured, sources, depth, torch.device("cpu"))


def walk(
    stage: Stage, facts: "Verifier", drafter: Path, replies: Replies, measured: dict[str, Measured],
    sources: dict[str, str], depth: int, device: "torch.device",
) -> dict[str, tuple[dict[str, Any], Margins]]:
    """Walk captured replies on a device; returns what `predict_measurements` does."""
    import torch

    from eagle3.drafter import network, teacher

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    drafting, head = on_device(network.load(drafter, facts), device, dtype), teacher.TeacherHead(facts, dtype, device)
    wanted: dict[Sampling | None, set[int]] = {}
    for group in measured.values():
        numbers = {replies.number(*reply) for reply in group.replies} - {None}
        wanted.setdefault(sampling_of(group.sampling), set()).update(k for k in numbers if k is not None)
    drafted = {sampling: draft_replies(stage, drafting, head, replies, numbers, sampling, depth)
               for sampling, numbers in wanted.items()}
    results = {}
    for name, group in measured.items():
        mine, walked, margins = drafted[sampling_of(group.sampling)], [], Margins()
        for place, (prompt, reply) in enumerate(group.replies):
            k = replies.number(prompt, reply)
            if k is None:
                continue
            right, probabilities = mine[k]
            source = sources.get(group.ids[place], "")
            walked.append(rounds.Drafted(right, probabilities, len(prompt), source))
            if place in group.parted:
                index, other = group.parted[place]
                state = replies.store.load(k)[0][len(prompt) + index - 1, -1]
                margins[group.ids[place]] = margin(head, state, other, reply[index])
        results[name] = (rounds.predicted(walked, group.draft_tokens, depth), margins)
    return results


def sampling_of(sent: dict[str, Any]) -> "Sampling | None":
    """Return the distribution that sampling settings stand for, None where they do not tell it all."""
    from eagle3.training.drafting import Sampling

    told = {"temperature", "top_k", "top_p"} <= sent.keys()
    if not sent.get("temperature") and "temperature" in sent:
        return Sampling(0.0) if all(sent.get(name, off) == off for name, off in _NEUTRAL.items()) else None
    if not told or any(sent.get(name) != off for name, off in _NEUTRAL.items()):
        return None
    # vLLM raises lower temperatures to this one (vllm/sampling_params.py)
    return Sampling(max(0.01, float(sent["temperature"])), int(sent["top_k"]), float(sent["top_p"]))


def on_device(model: Any, device: "torch.device", dtype: "torch.dtype") -> Any:
    """Return a drafter on a device with its weights in `dtype`; what RoPE is computed from keeps its precision."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(device, dtype)
    return model.to(device)


def draft_replies(
    stage: Stage, model: Any, head: "TeacherHead", replies: Replies, numbers: set[int], sampling: "Sampling | None",
    depth: int,
) -> "dict[int, tuple[Any, Any]]":
    """Return by number of the reply its `right` and `probabilities`, as `rounds.Drafted` has them."""
    from eagle3.training import drafting
    from eagle3.training.batches import collate, pack

    found, members = {}, replies.training_samples(numbers)
    weight = model.fc.weight
    longest = max((member.length for member in members), default=0)
    for packed in pack(members, max(_BATCH_TOKENS[weight.device.type], longest), None):
        stage.check_stop()
        batch = collate(replies.store, packed, longest, 1, verify=True, device=weight.device, dtype=weight.dtype)
        tokens, right = drafting.draft(model, batch, depth)
        chances = drafting.teacher_probabilities(head, batch, tokens, sampling).cpu() if sampling else None
        right, start = right.cpu(), 0
        for member, length in zip(packed, batch.lengths, strict=True):
            span = slice(start, start + length)
            found[member.i] = (right[span].numpy(), None if chances is None else chances[span].numpy())
            start += length
    return found


def capture_replies(
    stage: Stage, facts: "Verifier", model: ModelOptions, engine: EngineOptions, store: "StateStore",
    samples: "dict[int, Sample]",
) -> dict[int, str]:
    """Capture the states of all samples into a store; return {number: checksum} of those that succeeded."""
    from eagle3.states.extraction import Capture, batches, resolve_dtype, settings_for

    longest = max(len(sample.input_ids) for sample in samples.values())
    settings = settings_for(facts, facts.layers(model.layers), model, engine, backend=engine.kind,
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
