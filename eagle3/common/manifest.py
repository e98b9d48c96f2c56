"""The manifest of a stage's directory: read, sealed against flipped bits, and what it says was written."""

import json
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
    seal = manifest.pop("seal", None)
    if seal is not None and seal != files.sha256_json(manifest):
        raise PreconditionError("a manifest is not what its stage wrote", where=path, expected=f"SHA-256 {seal[:16]}…",
                                found=f"{files.sha256_json(manifest)[:16]}…", fix=fix or "restore it from a copy")
    return manifest


def outputs_of(manifest: dict[str, Any], directory: Path) -> dict[Path, dict[str, Any]]:
    """Return {file: its recorded bytes and SHA-256} of what a finished stage in `directory` wrote."""
    return {directory / entry["path"]: entry for entry in (manifest.get("outputs") or {}).values()}
