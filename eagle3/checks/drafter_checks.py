"""Checks of an exported drafter as an installed engine will load it, before it is loaded."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3.checks.subject import Subject
from eagle3.common import config, files, proofs, tensor_files, versions
from eagle3.common import manifest as manifests
from eagle3.common.findings import FAIL, OK, WARN, Finding, said
from eagle3.drafter import config_keys, verifier
from eagle3.drafter.checkpoint import Export, prove, trained_norms, training_record
from eagle3.drafter.flat_config import captured_ids
from eagle3.engines import installed

_SMALL = 1 << 30  # bytes of weights that are read in a second or two
_LAYERS_0_SINCE = {"vllm": (0, 16, 0), "sglang": (0, 5, 12)}  # versions that load `layers.0.` as well as `midlayer.`
_CACHE_SEES_IDS_SINCE = (0, 17, 0)
_SMOKE = "only a run on the engine tells: 05_fix_weight_keys.py --smoke"


def check_drafter(subject: Subject) -> Iterator[Finding]:
    """The drafter belongs to this verifier, and this engine loads all of it and feeds it the trained layers."""
    if subject.drafter is None:
        return
    yield from _as_written(subject, subject.drafter)
    export = read(subject, subject.drafter)
    if export.trained_ids is None:
        yield said(WARN, "drafter provenance", f"layers {export.ids or 'not named'}: unknown provenance, no record of "
                   "a training beside it", _SMOKE)
    for finding in findings(export):
        told = finding.found or finding.reason
        expected = f"; expected {finding.expected}" if finding.expected and finding.status != OK else ""
        yield said(finding.status, f"drafter {finding.name}", told + expected, finding.fix)
    yield from _as_in_training(subject)
    yield from _compile_cache(subject, export)


def _as_in_training(subject: Subject) -> Iterator[Finding]:
    """Say whether tokenizer and template are those with which this run's states were made."""
    path = subject.run_dir / "02_states" / "manifest.json"
    recorded = (files.read_json(path).get("inputs") or {}).get("model") if path.is_file() else None
    if not isinstance(recorded, dict) or subject.folder is None:
        return
    kinds = {"tokenizer": (FAIL, "every token id means something else"),
             "chat_template": (WARN, "the drafter has not seen such prompts")}
    for kind, (level, effect) in kinds.items():
        names = [name for name in recorded if name.startswith(kind) or (kind, name) == ("tokenizer", "merges.txt")]
        changed = [name for name in names if not (subject.folder / name).is_file()
                   or files.sha256_file(subject.folder / name) != recorded[name]]
        if changed:
            yield said(level, f"drafter {kind}", f"{', '.join(changed)} of {subject.folder} is not what the states of "
                       f"{path.parent} were made with: {effect}", "name the folder of the training with --model")


def read(subject: Subject, folder: Path) -> Export:
    """Return the drafter as the installed engine is to serve it, with what the manifests say of its training."""
    facts = verifier.read(Path(config.require(subject.model.path, "--model", "the verifier")))
    raw = config_keys.read(folder, "name an exported drafter with --drafter")
    length = subject.argument("--max-model-len", "--context-length") or ""
    return Export(
        folder=folder,
        raw=raw,
        tensors=tensor_files.read(folder),
        verifier=facts,
        engine=subject.engine.kind,
        version=installed.engine_version(subject.engine),
        serving_length=int(length) if length.isdigit() else facts.max_positions,
        **(subject.training or training_of(folder)),
    )


def training_of(folder: Path) -> dict[str, Any]:
    """Return what stage 05's manifest says of an export, or a checkpoint says of itself: trained ids and the like."""
    manifest = _export_manifest(folder)
    if "trained" in manifest:
        keeps = bool(((manifest.get("options") or {}).get("export") or {}).get("trained_embedding"))
        trained = manifest["trained"]
        return {"trained_ids": trained["ids"], "trained_here": trained["here"], "keeps_embedding": keeps,
                "trained_norms": trained.get("norms") or []}
    ids, here = training_record(folder)
    return {"trained_ids": ids, "trained_here": here, "keeps_embedding": False, "trained_norms": trained_norms(folder)}


def _export_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of the stage 05 that wrote a drafter's folder; {} when there is none."""
    above = folder.resolve().parent
    manifest = manifests.read(above) if (above / "manifest.json").is_file() else {}
    return manifest if manifest.get("stage") == "05_export" else {}


def _as_written(subject: Subject, folder: Path) -> Iterator[Finding]:
    """Say whether the drafter's files are what stage 05, or 04, wrote, by their checksums."""
    cache = subject.run_dir / proofs.CACHE
    cache_there = cache if cache.is_file() else None
    manifest, folder = _export_manifest(folder), folder.resolve()
    recorded = {path: entry for path, entry in manifests.outputs_of(manifest, folder.parent).items()
                if path.parent == folder}
    again = shlex.join(["python", *manifest["argv"]]) if manifest.get("argv") else "05_fix_weight_keys.py"
    for path, (expected, found) in proofs.look(recorded, cache=cache_there).items():
        yield said(FAIL, "drafter files", f"{path}: {found} instead of {expected}",
                   f"restore it from a copy, or export it again: {again}")
    if not recorded:
        prove(folder, cache_there)


def findings(export: Export) -> list[Finding]:
    """Return what the silent killers' checks find, and whether the folder needs no conversion for this engine.

    All weights are read up to 1 GiB; of larger drafters the mapping and an embedding, up to its first difference.
    Whether the engine is patched for the verifier is not asked here: that is seen in the engine itself.
    """
    from eagle3.drafter import export_checks, weight_checks

    small = sum(entry.size for entry in export.tensors.values()) <= _SMALL
    found = export_checks.run(export, values=small)
    if not small:
        found += [export_checks.finding_of(check, export)
                  for check in (weight_checks.mapping_consistent, weight_checks.embedding_is_the_verifiers)]
    found = [each for each in found if each.name != "engine-serves-the-verifier"]
    return found + as_served(export)


def as_served(export: Export) -> list[Finding]:
    """Return whether this engine loads the folder as it is, without conversion."""
    from eagle3.drafter import export_checks

    checks = (keys_as_the_engine_loads_them, ids_as_served, positions_as_served)
    return [export_checks.finding_of(check, export) for check in checks]


def keys_as_the_engine_loads_them(export: Export) -> Finding:
    """Stage 05 would rename what this engine does not load; SGLang up to 0.5.11 skips it without a word."""
    since = _LAYERS_0_SINCE[export.engine]
    reads_both = export.version is None or versions.numbers(export.version) >= since
    strange = [name for name, wanted in export.table.items()
               if name != wanted and not (reads_both and name.startswith("layers.0."))]
    if strange:
        return Finding(FAIL, f"{strange[0]} and {len(strange) - 1} more, which {export.engine} {export.version or ''} "
                       "does not load", export.table[strange[0]],
                       f"05_fix_weight_keys.py --checkpoint {export.folder} --to {export.engine} writes them so")
    return Finding(OK, f"{len(export.table)} names")


def ids_as_served(export: Export) -> Finding:
    """The engine reads the layers from this very config.json, at its own place and in its own numbering."""
    captured = captured_ids(export.raw, export.engine, export.version, export.verifier)
    if export.ids and captured != export.ids:
        return Finding(FAIL, f"{export.engine} {export.version or '(newest)'} captures {captured}", str(export.ids),
                       f"export it for this engine: 05_fix_weight_keys.py --checkpoint {export.folder} --to "
                       f"{export.engine}")
    return Finding(OK, str(captured))


def positions_as_served(export: Export) -> Finding:
    """Past the positions of this very config.json vLLM before 0.27 drafts garbage, and 0.32 nothing at all."""
    path = export.folder.resolve().parent / "manifest.json"
    manifest = files.read_json(path) if path.is_file() else {}
    told = (manifest.get("fingerprint_basis") or {}).get("export.serving_length")
    own, wanted = export.flat["max_position_embeddings"], min(export.serving_length, told or export.serving_length)
    if own < wanted:
        return Finding(FAIL, str(own), f"at least {wanted}",
                       f"export it with --serving-length {wanted}, or serve shorter sequences")
    return Finding(OK, f"{own} for {wanted}")


def _compile_cache(subject: Subject, export: Export) -> Iterator[Finding]:
    """An old vLLM takes compiled code from a time when the drafter had other layer ids."""
    if export.engine != "vllm" or not export.version or versions.numbers(export.version) >= _CACHE_SEES_IDS_SINCE:
        return
    cache = subject.environment.get("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm"))
    root = Path(cache) / "torch_compile_cache"
    if not root.is_dir() or subject.environment.get("VLLM_DISABLE_COMPILE_CACHE") == "1":
        return
    newest = max((os.stat(entry).st_mtime for entry in root.iterdir()), default=0.0)
    if newest and newest < (export.folder / "config.json").stat().st_mtime:
        yield said(WARN, "compile cache", f"{root} is older than the drafter's config.json; vLLM {export.version} does "
                   "not see that auxiliary layer ids have changed",
                   f"rm -r {root}, or set VLLM_DISABLE_COMPILE_CACHE=1")
