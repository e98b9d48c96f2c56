"""Stage 02: hidden states of the verifier for every trace.

Reads   01_traces (or --traces) and the verifier (--model).
Writes  02_states: an Arrow dataset (input_ids, loss_mask, seq_len, id), hidden_states/hs_{i}.safetensors with
        hidden_states [T, 4, H] and token_ids [T], and index.jsonl with a checksum per sample.
        `speculators train --data-path` reads the same folder (fp8: with --hidden-states-backend fp8).
Needs   the engine (GPUs for a large verifier); about 4 x H x 2 bytes of disk per token, with --states-dtype fp8 half.

Prefill only, inside vLLM or SGLang (--engine sglang), at any tensor-parallel size; --backend hf is transformers.
Every sample proves itself: the stored teacher state must give the engine's own next token, with its log-probability.

  python 02_extract_hidden_states.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi
  python 02_extract_hidden_states.py --config configs/smollm2-135m.yaml --run-dir runs/x --backend hf --out runs/x/02_hf
  python 02_extract_hidden_states.py --config configs/kimi-k2.5.yaml --run-dir runs/x --shard 1/4 --out runs/x/02_1
  python 02_extract_hidden_states.py --config configs/kimi-k2.5.yaml --run-dir runs/x --merge 'runs/x/02_1 runs/x/02_2'
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.common import config, files
from eagle3.common.errors import FailureLimitError, UsageError
from eagle3.common.log import logger
from eagle3.common.machine import require_free_disk
from eagle3.common.options import ExtractOptions, ExtractSection
from eagle3.common.script import main
from eagle3.common.stage import Stage
from eagle3.drafter import verifier

if TYPE_CHECKING:
    from eagle3.states.collecting import Collected
    from eagle3.states.store import Sample, StateStore


def run(options: ExtractOptions, stage: Stage) -> None:
    """Capture what is not captured yet, then write the dataset."""
    extract = options.extract
    model = Path(config.require(options.model.path, "--model", "the verifier"))
    facts = verifier.read(model)
    layers = facts.layers(options.model.layers)
    traces = stage.path_of(extract.traces, "01_traces")
    if stage.common.dry_run:
        from eagle3.dryrun.extract import describe

        describe(options, stage, facts, traces)
        look_ahead(options, stage)
        return

    from eagle3.states import shards
    from eagle3.states.extraction import batches, resolve_dtype
    from eagle3.states.numbering import number_traces
    from eagle3.states.sizes import backend_of, bytes_needed, stored_as
    from eagle3.states.store import StateStore

    shard = shards.parse(extract.shard)
    if shard[1] > 1 and not stage.common.out:
        raise UsageError("a shard needs a folder of its own", where="--shard", expected="--out DIR",
                         fix="then put the shards together with --merge DIR DIR …")
    upstream = stage.upstream(traces, "--traces")
    identity = {"traces": upstream["fingerprint"], "model": files.model_identity(model)}
    extract.dtype = resolve_dtype(extract.dtype, options.engine)
    extract.backend = backend_of(extract, options.engine)
    results = config.result_options(options) | {"model.layers": layers, "extract.backend": extract.backend}
    for name in ("states_dtype", "capture"):
        if getattr(extract, name) == "auto":
            del results[f"extract.{name}"]  # results older than this option stay what they are
    store = StateStore(stage.directory)
    stage.open(inputs=identity, results=results, grows=True, stale_on=("model", "traces"),
               holds=store.index_path.exists)
    index = store.index()
    numbered = number_traces(read_rows(traces), index, traces, max_length=extract.max_length, limit=stage.common.limit)
    skipped = numbered.skipped
    work = shards.share(batches(numbered.samples, max(extract.batch_tokens, extract.max_length)), shard)
    samples = [sample for batch in work for sample in batch]
    if extract.merge:
        stage.begin()
        shards.merge(store, [Path(folder) for folder in extract.merge], samples, stage.manifest["fingerprint"])
        index = store.index()
    content = files.sha256_json([sample.digest for sample in samples])
    done = store.complete(index | numbered.changes())
    if extract.verify == "full":
        done = store.intact(index, done)
    if stage.finished(content, len(samples) - len(done)):
        return
    todo = [sample for sample in samples if sample.i not in done]
    needed = bytes_needed(todo, facts.hidden_size, stored_as(extract, extract.dtype))
    require_free_disk(stage.directory, needed, f"{len(todo)} samples")
    stage.manifest.update(look_ahead(options, stage) if todo else {})
    if changes := numbered.changes():
        stage.begin()
        store.append(changes.values())
    failed, agreement = capture(options, stage, facts, layers, store, work, done) if todo else ([], {})
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
        **shards.about(shard),
        content=content,
        traces_identity=upstream.get("identity"),
    )
    if len(failed) > extract.max_failures:
        raise FailureLimitError(
            f"{len(failed)} of {len(samples)} samples failed",
            where=stage.directory,
            expected=f"at most {extract.max_failures} (--max-failures)",
            found="\n".join(f"{entry['i']}: {entry['error']}" for entry in failed[:10]),
            fix="run the same command again: only these are tried again",
        )


def read_rows(traces: Path) -> list[tuple[str, str, list[int], list[int], str]]:
    """Return (id, digest, token ids, loss mask, source) of every trace."""
    from eagle3.traces import trace_rows

    return [(row["id"], row["digest"], *trace_rows.sequence(row), row["source"])
            for row in trace_rows.read_traces(traces / "traces.jsonl")]


def look_ahead(options: ExtractOptions, stage: Stage) -> dict[str, Any]:
    """Look at what the engine needs, before it is started; return what the manifest says of it."""
    if options.extract.backend == "hf":
        return {}
    from eagle3.checks import preflight

    return preflight.before_engine(options, stage, captures=True)


def capture(
    options: ExtractOptions, stage: Stage, facts: verifier.Verifier, layers: list[int], store: "StateStore",
    work: "list[list[Sample]]", done: set[int],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run every batch that has a missing sample; return (failed entries, figures of the agreement)."""
    from eagle3.states.agreement import AgreementCheck
    from eagle3.states.extraction import Capture, settings_for
    from eagle3.states.sizes import stored_as

    extract = options.extract
    store.sweep()
    by_number = {sample.i: sample for batch in work for sample in batch}
    failed = list[dict[str, Any]]()
    check = AgreementCheck(facts, store, extract.min_agreement, extract.dtype, stored_as(extract, extract.dtype))
    settings = settings_for(facts, layers, options.model, options.engine, backend=extract.backend,
                            dtype=extract.dtype, max_length=extract.max_length, batch_tokens=extract.batch_tokens,
                            states_dtype=extract.states_dtype, capture=way(extract, store, done), compiled=True)
    missing = [(batch, wanted) for batch in work if (wanted := {sample.i for sample in batch} - done)]
    with Capture(stage, options.engine, store, settings) as child:
        total = sum(len(sample.input_ids) for sample in by_number.values())
        already = sum(len(by_number[i].input_ids) for i in done if i in by_number)
        progress = stage.progress("states", total, "tokens", already)

        def keep(collected: "Collected") -> list[dict[str, Any]]:
            good = [entry for entry in collected.entries if "error" not in entry]
            stage.begin()
            store.append(entry | {"capture": child.how} | by_number[entry["i"]].identity()
                         for entry in collected.entries)
            failed.extend(entry for entry in collected.entries if "error" in entry)
            progress.update(sum(entry["tokens"] for entry in good), failed=len(collected.entries) - len(good))
            if collected.problem is not None:
                logger.error("%d of %d samples are left", len(by_number) - len(store.complete(store.index())),
                             len(by_number))
                raise collected.problem
            check.add_rows(good, collected.rows, by_number)
            return good

        # The first batch is proved from its files, before anything else is captured.
        first = keep(child.run(*missing[0]))
        check.add(first)
        check.add_prompts(child.prove([by_number[entry["i"]] for entry in first]) if first else {})
        for collected in child.run_all(missing[1:]):
            stage.check_stop()
            keep(collected)
    progress.close()
    for entry in failed:
        logger.error("sample %d (%s): %s", entry["i"], by_number[entry["i"]].id, entry["error"])
    check.judge()
    logger.info("teacher states give the engine's next token at %d of %d positions; log-probabilities differ by %.4f",
                check.agreed, check.checked, check.difference)
    return failed, check.figures() | {"capture": child.how}


def way(extract: ExtractSection, store: "StateStore", done: set[int]) -> str:
    """Return how states are taken: as asked, else as those that lie there were, since rounding differs."""
    if extract.capture == "auto" and done:
        return str(store.index()[max(done)].get("capture", "hooks"))
    return extract.capture


if __name__ == "__main__":
    main(__doc__, ExtractOptions, run)
