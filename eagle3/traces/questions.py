"""What prompts are about, at a glance: the words that they begin with, and a sample. For the data report."""

import heapq
from collections import Counter
from typing import Any

from eagle3.common.files import hash64
from eagle3.traces.near_repeats import words

_FIRST = 2  # words
_MOST_BEGINNINGS = 20_000  # kept apart while counting; later ones that are new fall under the others
_LISTED = 15  # beginnings in the report
_SAMPLED = 20  # prompts in it
_SHOWN = 200  # characters of each
OTHERS = "(others)"


class Questions:
    """Counts what users say last, prompt by prompt; a few kilobytes however many there are."""

    def __init__(self) -> None:
        self._beginnings: Counter[str] = Counter()
        self._sample: list[tuple[int, str, str]] = []  # (minus the hash of the id, id, text), the largest hash first
        self._asked = 0

    def add(self, identity: str, messages: Any) -> None:
        """Take the prompt of one trace."""
        text = _said_last(messages)
        if text is None:
            return
        self._asked += 1
        beginning = " ".join(words(text[:_SHOWN])[:_FIRST]) or OTHERS
        known = beginning in self._beginnings or len(self._beginnings) < _MOST_BEGINNINGS
        self._beginnings[beginning if known else OTHERS] += 1
        heapq.heappush(self._sample, (-hash64(identity), identity, text[:_SHOWN + 1]))
        if len(self._sample) > _SAMPLED:
            heapq.heappop(self._sample)

    def report(self) -> dict[str, Any]:
        """Return {"asked", "beginnings": how many, "frequent": {beginning: prompts}, "sample": [{"id", "text"}]}."""
        frequent = sorted(self._beginnings.items(), key=lambda item: (-item[1], item[0]))[:_LISTED]
        sample = [{"id": identity, "text": text if len(text) <= _SHOWN else text[:_SHOWN] + "…"}
                  for _, identity, text in sorted(self._sample, reverse=True)]
        return {"asked": self._asked, "beginnings": len(self._beginnings), "frequent": dict(frequent), "sample": sample}


def _said_last(messages: Any) -> str | None:
    """Return the last text of a user, None where there is none."""
    for message in reversed(messages if isinstance(messages, list) else []):
        if isinstance(message, dict) and message.get("role") == "user" and isinstance(message.get("content"), str):
            return str(message["content"])
    return None
