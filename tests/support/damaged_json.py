"""Seeded damage: the same 10,000 broken inputs in every run."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ODD: list[Any] = [None, True, False, 0, 1, -1, 3, 1 << 70, 2.5, -0.0, 1e308, float("nan"), float("inf"), "", "64",
                  "x" * 300, "\ud800", [],
                  [[]], [2, 4, 5], ["a"], [True], [-1], {}, {"a": {}}, {"rope_type": {}}, {"factor": []}]


_STRANGE = [b"\xff", b"\n", b"\r\n", b"\0", b"[" * 2000, b"{}", b"NaN", b"1e999", b'"\\ud800"', b"\xef\xbb\xbf",
            b"9" * 5000]


def of_value(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """Return a JSON value with one to three places changed: another value, one more or less, a name changed."""
    for _ in range(rng.randint(1, 3) if depth == 0 else 1):
        value = _changed(value, rng, depth)
    return value


def _changed(value: Any, rng: random.Random, depth: int) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.95 - 0.2 * depth:
        name = rng.choice(sorted(value))
        rest = {key: each for key, each in value.items() if key != name}
        kind = rng.random()
        if kind < 0.1:
            return rest
        if kind < 0.2:
            return rest | {name + rng.choice("x_ \0"): value[name]}
        return value | {name: of_value(value[name], rng, depth + 1)}
    if isinstance(value, list) and value and rng.random() < 0.5:
        place = rng.randrange(len(value))
        return [*value[:place], of_value(value[place], rng, depth + 1), *value[place + rng.randint(0, 1):]]
    return rng.choice(ODD)


def of_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with a bit flipped, cut, torn, zeroed at the end, doubled, or with strange ones in them."""
    place = rng.randrange(len(data)) if data else 0
    kind = rng.randrange(7)
    if kind == 0:
        return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
    if kind == 1:
        return data[:place]
    if kind == 2:
        return data[:place] + bytes(len(data) - place)
    if kind == 3:
        return data[:place] + data[place // 2 :]
    if kind == 4:
        return data[:place] + rng.choice(_STRANGE) + data[place:]
    if kind == 5:
        return data[place:]
    end = min(len(data), place + rng.randint(1, 40))
    return data[:place] + bytes(rng.randrange(256) for _ in range(end - place)) + data[end:]


def put(path: Path, data: bytes) -> None:
    """Overwrite a file in place: ext4 waits for the disk when a file is cut to nothing first."""
    with open(path, "r+b" if path.exists() else "wb") as file:
        file.write(data)
        file.truncate()


def damaged(value: Any, count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield `count` damaged forms of a JSON value as bytes of a file, half of them JSON of other values."""
    rng = random.Random(seed)
    whole = json.dumps(value).encode()
    for number in range(count):
        yield of_bytes(whole, rng) if number % 2 else json.dumps(of_value(value, rng)).encode()
