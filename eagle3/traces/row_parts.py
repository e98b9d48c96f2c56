"""Parts of a prompt row: texts, objects and calls in the forms in use, and what cannot be sent."""

import json
import math
from typing import Any

MEDIA = ("image", "audio", "video", "file")
FIX = "correct or remove that row"


class Dropped(Exception):
    """A row that is well formed but is not asked."""

    def __init__(self, reason: str, words: str) -> None:
        """Take the reason it is counted under, and words for an example."""
        self.reason, self.words = reason, words
        super().__init__(reason, words)


class Malformed(Exception):
    """A row that is not understood."""

    def __init__(self, field: str, expected: str, found: str, fix: str = FIX) -> None:
        """Take the field, such as messages[0].role; "" is the whole row."""
        self.field, self.expected, self.found, self.fix = field, expected, found, fix
        super().__init__(field, expected, found)


def without_nulls(value: Any) -> Any:
    """Return a value without the null members of its objects: column stores have none or all of them."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def joined(content: Any, field: str) -> str:
    """Return the text of a list of text parts."""
    if not isinstance(content, list):
        raise Malformed(field, "text or a list of text parts", kind_of(content))
    for i, part in enumerate(content):
        kind = str(part.get("type")) if isinstance(part, dict) else ""
        if kind == "text" and isinstance(part.get("text"), str):
            continue
        if medium := next((name for name in MEDIA if name in kind), None):
            raise Dropped(f"{medium} content", f"{field}[{i}]")
        raise Malformed(f"{field}[{i}]", 'a part {"type": "text", "text": …}', kind_of(part))
    return "".join(part["text"] for part in content)


def objects(value: Any, field: str) -> list[dict[str, Any]]:
    """Return a list of objects; column stores often hold it, or each of them, as JSON text."""
    try:
        value = json.loads(value) if isinstance(value, str) and value else value or []
        found = [json.loads(item) if isinstance(item, str) else item for item in value or []]
    except (ValueError, TypeError, RecursionError):
        found = [None]
    if isinstance(value, dict) or not all(isinstance(item, dict) for item in found):
        raise Malformed(field, "a list of objects, also as JSON text", kind_of(value))
    return found


def tool_calls(value: Any, field: str) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as JSON text, the form in which servers take them."""
    if not value:
        return []
    calls = objects(value, field)
    for i, call in enumerate(calls):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            calls[i] = call | {"function": function | {"arguments": json.dumps(function["arguments"])}}
    return calls


def require_sendable(value: Any) -> None:
    """Raise UnicodeEncodeError when a text anywhere in a JSON value holds half of a surrogate pair.

    Raises Dropped for NaN and infinity, which Python's JSON has and a server's has not.
    """
    if isinstance(value, str):
        if not value.isascii():
            value.encode()
    elif isinstance(value, dict):
        for name, item in value.items():
            require_sendable(name)
            require_sendable(item)
    elif isinstance(value, list):
        for item in value:
            require_sendable(item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise Dropped("not a number", f"{value} cannot be sent")


def kind_of(value: Any) -> str:
    """Return in a few words what a value is, for a message."""
    if isinstance(value, dict):
        return f"an object with {sorted(map(str, value))[:20]}"
    return f"{type(value).__name__} {str(value)[:60]!r}"
