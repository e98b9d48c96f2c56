"""What a file system can do, tried before the work: what is needed is refused by name, what is missing is said once.

Lustre, FUSE, FAT and mounts of object stores lack one call or another, and say so only when it is made, which may be
after hours. Each is made here once, on small files in a folder of its own that is removed again: milliseconds.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from eagle3.common import files
from eagle3.common.errors import PreconditionError
from eagle3.common.log import logger


def look(directory: Path) -> list[str]:
    """Try a directory's file system and return what it lacks that there is a way around, in words.

    Raises PreconditionError naming the call that fails, when there is none.
    """
    folder = directory / f"{files.TEMPORARY_PREFIX}probe-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir()
        for name in ("new", "old"):
            (folder / name).write_bytes(b"1")
        for what, needed in _NEEDED.items():
            _require(what, needed, folder, directory)
        return [f"no {what}: {way}" for what, (way, call) in _MISSED.items() if not _works(call, folder)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def say(directory: Path) -> None:
    """Look, and log what is missing in one line."""
    if missing := look(directory):
        logger.warning("the file system of %s has %s", directory, "; ".join(missing))


def _require(what: str, call: Callable[[Path], object], folder: Path, directory: Path) -> None:
    try:
        call(folder)
    except OSError as error:
        if error.errno in files.DISK_FULL:
            raise files.disk_full(directory) from error
        raise PreconditionError(
            f"this file system cannot {what}, and results are written so", where=directory, found=error.strerror,
            fix="write to another disk with --out (or --run-dir) and copy the result here",
        ) from error


def _works(call: Callable[[Path], object], folder: Path) -> bool:
    try:
        call(folder)
    except OSError as error:
        return error.errno not in (*files.UNKNOWN_CALL, *files.NO_DIRECTORY_SYNC)
    return True


def _grow(folder: Path) -> None:
    with open(folder / "index", "ab", buffering=0) as file:
        file.write(b"12")
    with open(folder / "index", "ab", buffering=0) as file:
        file.write(b"34")
        os.ftruncate(file.fileno(), 2)


def _move(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "x").write_bytes(b"1")
    os.rename(folder / "a", folder / "b")


def _sync_file(folder: Path) -> None:
    with open(folder / "old", "rb+") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _link(folder: Path) -> None:
    os.symlink("old", folder / "link")
    os.symlink("new", folder / "link.new")
    os.replace(folder / "link.new", folder / "link")


# What nothing here can do without: a file is complete under its name or not there, and an index only grows.
_NEEDED: dict[str, Callable[[Path], object]] = {
    "rename a file over another": lambda folder: os.replace(folder / "new", folder / "old"),
    "append to a file and cut it": _grow,
    "rename a folder": _move,
}
# What there is a way around, and which.
_MISSED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "sync of files": ("a power cut may cost what was finished, a kill does not", _sync_file),
    "sync of folders": ("a power cut may cost what was finished last, a kill does not", _sync_folder),
    "symbolic links": ("best and last are text files with the checkpoint's name, which every stage here reads", _link),
}
