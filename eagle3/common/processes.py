"""Child processes of a stage: guarded, logged to a file, stopped with everything they started."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

from eagle3.common import child_guard


class Child:
    """A command in a process group of its own, ended with its whole group when this process ends.

    Args:
        command: program and arguments.
        log_path: file to which its stdout and stderr are appended.
        env: variables added to this process's environment.
        piped: connect stdin and stdout to `self.stdin` / `self.stdout` (stderr still goes to the log).
    """

    def __init__(
        self, command: list[str], *, log_path: Path, env: dict[str, str] | None = None, piped: bool = False
    ) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self.command, self.log_path = command, log_path
        read_end, self._lifeline = os.pipe()
        root = str(Path(__file__).resolve().parents[2])
        environment = {**os.environ, **(env or {}), "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))
        with open(log_path, "ab") as log:
            self.log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, child_guard.__file__, str(read_end), *command],
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else log,
                stderr=log,
                env=environment,
                pass_fds=(read_end,),
                start_new_session=True,
            )
        os.close(read_end)

    @property
    def pid(self) -> int:
        """The leader of the session in which the command and all that it starts run."""
        return self._process.pid

    @property
    def stdin(self) -> IO[bytes]:
        """The child's standard input (piped children only)."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """The child's standard output (piped children only)."""
        assert self._process.stdout is not None
        return self._process.stdout

    def poll(self) -> int | None:
        """Return the exit code, or None while it lives."""
        return self._process.poll()

    def stop(self) -> int:
        """End the whole group (SIGTERM, ten seconds, SIGKILL) and return the exit code."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return self._process.wait(timeout=child_guard.GRACE_S + 20)

    def tail(self, lines: int = 20) -> str:
        """Return the last lines that this child has written to its log."""
        with open(self.log_path, "rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self.log_start, end - (1 << 16)))
            text = log.read().decode(errors="replace")
        return "\n".join(line for line in text.splitlines()[-lines:])

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
