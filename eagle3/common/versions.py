"""Versions, compared by their numbers; every gate of an engine goes through here."""

import re

_LEAST = 3


def numbers(version: str | None) -> tuple[int, ...]:
    """Return the leading numbers of a version, at least three: 0.17.1rc2 → (0, 17, 1), 1.0+cpu → (1, 0, 0).

    A pre-release or a later build (`.post1`) counts as its release; what begins with no number is (0, 0, 0).
    """
    match = re.match(r"\d+(?:\.\d+)*", version or "")
    found = tuple(int(part) for part in match.group().split(".")) if match else ()
    return found + (0,) * (_LEAST - len(found))
