"""Where a run stands: each stage, and each variant beside it.

    python -m eagle3.status runs/smollm2-135m
    python -m eagle3.status runs/smollm2-135m --json

Reads the manifests, progress figures and locks in the run directory; it starts, locks and changes nothing, so it
can be asked at any time. States: not started, running, complete, partial (more failures than allowed), failed,
interrupted, died (it says running, but no process holds its lock), unreadable (its manifest is damaged). Exit code:
0; 2 for a wrong command; 3 when there is no run in that directory.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from eagle3.common import files, lock, log
from eagle3.common.errors import PreconditionError, StageError
from eagle3.common.stage import STAGES

_DISK_BUDGET_S = 0.5  # a folder of 300,000 states takes longer to add up; then the sum is a lower bound
_NAMES = {name: f"{script}.py" for script, (name, _) in STAGES.items()}


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


def main(arguments: list[str]) -> int:
    """Print the state of a run; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m eagle3.status", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, help="run directory, such as runs/smollm2-135m")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    try:
        entries = survey(given.run_dir)
    except StageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    following = next_step(given.run_dir, entries)
    if given.json:
        print(json.dumps({"run_dir": str(given.run_dir), "stages": [asdict(e) for e in entries], "next": following}))
    else:
        print(table(entries))
        print(f"\nnext: {following}")
    return 0


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
    entries += [Entry(name, name, "not started") for name in _NAMES if name not in present]
    order = list(_NAMES)
    return sorted(entries, key=lambda e: (order.index(e.stage), e.folder != e.stage, e.old, e.folder))


def next_step(run_dir: Path, entries: list[Entry]) -> str:
    """Return the command that takes the run on, or what to wait for or look at."""
    configs = [entry.config for entry in entries if entry.config]
    for entry in entries:
        if entry.folder != entry.stage or entry.state == "complete":
            continue
        if entry.state == "running":
            return f"wait for {entry.stage} ({entry.owner})"
        if entry.argv:
            return shlex.join(["python", *entry.argv])
        words = ["python", _NAMES[entry.stage], *(["--config", configs[-1]] if configs else [])]
        return shlex.join([*words, "--run-dir", str(run_dir)])
    return f"nothing to run; the report is {run_dir / '06_bench' / 'report.html'}"


def table(entries: list[Entry]) -> str:
    """Return the entries as aligned text, each error's first line below its stage."""
    rows = [("stage", "state", "done", "rate", "ETA", "disk", "started", "ended"), *map(_row, entries)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for at, entry in reversed(list(enumerate(entries, start=1))):
        if entry.error:
            lines.insert(at + 1, f"    {entry.error}")
    return "\n".join(lines)


def _row(entry: Entry) -> tuple[str, ...]:
    done = "" if entry.done is None else f"{entry.done:,}" + ("" if entry.total is None else f"/{entry.total:,}")
    failed = f" ({entry.failed} failed)" if entry.failed else ""
    return (
        entry.folder + (" (old)" if entry.old else ""),
        entry.state,
        done + failed,
        "" if entry.rate is None else f"{entry.rate:.1f} {entry.unit}/s",
        "" if entry.eta_s is None else log.duration(entry.eta_s),
        ("" if entry.disk_bytes_complete else "> ") + log.size(entry.disk_bytes) if entry.started_at else "",
        _local(entry.started_at),
        _local(entry.ended_at),
    )


def _local(moment: str) -> str:
    return datetime.fromisoformat(moment).astimezone().strftime("%m-%d %H:%M") if moment else ""


# --- one folder -------------------------------------------------------------------------------------------


def _entry(folder: Path, deadline: float) -> Entry | None:
    """Return what a folder says about itself; None when it is not a stage's."""
    if not folder.is_dir():
        return None
    old = re.search(r"\.old-\d+$", folder.name) is not None
    owner = lock.holder(folder)
    if not (folder / "manifest.json").exists():
        return Entry(folder.name, folder.name, "running", owner=owner) if owner and folder.name in _NAMES else None
    try:
        manifest = files.read_json(folder / "manifest.json")
        stage, status = manifest["stage"], manifest["status"]
    except (StageError, KeyError, TypeError) as error:
        stage = next((name for name in _NAMES if folder.name.startswith(name)), None)
        first = str(error).splitlines()[0]
        return Entry(folder.name, stage, "unreadable", old, error=f"manifest.json: {first}") if stage else None
    if stage not in _NAMES:
        return None
    state = ("running" if owner else "died") if status == "running" else status
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
