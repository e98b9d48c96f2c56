"""What lies in patches/: the diffs for each engine and version, the hashes of the files they touch, version gates.

patches/<engine>/<version>/*.patch are unified diffs whose first line says what the patch does; no file is touched by
two patches of a version. patches/<engine>/hashes.json holds the SHA-256 of each file as released and as patched,
patches/<engine>/gates.json what a version lacks that no patch mends.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from eagle3.common import files
from eagle3.common.versions import numbers

PATCHES = Path(__file__).resolve().parents[2] / "patches"


@dataclass(frozen=True)
class Hunk:
    """One place of a diff: the lines `old` at line number `old_at` (from 0) against `new` at `new_at`."""

    old_at: int
    old: list[bytes]
    new_at: int
    new: list[bytes]


@dataclass(frozen=True)
class Patch:
    """One concern: its file's name without suffix, what it does, and the hunks of each file below the root."""

    name: str
    what: str
    hunks: dict[str, list[Hunk]]


def versions(engine: str) -> list[str]:
    """Return the versions that have patches, oldest first."""
    return sorted((path.name for path in (PATCHES / engine).iterdir() if path.is_dir()), key=numbers)


def read_patches(engine: str, version: str) -> list[Patch]:
    """Return the patches for a version, in the order of their names."""
    return [read_patch(path) for path in sorted((PATCHES / engine / version).glob("*.patch"))]


def every_patch(engine: str) -> list[Patch]:
    """Return one patch of each name, from the newest version that has it."""
    every = {patch.name: patch for version in versions(engine) for patch in read_patches(engine, version)}
    return [every[name] for name in sorted(every)]


def read_patch(path: Path) -> Patch:
    """Return the patch in a file."""
    what, *lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    hunks: dict[str, list[Hunk]] = {}
    for line in lines:
        if line.startswith(b"--- a/"):
            continue
        if line.startswith(b"+++ b/"):
            here = hunks.setdefault(line[6:].decode(), [])
        elif match := re.match(rb"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@", line):
            here.append(Hunk(int(match[1]) - 1, [], int(match[2]) - 1, []))
        else:
            if line[:1] in (b" ", b"-"):
                here[-1].old.append(line[1:])
            if line[:1] in (b" ", b"+"):
                here[-1].new.append(line[1:])
    return Patch(path.stem, what.decode(), hunks)


def patched(data: bytes, hunks: list[Hunk], *, reverse: bool = False) -> bytes:
    """Return a file's bytes with the hunks applied or taken back; ValueError unless each line is where it should be."""
    lines, result, at = data.split(b"\n"), [], 0
    for hunk in hunks:
        start, old, new = (hunk.new_at, hunk.new, hunk.old) if reverse else (hunk.old_at, hunk.old, hunk.new)
        if lines[start : start + len(old)] != old:
            raise ValueError(f"the lines at {start + 1} are not those of the diff")
        result += lines[at:start] + new
        at = start + len(old)
    return b"\n".join(result + lines[at:])


def sha256(data: bytes) -> str:
    """Return the hexadecimal SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def known_hashes(engine: str) -> dict[str, dict[str, dict[str, str]]]:
    """Return {version: {file: {"original": SHA-256, "patched": SHA-256}}} as recorded."""
    return files.read_json(PATCHES / engine / "hashes.json")


def measured_hashes(engine: str, version: str, root: Path) -> dict[str, dict[str, str]]:
    """Return one version's part of `known_hashes`, from its released files unpacked below `root`.

    Raises ValueError when a patch does not fit them.
    """
    measured = {}
    for patch in read_patches(engine, version):
        for path, hunks in patch.hunks.items():
            data = (root / path).read_bytes()
            measured[path] = {"original": sha256(data), "patched": sha256(patched(data, hunks))}
    return measured


def gates(engine: str, version: str | None) -> list[dict[str, str]]:
    """Return what a version lacks that no patch mends, as rows with from, before, verifier, lacks and fix.

    A row holds for versions of at least `from` and below `before`.
    """
    path = PATCHES / engine / "gates.json"
    rows = files.read_json(path) if path.exists() and version else []
    return [row for row in rows if numbers(row["from"]) <= numbers(version) < numbers(row["before"])]


def base(version: str | None) -> str:
    """Return a version without its build: 0.16.0+cu129 has the Python files of 0.16.0."""
    return (version or "").split("+")[0]
