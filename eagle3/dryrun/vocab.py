"""The dry run of stage 03: how large a mapping would be chosen, or taken, from how many traces."""

from pathlib import Path

from eagle3.common.errors import PreconditionError
from eagle3.common.options import VocabOptions
from eagle3.common.stage import Stage
from eagle3.drafter.verifier import Verifier
from eagle3.dryrun import foreseen
from eagle3.dryrun.dry_run import DryRun


def describe(options: VocabOptions, stage: Stage, facts: Verifier, traces: Path) -> None:
    """Print what a run would do; PreconditionError when the draft vocabulary does not fit the verifier's."""
    dry, size = DryRun(stage, facts.folder), options.vocab.draft_vocab_size
    planned = None if options.vocab.traces else foreseen.traces(stage, facts)
    rows, tokens = foreseen.limited(stage.upstream(traces, "--traces", planned)["counts"], stage.common.limit)
    dry.say("reads", f"{traces}: {rows:,} traces, {tokens:,} tokens; target vocabulary {facts.vocab_size:,}")
    if options.vocab.from_checkpoint and (taken := dry.published(options.vocab.from_checkpoint)):
        size = taken["draft_vocab_size"]
    dry.say("writes", f"{stage.directory}: draft vocabulary {size:,}, {size * 8 + facts.vocab_size * 9:,} bytes")
    if not 1 <= size <= facts.vocab_size:
        raise PreconditionError("the draft vocabulary does not fit the verifier's", where="--draft-vocab-size",
                                expected=f"from 1 to {facts.vocab_size:,}", found=f"{size:,}")
    dry.end()
