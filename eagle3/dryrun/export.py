"""The dry run of stage 05: how a checkpoint's tensors would be renamed, or which an untrained one would have."""

from pathlib import Path

from eagle3.common import config, log
from eagle3.common.log import logger
from eagle3.common.machine import require_free_disk
from eagle3.common.options import ExportOptions
from eagle3.common.stage import Stage
from eagle3.drafter import verifier
from eagle3.drafter.checkpoint import Export, engine_key
from eagle3.drafter.flat_config import nested_ids
from eagle3.drafter.soundness import require_sound
from eagle3.dryrun import estimates, foreseen
from eagle3.dryrun.dry_run import DryRun


def describe(stage: Stage, export: Export, target: Path) -> None:
    """Print the rename table, what is left out and what would be written; fail where the run would."""
    for key, name in export.table.items():
        logger.info("%s → %s", key, name)
    for key in export.removed:
        logger.info("%s is left out", key)
    size = sum(entry.size for entry in export.shipped.values())
    logger.info("reads   %s; writes %s of %s for %s %s", export.folder, log.size(size), target, export.engine,
                export.version or "(newest)")
    require_sound(stage, export, values=False)
    require_free_disk(target, size, "the exported drafter")


def describe_untrained(options: ExportOptions, stage: Stage) -> None:
    """Print what a run would do with the checkpoint that stage 04 has yet to make."""
    section, facts = options.export, verifier.read(Path(config.require(options.model.path, "--model", "the verifier")))
    dry, vocabulary = DryRun(stage, facts.folder), foreseen.vocab(stage, facts)()["draft_vocab_size"]
    drafter, ids = estimates.drafter(facts, vocabulary), facts.layers(options.model.layers)[:-1]
    version = section.engine_version
    dry.say("reads", f"{stage.run_dir}/04_train/checkpoints/best, which has not been trained yet")
    dry.say("writes", f"{stage.directory / section.to}: {log.size(drafter.served_bytes)} for {section.to} "
            f"{version or '(newest)'}: {drafter.trained:,} parameters in bf16, and the vocabulary mapping (estimate)")
    for name, shape in estimates.tensors(facts, vocabulary).items():
        dry.say("", f"{engine_key(name, section.to)} {list(shape)}")
    dry.say("", f"auxiliary layers {ids}, nested list {nested_ids(ids, section.to, version, facts)}; positions up to "
            f"{section.serving_length or facts.max_positions:,}")
    dry.disk(stage.directory, drafter.served_bytes, "the exported drafter")
    if section.smoke:
        dry.say("engine", dry.engine(options.engine, facts.folder))
    dry.end()
