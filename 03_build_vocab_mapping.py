"""Stage 03: the draft vocabulary, from what the verifier really generated.

Reads   01_traces (or --traces); of the verifier only config.json.
Writes  03_vocab/vocab_mapping.safetensors (d2t int64, t2d bool) and token_counts.safetensors.
Needs   neither a GPU nor an engine; seconds to minutes.

Only generated tokens are counted: the drafter never proposes a prompt. Coverage is the share of generated
tokens that the draft vocabulary holds, and so a ceiling of the acceptance rate.

  python 03_build_vocab_mapping.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi
  python 03_build_vocab_mapping.py --run-dir runs/x --model models/x --draft-vocab-size 8192 --out runs/x/03_vocab_8k
"""

from pathlib import Path
from typing import TYPE_CHECKING

from eagle3 import config, files, verifier
from eagle3.errors import PreconditionError
from eagle3.log import logger
from eagle3.options import VocabOptions
from eagle3.script import main
from eagle3.stage import Stage

if TYPE_CHECKING:
    import numpy as np


def run(options: VocabOptions, stage: Stage) -> None:
    """Count generated tokens, choose the most frequent ones, write the mapping, print its coverage."""
    facts = verifier.read(Path(config.require(options.model.path, "--model", "the verifier")))
    traces = stage.path_of(options.vocab.traces, "01_traces")
    upstream = stage.upstream(traces, "--traces")
    if stage.common.dry_run:
        return describe(options, stage, facts, upstream["counts"]["done"])
    results = config.result_options(options) | {"common.limit": stage.common.limit, "vocab_size": facts.vocab_size}
    if not stage.open(inputs={"traces": upstream["identity"]}, results=results):
        return None

    from eagle3 import vocab

    halves, rows = count_tokens(traces / "traces.jsonl", facts.vocab_size, stage)
    counts = halves.sum(0)
    d2t, t2d = vocab.build_mapping(counts, options.vocab.draft_vocab_size)
    mapping, counted = stage.directory / vocab.MAPPING, stage.directory / vocab.COUNTS
    write_tensors(mapping, {"d2t": d2t, "t2d": t2d})
    write_tensors(counted, {"counts": counts})
    vocab.load_mapping(mapping)  # read back what was written: the invariant holds on disk

    covered, seen = vocab.coverage(counts, t2d), int((counts > 0).sum())
    unseen = vocab.held_out_coverage(halves, options.vocab.draft_vocab_size)
    stage.complete(
        counts={"expected": rows, "done": rows, "tokens": int(counts.sum()), "distinct_tokens": seen},
        outputs={"vocab_mapping": mapping, "token_counts": counted},
        coverage=covered,
        held_out_coverage=unseen,
        draft_vocab_size=len(d2t),
        vocab_size=facts.vocab_size,
    )
    logger.info(
        "draft vocabulary %s of %s tokens holds %.2f%% of these %s generated tokens (%s distinct) and, chosen from "
        "half the traces, %.2f%% of the other half's: what it lacks is never accepted", f"{len(d2t):,}",
        f"{facts.vocab_size:,}", 100 * covered, f"{int(counts.sum()):,}", f"{seen:,}", 100 * unseen)
    if seen < len(d2t):
        logger.warning("only %s distinct tokens were generated: %s places go to the lowest ids; more traces would "
                       "choose better", f"{seen:,}", f"{len(d2t) - seen:,}")
    return None


def count_tokens(path: Path, vocab_size: int, stage: Stage) -> "tuple[np.ndarray, int]":
    """Return (how often each target token was generated [2, V] int64, by odd and even trace; number of traces)."""
    import numpy as np

    from eagle3 import traces as trace_rows

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


def describe(options: VocabOptions, stage: Stage, facts: verifier.Verifier, rows: int) -> None:
    """Print what a run would do."""
    size = options.vocab.draft_vocab_size
    logger.info("reads   %d traces; target vocabulary %s", rows, f"{facts.vocab_size:,}")
    logger.info("writes  %s: draft vocabulary %s, %s bytes", stage.directory, f"{size:,}",
                f"{size * 8 + facts.vocab_size * 9:,}")
    if not 1 <= size <= facts.vocab_size:
        raise PreconditionError("the draft vocabulary does not fit the verifier's", where="--draft-vocab-size",
                                expected=f"from 1 to {facts.vocab_size:,}", found=f"{size:,}")


if __name__ == "__main__":
    main(__doc__, VocabOptions, run)
