"""One run per directory: an advisory lock that the kernel drops with its owner, or a file where there are none."""

import contextlib
import errno
import fcntl
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from eagle3.common.errors import PreconditionError
from eagle3.common.log import logger

OWNER = ".lock-owner"  # there while a run holds a directory on a file system without locks
_TAKING_OVER = ".lock-taken-over"
_HELD = (errno.EWOULDBLOCK, errno.EACCES)


class DirectoryLock:
    """The lock on a stage's directory, from construction to `release`.

    Raises PreconditionError naming the owner when another process holds it. A killed owner needs no
    clean-up: its lock is free, only the name in the file is old. Where a file system has no locks (Lustre mounted
    without them, some FUSE and network mounts), the file OWNER is the lock: whoever creates it holds the directory,
    and it counts for as long as its process lives. A process of another host cannot be looked for and is believed.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._owns_file = directory, False
        self._file: IO[str] = open(directory / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 - until release()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            if error.errno in _HELD:
                raise _held(directory, _text(directory / ".lock")) from None
            logger.warning("this file system has no locks (%s): %s marks that this run works on %s", error.strerror,
                           OWNER, directory)
            _own(directory)
            self._owns_file = True
            self._file = open(directory / ".lock", "a+", encoding="utf-8")  # noqa: SIM115
        self._file.truncate(0)
        self._file.write(_me())
        self._file.flush()

    def fileno(self) -> int:
        """Return the descriptor that holds the lock; so does a process that inherits it."""
        return self._file.fileno()

    def release(self, moved: Path | None = None) -> None:
        """Unlock the directory, which may have been moved since."""
        self._file.close()
        if self._owns_file:
            with contextlib.suppress(OSError):
                ((moved or self._directory) / OWNER).unlink()


def holder(directory: Path) -> str:
    """Return who holds the directory's lock, "" when nobody does; a lock of another host is believed.

    Reads /proc/locks instead of trying the lock: a look must not get in the way of a stage that starts.
    """
    if (directory / OWNER).exists():
        owner = _text(directory / OWNER)
        return owner if _lives(directory, owner) else ""
    owner = _text(directory / ".lock")
    match = re.match(r"pid (\d+) on (\S+)", owner)
    if not match:
        return ""
    if match[2] != os.uname().nodename:
        return owner
    inode = (directory / ".lock").stat().st_ino
    held = re.compile(rf"FLOCK\s+ADVISORY\s+WRITE\s+{match[1]}\s+\S+:{inode}\s")
    return owner if held.search(Path("/proc/locks").read_text()) else ""


# --- a file instead of a lock -----------------------------------------------------------------------------


def _own(directory: Path) -> None:
    """Create OWNER; PreconditionError when its process lives, one taker at a time when it does not."""
    if _created(directory / OWNER):
        return
    owner, guard = _text(directory / OWNER), directory / _TAKING_OVER
    if _lives(directory, owner):
        raise _held(directory, owner, f"; if that run is gone, remove {directory / OWNER}")
    if not _created(guard):  # there for microseconds
        raise _held(directory, _text(guard), f"; if that run is gone, remove {guard}")
    try:
        if _text(directory / OWNER) == owner:
            (directory / OWNER).unlink(missing_ok=True)
        if not _created(directory / OWNER):
            raise _held(directory, _text(directory / OWNER))
    finally:
        guard.unlink(missing_ok=True)


def _created(path: Path) -> bool:
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(_me())
    except FileExistsError:
        return False
    return True


def _lives(directory: Path, owner: str) -> bool:
    """Say whether the run that an OWNER names is there: its process, or one that inherited its open lock file.

    An empty file was created a moment ago. Process ids are given again, so the start of the process counts as well.
    """
    match = re.match(r"pid (\d+) on (\S+) .*started (\S+)", owner)
    if not match or match[2] != os.uname().nodename:
        return True
    return _start(int(match[1])) == match[3] or _is_open(directory / ".lock")


def _is_open(path: Path) -> bool:
    """Say whether another process of this user and host has a file open."""
    wanted = os.path.realpath(path)
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                if any(os.readlink(entry) == wanted for entry in (process / "fd").iterdir()):
                    return True
    return False


def _start(pid: int) -> str:
    """Return when a process started, in ticks since the machine did; "" when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


# --- names ------------------------------------------------------------------------------------------------


def _me() -> str:
    pid = os.getpid()
    return f"pid {pid} on {os.uname().nodename} since {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}, started {_start(pid)}"


def _held(directory: Path, owner: str, more: str = "") -> PreconditionError:
    return PreconditionError(
        "another run of this stage works on this directory",
        where=directory,
        found=owner or "owner unknown",
        fix=f"wait for it, stop it, or write elsewhere with --out{more}",
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""
