"""One run per directory: an advisory lock that the kernel drops with its owner."""

import fcntl
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from eagle3.common.errors import PreconditionError
from eagle3.common.files import make_directory


class DirectoryLock:
    """The lock on a stage's directory, from construction to `release`.

    Raises PreconditionError naming the owner when another process holds it. A killed owner needs no
    clean-up: its lock is free, only the name in the file is old.
    """

    def __init__(self, directory: Path) -> None:
        make_directory(directory)
        self._file: IO[str] = open(directory / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 - until release()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise PreconditionError(
                "another run of this stage works on this directory",
                where=directory,
                found=_owner(directory) or "owner unknown",
                fix="wait for it, stop it, or write elsewhere with --out",
            ) from None
        self._file.truncate(0)
        self._file.write(f"pid {os.getpid()} on {os.uname().nodename} since {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")
        self._file.flush()

    def fileno(self) -> int:
        """Return the descriptor that holds the lock; so does a process that inherits it."""
        return self._file.fileno()

    def release(self) -> None:
        """Unlock the directory."""
        self._file.close()


def holder(directory: Path) -> str:
    """Return who holds the directory's lock, "" when nobody does; a lock of another host is believed.

    Reads /proc/locks instead of trying the lock: a look must not get in the way of a stage that starts.
    """
    owner = _owner(directory)
    match = re.match(r"pid (\d+) on (\S+)", owner)
    if not match:
        return ""
    if match[2] != os.uname().nodename:
        return owner
    inode = (directory / ".lock").stat().st_ino
    held = re.compile(rf"FLOCK\s+ADVISORY\s+WRITE\s+{match[1]}\s+\S+:{inode}\s")
    return owner if held.search(Path("/proc/locks").read_text()) else ""


def _owner(directory: Path) -> str:
    path = directory / ".lock"
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else ""
