"""Stage 02: hidden states of the verifier for every trace.

Reads   01_traces (or --traces) and the verifier (--model).
Writes  02_states: an Arrow dataset (input_ids, loss_mask, seq_len, id), hidden_states/hs_{i}.safetensors with
        hidden_states [T, 4, H] and token_ids [T], and index.jsonl with a checksum per sample.
        `speculators train --data-path` reads the same folder (fp8: with --hidden-states-backend fp8).
Needs   the engine (GPUs for a large verifier); about 4 x H x 2 bytes of disk per token, with --states-dtype fp8 half.

Prefill only, inside vLLM, at any tensor-parallel size; --backend hf is the transformers reference.
Every sample proves itself: the stored teacher state must give the engine's own next token, with its log-probability.

  python 02_extract_hidden_states.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi
  python 02_extract_hidden_states.py --config configs/smollm2-135m.yaml --run-dir runs/x --backend hf --out runs/x/02_hf
"""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.common import config, files, log
from eagle3.common.errors import FailureLimitError, PreconditionError, StaleError
from eagle3.common.log import logger
from eagle3.common.options import ExtractOptions, ExtractSection
from eagle3.common.script import main
from eagle3.common.stage import Stage, require_free_disk
from eagle3.drafter import verifier

if TYPE_CHECKING:
    from eagle3.states.store import Sample, StateStore


def run(options: ExtractOptions, stage: Stage) -> None:
    """Capture what is not captured yet, then write the dataset."""
    extract = options.extract
    model = Path(config.require(options.model.path, "--model", "the verifier"))
    facts = verifier.read(model)
    layers = facts.layers(options.model.layers)
    traces = stage.path_of(extract.traces, "01_traces")
    from eagle3.states.extraction import resolve_dtype

    if stage.common.dry_run:
        return describe(options, stage, facts, traces)

    upstream = stage.upstream(traces, "--traces")
    identity = {"traces": upstream["fingerprint"], "model": files.model_identity(model)}
    extract.dtype = resolve_dtype(extract.dtype, options.engine)
    results = config.result_options(options) | {"model.layers": layers}
    if extract.states_dtype == "auto":
        del results["extract.states_dtype"]  # results older than this option stay what they are
    from eagle3.states.store import StateStore

    store = StateStore(stage.directory)
    stage.open(inputs=identity, results=results, grows=True, stale_on=("model", "traces"),
               holds=store.index_path.exists)
    samples, skipped = plan(traces, store, extract.max_length, stage.common.limit)
    content = files.sha256_json([sample.digest for sample in samples])
    done = store.complete(store.index())
    if stage.finished(content, len(samples) - len(done)):
        return None
    todo = [sample for sample in samples if sample.i not in done]
    needed = bytes_needed(todo, facts.hidden_size, stored_as(extract, extract.dtype))
    require_free_disk(stage.directory, needed, f"{len(todo)} samples")
    stage.manifest.update(look_ahead(options, stage) if todo else {})
    failed, agreement = capture(options, stage, facts, layers, store, samples, done) if todo else ([], {})
    outputs = store.finish(samples)
    stage.complete(
        counts={
            "expected": len(samples) + sum(skipped.values()),
            "done": len(samples) - len(failed),
            "skipped": skipped,
            "failed": len(failed),
            "tokens": sum(len(sample.input_ids) for sample in samples),
            "supervised_tokens": sum(sum(sample.loss_mask) for sample in samples),
        },
        outputs={path.name: path for path in outputs},
        layers=layers,
        hidden_size=facts.hidden_size,
        states_dtype=stored_as(extract, extract.dtype),
        **agreement,
        content=content,
    )
    if len(failed) > extract.max_failures:
        raise FailureLimitError(
            f"{len(failed)} of {len(samples)} samples failed",
            where=stage.directory,
            expected=f"at most {extract.max_failures} (--max-failures)",
            found="\n".join(f"{entry['i']}: {entry['error']}" for entry in failed[:10]),
            fix="run the same command again: only these are tried again",
        )
    return None


def plan(
    traces: Path, store: "StateStore", max_length: int, limit: int | None
) -> "tuple[list[Sample], dict[str, int]]":
    """Number the traces: known ones keep their number, new ones follow in the order of their ids.

    The order of ids, not of completion, so that the numbering does not depend on how stage 01 was scheduled.
    Raises StaleError when a captured trace has changed since.
    """
    from eagle3.states.store import Sample
    from eagle3.traces import trace_rows as trace_rows

    known = {row["id"]: row for row in store.index().values()}
    numbered, fresh = [], []
    skipped = {"too_long": 0, "nothing_generated": 0}
    rows = sorted(trace_rows.read_traces(traces / "traces.jsonl"), key=lambda row: row["id"])
    for row in rows[:limit]:
        ids, mask = trace_rows.sequence(row)
        digest = trace_rows.row_digest(row)
        if len(ids) > max_length or not any(mask):
            skipped["too_long" if len(ids) > max_length else "nothing_generated"] += 1
            continue
        before = known.get(row["id"])
        if before is None:
            fresh.append((row["id"], digest, ids, mask))
        elif before["digest"] != digest:
            raise StaleError(
                "a trace has changed since its states were captured",
                where=f"trace {row['id']}",
                expected=before["digest"],
                found=digest,
                fix="capture into another directory with --out, or start anew with --restart",
            )
        else:
            numbered.append(Sample(before["i"], row["id"], digest, ids, mask))
    first = 1 + max((sample.i for sample in numbered), default=-1)
    samples = numbered + [Sample(first + k, *rest) for k, rest in enumerate(fresh)]
    samples.sort(key=lambda sample: sample.i)
    if not samples:
        raise PreconditionError("no trace can be captured", where=traces, found=f"skipped: {skipped}")
    if any(skipped.values()):
        logger.warning("skipped traces: %s (limit %d tokens)", skipped, max_length)
    return samples, skipped


def capture(
    options: ExtractOptions, stage: Stage, facts: verifier.Verifier, layers: list[int], store: "StateStore",
    samples: "list[Sample]", done: set[int],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run every batch that has a missing sample; return (failed entries, figures of the agreement)."""
    from eagle3.states.extraction import AgreementCheck, Capture, batches, settings_for

    extract = options.extract
    store.sweep()
    by_number = {sample.i: sample for sample in samples}
    failed, proved = list[dict[str, Any]](), False
    total = sum(len(sample.input_ids) for sample in samples)
    already = sum(len(by_number[i].input_ids) for i in done if i in by_number)
    progress = stage.progress("states", total, "tokens", already)
    check = AgreementCheck(facts, store, extract.min_agreement, extract.dtype, stored_as(extract, extract.dtype))
    settings = settings_for(facts, layers, options.model, options.engine, store, backend=extract.backend,
                            dtype=extract.dtype, max_length=extract.max_length, batch_tokens=extract.batch_tokens,
                            states_dtype=extract.states_dtype)
    with Capture(stage, options.engine, store, settings) as child:
        for batch in batches(samples, settings.batch_tokens):
            missing = {sample.i for sample in batch} - done
            if not missing:
                continue
            stage.check_stop()
            entries = child.run(batch, missing)
            good = [entry for entry in entries if "error" not in entry]
            check.add(good)
            if good and not proved:
                check.add_prompts(child.prove([by_number[entry["i"]] for entry in good]))
                proved = True
            store.append(entry | by_number[entry["i"]].identity() for entry in entries)
            failed += [entry for entry in entries if "error" in entry]
            progress.update(sum(entry["tokens"] for entry in good), failed=len(entries) - len(good))
    progress.close()
    for entry in failed:
        logger.error("sample %d (%s): %s", entry["i"], by_number[entry["i"]].id, entry["error"])
    check.judge()
    logger.info("teacher states give the engine's next token on %d of %d samples; log-probabilities differ by %.4f",
                check.agreed, check.checked, check.difference)
    return failed, check.figures()


def stored_as(extract: ExtractSection, dtype: str) -> str:
    """Return what the values in the files are: fp8, or the verifier's precision `dtype`."""
    return dtype if extract.states_dtype == "auto" else extract.states_dtype


def bytes_needed(samples: "list[Sample]", hidden_size: int, dtype: str) -> int:
    """Return the bytes that the states of these samples take on disk."""
    from eagle3.states.store import bytes_per_token

    return sum(len(sample.input_ids) for sample in samples) * bytes_per_token(hidden_size, dtype)


def describe(options: ExtractOptions, stage: Stage, facts: verifier.Verifier, traces: Path) -> None:
    """Print what a run would do, from manifests and JSON files only."""
    from eagle3.dryrun import dry_run
    from eagle3.states.store import bytes_per_token

    extract, engine, plan = options.extract, options.engine, dry_run.DryRun(stage, facts.folder)
    foreseen = None if extract.traces else dry_run.traces(stage, facts)
    samples, tokens = dry_run.limited(stage.upstream(traces, "--traces", foreseen)["counts"], stage.common.limit)
    layers = facts.layers(options.model.layers)
    plan.say("reads", f"{traces}: {samples:,} samples, {tokens:,} tokens")
    plan.say("model", f"{facts.folder}: {facts.architecture}, {facts.num_layers} layers, hidden {facts.hidden_size}; "
             f"captures {layers}")
    if extract.backend == "vllm":
        plan.say("engine", plan.engine(engine))
    dtype = plan.dtype(extract.dtype, engine)
    captured, per_token = (bytes_per_token(facts.hidden_size, form, len(layers))
                           for form in (dtype, stored_as(extract, dtype)))
    needed, values = tokens * per_token, len(layers) * facts.hidden_size
    scales = f", {4 * len(layers)} for scales" if extract.states_dtype == "fp8" else ""
    plan.say("writes", f"{stage.directory}: {log.size(needed)}, {log.size(needed / max(1, samples))} a sample; "
             f"{per_token // values * values:,} bytes a token ({len(layers)} x {facts.hidden_size} x "
             f"{per_token // values}){scales}, 8 for its id (estimate)")
    if scales:
        plan.say("", f"fp8 instead of {log.size(tokens * captured)}; stage 04 decodes it, speculators train with "
                 "--hidden-states-backend fp8")
    batch = max(extract.batch_tokens, extract.max_length)
    if extract.backend == "vllm":
        plan.say("starts", f"{engine.python or sys.executable} -m eagle3.states.engine_side, which loads vLLM with "
                 + shlex.join([*engine.args, "--tensor-parallel-size", str(engine.tensor_parallel_size),
                               "--max-model-len", str(extract.max_length + 1), "--max-num-batched-tokens", str(batch),
                               "--enforce-eager", "--no-enable-prefix-caching"]))
        plan.memory(engine, prefill=batch, cached=batch, why="one pass",
                    more=batch * (2 * captured + (per_token + captured if scales else 0)))
    else:
        plan.say("starts", "transformers in a process of its own, one sequence at a time")
    if plan.known:
        seconds = plan.known.load_s + plan.known.capture_seconds(tokens)
        plan.time(seconds, f"{log.duration(plan.known.load_s)} for loading, then {plan.known.capture_rate:,.0f} tok/s, "
                  f"as in {plan.known.name}")
    plan.disk(stage.directory, needed, f"{samples} samples")
    plan.end()
    look_ahead(options, stage)


def look_ahead(options: ExtractOptions, stage: Stage) -> dict[str, Any]:
    """Look at what the engine needs, before it is started; return what the manifest says of it."""
    if options.extract.backend != "vllm":
        return {}
    from eagle3.checks import preflight

    return preflight.before_engine(options, stage)


if __name__ == "__main__":
    main(__doc__, ExtractOptions, run)
