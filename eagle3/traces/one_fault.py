"""One fault in all replies: a setting causes it, so the run stops early and writes none of them off.

A skipped prompt is never asked again. As long as a setting of the mix has given no trace, what it skips is held back;
its first trace shows that the others are single cases, and they are recorded. Doubtful token ids are recorded last: if
they become too many, the run stops, and none of them is written off.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from eagle3.common.errors import PreconditionError
from eagle3.traces import token_proof

FOLLOWS = "an earlier turn was skipped"
ENOUGH = 20  # replies without a trace after which none is expected
_PARSER = ("start the server with its reasoning parser (vLLM: --reasoning-parser NAME, with --serve in --serve-args), "
           "switch thinking on with --chat-template-kwargs, or use --reasoning optional")
_IDS = "let the server return token ids (vLLM does, and so it does behind a gateway that passes return_token_ids on)"
_DOUBTS = (token_proof.COUNT_DIFFERS, token_proof.NO_COUNT)
# What makes every reply end so.
_SETTINGS = {
    "truncated": "raise --max-tokens (a reply that is cut in its reasoning is no example), switch thinking off with "
    "--chat-template-kwargs, or raise the server's own limit; without token ids no reply that is cut can be used",
    "empty": "see what the server answers: a reasoning or tool parser that takes the whole reply, a stop word or a "
    "template of another model",
    "no reasoning": _PARSER,
    "unwanted reasoning": "switch thinking off with --chat-template-kwargs, or use --reasoning optional",
    "tool call without token ids": _IDS,
    "reasoning without token ids": _IDS + ", or name the folder of the model that is served with --model",
    token_proof.COUNT_DIFFERS: _IDS + ", or name the folder of the model that is served with --model",
    token_proof.NO_COUNT: _IDS + ", or usage with each reply",
}


class HeldBack:
    """Skips that are not written yet, by the setting with which they were asked."""

    def __init__(self, proved: Iterable[str]) -> None:
        """Take the names of the settings that have given traces."""
        self._proved = set(proved)
        self._records: dict[str, list[dict[str, Any]]] = {}
        self._doubtful: list[dict[str, Any]] = []

    def holds(self, setting: str, record: dict[str, Any]) -> bool:
        """Keep a skip that may be the setting's fault; say whether it is kept.

        Raises PreconditionError when that is one too many.
        """
        if setting in self._proved and record["reason"] in _DOUBTS:
            self._doubtful.append(record)
            return True
        if setting in self._proved or not (record["reason"] in _SETTINGS or record["reason"] == FOLLOWS):
            return False
        self._records.setdefault(setting, []).append(record)
        if sum(_reasons(self._records[setting]).values()) >= ENOUGH:
            raise _problem(self._records[setting])
        return True

    def release(self, setting: str) -> list[dict[str, Any]]:
        """Note that a setting gives traces; return what was held back until then."""
        self._proved.add(setting)
        return self._records.pop(setting, [])

    def left(self) -> list[dict[str, Any]]:
        """Return at the end what is to be written after all; PreconditionError when there is no trace at all."""
        records = [record for held in self._records.values() for record in held]
        if _reasons(records) and not self._proved:
            raise _problem(records)
        records += self._doubtful
        self._records, self._doubtful = {}, []
        return records


def _reasons(records: list[dict[str, Any]]) -> Counter[str]:
    return Counter(record["reason"] for record in records if record["reason"] != FOLLOWS)


def _problem(records: list[dict[str, Any]]) -> PreconditionError:
    reasons = _reasons(records).most_common()
    first, count = reasons[0]
    many = sum(number for _, number in reasons)
    which = f"the first {many} replies" if many > 1 else "the first reply"
    detail = next((record["detail"] for record in records if record["reason"] == first), "")
    said = f"{first}, though it is required" if first == "no reasoning" else first
    return PreconditionError(
        f"{which} gave no trace; none is recorded: "
        + (said if len(reasons) == 1 else ", ".join(f"{number} × {reason}" for reason, number in reasons)),
        where="--reasoning required" if first == "no reasoning" else "the server or a setting",
        expected="reasoning or reasoning_content in the reply, or a think block in its content"
        if first == "no reasoning" else "at least one reply that can be learned from",
        found=f"{count} × {first}" + (f", such as: {detail}" if detail else ""),
        fix=_SETTINGS[first] + "; the same command asks them again",
    )
