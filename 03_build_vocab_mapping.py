"""Stage 03: the draft vocabulary, from what the verifier really generated.

Reads   01_traces (or --traces); of the verifier config.json and, if it loads, the tokenizer.
Writes  03_vocab/vocab_mapping.safetensors (d2t int64, t2d bool) and token_counts.safetensors.
Needs   neither a GPU nor an engine; seconds to minutes.

Only generated tokens are counted: the drafter never proposes a prompt. Coverage is the share of generated
tokens that the draft vocabulary holds, and so a ceiling of the acceptance rate. The tokens that end a turn and
mark reasoning always go in, other special ones when they were generated.

A drafter that is to be trained further (04_train.py --init-from) keeps its vocabulary: --from-checkpoint takes the
mapping of its folder, whatever its layout, and says what it covers of these traces.

  python 03_build_vocab_mapping.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi
  python 03_build_vocab_mapping.py --run-dir runs/x --model models/x --draft-vocab-size 8192 --out runs/x/03_vocab_8k
  python 03_build_vocab_mapping.py --run-dir runs/x --model models/x --from-checkpoint drafters/published
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.common import config, files
from eagle3.common.errors import PreconditionError
from eagle3.common.log import logger
from eagle3.common.options import VocabOptions
from eagle3.common.script import main
from eagle3.common.stage import Stage
from eagle3.drafter import verifier

if TYPE_CHECKING:
    import numpy as np

    from eagle3.traces.chat import Chat

WORSE = 0.01  # a taken vocabulary may cover this much less than a fresh one before it is worth a warning


def run(options: VocabOptions, stage: Stage) -> None:
    """Count generated tokens, choose the most frequent ones (or take a drafter's), write the mapping, report on it."""
    facts = verifier.read(Path(config.require(options.model.path, "--model", "the verifier")))
    traces = stage.path_of(options.vocab.traces, "01_traces")
    if stage.common.dry_run:
        from eagle3.dryrun.vocab import describe

        return describe(options, stage, facts, traces)
    upstream = stage.upstream(traces, "--traces")
    taken = read_taken(options.vocab.from_checkpoint, facts.vocab_size)
    if not open_stage(options, stage, upstream, facts, taken):
        return None

    from eagle3.drafter import vocab

    chat = load_chat(options)
    halves, rows = count_tokens(traces / "traces.jsonl", facts.vocab_size, stage)
    counts = halves.sum(0)
    controls = {text: token for text, token in chat.control_ids.items() if token < len(counts)} if chat else {}
    special = [token for token in sorted(chat.special_ids) if token < len(counts) and counts[token]] if chat else []
    pinned = [*controls.values(), *special]
    d2t, t2d = taken or vocab.build_mapping(counts, options.vocab.draft_vocab_size, pinned)
    mapping, counted = stage.directory / vocab.MAPPING, stage.directory / vocab.COUNTS
    write_tensors(mapping, {"d2t": d2t, "t2d": t2d})
    write_tensors(counted, {"counts": counts})
    vocab.load_mapping(mapping)  # read back what was written: the invariant holds on disk

    fresh = vocab.build_mapping(counts, len(d2t), pinned)[1]
    figures = {
        "coverage": vocab.coverage(counts, t2d),
        "fresh_coverage": vocab.coverage(counts, fresh),
        "held_out_coverage": vocab.held_out_coverage(halves, len(d2t), pinned),
    }
    inside = {text: bool(t2d[token]) for text, token in controls.items()}
    missing = [{"id": token, "text": chat.decode([token]) if chat else None, "count": count}
               for token, count in vocab.most_frequent_missing(counts, t2d)]
    stage.complete(
        counts={"expected": rows, "done": rows, "tokens": int(counts.sum()),
                "distinct_tokens": int((counts > 0).sum())},
        outputs={"vocab_mapping": mapping, "token_counts": counted},
        **figures,
        draft_vocab_size=len(d2t),
        vocab_size=facts.vocab_size,
        from_checkpoint=options.vocab.from_checkpoint,
        control_tokens={text: {"id": controls[text], "in": inside[text]} for text in controls},
        missing_tokens=missing,
    )
    report(counts, t2d, figures, inside, missing, taken is not None)
    return None


def read_taken(folder: str | None, vocab_size: int) -> "tuple[np.ndarray, np.ndarray] | None":
    """Return (d2t, t2d) of the drafter that --from-checkpoint names, None without one."""
    if folder is None:
        return None
    from eagle3.drafter import vocab

    d2t, t2d = vocab.published_mapping(Path(folder), vocab_size)
    return d2t.numpy(), t2d.numpy()


def open_stage(options: VocabOptions, stage: Stage, upstream: dict[str, Any], facts: verifier.Verifier,
               taken: "tuple[np.ndarray, np.ndarray] | None") -> bool:
    """Open the stage; a mapping that is taken counts as an input and decides the size."""
    inputs = {"traces": upstream["identity"]}
    results = config.result_options(options) | {"common.limit": stage.common.limit, "vocab_size": facts.vocab_size}
    if taken is not None:
        inputs["mapping"] = hashlib.sha256(taken[1].tobytes()).hexdigest()
        results["vocab.draft_vocab_size"] = len(taken[0])
    return stage.open(inputs=inputs, results=results)


def load_chat(options: VocabOptions) -> "Chat | None":
    """Return the verifier's tokenizer and template, None when they do not load here: ids are counted all the same."""
    from eagle3.traces import chat

    try:
        return chat.load_chat(Path(options.model.path), trust_remote_code=options.model.trust_remote_code)
    except Exception as error:  # noqa: BLE001 - whatever a tokenizer raises
        reason = (error.parts["found"] if isinstance(error, PreconditionError) else "") or error
        logger.warning("the tokenizer does not load, so it is unknown whether the tokens that end a turn and mark "
                       "reasoning are in the draft vocabulary: %s", str(reason).splitlines()[0])
        return None


def count_tokens(path: Path, vocab_size: int, stage: Stage) -> "tuple[np.ndarray, int]":
    """Return (how often each target token was generated [2, V] int64, by odd and even trace; number of traces)."""
    import numpy as np

    from eagle3.traces import trace_rows

    counts = np.zeros((2, vocab_size), dtype=np.int64)
    rows = 0
    for row in trace_rows.read_traces(path):
        if stage.common.limit is not None and rows >= stage.common.limit:
            break
        ids, mask = (np.asarray(values) for values in trace_rows.sequence(row))
        generated = ids[mask.astype(bool)]
        if len(generated) and generated.max() >= vocab_size:
            raise PreconditionError(
                "a trace has a token that the verifier does not have",
                where=f"{path}: trace {row['id']}",
                expected=f"ids below {vocab_size}",
                found=int(generated.max()),
                fix="the traces are of another model: check --model and --traces",
            )
        counts[rows % 2] += np.bincount(generated, minlength=vocab_size)
        rows += 1
        stage.check_stop()
    if not counts.any():
        raise PreconditionError("no generated token in the traces", where=path, found=f"{rows} traces")
    return counts, rows


def write_tensors(path: Path, tensors: "dict[str, np.ndarray]") -> None:
    """Write a safetensors file atomically."""
    from safetensors.numpy import save

    files.write_bytes(path, save(tensors))


def report(counts: "np.ndarray", t2d: "np.ndarray", figures: dict[str, float], controls: dict[str, bool],
           missing: list[dict[str, Any]], taken: bool) -> None:
    """Say what the draft vocabulary covers and lacks; warn where that will cost acceptance."""
    size, seen = int(t2d.sum()), int((counts > 0).sum())
    covered, fresh, unseen = (f"{100 * figures[name]:.2f}%"
                              for name in ("coverage", "fresh_coverage", "held_out_coverage"))
    holds = (f"draft vocabulary {size:,} of {len(t2d):,} tokens holds {covered} of these {counts.sum():,} generated "
             f"tokens ({seen:,} distinct)")
    if not taken:
        logger.info("%s and, chosen from half the traces, %s of the other half's: what it lacks is never accepted",
                    holds, unseen)
        if seen < size:
            logger.warning("only %s distinct tokens were generated: %s places go to the lowest ids; more traces would "
                           "choose better", f"{seen:,}", f"{size - seen:,}")
        return
    logger.info("%s; a fresh choice of this size would hold %s, and %s of traces that it was not chosen from", holds,
                fresh, unseen)
    if missing:
        logger.info("generated most of what it lacks: %s", ", ".join(
            f"{each['id']} {each['text'] or ''!r} {each['count']:,} times" for each in missing))
    if controls:
        logger.info("the tokens that end a turn and mark reasoning: %s", ", ".join(
            f"{text} is {'in it' if inside else 'NOT in it'}" for text, inside in controls.items()))
    outside = [text for text, inside in controls.items() if not inside]
    if outside:
        logger.warning("the drafter can never propose %s: each costs a rejected round; a fresh drafter would have them",
                       " and ".join(outside))
    if figures["coverage"] < figures["held_out_coverage"] - WORSE:
        logger.warning("it covers %.1f percentage points less than a fresh choice covers of unseen traces, and so much "
                       "is lost at every draft position; a fresh drafter (no --from-checkpoint) may end up better",
                       100 * (figures["held_out_coverage"] - figures["coverage"]))


if __name__ == "__main__":
    main(__doc__, VocabOptions, run)
