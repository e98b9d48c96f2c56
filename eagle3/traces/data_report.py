"""The data report of stage 01: what the traces look like, before GPU hours are spent on them.

  python -m eagle3.datareport runs/kimi/01_traces --closing-id 163607
  python -m eagle3.datareport runs/kimi/01_traces --render      (page and plots again, from data_report.json alone)

Reads traces.jsonl, skipped.jsonl and failures.jsonl as streams and writes data_report.json, data_report.html,
data_lengths.png and data_outcomes.png beside them. About 60 bytes a trace are held in memory, never a text.
"""

import argparse
import base64
import html
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3.common import files, log
from eagle3.common.errors import PreconditionError, StageError
from eagle3.common.log import logger
from eagle3.traces import trace_rows, trace_statistics

NAME = "data_report"
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
    survey = trace_statistics.Survey(closing_id)
    for row in trace_rows.read_traces(directory / trace_rows.FILE_NAME):
        survey.add(row)
    for kind in ("skipped", "failures"):
        for _, record in files.read_jsonl(directory / f"{kind}.jsonl"):
            survey.add_lost(kind, record)
    report = survey.report(lambda wanted: trace_statistics.pick(directory / trace_rows.FILE_NAME, wanted))
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
    if version != trace_statistics.SCHEMA_VERSION:
        raise PreconditionError("a report of another schema version", where=path,
                                expected=trace_statistics.SCHEMA_VERSION, found=version,
                                fix="write it anew from the traces")
    return report


def outputs(directory: Path) -> dict[str, Path]:
    """Return {name: path} of the report's files that lie in a folder."""
    names = (f"{NAME}.json", f"{NAME}.html", "data_lengths.png", "data_outcomes.png")
    return {name: directory / name for name in names if (directory / name).is_file()}


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
