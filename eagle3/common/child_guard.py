"""Run a command whose whole process group ends when the stage that wanted it is gone.

Started by `eagle3.common.processes`, never by hand: `python guard.py FD command…`. FD is the read end of a pipe
whose write end only the stage holds. A stage killed by SIGKILL cannot stop its server, and a server killed
alone leaves its workers on the GPU; but the kernel closes the pipe with the stage, so the guard sees the end
of the pipe and stops the group: SIGTERM, ten seconds, SIGKILL. Standard library only: it runs by file name.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = float(os.environ.get("EAGLE3_GRACE_S", "10"))  # shorter in tests
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the command, watch the pipe, return the command's exit code (128 + signal if one ended it)."""
    lifeline = int(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the pipe decides
    child = subprocess.Popen(sys.argv[2:], process_group=0, preexec_fn=_in_child)  # noqa: PLW1509 - single thread
    watch = select.poll()  # select() refuses descriptors above 1,023
    watch.register(lifeline)
    while child.poll() is None:
        if watch.poll(200) and os.read(lifeline, 1) == b"":
            _end_group(child)
            break
    _signal_group(child.pid, signal.SIGKILL)  # workers that outlived their leader
    code = child.wait()
    return 128 - code if code < 0 else code


def _in_child() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # should the guard itself be killed


def _end_group(child: "subprocess.Popen[bytes]") -> None:
    _signal_group(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and _group_lives(child):
        time.sleep(0.1)


def _group_lives(child: "subprocess.Popen[bytes]") -> bool:
    child.poll()  # reap the leader, or its zombie keeps the group alive
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
