"""Stage 03: the draft vocabulary, from what the verifier really generated.

Reads   01_traces (or --traces), of which the counts that stage 01 kept, if it did; of the verifier config.json and, if
        it loads, the tokenizer.
Writes  03_vocab/vocab_mapping.safetensors (d2t int64, t2d bool), token_counts.safetensors, coverage.html.
Needs   neither a GPU nor an engine; seconds.

Only generated tokens are counted: the drafter never proposes a prompt. Coverage is the share of generated
tokens that the draft vocabulary holds, and so a ceiling of the acceptance rate. The tokens that end a turn and
mark reasoning always go in, other special ones when they were generated, and whatever --pin names. A table says what
other sizes would cover, of these traces and of unseen ones, and what their heads cost.

A drafter that is to be trained further (04_train.py --init-from) keeps its vocabulary: --from-checkpoint takes the
mapping of its folder, whatever its layout, and says what it covers of these traces.

  python 03_build_vocab_mapping.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi
  python 03_build_vocab_mapping.py --run-dir runs/x --model models/x --draft-vocab-size 8192 --out runs/x/03_vocab_8k
  python 03_build_vocab_mapping.py --run-dir runs/x --model models/x --pin '163607 <|tool_call_begin|>'
  python 03_build_vocab_mapping.py --run-dir runs/x --model models/x --from-checkpoint drafters/published
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.common import config, files, pages
from eagle3.common.errors import PreconditionError, UsageError
from eagle3.common.log import logger
from eagle3.common.options import VocabOptions
from eagle3.common.script import main
from eagle3.common.stage import Stage
from eagle3.drafter import verifier

if TYPE_CHECKING:
    import numpy as np

    from eagle3.traces.chat import Chat

def run(options: VocabOptions, stage: Stage) -> None:
    """Count generated tokens, choose the most frequent ones (or take a drafter's), write the mapping, report on it."""
    facts = verifier.read(Path(config.require(options.model.path, "--model", "the verifier")))
    traces = stage.path_of(options.vocab.traces, "01_traces")
    if stage.common.dry_run:
        from eagle3.dryrun.vocab import describe

        return describe(options, stage, facts, traces)
    upstream = stage.upstream(traces, "--traces")
    if options.vocab.pin and options.vocab.from_checkpoint:
        raise UsageError("a vocabulary that is taken cannot be added to", where="--pin and --from-checkpoint",
                         fix="give one of the two: the taken one belongs to its drafter's head")
    taken = read_taken(options.vocab.from_checkpoint, facts.vocab_size)
    if not open_stage(options, stage, upstream, facts, taken):
        return None

    from eagle3.drafter import coverage, vocab
    from eagle3.drafter.flat_config import layer_shape
    from eagle3.dryrun import estimates

    chat = load_chat(options)
    pins = pinned_ids(options.vocab.pin, chat, facts.vocab_size)
    halves, rows = kept_counts(upstream, traces, facts.vocab_size, stage) or \
        count_tokens(traces / "traces.jsonl", facts.vocab_size, stage)
    counts = halves.sum(0)
    controls = {text: token for text, token in chat.control_ids.items() if token < len(counts)} if chat else {}
    special = [token for token in sorted(chat.special_ids) if token < len(counts) and counts[token]] if chat else []
    pinned = [*controls.values(), *special, *pins]
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
    missing = [{"id": token, "text": text_of(token, chat), "count": count}
               for token, count in vocab.most_frequent_missing(counts, t2d)]
    drafter = estimates.drafter(facts, len(d2t), layer_shape(facts))
    sizes = coverage.by_size(halves, len(d2t), pinned, facts.hidden_size, drafter.trained - drafter.head - drafter.fc)
    files.write_bytes(stage.directory / coverage.PAGE,
                      coverage.page(sizes, len(d2t), int(counts.sum())).encode())
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
        pinned=pins,
        coverage_by_size=coverage.as_json(sizes),
    )
    coverage.say(counts, t2d, figures, inside, missing, taken is not None)
    logger.info("other sizes (%s has the curve):\n%s", stage.directory / coverage.PAGE,
                pages.text_table(*coverage.table(sizes, len(d2t))))
    if chat:
        coverage.say_padding(counts, t2d, chat.known_ids)
    return None


def read_taken(folder: str | None, vocab_size: int) -> "tuple[np.ndarray, np.ndarray] | None":
    """Return (d2t, t2d) of the drafter that --from-checkpoint names, None without one."""
    if folder is None:
        return None
    from eagle3.drafter import vocab

    d2t, t2d = vocab.published_mapping(Path(folder), vocab_size)
    return d2t.numpy(), t2d.numpy()


def pinned_ids(words: list[str], chat: "Chat | None", vocab_size: int) -> list[int]:
    """Return the ids that --pin names; PreconditionError for what is no token of the verifier."""
    found = []
    for word in words:
        token = int(word) if word.isdecimal() else chat.id_of(word) if chat else None
        if token is None or token >= vocab_size:
            known = f"an id below {vocab_size:,}, or the text of one token{'' if chat else ' (no tokenizer loads)'}"
            raise PreconditionError("not a token of the verifier", where="--pin", expected=known, found=repr(word),
                                    fix="name the ids of its parts, or leave it out")
        found.append(token)
    return sorted({*found})


def text_of(token: int, chat: "Chat | None") -> str | None:
    """Return a token's text; None without a tokenizer, and for rows of the model that the tokenizer does not have."""
    return chat.decode([token]) if chat and token < chat.known_ids else None


def open_stage(options: VocabOptions, stage: Stage, upstream: dict[str, Any], facts: verifier.Verifier,
               taken: "tuple[np.ndarray, np.ndarray] | None") -> bool:
    """Open the stage; a mapping that is taken counts as an input and decides the size."""
    from eagle3.drafter import vocab

    inputs = {"traces": upstream["identity"]}
    results = config.result_options(options) | {"common.limit": stage.common.limit, "vocab_size": facts.vocab_size}
    if not options.vocab.pin:
        del results["vocab.pin"]  # results older than this option stay what they are
    if taken is not None:
        inputs["mapping"] = hashlib.sha256(taken[1].tobytes()).hexdigest()
        results["vocab.draft_vocab_size"] = len(taken[0])
    return stage.open(inputs=inputs, results=results, holds=(stage.directory / vocab.MAPPING).exists)


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


def kept_counts(upstream: dict[str, Any], traces: Path, vocab_size: int, stage: Stage
                ) -> "tuple[np.ndarray, int] | None":
    """Return what `count_tokens` does, from the counts of stage 01; None where it kept none, --limit asks for the first
    traces only, or a token is too large, which `count_tokens` names."""
    import numpy as np

    from eagle3.traces import token_counts

    if stage.common.limit is not None or "token_counts" not in (upstream.get("outputs") or {}):
        return None
    counts, rows = token_counts.read(traces / token_counts.FILE_NAME)
    if counts.shape[1] > vocab_size or not counts.any():
        return None
    return np.pad(counts, ((0, 0), (0, vocab_size - counts.shape[1]))), rows


def count_tokens(path: Path, vocab_size: int, stage: Stage) -> "tuple[np.ndarray, int]":
    """Return (how often each target token was generated [2, V] int64, by odd and even trace; number of traces)."""
    from eagle3.traces import trace_rows
    from eagle3.traces.token_counts import TokenCounts

    counts = TokenCounts()
    for row in trace_rows.read_traces(path):
        if stage.common.limit is not None and counts.traces >= stage.common.limit:
            break
        generated = row["completion_token_ids"]
        if max(generated) >= vocab_size:
            raise PreconditionError(
                "a trace has a token that the verifier does not have",
                where=f"{path}: trace {row['id']}",
                expected=f"ids below {vocab_size}",
                found=max(generated),
                fix="the traces are of another model: check --model and --traces",
            )
        counts.add(generated)
        stage.check_stop()
    halves = counts.halves(vocab_size)
    if not halves.any():
        raise PreconditionError("no generated token in the traces", where=path, found=f"{counts.traces} traces")
    return halves, counts.traces


def write_tensors(path: Path, tensors: "dict[str, np.ndarray]") -> None:
    """Write a safetensors file atomically."""
    from safetensors.numpy import save

    files.write_bytes(path, save(tensors))


if __name__ == "__main__":
    main(__doc__, VocabOptions, run)
