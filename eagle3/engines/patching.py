"""Patching an installed engine: where each patch stands, applying them all or none, and taking them back.

Patches and the SHA-256 of every file before and after lie in patches/<engine>/; the originals are kept in
.eagle3-originals beside the package. What a killed run left half done is finished by the next. A file with other bytes
than the released or the patched ones is never touched.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from eagle3.common import files
from eagle3.common.errors import PreconditionError
from eagle3.common.versions import numbers
from eagle3.engines import patch_files
from eagle3.engines.lookup import Installation
from eagle3.engines.patch_files import base

# Beside the package, not in it: a folder left inside after an uninstall would still import as an empty package.
ORIGINALS = ".eagle3-originals"
NOT_NEEDED_SINCE = {"vllm": "0.18.0", "sglang": "0.5.10"}
GOOD = ("applied", "not needed")


@dataclass
class PatchState:
    """Where one patch stands; `files` maps each of its files to original, patched, unknown or absent."""

    name: str
    state: str
    what: str
    note: str = ""
    files: dict[str, str] = field(default_factory=dict)


def survey(where: Installation) -> list[PatchState]:
    """Return where each patch of an engine stands; reads the files concerned and changes nothing."""
    known = _hashes(where)
    if known is None:
        state, note = _without_patches(where)
        return [PatchState(patch.name, state, patch.what, note) for patch in patch_files.every_patch(where.engine)]
    entries = []
    for patch in patch_files.read_patches(where.engine, base(where.version)):
        seen = {path: _file_state(where.root / path, known[path]) for path in patch.hunks}
        entries.append(PatchState(patch.name, _patch_state(set(seen.values())), patch.what, files=seen))
        entries[-1].note = _unknown_note(where, entries[-1])
    return entries


def apply(where: Installation) -> list[str]:
    """Apply every patch that is missing, all or none; return the files changed.

    Raises PreconditionError when the version has no patches, when a file is neither as released nor as patched
    (nothing is touched), or when the folder is read-only.
    """
    if _hashes(where) is None:
        state, note = _without_patches(where)
        if state == "not needed":
            return []
        raise PreconditionError(
            "there is no patch for this version", where=where.root, found=f"{where.engine} {where.version}", fix=note
        )
    return _change(where, "patched")


def revert(where: Installation) -> list[str]:
    """Restore the released bytes of every patched file, all or none; return the files changed.

    Raises PreconditionError when a file is neither as released nor as patched (nothing is touched), or when the
    folder is read-only.
    """
    return _change(where, "original") if _hashes(where) is not None else []


# --- states -----------------------------------------------------------------------------------------------


def _hashes(where: Installation) -> dict[str, dict[str, str]] | None:
    """Return the known hashes for the installed version, None when there are no patches for it."""
    return patch_files.known_hashes(where.engine).get(base(where.version))


def _without_patches(where: Installation) -> tuple[str, str]:
    """Return (state, note) for a version that has no patches."""
    since, covered = NOT_NEEDED_SINCE[where.engine], patch_files.versions(where.engine)
    if where.version and numbers(where.version) >= numbers(since):
        rest = "; settings mend what is listed below" if patch_files.gates(where.engine, where.version) else ""
        return "not needed", f"since {since}{rest}"
    advice = f"install {where.engine} {since} or newer; patches are there for {', '.join(covered)}"
    return "no patch", advice if where.version else f"its version is unknown; {advice}"


def _file_state(path: Path, known: dict[str, str]) -> str:
    if not path.is_file():
        return "absent"
    digest = files.sha256_file(path)
    return next((name for name, expected in known.items() if digest == expected), "unknown")


def _patch_state(seen: set[str]) -> str:
    if seen & {"unknown", "absent"}:
        return "unknown"
    if len(seen) > 1:
        return "partly applied"
    return "applied" if seen == {"patched"} else "missing"


def _unknown_note(where: Installation, entry: PatchState) -> str:
    """Return which files keep a patch from being handled, and the way out."""
    strange = [path for path, seen in entry.files.items() if seen in ("unknown", "absent")]
    if not strange:
        return ""
    kept = [str(_kept(where, path)) for path in strange if _kept(where, path).exists()]
    copies = f", or copy the released file back from {', '.join(kept)}" if kept else ""
    advice = f"install {where.engine} {where.version} anew{copies}"
    return f"{', '.join(strange)}: neither as released nor as patched; {advice}"


def _kept(where: Installation, path: str) -> Path:
    """Return where a file's original is kept; "" gives the folder of all."""
    folder = where.root / ORIGINALS / f"{where.engine}-{base(where.version)}"
    return folder / f"{path}.orig" if path else folder


# --- changes ----------------------------------------------------------------------------------------------


def _change(where: Installation, wanted: str) -> list[str]:
    """Bring the files of all patches into the wanted state, original or patched: all of them or none."""
    with _one_at_a_time(where):
        pending = _pending(where, wanted)
        for path, (before, _) in pending.items():
            if wanted == "patched":
                files.write_bytes(_kept(where, path), before)
        done: list[str] = []
        try:
            for path, (_, after) in pending.items():
                _replace(where.root / path, after)
                done.append(path)
        except BaseException:
            for path in done:
                _replace(where.root / path, pending[path][0])
            raise
        _sweep(where)
        if wanted == "original":
            shutil.rmtree(_kept(where, ""), ignore_errors=True)
            with contextlib.suppress(OSError):
                (where.root / ORIGINALS).rmdir()
    return list(pending)


def _pending(where: Installation, wanted: str) -> dict[str, tuple[bytes, bytes]]:
    """Return {file: (bytes now, bytes wanted)} of what is not yet so; PreconditionError on an unknown file."""
    entries, known = survey(where), _hashes(where) or {}
    if strange := [entry.note for entry in entries if entry.state == "unknown"]:
        raise PreconditionError(
            "a file has been changed by somebody else; nothing was touched", where=where.root, found="\n".join(strange)
        )
    pending = {}
    patches = patch_files.read_patches(where.engine, base(where.version))
    hunks = {path: part for patch in patches for path, part in patch.hunks.items()}
    for path, seen in [item for entry in entries for item in entry.files.items()]:
        if seen != wanted:
            before = (where.root / path).read_bytes()
            after = patch_files.patched(before, hunks[path], reverse=wanted == "original")
            if patch_files.sha256(after) != known[path][wanted]:
                raise ValueError(f"{path}: the diff does not lead to the recorded bytes")
            pending[path] = before, after
    return pending


def _replace(path: Path, data: bytes) -> None:
    """Replace a file atomically; a package manager's cache that is hard-linked here keeps its own bytes."""
    with files.replacing(path) as temporary:
        temporary.write_bytes(data)
        shutil.copymode(path, temporary)


def _sweep(where: Installation) -> None:
    """Remove stale bytecode of the touched modules, and what a killed run left behind.

    Python compares bytecode with its source by time and size, but not the kind that is marked as never to be checked.
    """
    for path in _hashes(where) or {}:
        module = where.root / path
        stale = [*(module.parent / "__pycache__").glob(f"{module.stem}.*.pyc")]
        for leftover in [*stale, module.parent / f"{files.TEMPORARY_PREFIX}{module.name}"]:
            with contextlib.suppress(OSError):
                leftover.unlink()


@contextlib.contextmanager
def _one_at_a_time(where: Installation) -> Iterator[None]:
    """Let one process change an installation at a time; PreconditionError when its folders cannot be written."""
    descriptor = os.open(where.root / where.engine, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # NFS cannot lock a folder
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise PreconditionError(
            "the engine's folder cannot be written; the engine is as it was",
            where=error.filename or where.root,
            found=error.strerror,
            fix="run this as the owner of that folder, or give the engine a virtual environment of your own",
        ) from None
    finally:
        os.close(descriptor)
