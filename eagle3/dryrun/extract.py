"""The dry run of stage 02: how many states would be captured with what, and the disk and time that they take."""

import shlex
import sys
from pathlib import Path

from eagle3.common import log
from eagle3.common.options import ExtractOptions
from eagle3.common.stage import Stage
from eagle3.drafter.verifier import Verifier
from eagle3.dryrun import foreseen
from eagle3.dryrun.dry_run import DryRun
from eagle3.states import slabs
from eagle3.states.encoding import bytes_per_token
from eagle3.states.sglang_side import SPARE_POSITIONS
from eagle3.states.sizes import backend_of, stored_as


def describe(options: ExtractOptions, stage: Stage, facts: Verifier, traces: Path) -> None:
    """Print what a run would do, from manifests and JSON files only."""
    extract, engine, dry = options.extract, options.engine, DryRun(stage, facts.folder)
    planned = None if extract.traces else foreseen.traces(stage, facts)
    samples, tokens = foreseen.limited(stage.upstream(traces, "--traces", planned)["counts"], stage.common.limit)
    layers, extract.backend = facts.layers(options.model.layers), backend_of(extract, engine)
    dry.say("reads", f"{traces}: {samples:,} samples, {tokens:,} tokens")
    dry.say("model", f"{facts.folder}: {facts.architecture}, {facts.num_layers} layers, hidden {facts.hidden_size}; "
            f"captures {layers}")
    if extract.backend != "hf":
        dry.say("engine", dry.engine(engine))
    dtype = dry.dtype(extract.dtype, engine)
    captured, per_token = (bytes_per_token(facts.hidden_size, form, len(layers))
                           for form in (dtype, stored_as(extract, dtype)))
    needed, values = tokens * per_token, len(layers) * facts.hidden_size
    scales = f", {4 * len(layers)} for scales" if extract.states_dtype == "fp8" else ""
    dry.say("writes", f"{stage.directory}: {log.size(needed)}, {log.size(needed / max(1, samples))} a sample; "
            f"{per_token // values * values:,} bytes a token ({len(layers)} x {facts.hidden_size} x "
            f"{per_token // values}){scales}, 8 for its id (estimate)")
    if scales:
        dry.say("", f"fp8 instead of {log.size(tokens * captured)}; stage 04 decodes it, speculators train with "
                "--hidden-states-backend fp8")
    if extract.backend != "hf":
        batch = max(extract.batch_tokens, extract.max_length)
        # On a GPU the streams, the same packed, and what the pass before is still copied from; on the first one norm
        # and head once more, for the self-check.
        head = 2 * facts.hidden_size * facts.vocab_size
        describe_engine(dry, options, batch, more=batch * (2 * captured + (2 if scales else 1) * per_token) + head)
        dry.say("", f"{log.size(slabs.SLABS * slabs.slab_bytes(batch, per_token))} of main memory: {slabs.SLABS} "
                "passes between engine and disk, pinned where there is a GPU (estimate)")
    else:
        dry.say("starts", "transformers in a process of its own, one sequence at a time")
    if dry.known:
        seconds = dry.known.load_s + dry.known.capture_seconds(tokens)
        dry.time(seconds, f"{log.duration(dry.known.load_s)} for loading, then {dry.known.capture_rate:,.0f} tok/s, "
                 f"as in {dry.known.name}")
    dry.disk(stage.directory, needed, f"{samples} samples")
    dry.end()


def describe_engine(dry: DryRun, options: ExtractOptions, batch: int, more: int) -> None:
    """Print how the capturing engine is started, and its memory: `batch` tokens a pass, `more` bytes for states."""
    engine, longest = options.engine, options.extract.max_length
    if engine.kind == "sglang":
        words = ["--tp-size", str(engine.tensor_parallel_size), "--context-length", str(longest + SPARE_POSITIONS),
                 "--max-prefill-tokens", str(batch + 1), "--chunked-prefill-size", "-1", "--disable-radix-cache",
                 "--disable-cuda-graph"]
        more_words = " --forward-hooks of the decoder's layers"
    else:
        words = ["--tensor-parallel-size", str(engine.tensor_parallel_size), "--max-model-len", str(longest + 1),
                 "--max-num-batched-tokens", str(batch), "--no-enable-prefix-caching"]
        eager = options.extract.capture != "outputs"
        more_words = " (--enforce-eager, unless the model serves EAGLE-3)" * eager
    name = {"vllm": "vLLM", "sglang": "SGLang"}[engine.kind]
    dry.say("starts", f"{engine.python or sys.executable} -m eagle3.states.engine_side, which loads {name} with "
            + shlex.join([*engine.args, *words]) + more_words)
    dry.memory(engine, prefill=batch, cached=batch, why="one pass", more=more)
