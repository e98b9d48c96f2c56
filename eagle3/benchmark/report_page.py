"""The page of a benchmark: what it comes to, then charts and tables, then what it was measured with."""

import json
from typing import Any

from eagle3.benchmark import figures, headline, prediction_tables, report_tables
from eagle3.common import charts, pages
from eagle3.common.charts import Point, Series

_PARTS = (("median", "p50"), ("p95", "p95"), ("p99", "p99"))
_TIMES = (("first_token_s", "Time to first token", 1, "s"), ("between_tokens_s", "Time between tokens", 1000, "ms"),
          ("latency_s", "Whole request", 1, "s"))
_NOTES = """Acceptance length is 1 + accepted draft tokens / draft rounds, from the engine's counters over the
measured requests, ± its standard error. Acceptance by position is the share of all rounds that accepted that position
and every one before it; conditional is the share of the rounds that got there. "Used" is the share of all drafted
tokens that were accepted. Predicted values walk the same replies offline in draft
rounds; expected ones take the verifier's probability of each draft instead of the tokens that it happened to draw.
Brackets hold the smallest
and largest of the repeats; of a speed-up, the slowest drafter over the fastest verifier and the reverse. First token is
the time to the first chunk with tokens. Where a chunk brings several tokens, as with a drafter, they share its time:
time between tokens is a request's time after the first chunk over the tokens after it, time between chunks what a
reader waits. Tokens/s per user is 1 / the median time between tokens. Energy is the whole board's."""
Run = dict[str, Any]


def page(results: dict[str, Any]) -> pages.Html:
    """Return the page of results as `report.load` gives them."""
    tables, drawn = report_tables.tables(results), _charts(results)
    first, *more = headline.lines(results)
    parts = [pages.lead(first), *map(pages.lead, more), pages.definitions(_facts(results))]
    if results["control"]:
        parts.append(pages.paragraph(f"Control: {results['control']['text']}"))
    for title in dict.fromkeys([*report_tables.ORDER, *tables, *drawn]):
        if title in tables or drawn.get(title):
            parts += [pages.heading(title), *drawn.get(title, [])]
            parts += [pages.table(*tables[title])] if title in tables else []
        if title == report_tables.ACCEPTANCE:
            parts += [pages.block(line.strip()) if line.startswith("  ") else pages.warning(line)
                      for line in prediction_tables.remarks(results)]
        if title == report_tables.SERVING and title in tables:
            parts += [pages.block(line.strip()) if line.startswith("  ") else pages.paragraph(line)
                      for line in prediction_tables.serving_words(results)]
    return pages.document("Drafter benchmark", *parts, pages.heading("What the figures are"), pages.paragraph(_NOTES),
                          *_made_with(results))


def _charts(results: dict[str, Any]) -> dict[str, list[pages.Html]]:
    """Return the charts that stand under each heading, those with nothing to show left out."""
    runs = results["runs"]
    drafted = [run for run in runs if run["draft_tokens"]]
    compared = {_name(run, runs): {"measured": run["acceptance"]["length"], "predicted": run["predicted"]["length"]}
                for run in drafted if run.get("acceptance") and run.get("predicted")}
    found = {
        report_tables.ACCEPTANCE: [charts.dot_chart("Predicted against measured acceptance length (←: further apart "
                                                    f"than {prediction_tables.FAR:g})", compared, "acceptance length")],
        report_tables.BY_POSITION: [
            charts.line_chart("Cumulative: rounds that accept this position and all before it",
                              _positions(runs), "draft position", marks=True, y_range=(0, 1)),
            charts.line_chart("Conditional: of the rounds that got there", _positions(runs, conditional=True),
                              "draft position", marks=True, y_range=(0, 1))],
        report_tables.SPEED: [
            charts.line_chart("Speed-up over the verifier alone", _by_load(drafted, "speedup"), "requests in flight",
                              log_x=True, marks=True, y_range=(0, None)),
            charts.line_chart("Output tokens/s", _by_load(runs, "tokens_per_s"), "requests in flight", log_x=True,
                              marks=True, y_range=(0, None))],
        report_tables.TIMES: [
            charts.dot_chart(title, {_name(run, runs): {label: scale * run[name][key] for key, label in _PARTS
                                                        if key in run[name]} for run in runs if run.get(name)}, unit)
            for name, title, scale, unit in _TIMES],
    }
    return {title: kept for title, parts in found.items() if (kept := [part for part in parts if part])}


def _positions(runs: list[Run], *, conditional: bool = False) -> Series:
    """Return acceptance by position, a line for each measurement and its prediction."""
    series: Series = {}
    for run in runs:
        for source, word in (("acceptance", ""), ("predicted", ", predicted")):
            cumulative = (run.get(source) or {}).get("by_position") or []
            shares = figures.conditional(cumulative) if conditional else cumulative  # older results have but the one
            if points := [(float(k), share) for k, share in enumerate(shares, start=1) if share is not None]:
                series[_name(run, runs) + word] = [*points]
    return series


def _by_load(runs: list[Run], figure: str) -> Series:
    """Return a figure with its spread over requests in flight, a line for each server and its conditions."""
    series: dict[str, list[Point]] = {}
    for run in sorted(runs, key=lambda run: run["concurrency"]):
        if run.get(figure) is not None:
            point = (run["concurrency"], run[figure], *(run["spread"].get(figure) or ()))
            series.setdefault(_name(run, runs, load=False), []).append(point)
    return series


def _name(run: Run, runs: list[Run], *, load: bool = True) -> str:
    """Return what tells a run from the others, as the first columns of the tables do; far predictions are marked."""
    cells = {head: cell(run) for head, cell in report_tables.where(runs) if load or head != "in flight"}
    words = [text if head in ("server", "prompts") else f"{head} {text}" for head, text in cells.items()]
    return ", ".join(words) + " ←" * (load and prediction_tables.is_far(run))


def _facts(results: dict[str, Any]) -> dict[str, str]:
    engine, settings = results["engine"], results["settings"]
    temperatures = sorted({run["temperature"] for run in results["runs"]})
    asked = ", ".join(f"{each['prompts']} prompts of {each['name']}" for each in results["sets"])
    return {
        "Verifier": results["model"]["path"],
        "Drafter": f"{results['drafter']['path']} (identity {results['drafter']['identity'][:12]})",
        "Engine": f"{engine['kind']} {engine['version'] or '(version unknown)'}",
        "Hardware": ", ".join(settings["gpus"]) or "CPU",
        "Load": f"{asked}, at most {settings['max_tokens']} tokens each, temperature "
                + ", ".join(f"{each:g}" for each in temperatures),
    }


def _made_with(results: dict[str, Any]) -> list[pages.Html]:
    """Return configuration, versions, hardware and command; nothing for results of versions that did not keep them."""
    made = results.get("made_with")
    if not made:
        return []
    facts = {"Hardware": ", ".join(made["gpus"]) or made["processor"] or "CPU", "Commit": made["git_commit"] or "–",
             **made["versions"]}
    return [pages.heading("Command"), pages.block(made["command"]), pages.heading("Versions and hardware"),
            pages.definitions(facts), pages.heading("Resolved configuration"),
            pages.block(json.dumps(made["options"], indent=2, ensure_ascii=False, sort_keys=True))]
