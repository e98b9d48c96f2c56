"""Stage 05: a checkpoint becomes what vLLM, SGLang or speculators load, whatever published layout it has.

Reads   04_train/checkpoints/best (or --checkpoint: one file or shards with an index; `layers.0.`, `midlayer.` and
        `model.` prefixes; flat configurations and those that speculators saves), the verifier's config.json.
Writes  05_export/{vllm,sglang,speculators}/model.safetensors and config.json; --in-place rewrites the checkpoint's
        own folder instead and keeps the old files as NAME.bak; --check writes nothing.
Needs   no GPU; as much free disk as the drafter's weights. --smoke needs the engine.

Renaming rewrites the header and copies the data as it is. The configuration is written anew for the engine: the
auxiliary layer ids where this version reads them for this verifier, norm flags, RoPE in both spellings, positions
that cover --serving-length. What would silently cost acceptance is a named check, and its failure an error.

  python 05_fix_weight_keys.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi --to sglang --engine-version 0.5.12
  python 05_fix_weight_keys.py --model models/x --checkpoint some/drafter --to vllm --out exported --check
"""

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from eagle3.common import config, files, findings, log, tensor_files
from eagle3.common.errors import PreconditionError, UsageError
from eagle3.common.log import logger
from eagle3.common.options import BenchmarkSection, ExportOptions
from eagle3.common.script import main
from eagle3.common.stage import Stage, require_free_disk
from eagle3.drafter import verifier
from eagle3.drafter.checkpoint import Export

CONFIG = "config.json"
PROMPTS = Path(__file__).parent / "prompts" / "benchmark.jsonl"


def run(options: ExportOptions, stage: Stage) -> None:
    """Check the checkpoint, write it under new names with a new config, try it on the engine if asked to."""
    if stage.common.dry_run and not options.export.checkpoint and not (stage.run_dir / "04_train").exists():
        from eagle3.dryrun import dry_run

        return dry_run.export(options, stage)
    export = read_export(options, stage)
    in_place = options.export.in_place
    target = export.folder if in_place else stage.directory / export.engine
    if options.export.smoke:
        check_smoke(options)
    if stage.common.dry_run:
        describe(stage, export, target)
        look_ahead(options, stage)
        return None
    if options.export.check:
        check(stage, export, only=True)
        return None
    engine = look_ahead(options, stage)
    changes = plan(export, target, in_place)
    if in_place and not changes and files.read_json(target / CONFIG) == export.config():
        logger.info("%s is what %s loads already", target, export.engine)
        return None
    if not open_stage(options, stage, export):
        if options.export.smoke:
            smoke(options, stage, export, target)
        return None

    results = check(stage, export)
    written = write(export, target, changes, in_place)
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
        trained={"ids": export.trained_ids, "here": export.trained_here},
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
    folder = stage.path_of(section.checkpoint, "04_train/checkpoints/best")
    fix = "run 04_train.py first, or name a checkpoint with --checkpoint"
    if not folder.is_dir():
        raise PreconditionError("there is no checkpoint", where=folder, fix=fix)
    if section.in_place and (folder / "checksums.json").exists():
        raise PreconditionError("training resumes from this folder, only with the files that it has", where=folder,
                                fix="leave --in-place out")
    from eagle3.checks.drafter_checks import training_of

    training = training_of(folder)
    return Export(
        folder=folder,
        raw=files.read_json(folder / CONFIG, fix=fix),
        tensors=tensor_files.read(folder),
        verifier=facts,
        engine=section.to,
        version=section.engine_version or installed_version(options),
        serving_length=section.serving_length or facts.max_positions,
        given_ids=facts.layers(options.model.layers)[:-1] if options.model.layers else [],
        trained_ids=training["trained_ids"],
        trained_here=training["trained_here"],
        keeps_embedding=section.trained_embedding,
    )


def installed_version(options: ExportOptions) -> str | None:
    """Return the installed engine's version, or None for the newest."""
    if options.export.to == "speculators":
        return None
    from eagle3.common.options import EngineOptions
    from eagle3.engines import installed

    return installed.engine_version(EngineOptions(kind=options.export.to, python=options.engine.python))


def check(stage: Stage, export: Export, *, only: bool = False, values: bool = True) -> list[findings.Finding]:
    """Print what every check finds; PreconditionError when one fails. `only`: the report is the result."""
    from eagle3.drafter import export_checks

    results = export_checks.run(export, values=values)
    for each in results:
        if only or stage.common.dry_run or each.status == findings.WARN:
            logger.log({"ok": logging.INFO, "warn": logging.WARNING, "fail": logging.ERROR}[each.status], each.line())
    failed = any(each.status == findings.FAIL for each in results)
    if stage.common.json and (only or failed):
        print(json.dumps({"checkpoint": str(export.folder), "to": export.engine, "version": export.version,
                          "checks": findings.as_json(results)}, indent=2))
    findings.require(results, export.folder)
    if only:
        logger.info("%s is sound: %d checks, %d tensors", export.folder, len(results), len(export.tensors))
    return results


def open_stage(options: ExportOptions, stage: Stage, export: Export) -> bool:
    """Lock the directory and say whether there is work; --in-place has no earlier result to be stale."""
    results = config.result_options(options) | {"export.engine_version": export.version}
    identities = {path.name: files.sampled_digest(path) for path in sorted({e.file for e in export.tensors.values()})}
    identities |= {CONFIG: files.sha256_file(export.folder / CONFIG),
                   "verifier": files.sha256_file(export.verifier.folder / CONFIG)}
    if options.export.in_place:
        return stage.open(inputs=identities, results=results, grows=True, holds=lambda: False)
    return stage.open(inputs=identities, results=results)


def layout(export: Export, in_place: bool) -> dict[str, dict[str, tensor_files.Entry]]:
    """Return {file name: its tensors by new name}: one file, or in place the files that there are."""
    own = sorted(path.name for path in {entry.file for entry in export.tensors.values()})
    planned: dict[str, dict[str, tensor_files.Entry]] = {}
    for name, entry in export.shipped.items():
        place = entry.file.name if entry.file.parent == export.folder else own[0]
        planned.setdefault(place if in_place else tensor_files.SINGLE, {})[name] = entry
    return planned


def plan(export: Export, target: Path, in_place: bool) -> dict[Path, dict[str, tensor_files.Entry]]:
    """Return {file to write: its tensors by new name}; in place only files that change."""
    planned = {target / name: tensors for name, tensors in layout(export, in_place).items()}
    if not in_place:
        return planned
    return {path: tensors for path, tensors in planned.items()
            if tensors.keys() != tensor_files.read_header(path).keys()}


def write(
    export: Export, target: Path, changes: dict[Path, dict[str, tensor_files.Entry]], in_place: bool
) -> dict[str, Path]:
    """Write weights and config beside their final names, then rename all of them; return the files by name."""
    require_free_disk(target, sum(e.size for tensors in changes.values() for e in tensors.values()),
                      "the exported drafter")
    index = target / tensor_files.INDEX
    outputs = [*changes, target / CONFIG, *([index] if in_place and index.exists() else [])]
    backups = {path: path.with_name(f"{path.name}.bak") for path in outputs if in_place}
    for path, backup in backups.items():
        if backup.exists() and not backup.samefile(path):
            raise PreconditionError("an old file is kept there already", where=backup, fix="move it away")
    with contextlib.ExitStack() as stack:  # renames in reverse order: weights first
        temporary = {path: stack.enter_context(files.replacing(path)) for path in reversed(outputs)}
        for path, tensors in changes.items():
            tensor_files.write(temporary[path], tensors)
            logger.info("%s: %d tensors, %s", path, len(tensors), log.size(sum(e.size for e in tensors.values())))
        temporary[target / CONFIG].write_text(json.dumps(export.config(), indent=2) + "\n", encoding="utf-8")
        if index in temporary:
            tensor_files.write_index(temporary[index], layout(export, in_place))
        for path, backup in backups.items():
            keep(path, backup)
    return {path.name: path for path in outputs}


def keep(path: Path, backup: Path) -> None:
    """Give an old file a second name, so that its own can be taken over in one step."""
    try:
        os.link(path, backup)
    except FileExistsError:  # of a run that was killed right here
        return
    except OSError:  # a file system without hard links
        os.rename(path, backup)


def describe(stage: Stage, export: Export, target: Path) -> None:
    """Print the rename table, what is left out and what would be written; fail where the run would."""
    for key, name in export.table.items():
        logger.info("%s → %s", key, name)
    for key in export.removed:
        logger.info("%s is left out", key)
    size = sum(entry.size for entry in export.shipped.values())
    logger.info("reads   %s; writes %s of %s for %s %s", export.folder, log.size(size), target, export.engine,
                export.version or "(newest)")
    check(stage, export, values=False)
    require_free_disk(target, size, "the exported drafter")


# --- on the engine ----------------------------------------------------------------------------------------


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


def smoke(options: ExportOptions, stage: Stage, export: Export, drafter: Path) -> dict[str, Any]:
    """Ask a few prompts at temperature 0 and return the acceptance; PreconditionError when it is too low."""
    from eagle3.benchmark import load
    from eagle3.checks import preflight
    from eagle3.engines import defaults, launch
    from eagle3.traces import prompts

    section, model = options.export, Path(options.model.path)
    preflight.before_drafter(options, stage, drafter, export)
    asked = prompts.read_prompts(Path(section.smoke_prompts or PROMPTS), section.smoke_count)
    load_section = BenchmarkSection(max_tokens=section.smoke_tokens, temperature=0.0)
    arguments = defaults.no_prefix_caching(options.engine)
    arguments = [*arguments, "--trust-remote-code"] if options.model.trust_remote_code else arguments
    speculative = {"model": str(drafter), "num_speculative_tokens": section.smoke_draft_tokens}
    with launch.serve(options.engine, model, stage=stage, label=f"{stage.directory.name}-smoke",
                      extra_args=arguments, speculative=speculative) as server:
        figures, _ = load.measure(server, asked, load_section, len(asked), stage, "smoke")
    acceptance = figures["acceptance"]
    files.write_json(stage.directory / "smoke.json", {"drafter": str(drafter), "acceptance": acceptance})
    first = acceptance["by_position"][0] if acceptance and acceptance["by_position"] else None
    if first is None or first < section.min_first_acceptance:
        measured = "the engine does not count" if first is None else f"{first:.1%} of {acceptance['drafts']:.0f} rounds"
        raise PreconditionError(
            "the engine serves the drafter but accepts too little of it",
            where=drafter,
            expected=f"the first draft token accepted in {section.min_first_acceptance:.0%} of the rounds or more",
            found=measured,
            fix="compare with what stage 04 predicted; `--check` names what is known to cost acceptance",
        )
    logger.info("smoke: first draft token accepted in %.1f%% of %d rounds, acceptance length %.3f", 100 * first,
                acceptance["drafts"], acceptance["length"])
    return acceptance


if __name__ == "__main__":
    main(__doc__, ExportOptions, run)
