"""An engine that stands still while it starts: noticed by its silence, looked at, named.

An engine that loads writes log lines, computes, reads weights or works on its GPUs. One that hangs does none of it, and
would do so until the start-up time-out. What it waits for is most often in its last log lines or in its stacks. An
engine that spins (as NCCL does when a rank is missing) computes, and is left to the time-out.
"""

import contextlib
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from eagle3.common import machine
from eagle3.common.errors import PreconditionError
from eagle3.common.log import duration
from eagle3.common.options import EngineOptions
from eagle3.common.processes import Child
from eagle3.engines import installed

_LOOK_S = 5.0
_BUSY = 0.02  # of one core: idle event loops and watchdogs of an engine that hangs stay below
_READ_BYTES = 1 << 20  # a second, over all processes: they read less from their pipes and sockets
_STACK_S = 20
_TICKS = os.sysconf("SC_CLK_TCK")

# What its last lines speak of: what it most likely hangs in, and what to try (vLLM's flag, SGLang's).
_CAUSES = (
    (r"cuda.?graph|captur", "capturing CUDA graphs", "--enforce-eager", "--disable-cuda-graph"),
    (r"all.?reduce", "the custom all-reduce, which some PCIe-only GPUs lack", "--disable-custom-all-reduce",
     "--disable-custom-all-reduce"),
    (r"nccl|init_process_group|distributed|rank", "GPUs that do not reach each other",
     "--engine-env '{\"NCCL_P2P_DISABLE\": \"1\"}'", "--engine-env '{\"NCCL_P2P_DISABLE\": \"1\"}'"),
    (r"address already in use|\bport\b|bind", "a port that another program holds",
     "no --port in the engine's arguments", "no --port in the engine's arguments"),
)


@dataclass(frozen=True)
class _Signs:
    """What a process group has done so far: bytes of log, seconds of CPU, bytes read."""

    log: int
    cpu: float
    read: int


class Watch:
    """Watches an engine that starts; `check` is cheap and may be called often."""

    def __init__(self, engine: EngineOptions, child: Child) -> None:
        self._engine, self._child, self._limit_s = engine, child, engine.stall_min * 60
        self._gpus = engine.env.get("CUDA_VISIBLE_DEVICES")
        self._alive = self._looked = time.monotonic()
        self._signs, self._used = self._look(), list[int]()

    def check(self) -> None:
        """Raise PreconditionError once the engine has been silent for --engine-stall-min; its stacks are then kept."""
        now = time.monotonic()
        apart = now - self._looked
        if not self._limit_s or apart < min(_LOOK_S, self._limit_s / 4):
            return
        before, self._signs, self._looked = self._signs, self._look(), now
        if self._works(before, apart):
            self._alive = now
        elif now - self._alive >= self._limit_s:
            raise self._error(now - self._alive)

    def _works(self, before: _Signs, apart: float) -> bool:
        after = self._signs
        # A process that ended takes its share of both totals along.
        if (after.log != before.log or abs(after.cpu - before.cpu) > _BUSY * apart
                or abs(after.read - before.read) > _READ_BYTES * apart):
            return True
        used, self._used = self._used, [gpu.used_mib for gpu in machine.gpus(self._gpus)]
        return self._used != used or any(load > 0 for load in machine.gpu_loads(self._gpus))

    def _look(self) -> _Signs:
        cpu, read = 0.0, 0
        for pid in _members(self._child.pid):
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                cpu += (int(fields[11]) + int(fields[12])) / _TICKS  # utime, stime: fields 14 and 15 of proc(5)
            with contextlib.suppress(OSError, ValueError):
                told = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
                # read() counts in rchar, also from a network; a mapped file's pages only in read_bytes.
                read += int(told["rchar"]) + int(told["read_bytes"])
        return _Signs(self._child.log_path.stat().st_size, cpu, read)

    # --- what is said ---

    def _error(self, silent_s: float) -> PreconditionError:
        tail, stacks = self._child.tail(20), self._dump()
        flag = 2 if self._engine.kind == "vllm" else 3
        last = tail[-2000:].lower()
        likely = sorted(_CAUSES, key=lambda cause: not re.search(cause[0], last))
        named = [f"{cause[1]}{' (its log speaks of it)' if re.search(cause[0], last) else ''}: {cause[flag]}"
                 for cause in likely]
        return PreconditionError(
            f"the engine stands still: for {duration(silent_s)} no log line, no CPU time, nothing read, no GPU work",
            where=self._child.log_path,
            found=f"{stacks}\nthe end of its log:\n{tail}",
            fix="it was stopped. Known causes, and what to try with --engine-args:\n" + "\n".join(named)
            + "\nif it only waits for a slow disk, raise --engine-stall-min (0: never)",
        )

    def _dump(self) -> str:
        """Write the Python stacks of every process of the engine beside its log, if py-spy is there."""
        beside = Path(installed.interpreter(self._engine)).parent / "py-spy"
        tool = str(beside) if beside.is_file() else shutil.which("py-spy")
        if not tool:
            return "where it stands is not known: py-spy is not installed (pip install py-spy, and run it again)"
        path = self._child.log_path.with_suffix(".stacks")
        parts = []
        for pid in _members(self._child.pid):
            if pid == self._child.pid:
                continue  # our own guard
            try:
                done = subprocess.run([tool, "dump", "--pid", str(pid)], capture_output=True, text=True,
                                      timeout=_STACK_S)
                parts.append(done.stdout or f"process {pid}: {done.stderr.strip()[-300:]}\n")
            except (OSError, subprocess.TimeoutExpired) as error:
                parts.append(f"process {pid}: {error}\n")
        path.write_text("\n".join(parts), encoding="utf-8")
        return f"its stacks: {path}"


def _members(session: int) -> list[int]:
    """Return the processes of a session, its leader included: a child of a stage has one of its own."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                found.append(int(entry.name))
    return sorted(found)
