"""Waiting for processes, and whether they still live."""

import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def wait_for(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Return the first true value of `condition`; AssertionError when there is none in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
    return value


def lives(pid: int) -> bool:
    """Say whether a process runs; a zombie that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids: Iterable[int], seconds: float = 0.0) -> bool:
    """Say whether none of the processes runs after at most so many seconds."""
    deadline, left = time.monotonic() + seconds, list(pids)
    assert left, "no process to look for"
    while any(lives(pid) for pid in left):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def end(process: subprocess.Popen, seconds: float = 20) -> tuple[int, str]:
    """Return (exit code, stderr) of a process that ends by itself."""
    _, errors = process.communicate(timeout=seconds)
    return process.returncode, errors


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on just now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
