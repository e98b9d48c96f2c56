"""Generated nonsense for readers of what others wrote: seeded, so that a failure comes again by its number."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

TEXTS = ("", " ", "a", "Hello", "user", "assistant", "null", "None", "0", "-1", "1e400", "[", "{}",
         '[{"role": "user"}]', "\u2028", "\x85", "\x0c", "\x00", "\ud800", "\ufffd", "<think>", "</think>", "é" * 40,
         "x" * 300, "'", '"', "\\", "\n", "%s", "{0}", "text", "stop", "length", "image", "~", "!!int x", "2001-99-99",
         "&a [*a]")
NUMBERS = (0, 1, -1, 3, 256, 10**9, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan"))


class Nonsense:
    """Values of any kind from one random generator."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def value(self, depth: int = 3) -> Any:
        """Return a JSON value, small and nested at most so deep."""
        kind = self.chance.randrange(8 if depth else 5)
        if kind < 2:
            return self.chance.choice(TEXTS)
        if kind < 4:
            return self.chance.choice(NUMBERS)
        if kind == 4:
            return self.chance.choice((None, True, False))
        if kind == 5:
            return [self.value(depth - 1) for _ in range(self.chance.randrange(4))]
        if kind == 6:
            return {self.chance.choice(TEXTS): self.value(depth - 1) for _ in range(self.chance.randrange(4))}
        return json.dumps(self.value(depth - 1))

    def mutated(self, value: Any, changes: int) -> Any:
        """Return a JSON value in which so many of its places hold something else, are missing or stand twice."""
        root = {"": json.loads(json.dumps(value))}
        for _ in range(changes):
            holder, key = self.chance.choice(list(_places(root)))
            what = self.chance.randrange(5)
            if what == 0 and isinstance(holder, dict) and key != "":
                del holder[key]
            elif what == 1 and isinstance(holder, list):
                holder.insert(key, holder[key])
            elif what == 2:
                holder[key] = [holder[key]]
            else:
                holder[key] = self.value()
        return root.get("")

    def damaged(self, text: str, deepest: int = 100_000) -> str:
        """Return a text as it stands, or cut, or with a character of another kind, or nested very deeply."""
        what = self.chance.randrange(30)
        at = self.chance.randrange(len(text) + 1)
        if what == 0:
            return text[:at]
        if what == 1:
            return text[:at] + self.chance.choice(TEXTS) + text[at + 1 :]
        if what == 2:
            return "[" * self.chance.choice((3, 40, deepest)) + text
        if what == 3:
            return text.replace(":", ': [' * 3, 1)
        return text


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of everything in a JSON value."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def outcomes(count: int, read: Callable[[int], str]) -> dict[str, int]:
    """Call a reader with the numbers below `count` and count what it says came of each."""
    found: dict[str, int] = {}
    for number in range(count):
        try:
            outcome = read(number)
        except Exception as error:
            raise AssertionError(f"input {number} ends in {type(error).__name__}: {error}") from error
        found[outcome] = found.get(outcome, 0) + 1
    return found
