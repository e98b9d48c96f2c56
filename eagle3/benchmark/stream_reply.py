"""A streamed chat completion, put together: one body as an unstreamed request would have given, and its chunks.

Servers send server-sent events: `data: {…}` a line, `data: [DONE]` at the end. What a chunk brings stands in
`choices[0].delta` (texts), `choices[0].token_ids` (vLLM, when asked) and `usage` (the last chunk; each one where
`continuous_usage_stats` was asked). Nothing is trusted to be of its type: what does not fit stays in the body as it
came, and the one who reads the body refuses it.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

UNKNOWN = -1  # tokens of a chunk where the server does not tell
_TEXTS = ("content", "reasoning", "reasoning_content")
_KEPT = ("id", "created", "model", "usage", "prompt_token_ids", "service_tier")


def assembled(arrivals: Iterable[tuple[float, bytes]]) -> tuple[str, list[float], list[int]]:
    """Return (the body as JSON text, the time of each chunk that brought tokens, how many it brought).

    Args:
        arrivals: (time, bytes) of each read. A chunk has the time of the read that completed it.
    """
    body: dict[str, Any] = {"object": "chat.completion"}
    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
    message: dict[str, Any] = {"role": "assistant", "content": None}
    times: list[float] = []
    tokens: list[int] = []
    counted = 0
    for when, data in _events(arrivals):
        if data == b"[DONE]":
            break
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            return data.decode(errors="replace"), times, tokens
        if not isinstance(event, dict) or event.get("error") or event.get("object") == "error":
            return data.decode(errors="replace"), times, tokens  # the server's own words
        body |= {name: event[name] for name in _KEPT if event.get(name) is not None}
        part = _part(event)
        brings = _add(choice, message, part)
        told = (event.get("usage") or {}).get("completion_tokens") if isinstance(event.get("usage"), dict) else None
        ids = part.get("token_ids")
        if isinstance(ids, list):
            count = len(ids)
        elif isinstance(told, int) and brings:
            count = told - counted
        else:
            count = UNKNOWN if brings else 0
        counted = told if isinstance(told, int) else counted + max(0, count)
        if count:
            times.append(when)
            tokens.append(count)
    if UNKNOWN in tokens:
        tokens = [UNKNOWN] * len(tokens)
    return json.dumps(body | {"choices": [choice | {"message": message}]}), times, tokens


def _events(arrivals: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield (time, data) of each event, whose data is one line with every known server."""
    rest, when = b"", 0.0
    for when, data in arrivals:
        *lines, rest = (rest + data).split(b"\n")
        yield from ((when, line[5:].strip()) for line in lines if line.startswith(b"data:"))
    if rest.startswith(b"data:"):
        yield when, rest[5:].strip()


def _part(event: dict[str, Any]) -> dict[str, Any]:
    choices = event.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _add(choice: dict[str, Any], message: dict[str, Any], part: dict[str, Any]) -> bool:
    """Add what a chunk brings to the choice and its message; say whether it brought something of the reply."""
    given = part.get("delta")
    delta: dict[str, Any] = given if isinstance(given, dict) else {}
    for name in ("finish_reason", "meta_info", "error"):
        if part.get(name) is not None:
            choice[name] = part[name]
    for holder, name, value in ((choice, "token_ids", part.get("token_ids")),
                                (choice, "prompt_token_ids", part.get("prompt_token_ids")),
                                *((message, name, delta.get(name)) for name in _TEXTS)):
        if value:
            before = holder.get(name)
            if isinstance(before, list) and isinstance(value, list):
                before.extend(value)
            else:
                holder[name] = before + value if isinstance(before, str) and isinstance(value, str) else value
    calls = delta.get("tool_calls")
    if isinstance(calls, list) and calls:
        message["tool_calls"] = _with_calls(message.get("tool_calls") or [], calls)
    return any(delta.get(name) for name in (*_TEXTS, "tool_calls"))


def _with_calls(known: list[Any], parts: list[Any]) -> list[Any]:
    """Return tool calls with what a chunk adds to them: names come whole, arguments in pieces, by index."""
    for part in parts:
        index = part.get("index") if isinstance(part, dict) else None
        if not isinstance(index, int) or not 0 <= index < len(known):
            known.append(part)
            continue
        function, more = known[index].get("function"), part.get("function")
        if isinstance(function, dict) and isinstance(more, dict):
            pieces = (function.get("arguments"), more.get("arguments"))
            if all(isinstance(piece, str) for piece in pieces):
                function["arguments"] = "".join(pieces)  # type: ignore[arg-type]
    return known
