"""What the machine is: GPUs and who holds them, their links, disk, shared memory, limits. Asked, never changed."""

import contextlib
import os
import pwd
import re
import resource
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from eagle3.common.errors import PreconditionError
from eagle3.common.log import size

_TIMEOUT_S = 20
MIB = 1 << 20
_LISTENING = "0A"  # as /proc/net/tcp writes it


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi describes it; memory in MiB, capability such as (9, 0), uuid such as GPU-1f…"""

    index: int
    name: str
    total_mib: int
    used_mib: int
    driver: str
    capability: tuple[int, int]
    uuid: str = ""


@dataclass(frozen=True)
class Holder:
    """A process that holds GPU memory (`used_mib`) or a port."""

    pid: int
    used_mib: int
    user: str
    command: str


def gpus(visible: str | None = None) -> list[Gpu]:
    """Return the GPUs, none when there is no nvidia-smi or no GPU.

    Args:
        visible: CUDA_VISIBLE_DEVICES, as the process that will use them sees it; default: this process's. Its order
            is kept, and as in CUDA the first entry that names no GPU ends the list.
    """
    fields = "index,name,memory.total,memory.used,driver_version,compute_cap,uuid"
    found = []
    for row in _rows("--query-gpu=" + fields):
        index, name, total, used, driver, capability, uuid = row
        major, _, minor = capability.partition(".")
        found.append(Gpu(int(index), name, _number(total), _number(used), driver, (_number(major), _number(minor)),
                         uuid))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    if visible is None:
        return found
    chosen: list[Gpu] = []
    for word in visible.split(","):
        named = [gpu for gpu in found if word.strip() and (str(gpu.index) == word.strip()
                                                           or gpu.uuid.startswith(word.strip()))]
        if len(named) != 1:
            break
        chosen += named
    return chosen


def gpu_loads(visible: str | None = None) -> list[int]:
    """Return how busy each GPU was in the last moment, in percent; none when there is no GPU, or it does not tell."""
    wanted = {gpu.index for gpu in gpus(visible)}
    return [_number(load) for index, load in _rows("--query-gpu=index,utilization.gpu") if int(index) in wanted]


def holders() -> list[Holder]:
    """Return the processes that hold GPU memory; those of other containers may have no name here."""
    found = []
    for row in _rows("--query-compute-apps=pid,used_memory"):
        pid, used = row
        found.append(Holder(int(pid), _number(used), *_process(int(pid))))
    return found


def has_nvlink() -> bool:
    """Say whether any two GPUs are joined by NVLink."""
    return bool(re.search(r"\bNV\d+\b", _smi("topo", "-m")))


def port_holder(port: int) -> Holder | None:
    """Return who listens on a TCP port, pid 0 when their processes cannot be seen from here; None if it is free."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(table).read_text(encoding="utf-8").splitlines()[1:]]
            listening = [row for row in rows if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port]
            sockets |= {f"socket:[{row[9]}]" for row in listening}
    if not sockets:
        return None
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and any(os.readlink(entry) in sockets for entry in (process / "fd").iterdir()):
                return Holder(int(process.name), 0, *_process(int(process.name)))
    return Holder(0, 0, "?", "?")


def memory() -> int:
    """Return the size of the RAM in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def shared_memory() -> int:
    """Return the size of /dev/shm in bytes (0 where there is none)."""
    path = Path("/dev/shm")
    return shutil.disk_usage(path).total if path.is_dir() else 0


def free_disk(directory: Path) -> int:
    """Return the free bytes of the file system that holds a directory (or will hold it)."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def require_free_disk(directory: Path, needed: int, what: str) -> None:
    """Raise PreconditionError when the file system of `directory` has less than `needed` bytes free."""
    free = free_disk(directory)
    if needed > free:
        raise PreconditionError(
            f"the disk is too small for {what}",
            where=directory,
            expected=f"{size(needed)} free",
            found=f"{size(free)} free",
            fix="name another disk with --out, or take fewer inputs with --limit",
        )


def open_file_limit() -> int:
    """Return how many files a process may open; the hard limit, since engines raise the soft one."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def process_limit() -> int:
    """Return how many processes and threads a user may have (-1: no limit)."""
    return resource.getrlimit(resource.RLIMIT_NPROC)[0]


def clock_skew(directory: Path) -> float:
    """Return by how many seconds the file system's clock differs from this machine's (network disks drift)."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    probe = existing / f".clock-{os.getpid()}"
    try:
        probe.touch()
        return probe.stat().st_mtime - time.time()
    except OSError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)


def _rows(query: str) -> list[list[str]]:
    text = _smi(query, "--format=csv,noheader,nounits")
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if "," in line]


def _smi(*arguments: str) -> str:
    """Return what nvidia-smi prints, "" when it is missing or fails."""
    try:
        result = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""


def _number(text: str) -> int:
    return int(float(text)) if re.fullmatch(r"[\d.]+", text) else 0


def _process(pid: int) -> tuple[str, str]:
    """Return (user, command) of a process, "?" for what cannot be told."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return "?", "?"
    try:
        user = pwd.getpwuid(owner).pw_name
    except KeyError:
        user = str(owner)
    return user, words[:120] or "?"
