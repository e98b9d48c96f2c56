"""Stage 01 on tmp_path/run: its prompts, its command line, and what it leaves behind."""

import json
from pathlib import Path

from eagle3.common import files
from support.project import ROOT
from support.stub_server import Stub

SCRIPT = ROOT / "01_generate_synthetic.py"


def command(tmp_path: Path, stub: Stub) -> list[str]:
    return ["--run-dir", str(tmp_path / "run"), "--prompts", str(tmp_path / "prompts.jsonl"), "--endpoint", stub.url,
            "--max-tokens", "64"]


def write_prompts(tmp_path: Path, *rows: object) -> Path:
    """Write rows; a text is a user message with an id of its own."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"id-{row}", "messages": [{"role": "user", "content": row}]} if isinstance(row, str) else row
            for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(tmp_path: Path, name: str = "traces") -> list[dict]:
    """Return the rows of traces.jsonl, or of another file of the stage."""
    return [row for _, row in files.read_jsonl(tmp_path / "run/01_traces" / f"{name}.jsonl")]


def manifest(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "run/01_traces/manifest.json").read_text())


def log(tmp_path: Path) -> str:
    return (tmp_path / "run/logs/01_traces.log").read_text()


def by_id(tmp_path: Path) -> dict[str, dict]:
    rows = lines(tmp_path)
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}
