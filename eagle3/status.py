"""Where a run stands: each stage, and each variant beside it.

    python -m eagle3.status runs/smollm2-135m
    python -m eagle3.status runs/smollm2-135m --json

Reads the manifests, progress figures and locks in the run directory; it starts, locks and changes nothing, so it
can be asked at any time. States: not started, running, complete, partial (more failures than allowed), failed,
interrupted, died (it says running, but no process holds its lock), unreadable (its manifest is damaged). Exit code:
0; 2 for a wrong command; 3 when there is no run in that directory.
"""

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from eagle3.common import log, pages
from eagle3.common.errors import StageError
from eagle3.common.runs import SCRIPTS, Entry, survey


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
        words = ["python", SCRIPTS[entry.stage], *(["--config", configs[-1]] if configs else [])]
        return shlex.join([*words, "--run-dir", str(run_dir)])
    return f"nothing to run; the report is {run_dir / '06_bench' / 'report.html'}"


def table(entries: list[Entry]) -> str:
    """Return the entries as aligned text, each error's first line below its stage."""
    head = ("stage", "state", "done", "rate", "ETA", "disk", "started", "ended")
    lines = pages.text_table(head, [_row(entry) for entry in entries]).split("\n")
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
