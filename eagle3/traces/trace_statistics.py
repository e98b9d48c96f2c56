"""Statistics of traces: lengths, endings, repetition, examples; a stream, about 60 bytes a trace in memory.

How repetition is measured: a token counts as repeated when the 16 tokens that end with it stand earlier in the
same completion already. Ordinary prose gives about 0%, code and tables some, a model caught in a loop nearly
100%; a trace with half of its tokens repeated is called a loop. Such traces teach a drafter the loop.
"""

import contextlib
import json
import math
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3.common.files import hash64
from eagle3.traces.questions import Questions

SCHEMA_VERSION = 1
NGRAM = 16
LOOP_SHARE = 0.5
KINDS = ("prompt", "completion", "reasoning", "content")
_OTHERS = "(all other sources)"
_SHOWN = 12  # sources and settings with rows of their own; the rest is summed up
_LISTED = 5  # ids of the longest, the shortest, the most repeated
_BINS = 30
_WIDE = 30  # 99th percentile over 1st from which a length axis is logarithmic


def repeated_tokens(ids: list[int]) -> int:
    """Return how many tokens end a run of NGRAM tokens that stands earlier in `ids` ([C]) already."""
    import numpy as np

    if len(ids) <= NGRAM:
        return 0
    # A hash of each window, by doubling: the hash of 2k tokens is made of two hashes of k. Ids are spread over
    # 64 bits first; arithmetic wraps.
    hashes = np.asarray(ids, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    hashes ^= hashes >> np.uint64(29)
    factor, span = 0xD6E8FEB86659FD93, 1
    while span < NGRAM:
        hashes = hashes[:-span] * np.uint64(factor) + hashes[span:]
        factor, span = factor * factor % (1 << 64), 2 * span
    hashes.sort()
    return int(np.count_nonzero(hashes[1:] == hashes[:-1]))


def reasoning_tokens(row: dict[str, Any], closing_id: int | None) -> tuple[int, bool]:
    """Return (tokens of a row's completion that are reasoning, whether that is an estimate)."""
    ids = row["completion_token_ids"]
    if closing_id is not None:
        with contextlib.suppress(ValueError):
            return ids.index(closing_id) + 1, False
    if not row["reasoning"]:
        return 0, False
    other = len(row["content"] or "") + (len(json.dumps(row["tool_calls"])) if row["tool_calls"] else 0)
    return round(len(ids) * len(row["reasoning"]) / (len(row["reasoning"]) + other)), True


class _Names:
    """Numbers for names, in the order in which they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))


class Survey:
    """What is kept of every trace while they stream by: numbers in flat arrays."""

    def __init__(self, closing_id: int | None) -> None:
        self.closing_id = closing_id
        self.sources, self.finishes, self.settings, self.origins = (_Names() for _ in range(4))
        self.reasons, self.models = _Names(), _Names()
        columns = (*KINDS, "repeated", "source", "finish", "setting", "origin", "reasoned", "estimated")
        self.columns = {name: array("i") for name in columns}
        self.columns |= {name: array("Q") for name in ("identity", "text")}
        self.questions = Questions()
        self.lost: dict[str, dict[int, tuple[int, int, int]]] = {"skipped": {}, "failures": {}}

    def add(self, row: dict[str, Any]) -> None:
        """Take the numbers of one trace."""
        completion = row["completion_token_ids"]
        reasoning, estimated = reasoning_tokens(row, self.closing_id)
        text = row["content"] or ""
        self.models[row["model"]]
        self.questions.add(row["id"], row["prompt"].get("messages"))
        values = {
            "prompt": len(row["prompt_token_ids"]), "completion": len(completion), "reasoning": reasoning,
            "content": len(completion) - reasoning, "repeated": repeated_tokens(completion),
            "source": self.sources[row["source"]], "finish": self.finishes[row["finish_reason"]],
            "setting": self.settings[_setting(row)], "origin": self.origins[row["token_source"]],
            "reasoned": bool(row["reasoning"]), "estimated": estimated,
            "identity": hash64(row["id"]), "text": hash64(text) if text.strip() else 0,
        }
        for name, column in self.columns.items():
            column.append(values[name])

    def add_lost(self, kind: str, record: dict[str, Any]) -> None:
        """Note a skip or a failure; the latest record of an id counts."""
        source = self.sources[str(record.get("source") or "(not recorded)")]
        reason = self.reasons[str(record.get("reason"))]
        tokens = record.get("tokens")
        self.lost[kind][hash64(str(record.get("id")))] = source, reason, tokens if isinstance(tokens, int) else 0

    def report(self, pick: Callable[[set[int]], dict[int, dict[str, Any]]]) -> dict[str, Any]:
        """Return the report; `pick` gives rows by their number in the file."""
        import numpy as np

        data = {name: np.asarray(column) for name, column in self.columns.items()}
        everything = np.ones(len(data["source"]), dtype=bool)
        lost = {kind: self._still_lost(kind, data["identity"]) for kind in self.lost}
        counted = Counter(data["source"].tolist()) + Counter(entry[0] for found in lost.values() for entry in found)
        shown = [number for number, _ in counted.most_common(_SHOWN)]
        names = list(self.sources.numbers)
        members = {names[number]: [number] for number in shown}
        if len(counted) > len(shown):
            members[_OTHERS] = [number for number in counted if number not in shown]
        groups = {
            name: (np.isin(data["source"], numbers), {
                kind: [entry for entry in found if entry[0] in set(numbers)] for kind, found in lost.items()
            }) for name, numbers in members.items()
        }
        return {
            "schema_version": SCHEMA_VERSION,
            "models": list(self.models.numbers),
            "closing_id": self.closing_id,
            "estimated_reasoning": int(data["estimated"].sum()),
            "total": self._group(data, everything, lost),
            "sources": {name: self._group(data, mask, part) for name, (mask, part) in groups.items()},
            "settings": self._settings(data),
            "token_sources": {name: {"traces": int((mask := data["origin"] == number).sum()),
                                     "tokens": int(data["completion"][mask].sum())}
                              for name, number in self.origins.numbers.items()},
            "histograms": {kind: _histogram(data, kind, {name: mask for name, (mask, _) in groups.items()})
                           for kind in ("prompt", "reasoning", "content")},
            "questions": self.questions.report(),
            "repetition": {"ngram": NGRAM, "loop_share": LOOP_SHARE},
        } | _examples(data, pick)

    def _still_lost(self, kind: str, traced: Any) -> list[tuple[int, int, int]]:
        """Return the skips or failures of ids that have no trace by now."""
        import numpy as np

        records = self.lost[kind]
        known = np.isin(np.fromiter(records, dtype=np.uint64, count=len(records)), traced)
        return [record for record, has_trace in zip(records.values(), known, strict=True) if not has_trace]

    def _group(self, data: dict[str, Any], mask: Any, lost: dict[str, list[tuple[int, int, int]]]) -> dict[str, Any]:
        reasons, finishes = list(self.reasons.numbers), list(self.finishes.numbers)
        tokens = {kind: data[kind][mask & (data["reasoned"] > 0) if kind == "reasoning" else mask] for kind in KINDS}
        total, repeated = int(tokens["completion"].sum()), data["repeated"][mask]
        finished = Counter(finishes[number] for number in data["finish"][mask].tolist())
        return {
            "traces": int(mask.sum()),
            "skipped": dict(Counter(reasons[reason] for _, reason, _ in lost["skipped"]).most_common()),
            "failed": dict(Counter(reasons[reason] for _, reason, _ in lost["failures"]).most_common()),
            "tokens_of_skipped": sum(count for _, _, count in lost["skipped"]),
            "with_reasoning": int(data["reasoned"][mask].sum()),
            "truncated": finished["length"],
            "finish_reasons": dict(finished.most_common()),
            "tokens": {kind: _statistics(values) for kind, values in tokens.items()},
            "repeated_share": int(repeated.sum()) / total if total else 0.0,
            "loops": int((repeated >= LOOP_SHARE * data["completion"][mask]).sum()),
        }

    def _settings(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        counted = Counter(data["setting"].tolist())
        names, length = list(self.settings.numbers), self.finishes.numbers.get("length", -1)
        found = []
        for number, count in counted.most_common(_SHOWN):
            mask = data["setting"] == number
            found.append({
                "setting": names[number], "traces": count, "with_reasoning": int(data["reasoned"][mask].sum()),
                "truncated": int((data["finish"][mask] == length).sum()),
                "completion": _statistics(data["completion"][mask]),
            })
        return found


def _setting(row: dict[str, Any]) -> str:
    """Return the name of a row's sampling; without one, what was asked, but for what differs from row to row."""
    sampling = row["sampling"]
    if isinstance(sampling.get("name"), str):
        return sampling["name"]
    settings = {name: value for name, value in sampling.items() if name not in ("max_tokens", "seed")}
    if row["chat_template_kwargs"]:
        settings["chat_template_kwargs"] = row["chat_template_kwargs"]
    return json.dumps(settings, sort_keys=True)


def _statistics(values: Any) -> dict[str, float]:
    """Return count, sum, mean, median, p90, p99 and max of token counts ([N]); count alone when N is 0."""
    import numpy as np

    if not len(values):
        return {"count": 0}
    median, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return {"count": len(values), "sum": int(values.sum()), "mean": round(float(values.mean()), 2),
            "median": round(median, 1), "p90": round(p90, 1), "p99": round(p99, 1), "max": int(values.max())}


def _histogram(data: dict[str, Any], kind: str, masks: dict[str, Any]) -> dict[str, Any] | None:
    """Return bin edges in tokens and counts by source; None without values. Reasoning: traces that have any."""
    import numpy as np

    wanted = data["reasoned"] > 0 if kind == "reasoning" else np.ones(len(data[kind]), dtype=bool)
    values = np.maximum(data[kind], 1)
    if not wanted.any():
        return None
    low, p1, p99, high = np.percentile(values[wanted], (0, 1, 99, 100))
    logarithmic = bool(p99 / p1 >= _WIDE)
    if logarithmic:
        edges = np.unique(np.geomspace(low, high + 1, _BINS + 1).round())
    else:  # of whole and equal widths: counts of whole numbers would look like a comb otherwise
        step = max(1, math.ceil((high + 1 - low) / _BINS))
        edges = np.arange(low, high + 1 + step, step)
    counts = {name: np.histogram(values[mask & wanted], edges)[0].tolist() for name, mask in masks.items()}
    return {"log": logarithmic, "edges": edges.astype(int).tolist(), "counts": counts}


# --- examples ---------------------------------------------------------------------------------------------


def _examples(data: dict[str, Any], pick: Callable[[set[int]], dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """Return the longest, shortest and most repeated traces, equal replies, and three samples."""
    import numpy as np

    count = len(data["source"])
    by_length = np.lexsort((data["identity"], data["completion"])).tolist()  # not the order in the file
    repeated = data["repeated"] / np.maximum(data["completion"], 1)
    by_repetition = [number for number in np.lexsort((data["identity"], -repeated)).tolist()[:_LISTED]
                     if repeated[number] > 0]
    texts, sizes = np.unique(data["text"][data["text"] != 0], return_counts=True)
    largest = [number for number in np.lexsort((texts, -sizes))[:_LISTED] if sizes[number] > 1]
    equal = []
    for number in largest:
        same = np.flatnonzero(data["text"] == texts[number])
        equal.append((int(same[np.argmin(data["identity"][same])]), int(sizes[number])))
    lists = {"longest": by_length[::-1][:_LISTED], "shortest": by_length[:_LISTED], "most_repeated": by_repetition}
    samples = sorted({by_length[int(count * share)] for share in (0.1, 0.5, 0.9)}, key=by_length.index) if count else []
    rows = pick({number for numbers in (*lists.values(), samples, [first for first, _ in equal]) for number in numbers})

    def line(number: int) -> dict[str, Any]:
        return {"id": rows[number]["id"], "finish_reason": rows[number]["finish_reason"],
                "repeated_share": float(repeated[number])} | {kind: int(data[kind][number]) for kind in KINDS}

    return {name: [line(number) for number in numbers] for name, numbers in lists.items()} | {
        "duplicates": {
            "replies": int((sizes - 1).sum()),
            "texts": int((sizes > 1).sum()),
            "largest": [{"id": rows[first]["id"], "count": times, "content": _shortened(rows[first]["content"], 160)}
                        for first, times in equal],
        },
        "samples": [line(number) | _texts(rows[number]) for number in samples],
    }


def _texts(row: dict[str, Any]) -> dict[str, Any]:
    messages = row["prompt"].get("messages") or [{}]
    asked = messages[-1].get("content") if isinstance(messages[-1], dict) else None
    asked = asked if isinstance(asked, str) else json.dumps(asked)
    return {"source": row["source"], "asked": _shortened(asked), "reasoning": _shortened(row["reasoning"]),
            "reply": _shortened(row["content"]), "tool_calls": len(row["tool_calls"])}


def _shortened(text: str | None, longest: int = 700) -> str | None:
    """Return a text with its middle left out when it is long."""
    if text is None or len(text) <= longest:
        return text
    head = 2 * longest // 3
    return f"{text[:head]} […{len(text) - longest:,} characters…] {text[head - longest:]}"


def pick(path: Path, wanted: set[int]) -> dict[int, dict[str, Any]]:
    """Return rows by their number (from 0) in a traces file that has been checked already."""
    if not wanted:
        return {}
    with open(path, "rb") as file:
        return {number: json.loads(line) for number, line in enumerate(file) if number in wanted}
