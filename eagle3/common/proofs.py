"""Proof that a file is what its writer recorded: its SHA-256 at the first use, later its size, time and sampled bytes.

A header says nothing of flipped bits and zero-filled tails, and a gigabyte hashes in under a second, so every stage
proves what it reads before it computes with it. What was proved is remembered in the run directory: gigabytes of
weights are read once, unless something about the file has changed since.
"""

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.common import files
from eagle3.common.errors import PreconditionError
from eagle3.common.log import logger, size

CACHE = ".verified.json"  # in a run directory
_SMALL = 64 << 20  # bytes; files up to this are hashed whole every time
_WORTH_SAYING_S = 2.0


def require(recorded: Mapping[Path, Mapping[str, Any]], *, cache: Path | None = None, fix: str = "") -> None:
    """Raise PreconditionError naming every file that is not as recorded.

    Args:
        recorded: {file: {"sha256", and "bytes" where it is known}}.
        cache: JSON file that remembers what was proved; None to prove everything now and write nothing.
        fix: the command that makes the files anew.
    """
    if problems := look(recorded, cache=cache):
        expected, found = (" and ".join(sorted({problem[k] for problem in problems.values()})) for k in (0, 1))
        raise PreconditionError("a file is not what its stage wrote", where="\n".join(map(str, problems)),
                                expected=expected, found=found, fix=fix)


def look(recorded: Mapping[Path, Mapping[str, Any]], *, cache: Path | None = None) -> dict[Path, tuple[str, str]]:
    """Return {file: (expected, found)} of every file that is not as recorded; arguments as of `require`."""
    known = _read(cache)
    started, hashed, problems = time.monotonic(), 0, {}
    for path, entry in recorded.items():
        problem, read = _problem(path, entry, known)
        hashed += read
        if problem:
            problems[path] = problem
    if time.monotonic() - started > _WORTH_SAYING_S:
        logger.info("checksums of %d files proved (%s)", len(recorded), size(hashed))
    if cache is not None and known:
        with contextlib.suppress(OSError, PreconditionError):  # the next run proves it again
            files.write_json(cache, known)
    return problems


def _problem(path: Path, entry: Mapping[str, Any], known: dict[str, list[Any]]) -> tuple[tuple[str, str] | None, int]:
    """Return ((expected, found) of a file that is not as recorded, bytes hashed); note in `known` what was proved."""
    try:
        stat = path.stat()
        wanted = entry.get("bytes", stat.st_size)
        if stat.st_size != wanted:
            return (f"{wanted:,} bytes", f"{stat.st_size:,} bytes"), 0
        if stat.st_size <= _SMALL:
            digest = files.sha256_file(path)
            return _compared(entry["sha256"], digest), stat.st_size
        name, mark = str(path.resolve()), [stat.st_size, stat.st_mtime_ns, files.sampled_digest(path), entry["sha256"]]
        if known.get(name) == mark:
            return None, 0
        problem = _compared(entry["sha256"], files.sha256_file(path))
        if problem is None:
            known[name] = mark
        return problem, stat.st_size
    except FileNotFoundError:
        return ("a file", "none"), 0
    except IsADirectoryError:
        return ("a file", "a folder"), 0


def _compared(wanted: str, found: str) -> tuple[str, str] | None:
    return None if wanted == found else (f"SHA-256 {wanted[:16]}…", f"{found[:16]}…")


def _read(cache: Path | None) -> dict[str, list[Any]]:
    """Return what was proved before; a cache that cannot be read proves nothing."""
    if cache is None or not cache.is_file():
        return {}
    try:
        content = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
