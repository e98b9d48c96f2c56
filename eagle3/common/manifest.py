"""The manifest of a stage's directory: read, sealed against flipped bits, and what it says was written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3.common import files
from eagle3.common.errors import PreconditionError


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest with the checksum of its content, by which `read` finds a flipped bit in it."""
    content = json.loads(json.dumps({name: value for name, value in manifest.items() if name != "seal"}))
    return content | {"seal": files.sha256_json(content)}


def read(directory: Path, fix: str = "") -> dict[str, Any]:
    """Return the manifest in a stage's directory; PreconditionError when it is missing or not what was written.

    A manifest without a seal, of an older version, is taken as it is.
    """
    path = directory / "manifest.json"
    manifest = files.read_json(path, fix=fix)
    if not isinstance(manifest, dict):
        raise PreconditionError("not a manifest", where=path, expected="a JSON object",
                                found=type(manifest).__name__, fix=fix)
    fix = fix or "restore it from a copy"
    seal = manifest.pop("seal", None)
    if seal is not None and seal != files.sha256_json(manifest):
        raise PreconditionError("a manifest is not what its stage wrote", where=path, expected=f"SHA-256 {seal!s:.16}…",
                                found=f"{files.sha256_json(manifest)[:16]}…", fix=fix)
    if wrong := [name for name, fits in _FORMS.items() if manifest.get(name) is not None and not fits(manifest[name])]:
        raise PreconditionError("a manifest has values that no stage writes", where=path,
                                found="\n".join(f"{name}: {manifest[name]!r:.80}" for name in wrong), fix=fix)
    return manifest


def _is_output(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("path"), str) and "\0" not in entry["path"] \
        and isinstance(entry.get("sha256"), str) and isinstance(entry.get("bytes", 0), int)


_FORMS: dict[str, Callable[[Any], bool]] = {
    "stage": lambda value: isinstance(value, str),
    "status": lambda value: isinstance(value, str),
    "argv": lambda value: isinstance(value, list) and all(isinstance(word, str) for word in value),
    "outputs": lambda value: isinstance(value, dict) and all(map(_is_output, value.values())),
    **dict.fromkeys(("options", "inputs", "counts", "fingerprint_basis", "seconds"),
                    lambda value: isinstance(value, dict)),
}


def outputs_of(manifest: dict[str, Any], directory: Path) -> dict[Path, dict[str, Any]]:
    """Return {file: its recorded bytes and SHA-256} of what a finished stage in `directory` wrote."""
    return {directory / entry["path"]: entry for entry in (manifest.get("outputs") or {}).values()}
