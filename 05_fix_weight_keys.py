"""Stage 05: a training checkpoint becomes what vLLM or SGLang load.

Reads   04_train/checkpoints/best (or --checkpoint) and the verifier's config.json.
Writes  05_export/{vllm,sglang}/model.safetensors and config.json.
Needs   no GPU; as much free disk as the drafter's weights.

Keys become `midlayer.*`, which every version of both engines accepts; the auxiliary layer ids go where this
engine and version read them; what would silently cost acceptance is an error: missing or unknown keys, shapes,
a mapping that contradicts itself, an embedding that is not the verifier's. --check reports and writes nothing.

  python 05_fix_weight_keys.py --config configs/kimi-k2.5.yaml --run-dir runs/kimi --to sglang --engine-version 0.5.12
  python 05_fix_weight_keys.py --model models/x --checkpoint some/drafter --to vllm --out exported --check
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3 import config, files, verifier
from eagle3.errors import PreconditionError
from eagle3.log import logger
from eagle3.options import ExportOptions
from eagle3.script import main
from eagle3.stage import Stage, require_free_disk

if TYPE_CHECKING:
    import torch

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def run(options: ExportOptions, stage: Stage) -> None:
    """Check the checkpoint, rename its keys, rebuild its config, read the result back."""
    export = options.export
    facts = verifier.read(Path(config.require(options.model.path, "--model", "the verifier")))
    source = find_checkpoint(stage, export.checkpoint)
    version = engine_version(options)
    table = renames(source)
    if stage.common.dry_run:
        return describe(stage, source, table, export.to, version)
    if export.check:
        load_checked(source, table, facts)
        logger.info("%s is sound: %d tensors", source, len(table))
        return None
    results = config.result_options(options) | {"export.engine_version": version}
    identities = {name: files.sha256_file(source / name) for name in (WEIGHTS, CONFIG)}
    identities["verifier"] = files.sha256_file(facts.folder / CONFIG)
    target = stage.directory / export.to
    if not stage.open(inputs=identities, results=results):
        return None

    tensors = load_checked(source, table, facts)
    require_free_disk(target, (source / WEIGHTS).stat().st_size, "the exported drafter")
    write_weights(target / WEIGHTS, {table[key]: tensor for key, tensor in tensors.items()})
    files.write_json(target / CONFIG, served_config(source, options, facts, version))
    check_written(target, tensors, table)
    stage.complete(
        counts={"expected": len(table), "done": len(tensors), "removed": len(table) - len(tensors)},
        outputs={"weights": target / WEIGHTS, "config": target / CONFIG},
        engine={"kind": export.to, "version": version},
        renamed={key: name for key, name in table.items() if key != name},
    )
    logger.info("%s (%s) loads %s: %d tensors, %d keys renamed", export.to, version or "newest", target, len(tensors),
                sum(key != name for key, name in table.items()))
    return None


def find_checkpoint(stage: Stage, given: str | None) -> Path:
    """Return the checkpoint folder; PreconditionError when there is none."""
    source = stage.path_of(given, "04_train/checkpoints/best")
    for name in (WEIGHTS, CONFIG):
        if not (source / name).is_file():
            raise PreconditionError("a checkpoint file is missing", where=source / name,
                                    fix="run 04_train.py first, or name a checkpoint with --checkpoint")
    return source


def engine_version(options: ExportOptions) -> str | None:
    """Return the version to export for: the given one, the installed one, or None for the newest."""
    if options.export.engine_version:
        return options.export.engine_version
    from eagle3 import engines
    from eagle3.options import EngineOptions

    engine = EngineOptions(kind=options.export.to, python=options.engine.python)
    return engines.engine_version(engine)


def renames(source: Path) -> dict[str, str]:
    """Return {name in the file: name for the engines} from the file's header alone."""
    from eagle3.checkpoint import rename_table

    with open(source / WEIGHTS, "rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))

    keys = [key for key in json.loads(header) if key != "__metadata__"]
    return rename_table(keys, source)


def load_checked(source: Path, table: dict[str, str], facts: verifier.Verifier) -> "dict[str, torch.Tensor]":
    """Return the tensors to ship under their old names, after every check; a copy of the embedding is left out."""
    from safetensors.torch import load_file

    from eagle3.checkpoint import canonical_key, check_tensors

    tensors = load_file(source / WEIGHTS)
    drafter = files.read_json(source / CONFIG)
    if drafter["vocab_size"] != facts.vocab_size or drafter["hidden_size"] != facts.hidden_size:
        raise PreconditionError(
            "the drafter belongs to another verifier",
            where=source / CONFIG,
            expected=f"vocabulary {facts.vocab_size}, hidden size {facts.hidden_size}",
            found=f"vocabulary {drafter['vocab_size']}, hidden size {drafter['hidden_size']}",
            fix="give the drafter's own verifier with --model",
        )
    check_tensors({canonical_key(key): tensor for key, tensor in tensors.items()}, drafter, source)
    for key in [key for key in table if canonical_key(key) == "embed_tokens.weight"]:
        refuse_foreign_embedding(tensors.pop(key), facts, source)
        logger.info("left out %s: it equals the verifier's, which engines use anyway", key)
    return tensors


def refuse_foreign_embedding(embedding: "torch.Tensor", facts: verifier.Verifier, source: Path) -> None:
    """Raise unless the checkpoint's embedding is the verifier's own."""
    own = verifier.load_shared_weights(facts, ("embed_tokens",))["embed_tokens"]
    if embedding.shape != own.shape or not bool((embedding.to(own.dtype) == own).all()):
        raise PreconditionError(
            "the checkpoint ships an embedding that is not the verifier's",
            where=source,
            expected="no embed_tokens.weight, or the verifier's",
            found="another table: vLLM would use it, SGLang would ignore it",
            fix="remove it if it was never trained; a trained embedding cannot be served by SGLang",
        )


def served_config(
    source: Path, options: ExportOptions, facts: verifier.Verifier, version: str | None
) -> dict[str, Any]:
    """Return the config.json of the export."""
    from eagle3.checkpoint import engine_config

    return engine_config(
        files.read_json(source / CONFIG),
        engine=options.export.to,
        version=version,
        target_model_type=facts.model_type,
        serving_length=options.export.serving_length or facts.max_positions,
    )


def write_weights(path: Path, tensors: "dict[str, torch.Tensor]") -> None:
    """Write a safetensors file atomically."""
    from safetensors.torch import save_file

    with files.replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})


def check_written(target: Path, tensors: "dict[str, torch.Tensor]", table: dict[str, str]) -> None:
    """Read the export back: every kept tensor is bit-identical under its new name."""
    import torch
    from safetensors.torch import load_file

    written = load_file(target / WEIGHTS)
    wrong = [key for key, tensor in tensors.items() if not torch.equal(written.get(table[key], torch.empty(0)), tensor)]
    if wrong or len(written) != len(tensors):
        raise PreconditionError("the export differs from the checkpoint", where=target, found=", ".join(wrong),
                                fix="check the disk, then run the stage again with --restart")


def describe(stage: Stage, source: Path, table: dict[str, str], engine: str, version: str | None) -> None:
    """Print the rename table and the target."""
    for key, name in table.items():
        logger.info("%s → %s", key, name)
    logger.info("reads   %s; writes %s for %s %s", source, stage.directory / engine, engine, version or "(newest)")


if __name__ == "__main__":
    main(__doc__, ExportOptions, run)
