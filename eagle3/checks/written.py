"""An export as it lies on disk, read again by safetensors and the engine's configuration class, and checked anew."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3.checks import drafter_checks
from eagle3.common import findings, tensor_files
from eagle3.common.findings import FAIL, OK, WARN, Finding
from eagle3.common.options import EngineOptions
from eagle3.drafter import angles, config_keys, export_checks
from eagle3.drafter.checkpoint import Export
from eagle3.engines import installed

_TIMEOUT_S = 300
# Every engine loads a drafter's config.json with transformers; speculators' own layout with its class.
_LOAD = """
import json, sys
folder, layout = sys.argv[1:]
if layout == "speculators":
    from speculators import SpeculatorModelConfig
    config = SpeculatorModelConfig.from_pretrained(folder).transformer_layer_config
else:
    sys.modules["torch"] = None  # a configuration needs none of it, and it takes seconds
    from transformers import AutoConfig
    config = AutoConfig.from_pretrained(folder)
names = ("rope_parameters", "rope_theta", "rope_scaling", "max_position_embeddings", "head_dim", "hidden_size",
         "num_attention_heads", "num_key_value_heads", "intermediate_size", "rms_norm_eps", "vocab_size")
print(json.dumps({name: getattr(config, name, None) for name in names}))
"""


def require_written(export: Export, folder: Path, python: str | None = None) -> list[Finding]:
    """Return what the checks find in what was just written there; PreconditionError when one fails.

    Whether RoPE is as trained was asked of the checkpoint; here it has to be the checkpoint's.

    Args:
        export: what was to be written. python: interpreter of the engine; None for this one.
    """
    raw = config_keys.read(folder, "export it again")
    written = dataclasses.replace(export, folder=folder, raw=raw, tensors=tensor_files.read(folder),
                                  given_ids=export.ids)
    found = [each for each in export_checks.run(written) if each.name != "rope-as-trained"]
    if export.engine != "speculators":
        found += drafter_checks.as_served(written)
    found += [_named("rope-of-the-checkpoint", lambda: _rope(export, written)),
              _named("tensors-as-planned", lambda: _tensors(export, folder)),
              _named("config-as-the-engine-loads-it", lambda: _config(export, folder, python))]
    findings.require(found, folder)
    return [dataclasses.replace(each, name=f"written {each.name}") for each in found]


def _named(name: str, check: Callable[[], Finding]) -> Finding:
    reason = "an engine reads the file, not what was meant to be in it"
    return dataclasses.replace(export_checks.attempted(check), name=name, reason=reason)


def _rope(export: Export, written: Export) -> Finding:
    """Compare the RoPE that was written with the checkpoint's, as angles."""
    meant, found = angles.normal(export.flat), angles.normal(written.flat)
    if parts := angles.difference(found, meant, export.flat["head_dim"], export.serving_length):
        return Finding(FAIL, f"{found}, which parts at {parts}", str(meant), "export it again")
    return Finding(OK, f"{found['rope_type']}, theta {found['rope_theta']:g}")


def _tensors(export: Export, folder: Path) -> Finding:
    """Compare names, types and shapes that the safetensors library finds with those that were to be shipped."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in sorted({entry.file for entry in tensor_files.read(folder).values()}):
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 - not a dictionary
                    part = file.get_slice(name)
                    found[name] = part.get_dtype(), tuple(part.get_shape())
        except SafetensorError as error:
            return Finding(FAIL, f"{path}: {error}", "a file that safetensors loads", "export it again")
    planned = {name: (entry.dtype, entry.shape) for name, entry in export.shipped.items()}
    wrong = sorted(name for name in planned.keys() | found.keys() if planned.get(name) != found.get(name))
    if wrong:
        return Finding(FAIL, f"{wrong[0]}: {found.get(wrong[0])}", str(planned.get(wrong[0])), "export it again")
    return Finding(OK, f"{len(found)} tensors")


def _config(export: Export, folder: Path, python: str | None) -> Finding:
    """Let transformers in the engine's interpreter, or here, load the config, and compare what it says as angles."""
    kind = "sglang" if export.engine == "sglang" else "vllm"
    engine = EngineOptions(kind=kind, python=python)
    theirs = export.engine != "speculators" and installed.engine_version(engine) is not None
    interpreter = installed.interpreter(engine) if theirs else sys.executable
    done = subprocess.run([interpreter, "-c", _LOAD, str(folder), export.engine], capture_output=True, text=True,
                          timeout=_TIMEOUT_S)
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["no word of it"]
        missing = words[-1].startswith("ModuleNotFoundError")
        return Finding(WARN if missing else FAIL, words[-1][:400], f"a config that {interpreter} loads",
                       "correct the checkpoint's config.json")
    return _as_meant(export, json.loads(done.stdout.splitlines()[-1]))


def _as_meant(export: Export, loaded: dict[str, Any]) -> Finding:
    """Compare a loaded config with what was to be written: sizes, and RoPE as angles."""
    meant = export.config()
    meant = meant.get("transformer_layer_config") or meant
    wrong = [name for name in loaded if not name.startswith("rope_") and name in meant
             and loaded[name] is not None and loaded[name] != meant[name]]
    if wrong:
        return Finding(FAIL, ", ".join(f"{name} {loaded[name]}" for name in wrong),
                       ", ".join(f"{name} {meant[name]}" for name in wrong), "export it again")
    spelling = "new" if loaded["rope_parameters"] else "old"
    parts = angles.difference(angles.normal(loaded, spelling), angles.normal(export.flat), export.flat["head_dim"],
                            export.serving_length)
    if parts:
        return Finding(FAIL, f"{loaded['rope_parameters'] or loaded['rope_scaling']}, which parts at {parts}",
                       str(export.flat["rope_parameters"]), "serve it with an engine that reads it")
    return Finding(OK, f"loaded, RoPE {loaded['rope_parameters'] or loaded['rope_theta']}")
