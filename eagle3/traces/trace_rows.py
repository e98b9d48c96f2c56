"""Traces: what the verifier was asked and what it generated, with the exact token ids.

`traces.jsonl` holds one row a generated assistant turn, in the order of completion. A row carries a digest
of itself, so a flipped bit is found before anything is computed from it, and the identity of the whole file
is a sum over the digests, so the order of the rows does not matter.
"""

import hashlib
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from eagle3.common.errors import PreconditionError, StaleError
from eagle3.common.files import Appender, hash64, parse_json, read_jsonl, sha256_json
from eagle3.common.log import logger
from eagle3.traces.token_counts import TokenCounts

FILE_NAME = "traces.jsonl"
SKIPPED = "skipped: "  # before the reason, where the state of a prompt is told in one word
_TOKEN_FIELDS = ("prompt_token_ids", "completion_token_ids")
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
    lines: dict[int, int] = {}
    for number, row in read_jsonl(path, parse=_parser()):
        try:
            _require_fields(row)
            if row_digest(row) != row["digest"]:
                raise ValueError("its content does not fit its digest")
            name = hash64(row["id"])
            if name in lines:
                raise ValueError(f"id {row['id']} stands in line {lines[name]} already")
        except (ValueError, TypeError, OverflowError) as error:
            raise PreconditionError(
                "a trace is damaged",
                where=f"{path} line {number}",
                found=error,
                fix="remove that line and run 01_generate_synthetic.py again: only that prompt is asked again",
            ) from None
        lines[name] = number
        yield row


def _parser() -> Callable[[bytes], Any]:
    """Return what reads a line: msgspec where it is installed, in less than half the time of `json`.

    Where msgspec refuses a line, `json` has the last word: it takes NaN, numbers too large and lone surrogates.
    """
    try:
        from msgspec.json import Decoder
    except ImportError:
        return parse_json
    decode = Decoder().decode

    def parse(line: bytes) -> Any:
        try:
            return decode(line)
        except (ValueError, RecursionError):
            return parse_json(line)

    return parse


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
        if set(map(type, row[name])) != {int} or min(row[name]) < 0:
            raise ValueError(f"field {name} must hold token ids, at least one")


class Ledger:
    """What stage 01 has done in a directory: traces, skipped prompts, failures of the last run.

    A trace or a skip is done for good (until its key changes); a failure is asked again by the next run, so
    failures.jsonl starts empty with every run that asks anything. Loading only reads; `open` allows `write`.

    Attributes:
        model: name under which the traces and skips were asked, "" when there are none.
        counts: traces, truncated (kept though cut at max_tokens), with_reasoning, prompt and completion tokens.
        skips: how many prompts were skipped, whatever the reason.
        settings: names of the sampling settings that gave traces; "" is the only one of a run without a mix.
        tokens: how often each token was generated.
    """

    def __init__(self, directory: Path, *, read: bool = True, ask_again: Iterable[str] = ()) -> None:
        """Load what lies in a directory; an empty ledger without `read`.

        Args:
            ask_again: reasons for which a skipped prompt counts as missing all the same.
        """
        self.directory = directory
        self.model = ""
        self.counts: Counter[str] = Counter()
        self.skips = 0
        self.settings: set[str] = set()
        self.tokens = TokenCounts()
        self._ask_again = frozenset(ask_again)
        self._keys: dict[int, int] = {}
        self._skipped: dict[int, tuple[int, str]] = {}
        self._digests = 0
        self._files: dict[str, Appender] = {}
        if read:
            for row in read_traces(directory / FILE_NAME):
                self._count_trace(row)
            for _, record in read_jsonl(directory / "skipped.jsonl"):
                self._count_skip(record)

    def state(self, identity: str, key: str) -> str:
        """Return what is known of a prompt: "done", "changed" (a trace of another request), the reason for which
        it was skipped as "skipped: …", or "missing"."""
        name, wanted = hash64(identity), hash64(key)
        if name in self._keys:
            return "done" if self._keys[name] == wanted else "changed"
        known, reason = self._skipped.get(name, (None, ""))
        return SKIPPED + reason if known == wanted and reason not in self._ask_again else "missing"

    def refuse_other_model(self, asked: str) -> None:
        """Raise StaleError when what lies here was asked of a model with another name than `asked`."""
        if self.model and Path(self.model).name != Path(asked).name:
            raise StaleError(
                "another model is to be asked than the one that made the traces here",
                where=self.directory,
                expected=self.model,
                found=asked,
                fix="ask the old model, or write elsewhere with --out",
            )

    def replies(self, identities: set[str]) -> dict[str, dict[str, Any]]:
        """Return {id: assistant message} of some traces, for conversations that go on from them."""
        if not identities:
            return {}
        return {row["id"]: assistant_message(row["reasoning"], row["content"], row["tool_calls"])
                for _, row in read_jsonl(self.directory / FILE_NAME) if row["id"] in identities}

    @property
    def content(self) -> str:
        """The content identity of the traces."""
        return _identity_of(len(self._keys), self._digests)

    def open(self) -> None:
        """Open the files for writing: torn tails are repaired, the last run's failures are dropped."""
        (self.directory / "failures.jsonl").unlink(missing_ok=True)
        for name in ("traces", "skipped", "failures"):
            self._files[name] = Appender(self.directory / f"{name}.jsonl")
            if self._files[name].repaired_bytes:
                logger.warning("%s.jsonl: removed a torn last line (the last run was killed)", name)

    def write(self, lines: dict[str, bytes]) -> None:
        """Append encoded rows to traces, skipped or failures and wait until they are durable.

        It does nothing but that, so that a thread which runs it holds the interpreter's lock for moments only.
        """
        for name, data in lines.items():
            self._files[name].append_lines(data)

    def count(self, target: str, record: dict[str, Any]) -> None:
        """Count a record that has been written."""
        if target == "traces":
            self._count_trace(record)
        elif target == "skipped":
            self._count_skip(record)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _count_trace(self, row: dict[str, Any]) -> None:
        name = hash64(row["id"])
        self._keys[name] = hash64(row["key"])
        self.skips -= self._skipped.pop(name, None) is not None
        self.model = row["model"]
        self._digests += int(row["digest"], 16)
        self.settings.add(str(row["sampling"].get("name", "")))
        self.counts["traces"] += 1
        self.counts["truncated"] += row["finish_reason"] == "length"
        self.counts["with_reasoning"] += row["reasoning"] is not None
        self.counts["prompt_tokens"] += len(row["prompt_token_ids"])
        self.counts["completion_tokens"] += len(row["completion_token_ids"])
        self.tokens.add(row["completion_token_ids"])

    def _count_skip(self, record: dict[str, Any]) -> None:
        name = hash64(record["id"])
        if name not in self._keys:
            self.skips += name not in self._skipped
            self._skipped[name] = (hash64(record["key"]), sys.intern(record["reason"]))
            self.model = record["model"]


def assistant_message(reasoning: str | None, content: str | None, tool_calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a generated turn as a message of the conversation that goes on from it.

    Reasoning is sent under both names that servers read; templates decide what of it they keep.
    """
    message: dict[str, Any] = {"role": "assistant", "content": content or ""}
    if reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return message | ({"tool_calls": tool_calls} if tool_calls else {})
