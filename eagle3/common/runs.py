"""What a run directory holds: each stage's folder, its variants and its old results, from what they say themselves.

Reads manifests, progress figures and locks; starts, locks and changes nothing, so it can be asked at any time.
"""

import contextlib
import json
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.common import lock
from eagle3.common import manifest as manifests
from eagle3.common.errors import PreconditionError, StageError
from eagle3.common.stage import STAGES

SCRIPTS = {name: f"{script}.py" for script, (name, _) in STAGES.items()}
_DISK_BUDGET_S = 0.5  # a folder of 300,000 states takes longer to add up; then the sum is a lower bound


@dataclass
class Entry:
    """One stage's folder. Times are ISO 8601 (UTC), `rate` in units/s, `eta_s` in seconds."""

    folder: str
    stage: str
    state: str
    old: bool = False
    done: int | None = None
    total: int | None = None
    failed: int = 0
    unit: str = ""
    rate: float | None = None
    eta_s: float | None = None
    disk_bytes: int = 0
    disk_bytes_complete: bool = True
    started_at: str = ""
    ended_at: str = ""
    owner: str = ""
    error: str = ""
    argv: list[str] = field(default_factory=list)
    config: str = ""


def survey(run_dir: Path) -> list[Entry]:
    """Return every stage in order, each followed by its variants and its old results.

    Raises PreconditionError when the directory is missing or no stage has run in it.
    """
    if not run_dir.is_dir():
        raise PreconditionError(
            "no such run directory", where=run_dir, fix="give the directory that the stages got as --run-dir"
        )
    deadline = time.monotonic() + _DISK_BUDGET_S
    entries = [entry for folder in run_dir.iterdir() if (entry := _entry(folder, deadline)) is not None]
    if not entries:
        raise PreconditionError(
            "no stage has run in this directory", where=run_dir, expected="folders such as 01_traces with manifest.json"
        )
    present = {entry.folder for entry in entries}
    entries += [Entry(name, name, "not started") for name in SCRIPTS if name not in present]
    order = list(SCRIPTS)
    return sorted(entries, key=lambda e: (order.index(e.stage), e.folder != e.stage, e.old, e.folder))


# --- one folder -------------------------------------------------------------------------------------------


def _entry(folder: Path, deadline: float) -> Entry | None:
    """Return what a folder says about itself; None when it is not a stage's."""
    if not folder.is_dir():
        return None
    old = re.search(r"\.old-\d+$", folder.name) is not None
    owner = lock.holder(folder)
    if not (folder / "manifest.json").exists():
        return Entry(folder.name, folder.name, "running", owner=owner) if owner and folder.name in SCRIPTS else None
    try:
        manifest = manifests.read(folder)
        stage, status = manifest["stage"], manifest["status"]
    except (StageError, KeyError, TypeError) as error:
        stage = next((name for name in SCRIPTS if folder.name.startswith(name)), None)
        first = str(error).splitlines()[0]
        return Entry(folder.name, stage, "unreadable", old, error=f"manifest.json: {first}") if stage else None
    if stage not in SCRIPTS:
        return None
    # A complete result that is being extended keeps its manifest until there is something new.
    state = "running" if owner else "died" if status == "running" else status
    entry = Entry(folder.name, stage, state, old, owner=owner if state == "running" else "")
    entry.started_at, entry.ended_at = manifest.get("started_at") or "", manifest.get("ended_at") or ""
    entry.error = (manifest.get("error") or "").split("\n")[0]
    entry.argv = manifest.get("argv") or []
    entry.config = manifest.get("options", {}).get("common", {}).get("config", "")
    _add_progress(entry, folder, manifest.get("counts") or {})
    entry.disk_bytes, entry.disk_bytes_complete = _disk_bytes(folder, deadline)
    return entry


def _add_progress(entry: Entry, folder: Path, counts: dict[str, Any]) -> None:
    figures: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        figures = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
    seen = {"done": figures.get("done"), "expected": figures.get("total"), "failed": figures.get("failed")}
    seen = {name: value for name, value in seen.items() if value is not None}
    last = seen | counts if entry.ended_at else counts | seen  # counts are final only when the stage has ended
    entry.done, entry.total, entry.failed = last.get("done"), last.get("expected"), last.get("failed") or 0
    entry.unit = figures.get("unit", "")
    if entry.state == "running" and figures:
        entry.rate, eta = figures.get("rate"), figures.get("eta_s")
        entry.eta_s = None if eta is None else max(0.0, eta - (time.time() - figures.get("at", time.time())))


def _disk_bytes(folder: Path, deadline: float) -> tuple[int, bool]:
    """Return (bytes of all files below `folder`, whether there was time to see them all)."""
    total, todo = 0, [str(folder)]
    while todo:
        with contextlib.suppress(OSError), os.scandir(todo.pop()) as items:
            for number, item in enumerate(items):
                if number % 1000 == 999 and time.monotonic() > deadline:
                    return total, False
                if item.is_dir(follow_symlinks=False):
                    todo.append(item.path)
                else:
                    with contextlib.suppress(FileNotFoundError):  # a temporary file, renamed just now
                        total += item.stat(follow_symlinks=False).st_size
        if time.monotonic() > deadline and todo:
            return total, False
    return total, True
