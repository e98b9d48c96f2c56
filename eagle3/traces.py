"""Traces: what the verifier was asked and what it generated, with the exact token ids.

`traces.jsonl` holds one row a generated assistant turn, in the order of completion. A row carries a digest
of itself, so a flipped bit is found before anything is computed from it, and the identity of the whole file
is a sum over the digests, so the order of the rows does not matter.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from eagle3.errors import PreconditionError, StaleError
from eagle3.files import Appender, read_jsonl, sha256_json
from eagle3.log import logger
from eagle3.options import GenerateSection
from eagle3.prompts import Prompt

FILE_NAME = "traces.jsonl"
_TOKEN_FIELDS = ("prompt_token_ids", "completion_token_ids")
_SAMPLING = ("temperature", "top_p", "seed")
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "key": str,
    "source": str,
    "model": str,
    "prompt": dict,
    "chat_template_kwargs": dict,
    "sampling": dict,
    "reasoning": (str, type(None)),
    "content": (str, type(None)),
    "tool_calls": list,
    "finish_reason": str,
    "prompt_token_ids": list,
    "completion_token_ids": list,
    "token_source": str,
    "usage": dict,
    "digest": str,
}


def request_keys(prompts: list[Prompt], section: GenerateSection, model: str) -> dict[str, str]:
    """Return {prompt id: hash of everything that decides the reply}: prompt, sampling, template arguments, model.

    Of the model's name only the last path component counts: one server calls it by its folder, another by
    its name on the hub.
    """
    sampling = {name: getattr(section, name) for name in ("max_tokens", *_SAMPLING, "chat_template_kwargs")}
    model = Path(model).name
    return {prompt.id: sha256_json([prompt.messages, prompt.tools, sampling, model])[:32] for prompt in prompts}


def sampling_of(section: GenerateSection, max_tokens: int) -> dict[str, Any]:
    """Return the sampling of one request as a row records it; `max_tokens` may be clamped."""
    return {"max_tokens": max_tokens} | {name: getattr(section, name) for name in _SAMPLING}


def sealed(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with its digest; ValueError when it lacks a field, has a wrong type or no token."""
    row = row | {"digest": ""}
    _require_fields(row)
    return row | {"digest": row_digest(row)}


def row_digest(row: dict[str, Any]) -> str:
    """Return the SHA-256 of a row without its `digest` field."""
    texts = {name: value for name, value in row.items() if name not in ("digest", *_TOKEN_FIELDS)}
    tokens = [hashlib.sha256(array("q", row[name]).tobytes()).hexdigest() for name in _TOKEN_FIELDS]
    return sha256_json([texts, tokens])


def read_traces(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a traces file, each checked against its digest; a torn last line is left out.

    Raises PreconditionError with the line number for a damaged row, and for an id that occurs twice.
    """
    lines: dict[str, int] = {}
    for number, row in read_jsonl(path):
        try:
            _require_fields(row)
            if row_digest(row) != row["digest"]:
                raise ValueError("its content does not fit its digest")
            if row["id"] in lines:
                raise ValueError(f"id {row['id']} stands in line {lines[row['id']]} already")
        except (ValueError, TypeError, OverflowError) as error:
            raise PreconditionError(
                "a trace is damaged",
                where=f"{path} line {number}",
                found=error,
                fix="remove that line and run 01_generate_synthetic.py again: only that prompt is asked again",
            ) from None
        lines[row["id"]] = number
        yield row


def sequence(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return (input_ids, loss_mask), both [T]: prompt then completion; the mask is 1 on the completion only.

    The completion is what the model generated, its end token included when it generated one. Nothing that
    stands in the prompt is ever supervised, whatever control tokens its text spells.
    """
    prompt, completion = (row[name] for name in _TOKEN_FIELDS)
    return prompt + completion, [0] * len(prompt) + [1] * len(completion)


def lie_in(directory: Path) -> bool:
    """Say whether a directory holds any trace or skip."""
    paths = (directory / FILE_NAME, directory / "skipped.jsonl")
    return any(path.exists() and path.stat().st_size > 0 for path in paths)


def content_identity(rows: Iterable[dict[str, Any]]) -> str:
    """Return a hash of traces, the same in every order: their number and the sum of their digests."""
    count, total = 0, 0
    for row in rows:
        count, total = count + 1, total + int(row["digest"], 16)
    return _identity_of(count, total)


def _identity_of(count: int, total: int) -> str:
    return f"{count}-{total % (1 << 256):064x}"


def _require_fields(row: dict[str, Any]) -> None:
    for name, kind in _FIELDS.items():
        if name not in row:
            raise ValueError(f"field {name} is missing")
        if not isinstance(row[name], kind):
            raise ValueError(f"field {name} is of type {type(row[name]).__name__}")
    for name in _TOKEN_FIELDS:
        if not row[name] or not all(type(token) is int and token >= 0 for token in row[name]):
            raise ValueError(f"field {name} must hold token ids, at least one")


class Ledger:
    """What stage 01 has done in a directory: traces, skipped prompts, failures of the last run.

    A trace or a skip is done for good (until its key changes); a failure is asked again by the next run, so
    failures.jsonl starts empty with every run that asks anything. Loading only reads; `open` allows `write`.

    Attributes:
        keys: {id: request key} of the traces.
        skipped: {id: record} of the prompts that gave no trace, the latest record of each.
        model: name under which the traces and skips were asked, "" when there are none.
        counts: traces, truncated (kept though cut at max_tokens), with_reasoning, prompt and completion tokens.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.keys: dict[str, str] = {}
        self.skipped: dict[str, dict[str, Any]] = {}
        self.model = ""
        self.counts: Counter[str] = Counter()
        self._digests = 0
        self._files: dict[str, Appender] = {}
        for row in read_traces(directory / FILE_NAME):
            self._count_trace(row)
        for _, record in read_jsonl(directory / "skipped.jsonl"):
            self._count_skip(record)

    def missing(self, prompts: list[Prompt], keys: dict[str, str]) -> list[Prompt]:
        """Return the prompts to ask, in their order: neither a trace nor a skip under the same key.

        Args:
            keys: {prompt id: request key as of now}.
        Raises:
            StaleError: a trace lies there for the same id but another request.
        """
        stale = [prompt.id for prompt in prompts if self.keys.get(prompt.id, keys[prompt.id]) != keys[prompt.id]]
        if stale:
            raise StaleError(
                f"{len(stale)} traces were made from another prompt or with other sampling under the same id",
                where=self.directory / FILE_NAME,
                found="ids " + ", ".join(stale[:5]) + (" …" if len(stale) > 5 else ""),
                fix="give changed prompts new ids, write elsewhere with --out, or use --restart (moves the old aside)",
            )
        return [
            prompt for prompt in prompts
            if prompt.id not in self.keys and self.skipped.get(prompt.id, {}).get("key") != keys[prompt.id]
        ]

    @property
    def content(self) -> str:
        """The content identity of the traces."""
        return _identity_of(len(self.keys), self._digests)

    def figures(self, prompts: list[Prompt], failed: int) -> dict[str, Any]:
        """Return the counts of the manifest: of these prompts, and of all that lies in the directory."""
        wanted = {prompt.id for prompt in prompts}
        return {
            "expected": len(prompts),
            "done": sum(identity in self.keys for identity in wanted),
            "skipped": dict(Counter(row["reason"] for name, row in self.skipped.items() if name in wanted)),
            "failed": failed,
            **self.counts,
        }

    def open(self) -> None:
        """Open the files for writing: torn tails are repaired, the last run's failures are dropped."""
        (self.directory / "failures.jsonl").unlink(missing_ok=True)
        for name in ("traces", "skipped", "failures"):
            self._files[name] = Appender(self.directory / f"{name}.jsonl")
            if self._files[name].repaired_bytes:
                logger.warning("%s.jsonl: removed a torn last line (the last run was killed)", name)

    def write(self, records: list[tuple[str, dict[str, Any]]]) -> None:
        """Append (file, record) pairs, file being traces, skipped or failures, and wait until they are durable."""
        for name, file in self._files.items():
            chosen = [record for target, record in records if target == name]
            if chosen:
                file.append(chosen)
        for target, record in records:
            if target == "traces":
                self._count_trace(record)
            elif target == "skipped":
                self._count_skip(record)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _count_trace(self, row: dict[str, Any]) -> None:
        self.keys[row["id"]] = row["key"]
        self.skipped.pop(row["id"], None)
        self.model = row["model"]
        self._digests += int(row["digest"], 16)
        self.counts["traces"] += 1
        self.counts["truncated"] += row["finish_reason"] == "length"
        self.counts["with_reasoning"] += row["reasoning"] is not None
        self.counts["prompt_tokens"] += len(row["prompt_token_ids"])
        self.counts["completion_tokens"] += len(row["completion_token_ids"])

    def _count_skip(self, record: dict[str, Any]) -> None:
        if record["id"] not in self.keys:
            self.skipped[record["id"]] = record
            self.model = record["model"]
