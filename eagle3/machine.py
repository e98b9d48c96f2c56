"""What the machine is: GPUs and who holds them, their links, disk, shared memory, limits. Asked, never changed."""

import os
import pwd
import re
import resource
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 20
MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi describes it; memory in MiB, capability such as (9, 0)."""

    index: int
    name: str
    total_mib: int
    used_mib: int
    driver: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Holder:
    """A process that holds GPU memory."""

    pid: int
    used_mib: int
    user: str
    command: str


def gpus() -> list[Gpu]:
    """Return the GPUs, none when there is no nvidia-smi or no GPU."""
    fields = "index,name,memory.total,memory.used,driver_version,compute_cap"
    found = []
    for row in _rows("--query-gpu=" + fields):
        index, name, total, used, driver, capability = row
        major, _, minor = capability.partition(".")
        found.append(Gpu(int(index), name, _number(total), _number(used), driver, (int(major), int(minor or 0))))
    return found


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


def open_file_limit() -> int:
    """Return how many files a process may open; the hard limit, since engines raise the soft one."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


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
