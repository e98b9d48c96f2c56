"""Prompts: what the verifier is asked, from JSON lines or one JSON array.

A row is `{"id"?, "messages": [{"role", "content"}], "tools"?}` or `{"id"?, "prompt": "text"}`. Every row
becomes one or more `Prompt`s, each asking for one assistant turn; today that is the last turn of the row.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.errors import PreconditionError
from eagle3.files import sha256_json
from eagle3.log import logger

ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields of a message that templates and servers know, with their types.
_MESSAGE_FIELDS: dict[str, type] = {
    "name": str,
    "tool_call_id": str,
    "tool_calls": list,
    "reasoning": str,
    "reasoning_content": str,
}
_HASH_CHARS = 24  # 96 bits: no collision within any number of rows that fits on a disk


@dataclass(frozen=True)
class Prompt:
    """One assistant turn to be generated.

    Attributes:
        id: id of the row, "#", and the turn: how many assistant turns precede it.
        messages: the conversation up to that turn, contents as text.
        tools: tool definitions in the OpenAI form, or empty.
        source: the row's own `source`, else the name of its file.
    """

    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    source: str


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Return the prompts of the first `limit` rows of a file, in its order.

    Raises PreconditionError naming row and field for what is malformed, and both rows when an explicit id
    occurs twice. Rows that are equal throughout and have no id are asked once.
    """
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    repeated = ended_in_reply = 0
    for number, (where, row) in enumerate(_rows(path)):
        if limit is not None and number >= limit:
            break
        messages, tools = _messages(row, where), _tools(row, where)
        identity = _row_id(row, messages, where)
        if identity in seen:
            if "id" in row:
                raise _problem(f"{where}: id", "an id of its own", f"{identity!r}, as in {seen[identity]}")
            repeated += 1
            continue
        seen[identity] = where
        if messages[-1]["role"] == "assistant":
            ended_in_reply += 1
            messages = _without_last_reply(messages, where)
        turn = sum(message["role"] == "assistant" for message in messages)
        prompts.append(Prompt(f"{identity}#{turn}", messages, tools, str(row.get("source") or path.name)))
    if repeated:
        logger.info("%d rows of %s repeat an earlier one and are asked once", repeated, path.name)
    if ended_in_reply:
        logger.info("%d rows of %s end in a reply: it is generated anew", ended_in_reply, path.name)
    if not prompts:
        raise PreconditionError("no prompts", where=path, expected="JSON lines or a JSON array", found="no row")
    return prompts


# --- rows -------------------------------------------------------------------------------------------------


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, object) for each row; the place reads "prompts.jsonl line 3" or "prompts.json row 3"."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            if _starts_with_bracket(file):
                yield from ((f"{path} row {i}", _object(row, f"{path} row {i}"))
                            for i, row in enumerate(json.load(file), start=1))
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"{path} line {number}"
                    yield where, _object(_parsed(line, where), where)
    except (FileNotFoundError, IsADirectoryError):
        raise PreconditionError("the prompts file is missing", where=path, fix="correct --prompts") from None
    except ValueError as error:  # not UTF-8, or an array that does not end
        raise PreconditionError("the prompts file cannot be read", where=path, found=error) from None


def _starts_with_bracket(file: Any) -> bool:
    """Say whether the first character that is not white space is "["; leave the file at its start."""
    while (character := file.read(1)).isspace():
        pass
    file.seek(0)
    return character == "["


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise _problem(where, "a JSON object", error) from None


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _problem(where, "a JSON object", type(value).__name__)
    return value


def _row_id(row: dict[str, Any], messages: list[dict[str, Any]], where: str) -> str:
    """Return the given id, else a hash of the whole row, equal for equal text in whatever container."""
    if "id" not in row:
        rest = {name: value for name, value in row.items() if name not in ("messages", "prompt")}
        return sha256_json({"row": rest, "messages": messages})[:_HASH_CHARS]
    value = row["id"]
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise _problem(f"{where}: id", "text or a whole number", repr(value))
    return str(value)


# --- fields -----------------------------------------------------------------------------------------------


def _messages(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    if "messages" not in row and isinstance(row.get("prompt"), str):
        return [{"role": "user", "content": row["prompt"]}]
    if "messages" not in row:
        found = f"prompt of type {type(row['prompt']).__name__}" if "prompt" in row else f"fields {sorted(row)}"
        raise _problem(where, "messages (a list) or prompt (text)", found)
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise _problem(f"{where}: messages", "a list of messages", _kind(messages))
    return [_message(message, f"{where}: messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    """Return a message with its content as text and only the fields that a server knows."""
    role = _object(message, where).get("role")
    if role not in ROLES:
        raise _problem(f"{where}.role", "one of " + ", ".join(ROLES), repr(role))
    clean: dict[str, Any] = {"role": role, "content": _text(message, where)}
    for name, kind in _MESSAGE_FIELDS.items():
        if message.get(name) is not None:
            if not isinstance(message[name], kind):
                raise _problem(f"{where}.{name}", kind.__name__, _kind(message[name]))
            clean[name] = message[name]
    return clean


def _text(message: dict[str, Any], where: str) -> str | None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return content
    if not isinstance(content, list):
        raise _problem(f"{where}.content", "text or a list of text parts", _kind(content))
    for i, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise _problem(f"{where}.content[{i}]", 'a part {"type": "text", "text": …}', _kind(part))
    return "".join(part["text"] for part in content)


def _tools(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    tools = row.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _problem(f"{where}: tools", "a list of tool definitions", _kind(tools))
    return tools


def _without_last_reply(messages: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    asked = max((i for i, message in enumerate(messages) if message["role"] != "assistant"), default=-1)
    if asked < 0:
        raise _problem(f"{where}: messages", "a message that asks for a reply", "only assistant messages")
    return messages[: asked + 1]


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with {sorted(value)}"
    return f"{type(value).__name__} {str(value)[:60]!r}"


def _problem(where: str, expected: str, found: object) -> PreconditionError:
    return PreconditionError(
        "a prompt row is malformed", where=where, expected=expected, found=found, fix="correct or remove that row"
    )
