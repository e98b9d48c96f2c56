"""The data report of stage 01: what the traces look like, before GPU hours are spent on them.

  python -m eagle3.datareport runs/kimi/01_traces --closing-id 163607
  python -m eagle3.datareport runs/kimi/01_traces --render      (page and plots again, from data_report.json alone)

Reads traces.jsonl, skipped.jsonl and failures.jsonl as streams and writes data_report.json, data_report.html,
data_lengths.png and data_outcomes.png beside them. About 60 bytes a trace are held in memory, never a text.

How repetition is measured: a token counts as repeated when the 16 tokens that end with it stand earlier in the
same completion already. Ordinary prose gives about 0%, code and tables some, a model caught in a loop nearly
100%; a trace with half of its tokens repeated is called a loop. Such traces teach a drafter the loop.
"""

import argparse
import base64
import contextlib
import hashlib
import html
import json
import math
import sys
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eagle3 import files, log, traces
from eagle3.errors import PreconditionError, StageError
from eagle3.log import logger

NAME = "data_report"
NGRAM = 16
LOOP_SHARE = 0.5
_SCHEMA_VERSION = 1
_OTHERS = "(all other sources)"
_SHOWN = 12  # sources and settings with rows of their own; the rest is summed up
_LISTED = 5  # ids of the longest, the shortest, the most repeated
_BINS = 30
_WIDE = 30  # 99th percentile over 1st from which a length axis is logarithmic
_KINDS = ("prompt", "completion", "reasoning", "content")
_STATISTICS = ("sum", "mean", "median", "p90", "p99", "max")
_ABSENT = "–"
# Characters that hide or reorder the text around them.
_UNPRINTABLE = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160), 0x200E, 0x200F, *range(0x202A, 0x202F),
                              *range(0x2066, 0x206A)], "·")
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 58rem; margin: 1rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: .6rem 0 1.2rem; display: block; overflow-x: auto; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ccc; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; max-width: 16rem; overflow: hidden; text-overflow: ellipsis; }
img { max-width: 100%; display: block; } dt { font-weight: 600; } dd { margin: 0 0 .4rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f4f4f4; padding: .5rem; unicode-bidi: isolate; }
"""

Table = tuple[list[str], list[list[str]]]


def write(directory: Path, closing_id: int | None = None) -> dict[str, Any]:
    """Write the report of a 01_traces folder and return what data_report.json holds.

    Args:
        closing_id: id of the token that closes the reasoning. With it, reasoning and content are told apart
            exactly (the tag counts as reasoning, the end token as content). Rows without that token, or all rows
            when it is None, are divided in proportion to the characters of both texts: an estimate.

    Raises PreconditionError when the folder is missing or a trace is damaged. See `outputs` for what was written.
    """
    if not directory.is_dir():
        raise PreconditionError("no such folder", where=directory, fix="give the 01_traces folder of a run")
    survey = _Survey(closing_id)
    for row in traces.read_traces(directory / traces.FILE_NAME):
        survey.add(row)
    for kind in ("skipped", "failures"):
        for _, record in files.read_jsonl(directory / f"{kind}.jsonl"):
            survey.add_lost(kind, record)
    report = survey.report(lambda wanted: _pick(directory / traces.FILE_NAME, wanted))
    files.write_json(directory / f"{NAME}.json", report)
    render(directory)
    return report


def render(directory: Path) -> list[Path]:
    """Write page and plots from data_report.json alone and return their paths.

    Without matplotlib the page has tables only, and a warning says so.
    """
    report = load(directory)
    plots = _plots(report, directory)
    page = directory / f"{NAME}.html"
    files.write_bytes(page, _html(report, plots).encode())
    return [page, *plots]


def load(directory: Path) -> dict[str, Any]:
    """Return data_report.json after checking its schema version."""
    path = directory / f"{NAME}.json"
    report = files.read_json(path, fix="python -m eagle3.datareport RUN_DIR/01_traces writes it")
    version = report.get("schema_version") if isinstance(report, dict) else None
    if version != _SCHEMA_VERSION:
        raise PreconditionError("a report of another schema version", where=path, expected=_SCHEMA_VERSION,
                                found=version, fix="write it anew from the traces")
    return report


def outputs(directory: Path) -> dict[str, Path]:
    """Return {name: path} of the report's files that lie in a folder."""
    names = (f"{NAME}.json", f"{NAME}.html", "data_lengths.png", "data_outcomes.png")
    return {name: directory / name for name in names if (directory / name).is_file()}


# --- measuring --------------------------------------------------------------------------------------------


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


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


class _Names:
    """Numbers for names, in the order in which they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))


class _Survey:
    """What is kept of every trace while they stream by: numbers in flat arrays."""

    def __init__(self, closing_id: int | None) -> None:
        self.closing_id = closing_id
        self.sources, self.finishes, self.settings, self.origins = (_Names() for _ in range(4))
        self.reasons, self.models = _Names(), _Names()
        columns = (*_KINDS, "repeated", "source", "finish", "setting", "origin", "reasoned", "estimated")
        self.columns = {name: array("i") for name in columns}
        self.columns |= {name: array("Q") for name in ("identity", "text")}
        self.lost: dict[str, dict[int, tuple[int, int, int]]] = {"skipped": {}, "failures": {}}

    def add(self, row: dict[str, Any]) -> None:
        completion = row["completion_token_ids"]
        reasoning, estimated = reasoning_tokens(row, self.closing_id)
        text = row["content"] or ""
        self.models[row["model"]]
        values = {
            "prompt": len(row["prompt_token_ids"]), "completion": len(completion), "reasoning": reasoning,
            "content": len(completion) - reasoning, "repeated": repeated_tokens(completion),
            "source": self.sources[row["source"]], "finish": self.finishes[row["finish_reason"]],
            "setting": self.settings[_setting(row)], "origin": self.origins[row["token_source"]],
            "reasoned": bool(row["reasoning"]), "estimated": estimated,
            "identity": _hash(row["id"]), "text": _hash(text) if text.strip() else 0,
        }
        for name, column in self.columns.items():
            column.append(values[name])

    def add_lost(self, kind: str, record: dict[str, Any]) -> None:
        """Note a skip or a failure; the latest record of an id counts."""
        source = self.sources[str(record.get("source") or "(not recorded)")]
        reason = self.reasons[str(record.get("reason"))]
        tokens = record.get("tokens")
        self.lost[kind][_hash(str(record.get("id")))] = source, reason, tokens if isinstance(tokens, int) else 0

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
            "schema_version": _SCHEMA_VERSION,
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
        tokens = {kind: data[kind][mask & (data["reasoned"] > 0) if kind == "reasoning" else mask] for kind in _KINDS}
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
                "repeated_share": float(repeated[number])} | {kind: int(data[kind][number]) for kind in _KINDS}

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


def _pick(path: Path, wanted: set[int]) -> dict[int, dict[str, Any]]:
    """Return rows by their number (from 0) in a traces file that has been checked already."""
    if not wanted:
        return {}
    with open(path, "rb") as file:
        return {number: json.loads(line) for number, line in enumerate(file) if number in wanted}


# --- tables -----------------------------------------------------------------------------------------------


def tables(report: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    """Yield (title, (head, rows)) for every table of the report that has rows."""
    groups = {"in total": report["total"]}
    groups |= report["sources"] if len(report["sources"]) > 1 else {}
    yield "Counts", (
        ["source", "traces", "skipped", "failed", "with reasoning", "cut at max_tokens", "loops", "repeated tokens"],
        [[name, f"{group['traces']:,}", f"{sum(group['skipped'].values()):,}", f"{sum(group['failed'].values()):,}",
          _share(group["with_reasoning"], group["traces"]), _share(group["truncated"], group["traces"]),
          f"{group['loops']:,}", f"{100 * group['repeated_share']:.2f}%"] for name, group in groups.items()])
    for kind in _KINDS:
        rows = [[name, *(_number(group["tokens"][kind].get(statistic)) for statistic in _STATISTICS)]
                for name, group in groups.items() if group["tokens"][kind]["count"]]
        estimate = " (an estimate)" if report["estimated_reasoning"] and kind in ("reasoning", "content") else ""
        yield f"Tokens: {kind}{estimate}", (["source", *_STATISTICS], rows)
    for kind, title in (("finish_reasons", "How replies ended"), ("skipped", "Skipped, by reason"),
                        ("failed", "Failed, by reason")):
        reasons = list(report["total"][kind])
        rows = [[name, *(f"{group[kind].get(reason, 0):,}" for reason in reasons)] for name, group in groups.items()]
        yield title, (["source", *reasons], rows if reasons else [])
    if len(report["settings"]) > 1:
        yield "Sampling", (
            ["setting", "traces", "with reasoning", "cut at max_tokens", "tokens, mean", "tokens, p99"],
            [[s["setting"], _share(s["traces"], report["total"]["traces"]), _share(s["with_reasoning"], s["traces"]),
              _share(s["truncated"], s["traces"]), _number(s["completion"]["mean"]), _number(s["completion"]["p99"])]
             for s in report["settings"]])
    yield "Where token ids come from", (
        ["origin", "traces", "completion tokens"],
        [[name, f"{part['traces']:,}", f"{part['tokens']:,}"] for name, part in report["token_sources"].items()])
    yield "Equal replies", (
        ["text", "times", "one of them"],
        [[entry["content"], f"{entry['count']:,}", entry["id"]] for entry in report["duplicates"]["largest"]])
    for name in ("longest", "shortest", "most_repeated"):
        yield name.replace("_", " ").capitalize(), (
            ["id", *_KINDS, "repeated", "ended by"],
            [[e["id"], *(f"{e[kind]:,}" for kind in _KINDS), f"{100 * e['repeated_share']:.0f}%", e["finish_reason"]]
             for e in report[name]])


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({100 * part / whole:.1f}%)" if whole else "0"


def _number(value: float | None) -> str:
    return _ABSENT if value is None else f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"


def _visible(text: str) -> str:
    """Return a text of unknown origin with characters that hide or reorder others made visible."""
    return text.translate(_UNPRINTABLE).encode(errors="replace").decode()


# --- plots ------------------------------------------------------------------------------------------------


def _plots(report: dict[str, Any], directory: Path) -> list[Path]:
    try:
        import matplotlib  # noqa: F401 - figures are made without pyplot, so no backend needs choosing
    except ImportError:
        logger.warning("matplotlib is not installed: the data report has tables but no plots (pip install matplotlib)")
        return []
    made = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a source named in another script
        for name, draw in (("data_lengths", _draw_lengths), ("data_outcomes", _draw_outcomes)):
            figure = draw(report)
            if figure is not None:
                made.append(directory / f"{name}.png")
                with files.replacing(made[-1]) as temporary:
                    figure.savefig(temporary, format="png", dpi=150)
    return made


def _draw_lengths(report: dict[str, Any]) -> Any:
    """Return a figure of three histograms, one above the other, sources stacked; None without traces."""
    from matplotlib.figure import Figure

    present = {kind: histogram for kind, histogram in report["histograms"].items() if histogram}
    if not present:
        return None
    figure = Figure(figsize=(5.5, 2.6 * len(present)), layout="constrained")
    for axes, (kind, histogram) in zip(figure.subplots(len(present), squeeze=False)[:, 0], present.items(),
                                       strict=True):
        edges = histogram["edges"]
        counts = {name: values for name, values in histogram["counts"].items() if sum(values)}
        axes.hist([edges[:-1]] * len(counts), edges, weights=list(counts.values()), stacked=True,
                  label=[_label(name) for name in counts])
        estimate = " (estimated)" if report["estimated_reasoning"] and kind != "prompt" else ""
        axes.set(xlabel=f"{kind} tokens{estimate}", ylabel="traces", xscale="log" if histogram["log"] else "linear")
        if len(counts) > 1:
            axes.legend(fontsize=7)
    return figure


def _draw_outcomes(report: dict[str, Any]) -> Any:
    """Return a figure of how the replies to each source ended, in shares; None when nothing was asked."""
    from matplotlib.figure import Figure

    outcomes: dict[str, dict[str, int]] = {}
    for name, group in report["sources"].items():
        for title, kind in (("kept", "finish_reasons"), ("skipped", "skipped"), ("failed", "failed")):
            for reason, count in group[kind].items():
                outcomes.setdefault(f"{title}: {reason}", {})[name] = count
    if not outcomes:
        return None
    names = list(report["sources"])
    totals = [sum(counts.get(name, 0) for counts in outcomes.values()) for name in names]
    figure = Figure(figsize=(5.5, 1.6 + 0.35 * len(names) + 0.22 * len(outcomes)), layout="constrained")
    axes, lefts = figure.subplots(), [0.0] * len(names)
    for number, (outcome, counts) in enumerate(outcomes.items()):
        shares = [100 * counts.get(name, 0) / total for name, total in zip(names, totals, strict=True)]
        axes.barh(range(len(names)), shares, left=lefts, label=_label(outcome), color=f"C{number % 10}",
                  hatch="" if outcome.startswith("kept") else "//", edgecolor="white")
        lefts = [left + share for left, share in zip(lefts, shares, strict=True)]
    axes.set_yticks(range(len(names)), [_label(name) for name in names])
    axes.invert_yaxis()
    axes.set(xlabel="% of the prompts of the source", xlim=(0, 100))
    figure.legend(loc="outside lower center", fontsize=7, ncols=2)
    return figure


def _label(text: str) -> str:
    """Return a text as matplotlib takes it literally: `$` would start a formula, a leading `_` hide it."""
    text = _visible(text).replace("\n", " ")
    return " " * text.startswith("_") + (text if len(text) <= 28 else text[:27] + "…").replace("$", r"\$")


# --- page -------------------------------------------------------------------------------------------------


def _html(report: dict[str, Any], plots: list[Path]) -> str:
    """Return a page in one file: no script, no link, plots inside it; every text of a row escaped."""
    head = ('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Traces</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
            f'style-src \'unsafe-inline\'"><style>{_STYLE}</style></head><body><h1>Traces</h1>')
    images = "".join(_image(path) for path in plots)
    body = "".join(f"<h2>{_escaped(title)}</h2>{_html_table(*table)}" for title, table in tables(report) if table[1])
    samples = "".join(_html_sample(sample) for sample in report["samples"])
    return f"{head}{_html_facts(report)}{images}{body}<h2>Samples</h2>{samples}</body></html>\n"


def _image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}">'


def _html_facts(report: dict[str, Any]) -> str:
    total, repetition, equal = report["total"], report["repetition"], report["duplicates"]
    facts = {
        "Model": ", ".join(report["models"]) or _ABSENT,
        "Traces": f"{total['traces']:,}, with {total['tokens']['completion'].get('sum', 0):,} generated tokens",
        "Given up": f"{sum(total['skipped'].values()):,} skipped ({total['tokens_of_skipped']:,} generated tokens), "
                    f"{sum(total['failed'].values()):,} failed",
        "Equal replies": f"{equal['replies']:,} replies repeat another one's text ({equal['texts']:,} texts)",
        "Repetition": f"{100 * total['repeated_share']:.2f}% of the generated tokens end a run of "
                      f"{repetition['ngram']} tokens that stands earlier in the same reply; in {total['loops']:,} "
                      f"traces at least {100 * repetition['loop_share']:.0f}% (loops)",
        "Reasoning": f"in {_share(total['with_reasoning'], total['traces'])} of the traces; its tokens are "
                     + (f"estimated from characters in {report['estimated_reasoning']:,} traces"
                        if report["estimated_reasoning"] else "counted exactly"),
    }
    return f"<dl>{''.join(f'<dt>{_escaped(name)}</dt><dd>{_escaped(text)}</dd>' for name, text in facts.items())}</dl>"


def _html_table(head: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{_escaped(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _html_sample(sample: dict[str, Any]) -> str:
    title = f"{sample['id']} ({sample['source']}, {sample['completion']:,} tokens, {sample['finish_reason']})"
    texts = [(name, sample[name]) for name in ("asked", "reasoning", "reply") if sample[name]]
    texts += [("tool calls", str(sample["tool_calls"]))] if sample["tool_calls"] else []
    return f"<h3>{_escaped(title)}</h3>" + "".join(f"<p>{name}</p><pre>{_escaped(text)}</pre>" for name, text in texts)


def _escaped(text: str) -> str:
    return html.escape(_visible(text))


def main(arguments: list[str]) -> int:
    """Write or render the report of a folder and print its counts; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m eagle3.datareport", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="01_traces folder of a run")
    parser.add_argument("--closing-id", type=int, help="id of the token that closes the reasoning (Kimi: 163607)")
    parser.add_argument("--render", action="store_true", help="only page and plots, from data_report.json")
    given = parser.parse_args(arguments)
    log.set_up(None, "info")
    try:
        report = load(given.directory) if given.render else write(given.directory, given.closing_id)
        if given.render:
            render(given.directory)
        for title, (head, rows) in tables(report):
            if title == "Counts":
                print("\n".join("  ".join(cells) for cells in _aligned([head, *rows])))
        logger.info("wrote %s", ", ".join(str(path) for path in outputs(given.directory).values()))
        return 0
    except StageError as error:
        logger.error("%s", error)
        return error.exit_code


def _aligned(rows: list[list[str]]) -> list[list[str]]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [[_visible(cell).ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
