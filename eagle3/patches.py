"""Patches that let older released engines serve EAGLE-3 on a DeepSeek or Kimi verifier.

    python -m eagle3.patches status --python .venv-engine/bin/python
    python -m eagle3.patches apply --python .venv-engine/bin/python
    python -m eagle3.patches revert --root /opt/engine/lib/python3.12/site-packages

Reads patches/<engine>/<version>/*.patch and the SHA-256 of every file before and after, in
patches/<engine>/hashes.json; finds the installed engine without importing it. `apply` changes all files or none and
keeps each original in .eagle3-originals beside the package; `revert` restores the exact bytes. Both may be repeated,
and finish what a killed run left half done. A file with other bytes than the released or the patched ones is never
touched. Restart running servers afterwards.

States: missing (needed, not applied), applied, partly applied (a run was killed), not needed, no patch (for this
version), unknown (a file has been changed by somebody else). Exit codes: 0; 2 for a wrong command; 3 when patches
are needed and not all applied, or when the command could not be done.
"""

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from eagle3.common.errors import StageError
from eagle3.engines import patch_files
from eagle3.engines.lookup import DISTRIBUTIONS, Installation, at_root, find
from eagle3.engines.patching import GOOD, PatchState, apply, revert, survey


def main(arguments: list[str]) -> int:
    """Do what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m eagle3.patches", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("status", "apply", "revert"))
    parser.add_argument("--engine", choices=tuple(DISTRIBUTIONS), default="vllm", help="which engine (default: vllm)")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--python", default=sys.executable, help="interpreter with the engine (default: this one)")
    place.add_argument("--root", type=Path, help="site-packages folder with the engine, instead of --python")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    try:
        where = at_root(given.engine, given.root) if given.root else find(given.engine, given.python)
        changed = {"status": lambda _: [], "apply": apply, "revert": revert}[given.command](where)
        found = survey(where)
    except StageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if given.json:
        shown = {"engine": where.engine, "version": where.version, "root": str(where.root), "changed": changed}
        notes = patch_files.gates(where.engine, where.version)
        print(json.dumps(shown | {"patches": [asdict(entry) for entry in found], "gates": notes}))
    else:
        option = ["--root", str(given.root)] if given.root else ["--python", given.python]
        print(_text(where, found, changed, option, given.command))
    done = given.command == "revert" or all(entry.state in GOOD for entry in found)
    return 0 if done else 3


def _text(where: Installation, found: list[PatchState], changed: list[str], option: list[str], command: str) -> str:
    """Return the states for a terminal, and the command that comes next."""
    lines = [f"{where.engine} {where.version or '(version unknown)'} in {where.root}"]
    lines += [f"  changed {path}" for path in changed]
    width = max(len(entry.name) for entry in found)
    for entry in found:
        lines.append(f"  {entry.name:<{width}}  {entry.state:<14}  {entry.what}")
        lines += [f"  {'':<{width}}  {entry.note}"] if entry.note else []
    for gate in patch_files.gates(where.engine, where.version):
        lines += [f"  {gate['verifier']}: {gate['lacks']}", f"    fix: {gate['fix']}"]
    if command == "status" and any(entry.state in ("missing", "partly applied") for entry in found):
        engine = [] if where.engine == "vllm" else ["--engine", where.engine]
        lines.append(f"next: {shlex.join(['python', '-m', 'eagle3.patches', 'apply', *engine, *option])}")
    elif changed:
        lines.append("restart servers that are running")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
