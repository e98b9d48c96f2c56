"""Traces made by hand."""

from pathlib import Path

from eagle3.common import files
from eagle3.traces import trace_rows


def row(name: str, completion: list[int] | int, **more: object) -> dict:
    """Return a sealed row; a number of tokens stands for that many different ones."""
    ids = list(range(100, 100 + completion)) if isinstance(completion, int) else completion
    return trace_rows.sealed({
        "id": name, "key": "k", "source": "chat", "model": "m", "prompt": {"messages": [{"role": "user",
        "content": f"asked {name}"}], "tools": []}, "chat_template_kwargs": {}, "sampling": {"temperature": 0.0,
        "max_tokens": 64, "seed": 1}, "reasoning": None, "content": f"reply to {name}", "tool_calls": [],
        "finish_reason": "stop", "prompt_token_ids": [1, 2, 3], "completion_token_ids": ids,
        "token_source": "server", "usage": {},
    } | more)


def put(folder: Path, rows: list[dict], skipped: list[dict] = (), failures: list[dict] = ()) -> Path:
    """Write records as stage 01 does and return the folder."""
    for name, records in (("traces", rows), ("skipped", skipped), ("failures", failures)):
        with files.Appender(folder / f"{name}.jsonl") as appender:
            appender.append(records)
    return folder
