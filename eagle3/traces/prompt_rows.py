"""Rows of prompts: what one row, in any of the forms in use, asks the verifier.

Equal conversations are equal here, whatever form they came in: messages in the OpenAI form, contents as text.
A row that is not understood is an error; one that is understood but cannot be asked is dropped with a reason.
"""

import json
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from eagle3.common.errors import UsageError
from eagle3.common.files import sha256_json
from eagle3.common.log import logger
from eagle3.traces.row_parts import (
    FIX,
    MEDIA,
    Dropped,
    Malformed,
    joined,
    kind_of,
    objects,
    require_sendable,
    tool_calls,
    without_nulls,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
_ASKING = ("user", "tool")  # roles whose message asks for a reply
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool"}
_CONVERSATION_FIELDS = ("messages", "conversations", "conversation", "prompt", "turns")
# What names a row of user turns, such as benchmarks are published in: of SpecBench, of MT-Bench.
_QUESTION_IDS = ("id", "question_id", "prompt_id")
# Text fields of a message that templates and servers know.
_MESSAGE_FIELDS = ("name", "tool_call_id", "reasoning", "reasoning_content")
_HASH_CHARS = 24  # 96 bits: no collision within any number of rows that fits on a disk


@dataclass(frozen=True)
class Conversation:
    """One row of the source: what is to be asked, turn by turn.

    Attributes:
        id: the row's id; given, else a hash of the whole row.
        source: the row's own `source`, else the name of its file or dataset.
        messages: in the OpenAI form with contents as text, as far as the last reply to be generated needs them.
        tools: tool definitions in the OpenAI form, or empty.
        asked: for each reply to be generated, how many of the messages precede it. Except for the last one, the
            message at that index is the reply that the row has there.
    """

    id: str
    source: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    asked: tuple[int, ...]

    def prompt_id(self, k: int) -> str:
        """Return the id of the prompt for the k-th asked reply: "#" and how many replies precede it."""
        turn = sum(message["role"] == "assistant" for message in self.messages[: self.asked[k]])
        return f"{self.id}#{turn}"

    @property
    def characters(self) -> int:
        """Characters of the contents that precede the asked replies, summed over these."""
        before = [0, *accumulate(len(message["content"] or "") for message in self.messages)]
        return sum(before[end] for end in self.asked)

    def question(self) -> list[Any]:
        """Return what decides the prompts: tools and messages without the replies that are generated anew."""
        anew = set(self.asked)
        return [[None if i in anew else message for i, message in enumerate(self.messages)], self.tools]


class Reader:
    """Makes conversations of rows."""

    def __init__(self, turns: str, role_map: dict[str, str]) -> None:
        """Take --turns and --role-map; UsageError when a role is mapped to one that does not exist."""
        for name, role in role_map.items():
            if role not in ROLES:
                raise UsageError("a role is mapped to one that does not exist", where="--role-map",
                                 expected="one of " + ", ".join(ROLES), found=f"{name}: {role}")
        self._turns, self._role_map = turns, role_map
        self._mapped: set[str] = set()

    def __call__(self, row: dict[str, Any], source: str) -> Conversation:
        """Return the conversation of a row; `source` is for rows that have none of their own.

        Raises Malformed or Dropped.
        """
        row = {name: value for name, value in row.items() if value is not None}
        for name in MEDIA[:3]:
            if row.get(name) or row.get(name + "s"):
                raise Dropped(f"{name} content", f"field {name if row.get(name) else name + 's'}")
        messages = self._messages(row)
        system = row.get("system")
        if isinstance(system, str) and system.strip() and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": row.pop("system")})
        tools = objects(row.pop("tools", None), "tools")
        identity = _identity(row, messages, tools)
        source = str(row.get("source") or source)
        try:  # what is sent, hashed and stored has to be UTF-8
            require_sendable([identity, source, messages, tools])
        except UnicodeEncodeError as error:
            raise Dropped("lone surrogate", repr(error.object[max(0, error.start - 20) : error.end])) from None
        asked = _asked(messages)
        if not asked:
            raise Dropped("nothing asks for a reply", "roles " + ", ".join(message["role"] for message in messages))
        asked = asked if self._turns == "all" or _is_user_turns(row) else asked[-1:]
        _refuse_empty(messages, asked)
        return Conversation(identity, source, messages[: asked[-1]], tools, asked)

    def _messages(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        field = next((name for name in _CONVERSATION_FIELDS if name in row), None)
        if field is None:
            raise Malformed("", "messages or conversations (a list) or prompt (text)", f"fields {sorted(row)}")
        given = row[field]
        if _is_user_turns(row):
            return _user_turns(given)
        if field == "prompt" and isinstance(given, str):
            given = [{"role": "user", "content": given}]
        elif isinstance(given, str) and given.lstrip().startswith("["):
            given = objects(given, field)
        if not isinstance(given, list):
            expected = "text or a list of messages" if field == "prompt" else "a list of messages"
            raise Malformed(field, expected, kind_of(given))
        if not given:
            raise Dropped("empty prompt", f"{field} is an empty list")
        return [self._message(message, f"{field}[{i}]") for i, message in enumerate(given)]

    def _message(self, message: Any, field: str) -> dict[str, Any]:
        """Return a message with its content as text and only the fields that a server knows."""
        if not isinstance(message, dict):
            raise Malformed(field, "a message", kind_of(message))
        sharegpt = "from" in message and message.get("role") is None
        role_name, content_name = ("from", "value") if sharegpt else ("role", "content")
        calls = tool_calls(message.get("tool_calls"), f"{field}.tool_calls")
        content = message.get(content_name)
        clean: dict[str, Any] = {"role": self._role(message.get(role_name), sharegpt, f"{field}.{role_name}")}
        if isinstance(content, str) or (content is None and calls):
            clean["content"] = content
        else:
            clean["content"] = joined(content, f"{field}.{content_name}")
        if calls:
            clean["tool_calls"] = calls
        for name in _MESSAGE_FIELDS:
            value = message.get(name)
            if value is not None:
                if not isinstance(value, str):
                    raise Malformed(f"{field}.{name}", "text", kind_of(value))
                clean[name] = value
        return clean

    def _role(self, name: Any, sharegpt: bool, field: str) -> str:
        if isinstance(name, str):
            if name in self._role_map:
                role = self._role_map[name]
                if name not in self._mapped:
                    self._mapped.add(name)
                    logger.warning("role %r is taken for %r, as --role-map says", name, role)
                return role
            if name in ROLES:
                return name
            if sharegpt and name in _SHAREGPT_ROLES:
                return _SHAREGPT_ROLES[name]
        known = (*ROLES, *_SHAREGPT_ROLES) if sharegpt else ROLES
        fix = FIX
        if isinstance(name, str):
            fix = f"say what it stands for, such as --role-map '{json.dumps({name: 'assistant'})}', or {FIX}"
        raise Malformed(field, "one of " + ", ".join(known), kind_of(name), fix)


# --- parts of a row ---------------------------------------------------------------------------------------


def _identity(row: dict[str, Any], messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """Return the given id, else a hash of the whole row, equal for equal conversations in whatever form."""
    name = given_id(row)
    if name is None:
        rest = {name: without_nulls(value) for name, value in row.items() if name not in _CONVERSATION_FIELDS}
        rest |= {"tools": tools} if tools else {}
        return sha256_json({"row": rest, "messages": messages})[:_HASH_CHARS]
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise Malformed(name, "text or a whole number", kind_of(value))
    return str(value)


def given_id(row: dict[str, Any]) -> str | None:
    """Return the field that holds a row's id, None where it has none.

    Only rows of user turns go by `question_id` or `prompt_id`: in other data these need not be a row's own.
    """
    names = _QUESTION_IDS if _is_user_turns(row) else _QUESTION_IDS[:1]
    return next((name for name in names if row.get(name) is not None), None)


def _is_user_turns(row: dict[str, Any]) -> bool:
    """Say whether a row is a list of what the user says, turn by turn, to be answered one after the other."""
    field = next((name for name in _CONVERSATION_FIELDS if row.get(name) is not None), "")
    given = row.get(field)
    return field in ("prompt", "turns") and isinstance(given, list) and bool(given) and all(
        isinstance(turn, str) for turn in given)


def _user_turns(texts: list[str]) -> list[dict[str, Any]]:
    """Return user messages with a place for the reply between each two, which is generated before the next is asked."""
    messages: list[dict[str, Any]] = []
    for text in texts:
        messages += [{"role": "assistant", "content": None}] * bool(messages) + [{"role": "user", "content": text}]
    return messages


def _asked(messages: list[dict[str, Any]]) -> tuple[int, ...]:
    """Return the indexes before which a reply stands or is due: after a user or tool message, not another reply.

    A reply that nothing asks for (the conversation starts with it, or it follows another) stays as context; so does
    a call whose results follow, since they answer that call and no other.
    """
    positions, asking = [], False
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            answered = i + 1 < len(messages) and messages[i + 1]["role"] == "tool"
            positions += [i] if asking and not answered else []
            asking = False
        else:
            asking = asking or message["role"] in _ASKING
    return (*positions, len(messages)) if asking else tuple(positions)


def _refuse_empty(messages: list[dict[str, Any]], asked: tuple[int, ...]) -> None:
    """Raise Dropped when the user says nothing before one of the asked replies."""
    for end in asked:
        last = next((i for i in range(end - 1, -1, -1) if messages[i]["role"] == "user"), None)
        if last is not None and (not (text := messages[last]["content"]) or text.isspace()):
            raise Dropped("empty prompt", f"message {last + 1} of {len(messages)} is empty")
