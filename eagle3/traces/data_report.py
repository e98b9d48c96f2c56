"""The data report of stage 01: what the traces look like, before GPU hours are spent on them.

Reads traces.jsonl, skipped.jsonl and failures.jsonl as streams and writes data_report.json and data_report.html
beside them. About 60 bytes a trace are held in memory, never a text.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3.common import charts, files, pages
from eagle3.common.errors import PreconditionError
from eagle3.traces import self_prompts, trace_rows, trace_statistics

NAME = "data_report"
_STATISTICS = ("sum", "mean", "median", "p90", "p99", "max")
_ABSENT = "–"


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
    survey = trace_statistics.Survey(closing_id)
    for row in trace_rows.read_traces(directory / trace_rows.FILE_NAME):
        survey.add(row)
    for kind in ("skipped", "failures"):
        for _, record in files.read_jsonl(directory / f"{kind}.jsonl"):
            survey.add_lost(kind, record)
    report = survey.report(lambda wanted: trace_statistics.pick(directory / trace_rows.FILE_NAME, wanted))
    report["invented"] = self_prompts.recorded(directory)
    files.write_json(directory / f"{NAME}.json", report)
    render(directory)
    return report


def render(directory: Path) -> None:
    """Write the page from data_report.json alone."""
    files.write_bytes(directory / f"{NAME}.html", _page(load(directory)).encode())


def load(directory: Path) -> dict[str, Any]:
    """Return data_report.json after checking its schema version."""
    path = directory / f"{NAME}.json"
    report = files.read_json(path, fix="python -m eagle3.datareport RUN_DIR/01_traces writes it")
    version = report.get("schema_version") if isinstance(report, dict) else None
    if version != trace_statistics.SCHEMA_VERSION:
        raise PreconditionError("a report of another schema version", where=path,
                                expected=trace_statistics.SCHEMA_VERSION, found=version,
                                fix="write it anew from the traces")
    return report


def outputs(directory: Path) -> dict[str, Path]:
    """Return {name: path} of the report's files that lie in a folder."""
    names = (f"{NAME}.json", f"{NAME}.html")
    return {name: directory / name for name in names if (directory / name).is_file()}


# --- tables -----------------------------------------------------------------------------------------------


def tables(report: dict[str, Any]) -> Iterator[tuple[str, pages.Table]]:
    """Yield (title, (head, rows)) for every table of the report that has rows."""
    groups = {"in total": report["total"]}
    groups |= report["sources"] if len(report["sources"]) > 1 else {}
    yield "Counts", (
        ["source", "traces", "skipped", "failed", "with reasoning", "cut at max_tokens", "loops", "repeated tokens"],
        [[name, f"{group['traces']:,}", f"{sum(group['skipped'].values()):,}", f"{sum(group['failed'].values()):,}",
          _share(group["with_reasoning"], group["traces"]), _share(group["truncated"], group["traces"]),
          f"{group['loops']:,}", f"{100 * group['repeated_share']:.2f}%"] for name, group in groups.items()])
    for kind in trace_statistics.KINDS:
        rows = [[name, *(_number(group["tokens"][kind].get(statistic)) for statistic in _STATISTICS)]
                for name, group in groups.items() if group["tokens"][kind]["count"]]
        estimate = " (an estimate)" if report["estimated_reasoning"] and kind in ("reasoning", "content") else ""
        yield f"Tokens: {kind}{estimate}", (["source", *_STATISTICS], rows)
    for kind, title in (("finish_reasons", "How replies ended"), ("skipped", "Skipped, by reason"),
                        ("failed", "Failed, by reason")):
        reasons = list(report["total"][kind])
        rows = [[name, *(f"{group[kind].get(reason, 0):,}" for reason in reasons)] for name, group in groups.items()]
        yield title, (["source", *reasons], rows if reasons else [])
    yield from _questions(report)
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
            ["id", *trace_statistics.KINDS, "repeated", "ended by"],
            [[e["id"], *(f"{e[kind]:,}" for kind in trace_statistics.KINDS), f"{100 * e['repeated_share']:.0f}%",
              e["finish_reason"]]
             for e in report[name]])


def _questions(report: dict[str, Any]) -> Iterator[tuple[str, pages.Table]]:
    """Yield what is asked, and what came of inventing it; nothing for reports of versions that did not say."""
    if invented := report.get("invented"):
        rows = [["usable", f"{invented['usable']:,}", ""]]
        rows += [[reason, f"{each['attempts']:,}", each["example"]] for reason, each in invented["left_out"].items()]
        yield "Prompts that the verifier invented, by what became of them", (["outcome", "attempts", "such as"], rows)
    if asked := report.get("questions"):
        yield f"How prompts begin ({asked['beginnings']:,} beginnings)", (
            ["first words", "prompts"],
            [[words, _share(count, asked["asked"])] for words, count in asked["frequent"].items()])
        yield "Some prompts", (["id", "the user says"], [[each["id"], each["text"]] for each in asked["sample"]])


def counts_text(report: dict[str, Any]) -> str:
    """Return the counts by source as aligned text."""
    return pages.text_table(*dict(tables(report))["Counts"])


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({100 * part / whole:.1f}%)" if whole else "0"


def _number(value: float | None) -> str:
    return _ABSENT if value is None else f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"


# --- charts -----------------------------------------------------------------------------------------------


def _charts(report: dict[str, Any]) -> Iterator[pages.Html]:
    """Yield histograms of lengths, and how the replies to each source ended, in shares."""
    for kind, histogram in report["histograms"].items():
        if histogram:
            edges = histogram["edges"]
            bins = {f"{low:,}–{high - 1:,}" if high - low > 1 else f"{low:,}":
                    {name: counts[place] for name, counts in histogram["counts"].items()}
                    for place, (low, high) in enumerate(itertools.pairwise(edges))}
            estimate = " (estimated)" if report["estimated_reasoning"] and kind != "prompt" else ""
            yield charts.bar_chart(f"Traces by {kind} tokens{estimate}", bins, "traces")
    outcomes: dict[str, dict[str, float]] = {}
    for name, group in report["sources"].items():
        counts = {f"{title}: {reason}": count
                  for title, kind in (("kept", "finish_reasons"), ("skipped", "skipped"), ("failed", "failed"))
                  for reason, count in group[kind].items()}
        outcomes[name] = {outcome: 100 * count / sum(counts.values()) for outcome, count in counts.items() if count}
    yield charts.bar_chart("What became of the prompts", outcomes, "% of the prompts of the source")


# --- page -------------------------------------------------------------------------------------------------


def _page(report: dict[str, Any]) -> str:
    parts = [pages.lead(_in_words(report)), pages.definitions(_facts(report)), *_charts(report)]
    for title, table in tables(report):
        parts += [pages.heading(title), pages.table(*table)] if table[1] else []
    parts.append(pages.heading("Samples"))
    for sample in report["samples"]:
        parts += _sample(sample)
    return pages.document("Traces", *parts)


def _in_words(report: dict[str, Any]) -> str:
    total = report["total"]
    lost = sum(total["skipped"].values()) + sum(total["failed"].values())
    if not total["traces"]:
        return f"No trace; {lost:,} prompts gave none."
    return (f"{total['traces']:,} traces with {total['tokens']['completion']['sum']:,} generated tokens; "
            f"{lost:,} prompts gave none; {total['truncated']:,} traces are cut at max_tokens, "
            f"{total['loops']:,} loop.")


def _facts(report: dict[str, Any]) -> dict[str, str]:
    total, repetition, equal = report["total"], report["repetition"], report["duplicates"]
    return {
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


def _sample(sample: dict[str, Any]) -> list[pages.Html]:
    title = f"{sample['id']} ({sample['source']}, {sample['completion']:,} tokens, {sample['finish_reason']})"
    texts = [(name, sample[name]) for name in ("asked", "reasoning", "reply") if sample[name]]
    texts += [("tool calls", str(sample["tool_calls"]))] if sample["tool_calls"] else []
    parts = [part for name, text in texts for part in (pages.paragraph(name), pages.block(text))]
    return [pages.heading(title, 3), *parts]
