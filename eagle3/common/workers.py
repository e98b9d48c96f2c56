"""Several processes of one script, one a GPU: started, watched, and ended together.

The process that the user started (the parent) keeps the stage's lock and manifest and does not train. Its workers
are the same command again, with RANK and WORLD_SIZE in the environment as under torchrun, which works as well when
a user starts it. It is not used here: it kills workers 30 seconds after a signal, in the middle of a large checkpoint;
killed itself, it leaves them running with the GPUs; and it makes every exit code 1, below a traceback of its own.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3.common.errors import Interrupted, PreconditionError, StageError
from eagle3.common.interrupt import Interrupt
from eagle3.common.log import logger

# How long the others may go on when one has failed. They cannot do another step without it, but the first may be
# putting a checkpoint of many gigabytes on the disk, and the others may hang in NCCL for ever.
PEERS_S = float(os.environ.get("EAGLE3_PEERS_S", "180"))  # shorter in tests
_VARIABLE = "EAGLE3_WORKERS"
_PR_SET_PDEATHSIG = 1
_STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def _shared_folder() -> Path | None:
    parent, _, path = os.environ.get(_VARIABLE, "").partition(":")
    return Path(path) if path and parent == str(os.getppid()) else None  # else the variable is somebody else's


# The folder that a worker shares with its parent and the other workers; None in any other process.
FOLDER = _shared_folder()


def world() -> int:
    """Return how many processes train together, this one included; 1 also in their parent."""
    value = os.environ.get("WORLD_SIZE", "")
    return max(1, int(value)) if value.isdigit() else 1


def rank() -> int:
    """Return the number of this process among them, from 0. Alone it is 0, whatever an outer shell has in RANK."""
    return int(os.environ.get("RANK", "0")) if world() > 1 else 0


def local_rank() -> int:
    """Return the number of this process on its machine, and so of its GPU."""
    return int(os.environ.get("LOCAL_RANK", str(rank()))) if world() > 1 else 0


def check_environment(gpus: int) -> None:
    """Refuse variables of a launcher that contradict each other or --gpus: training would wait for nobody."""
    if world() == 1 or FOLDER:
        return
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = ", ".join(f"{name}={os.environ[name]}" if name in os.environ else f"no {name}" for name in names)
    if any(name not in os.environ for name in names) or gpus not in (1, world()):
        raise PreconditionError(
            "the environment says that a launcher such as torchrun started this process as one of several",
            where="environment", found=found,
            expected=f"all four of them, and {gpus} processes" if gpus > 1 else "all four of them",
            fix=f"without a launcher: env {' '.join(f'-u {name}' for name in names)} python …\n"
                f"with one: torchrun --nproc-per-node {world()} …, and --gpus {world()} or no --gpus")


def takes_part(script: str) -> bool:
    """Return whether this process of a script is one of several. Some clusters set a launcher's variables for every
    command; only training is ever divided."""
    return FOLDER is not None or (script == "04_train" and world() > 1)


def follow_parent(script: str) -> None:
    """End at once when the parent is gone, whatever killed it: a worker alone would keep the GPU and wait.

    torchrun's workers do so too.
    """
    if FOLDER is None and not (takes_part(script) and "TORCHELASTIC_RUN_ID" in os.environ):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if FOLDER and os.environ[_VARIABLE].partition(":")[0] != str(os.getppid()):
        os._exit(1)  # it was gone before


def report(error: StageError, code: int, trace: str = "", lost_peer: bool = False) -> bool:
    """Leave an error to the parent, which tells it once for all workers; False when this process has to do so.

    Args:
        trace: of a bug. lost_peer: the error only says that another process is gone.
    """
    if FOLDER is None:
        return False
    told = {"what": error.what, "parts": error.parts, "code": code, "trace": trace, "lost_peer": lost_peer,
            "rank": rank(), "at": time.time()}
    with contextlib.suppress(OSError):
        temporary = FOLDER / f".failure-{rank()}"
        temporary.write_text(json.dumps(told, default=str), encoding="utf-8")
        os.rename(temporary, FOLDER / f"failure-{rank()}.json")
        return True
    return False


def run(command: Sequence[str], count: int, interrupt: Interrupt, keep_open: Sequence[int] = ()) -> None:
    """Run `command` in `count` processes until all have completed.

    The first signal to this process is handed on, once: the workers save and end, however long that takes. The second
    kills them.

    Args:
        keep_open: file descriptors that workers inherit: a lock lasts until the last of them is gone.
    Raises:
        StageError: what the worker said that failed first; PreconditionError: one was killed. Interrupted.
    """
    folder = Path(tempfile.mkdtemp(prefix="eagle3-"))
    processes: list[subprocess.Popen[bytes]] = []

    def end() -> None:
        for process in processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)

    interrupt.on_stop(end)
    try:
        for number in range(count):
            processes.append(subprocess.Popen(command, env=_environment(number, count, folder), pass_fds=keep_open,
                                              stdin=subprocess.DEVNULL, start_new_session=True))
        codes = _wait(processes, interrupt)
        failures = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("failure-*.json")]
    finally:
        end()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel, with a GPU or a disk that hangs
                process.wait(timeout=20)
    if any(codes):
        raise _first_failure(codes, failures, interrupt.signal)


def _environment(number: int, count: int, folder: Path) -> dict[str, str]:
    own = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count,
           _VARIABLE: f"{os.getpid()}:{folder}"}
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // count))}  # else each takes all cores
    outer = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    return threads | outer | {name: str(value) for name, value in own.items()}


def _wait(processes: list["subprocess.Popen[bytes]"], interrupt: Interrupt) -> list[int | None]:
    """Return the exit codes when all have ended; None for one that still ran PEERS_S after the first failure."""
    handed_on, failed_at, told = False, float("inf"), False
    while None in (codes := [process.poll() for process in processes]):
        now = time.monotonic()
        if interrupt.signal is not None and not handed_on:
            handed_on = True
            for process in processes:
                process.send_signal(interrupt.signal)
        failed = next((number for number, code in enumerate(codes) if code), None)
        if failed is not None:
            failed_at = min(failed_at, now)
            starting = interrupt.signal is not None and -interrupt.signal in codes  # nothing can have been trained
            if starting or now > failed_at + PEERS_S:
                break
            if now > failed_at + 3 and not told:
                told = True
                logger.warning("process %d of %d has ended with code %s: the others get %.0f s to finish what they "
                               "write", failed + 1, len(codes), codes[failed], PEERS_S)
        time.sleep(0.1)
    return codes


def _first_failure(codes: list[int | None], failures: list[dict[str, Any]], number: int | None) -> StageError:
    """Return what made the others fail, or what stopped all of them.

    In this order: an error that a worker names, a bug, a worker killed, a signal to stop, a worker that lost another
    (without one that says why), an exit without a word.
    """
    failures.sort(key=lambda failure: failure["at"])
    own = [failure for failure in failures if failure["code"] < 128 and not failure["lost_peer"]]
    own.sort(key=lambda failure: failure["code"] == 1)
    if own:
        return _told(own[0], len(codes))
    dead = [(n, -code) for n, code in enumerate(codes) if code is not None and code < 0 and -code not in _STOPS]
    if dead:
        return _killed(*dead[0], len(codes))
    stops = [number, *(failure["code"] - 128 for failure in failures if failure["code"] > 128),
             *(-code for code in codes if code and code < 0)]
    if found := [stop for stop in stops if stop is not None]:
        return Interrupted(found[0])
    if failures:
        return _told(failures[0], len(codes))
    n, code = next((n, code) for n, code in enumerate(codes) if code)
    return StageError(f"process {n + 1} of {len(codes)} ended with exit code {code} and said no reason",
                      fix="look at its last lines above; the same command resumes from the newest checkpoint")


def _told(failure: dict[str, Any], count: int) -> StageError:
    """Return a worker's error; of a bug say the traceback first."""
    if failure["trace"]:
        logger.error("process %d of %d: %s\nThis is a bug in this stage; the whole log is in the log file.",
                     failure["rank"] + 1, count, failure["trace"])
    error = StageError(failure["what"], **failure["parts"])
    error.exit_code = failure["code"]
    return error


def _killed(n: int, number: int, count: int) -> PreconditionError:
    name = signal.Signals(number).name if number in {*signal.Signals} else "no known one"
    reason = "the kernel does so when memory runs out: see dmesg, and free -h while it trains" \
        if number == signal.SIGKILL else "its last lines above may say why"
    return PreconditionError(f"process {n + 1} of {count} was killed", found=f"signal {number} ({name})",
                             fix=f"{reason}\nthe same command resumes from the newest checkpoint")
