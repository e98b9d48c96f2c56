"""Stage 05: a checkpoint becomes what vLLM, SGLang or speculators load, whatever published layout it has.

Reads   04_train/checkpoints/best (or --checkpoint: one file or shards with an index; `layers.0.`, `midlayer.` and
        `model.` prefixes; flat configurations and those that speculators saves), the verifier's config.json.
Writes  05_export/{vllm,sglang,speculators}/model.safetensors and config.json; --in-place rewrites the checkpoint's
        own folder instead and keeps the old files as NAME.bak; --check writes nothing.
Needs   no GPU; as much free disk as the drafter's weights. --smoke needs the engine.

Renaming rewrites the header and copies the data as it is. The configuration is written anew for the engine: the
auxiliary layer ids where this version reads them for this verifier, norm flags, RoPE in both spellings, positions
that cover --serving-length. What would silently cost acceptance is a named check, and its failure an error;
what was written is read again, by safetensors and by the engine's configuration class, and checked as it lies there.

  python 05_fix_weight_keys.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi --to sglang --engine-version 0.5.12
  python 05_fix_weight_keys.py --model models/x --checkpoint some/drafter --to vllm --out exported --check
"""

from pathlib import Path
from typing import Any

from eagle3.common import config, files, findings, tensor_files
from eagle3.common.errors import PreconditionError, UsageError
from eagle3.common.log import logger
from eagle3.common.options import ExportOptions
from eagle3.common.script import main
from eagle3.common.stage import Stage
from eagle3.drafter import config_keys, verifier
from eagle3.drafter.checkpoint import CHECKSUMS, Export, prove

CONFIG = "config.json"
PROMPTS = Path(__file__).parent / "prompts" / "benchmark.jsonl"


def run(options: ExportOptions, stage: Stage) -> None:
    """Check the checkpoint, write it under new names with a new config, try it on the engine if asked to."""
    if stage.common.dry_run and not options.export.checkpoint and not (stage.run_dir / "04_train").exists():
        from eagle3.dryrun.export import describe_untrained

        return describe_untrained(options, stage)
    export = read_export(options, stage)
    in_place = options.export.in_place
    target = export.folder if in_place else stage.directory / export.engine
    if options.export.smoke:
        check_smoke(options)
    if stage.common.dry_run:
        from eagle3.dryrun.export import describe

        describe(stage, export, target)
        look_ahead(options, stage)
        return None
    from eagle3.checks.written import require_written
    from eagle3.drafter.export_files import files_to_write, write
    from eagle3.drafter.soundness import require_sound

    if options.export.check:
        require_sound(stage, export, only=True)
        return None
    engine = look_ahead(options, stage)
    changes = files_to_write(export, target, in_place)
    if in_place and not changes and files.read_json(target / CONFIG) == export.config():
        logger.info("%s is what %s loads already", target, export.engine)
        return None
    if not open_stage(options, stage, export):
        if options.export.smoke:
            smoke(options, stage, export, target)
        return None

    results = require_sound(stage, export)
    written = write(export, target, changes, in_place)
    results += require_written(export, target, options.engine.python)
    measured = smoke(options, stage, export, target) if options.export.smoke else None
    table = export.table
    stage.complete(
        counts={"expected": len(export.shipped), "done": len(export.shipped), "removed": len(export.removed)},
        outputs=written,
        engine={"kind": export.engine, "version": export.version},
        renamed={key: name for key, name in table.items() if key != name},
        removed=export.removed,
        checks=findings.as_json(results),
        smoke=measured,
        trained={"ids": export.trained_ids, "here": export.trained_here, "norms": export.trained_norms},
        patches=engine.get("patches", []),
    )
    logger.info("%s (%s) loads %s: %d tensors, %d keys renamed, left out: %s", export.engine,
                export.version or "newest", target, len(export.shipped), len(stage.manifest["renamed"]),
                ", ".join(export.removed) or "nothing")
    return None


def read_export(options: ExportOptions, stage: Stage) -> Export:
    """Return the checkpoint with all that is known about it; PreconditionError when there is none."""
    section = options.export
    facts = verifier.read(Path(config.require(options.model.path, "--model", "the verifier")))
    folder = files.followed(stage.path_of(section.checkpoint, "04_train/checkpoints/best"))
    fix = "run 04_train.py first, or name a checkpoint with --checkpoint"
    if not folder.is_dir():
        raise PreconditionError("there is no checkpoint", where=folder, fix=fix)
    if section.in_place and (folder / CHECKSUMS).exists():
        raise PreconditionError("training resumes from this folder, only with the files that it has", where=folder,
                                fix="leave --in-place out")
    from eagle3.checks.drafter_checks import training_of

    prove(folder, stage.proof_cache)
    training = training_of(folder)
    return Export(
        folder=folder,
        raw=config_keys.read(folder, fix),
        tensors=tensor_files.read(folder),
        verifier=facts,
        engine=section.to,
        version=section.engine_version or installed_version(options),
        serving_length=section.serving_length or facts.max_positions,
        given_ids=facts.layers(options.model.layers)[:-1] if options.model.layers else [],
        trained_ids=training["trained_ids"],
        trained_here=training["trained_here"],
        trained_norms=training["trained_norms"],
        keeps_embedding=section.trained_embedding,
    )


def installed_version(options: ExportOptions) -> str | None:
    """Return the installed engine's version, or None for the newest."""
    if options.export.to == "speculators":
        return None
    from eagle3.common.options import EngineOptions
    from eagle3.engines import installed

    return installed.engine_version(EngineOptions(kind=options.export.to, python=options.engine.python))


def check_smoke(options: ExportOptions) -> None:
    """Refuse --smoke before any work when its engine is another one."""
    kind = "sglang" if options.export.to == "sglang" else "vllm"
    if options.engine.kind != kind:
        raise UsageError("--smoke starts the engine that the export is for", where="--engine", expected=kind,
                         found=options.engine.kind, fix=f"add --engine {kind}, with its interpreter and arguments")


def look_ahead(options: ExportOptions, stage: Stage) -> dict[str, Any]:
    """Look at what the engine of --smoke needs, before any work; return what the manifest says of it."""
    if not options.export.smoke:
        return {}
    from eagle3.checks import preflight

    return preflight.before_engine(options, stage, speculates=True)


def open_stage(options: ExportOptions, stage: Stage, export: Export) -> bool:
    """Lock the directory and say whether there is work; --in-place has no earlier result to be stale."""
    results = config.result_options(options) | {"export.engine_version": export.version}
    identities = {path.name: files.sampled_digest(path) for path in sorted({e.file for e in export.tensors.values()})}
    identities |= {CONFIG: files.sha256_file(export.folder / CONFIG),
                   "verifier": files.sha256_file(export.verifier.folder / CONFIG)}
    if options.export.in_place:
        return stage.open(inputs=identities, results=results, grows=True, holds=lambda: False)
    return stage.open(inputs=identities, results=results)


def smoke(options: ExportOptions, stage: Stage, export: Export, drafter: Path) -> dict[str, Any]:
    """Look at the drafter as it was written, then try it on the engine; return the acceptance."""
    from eagle3.benchmark.smoke import measure
    from eagle3.checks import preflight

    preflight.before_drafter(options, stage, drafter, export)
    return measure(options, stage, drafter, Path(options.export.smoke_prompts or PROMPTS))


if __name__ == "__main__":
    main(__doc__, ExportOptions, run)
