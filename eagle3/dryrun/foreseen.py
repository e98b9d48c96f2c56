"""What stages that have not run would give to the next: their manifests, as far as a dry run needs them.

Each function takes a stage that is to be planned and returns one that gives the foreseen manifest, for `Stage.upstream`
to call where there is none.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from eagle3.common import config, files
from eagle3.common.log import logger
from eagle3.common.options import ExtractOptions, GenerateOptions, VocabOptions
from eagle3.common.stage import Stage
from eagle3.drafter import verifier
from eagle3.drafter.flat_config import flat_config
from eagle3.dryrun import estimates

Options = TypeVar("Options")


def traces(stage: Stage, facts: verifier.Verifier) -> Callable[[], dict[str, Any] | None]:
    """Return a function that foresees stage 01: the counts of its manifest, or None when nothing says how many."""

    def foresee() -> dict[str, Any] | None:
        from eagle3.traces.self_prompts import count_of

        section, known = _configured(stage, GenerateOptions).generate, estimates.reference(facts)
        if own := count_of(section.prompts):
            samples, origin = min(own, stage.common.limit or own), f"as many as {section.prompts} invents"
            tokens = samples * (section.max_tokens + estimates.INVENTED_TOKENS)
        elif section.prompts and Path(section.prompts).exists():
            from eagle3.traces.prompts import PromptSource
            from eagle3.traces.worklist import CHARACTERS_PER_TOKEN

            counts = PromptSource(section, stage.common.limit).scan(stage.check_stop)
            samples, origin = counts.replies, f"as many as {section.prompts} has"
            tokens = counts.characters // CHARACTERS_PER_TOKEN + samples * section.max_tokens
        elif known:
            samples = min(known.samples, stage.common.limit or known.samples)
            origin = f"as in {known.name}" if samples == known.samples else "--limit"
        else:
            return None
        how = "at most"
        if known:
            tokens, how = samples * known.tokens_per_sample, f"{known.tokens_per_sample:,} a sample as in {known.name}"
        logger.info("01_traces has not run yet: planned for %s samples (%s) and %s tokens (%s)", f"{samples:,}", origin,
                    f"{tokens:,}", how)
        return {"counts": {"done": samples, "prompt_tokens": 0, "completion_tokens": tokens}}

    return foresee


def states(stage: Stage, facts: verifier.Verifier) -> Callable[[], dict[str, Any]]:
    """Return a function that foresees stage 02 from the traces that there are or would be."""

    def foresee() -> dict[str, Any]:
        given = _configured(stage, ExtractOptions).extract.traces
        folder, planned = stage.path_of(given, "01_traces"), None if given else traces(stage, facts)
        manifest = stage.upstream(folder, "--traces", planned)
        samples, tokens = limited(manifest["counts"], stage.common.limit)
        logger.info("02_states has not run yet: planned for %s samples, %s tokens", f"{samples:,}", f"{tokens:,}")
        return {"hidden_size": facts.hidden_size, "layers": facts.layers(stage.options.model.layers),
                "counts": {"done": samples, "tokens": tokens}}

    return foresee


def vocab(stage: Stage, facts: verifier.Verifier) -> Callable[[], dict[str, Any]]:
    """Return a function that foresees stage 03."""

    def foresee() -> dict[str, Any]:
        section = _configured(stage, VocabOptions).vocab
        chosen = min(section.draft_vocab_size, facts.vocab_size)
        if section.from_checkpoint and (Path(section.from_checkpoint) / "config.json").exists():
            chosen = flat_config(files.read_json(Path(section.from_checkpoint) / "config.json"))["draft_vocab_size"]
        logger.info("03_vocab has not run yet: planned for a draft vocabulary of %s", f"{chosen:,}")
        return {"vocab_size": facts.vocab_size, "draft_vocab_size": chosen}

    return foresee


def limited(counts: dict[str, Any], limit: int | None) -> tuple[int, int]:
    """Return (samples, tokens) of a manifest's counts, scaled down to --limit."""
    samples = int(counts["done"])
    tokens = int(counts["tokens"] if "tokens" in counts and "prompt_tokens" not in counts
                 else counts.get("prompt_tokens", 0) + counts.get("completion_tokens", 0))
    return (limit, tokens * limit // samples) if limit and samples > limit else (samples, tokens)


def _configured(stage: Stage, options_class: type[Options]) -> Options:
    """Return another stage's options as the configuration file has them."""
    return config.parse(options_class, ["--config", stage.common.config] if stage.common.config else [], "")
