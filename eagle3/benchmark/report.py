"""Tables, plots and the report page of a benchmark, from its results.json alone."""

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eagle3.benchmark import prediction_tables
from eagle3.common import files, pages
from eagle3.common.errors import PreconditionError

_SCHEMA_VERSIONS = (1, 2)
_ABSENT = "–"
_UNAVAILABLE = "unavailable"
_DEEP = 6  # positions beyond which shares are told in whole percent, so that a row fits a terminal
_NAME = 14  # characters of a prompt set's name in a table
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


def render(directory: Path) -> list[Path]:
    """Write report.html and the plots of a results directory and return what was written.

    Without matplotlib the page has tables only, and a warning says so. Raises PreconditionError when
    results.json is missing or of another schema version.
    """
    results = load(directory)
    plots = pages.save_plots(directory, results, {"acceptance": _draw_acceptance, "throughput": _draw_throughput})
    page = directory / "report.html"
    files.write_bytes(page, _page(results, plots).encode())
    return [page, *plots]


def load(directory: Path) -> dict[str, Any]:
    """Return the results of a benchmark after checking their schema version; older ones as today's are."""
    path = directory / "results.json"
    results = files.read_json(path, fix="name the directory of a finished benchmark")
    version = results.get("schema_version") if isinstance(results, dict) else None
    if version not in _SCHEMA_VERSIONS:
        raise PreconditionError(
            "results of another schema version", where=path, expected=_SCHEMA_VERSIONS[-1], found=version
        )
    return (_as_today(results) if version == 1 else results) | {"directory": str(directory)}


def _as_today(results: dict[str, Any]) -> dict[str, Any]:
    """Return results of version 1, of one temperature and one prompt set, without the figures that it had not."""
    settings = results["settings"]
    known = {"temperature": settings["temperature"], "prompts": "prompts", "measurements": [""], "spread": {}}
    runs = [known | {"server": "drafter" if run["draft_tokens"] else "baseline"} | run for run in results["runs"]]
    sets = [{"name": "prompts", "about": "prompts of yours", "path": _ABSENT, "prompts": settings["prompts"]}]
    return results | {"runs": runs, "sets": sets, "drift": [], "control": None}


# --- tables -----------------------------------------------------------------------------------------------

# A column: its head, and what stands in it for a run.
Column = tuple[str, Callable[[Run], str]]


def tables(results: dict[str, Any]) -> dict[str, pages.Table]:
    """Return every table by its title; those without a row are left out."""
    runs = results["runs"]
    where = _where(runs)
    drafted = [run for run in runs if run["draft_tokens"]]
    found = {
        "Acceptance": _table([*where, *_LENGTH], drafted),
        "Acceptance by position": _by_position(where, drafted),
        "Speed": _table([*where, *_SPEED], runs),
        "Times, median/p95/p99: first token and whole request in s, between tokens and chunks in ms":
            _table([*where, *_TIMES], runs),
        "Prompt sets": (
            ["prompts", "number", "what", "file"],
            [[each["name"], str(each["prompts"]), each["about"], each["path"]] for each in results["sets"]]),
        "Drift: the verifier alone, at the start and at the end": (
            ["prompts", "T", "in flight", "start, tokens/s", "end, tokens/s", "change"],
            [[each["prompts"], f"{each['temperature']:g}", str(each["concurrency"]), f"{each['start']:.1f}",
              f"{each['end']:.1f}", f"{each['change']:+.1%}"] for each in results["drift"]]),
    }
    found |= {"Predicted for other settings": prediction_tables.lengths(results),
              "Predicted by prompts and context": prediction_tables.groups(results),
              "Which setting to serve": prediction_tables.serving(results)}
    return {title: table for title, table in found.items() if table[1]}


def text_table(results: dict[str, Any]) -> str:
    """Return the tables as aligned text of at most 120 columns, what the control says, and what to do.

    A command stays on one line however long it is: it is there to be copied.
    """
    results = _as_today(results) if results["schema_version"] == 1 else results
    shown = [f"{title}\n{pages.text_table(*table, width=120)}" for title, table in tables(results).items()]
    verdict = [pages.visible(f"Control: {results['control']['text']}")] if results["control"] else []
    lines = [*prediction_tables.remarks(results), *prediction_tables.serving_words(results)]
    told = [pages.visible(line) if line.startswith("  ") else textwrap.fill(pages.visible(line), 120) for line in lines]
    return "\n\n".join([*shown, *verdict, *told])


def _table(columns: Sequence[Column], runs: Sequence[Run]) -> pages.Table:
    return [head for head, _ in columns], [[cell(run) for _, cell in columns] for run in runs]


def _where(runs: Sequence[Run]) -> list[Column]:
    """Return the columns that say which measurement a row is of: what all have in common is left out."""
    columns: list[Column] = [("server", _server_name)]
    if len({run["prompts"] for run in runs}) > 1:
        columns.append(("prompts", lambda run: _short(run["prompts"])))
    if len({run["temperature"] for run in runs}) > 1:
        columns.append(("T", lambda run: f"{run['temperature']:g}"))
    return [*columns, ("in flight", lambda run: str(run["concurrency"]))]


def _short(name: str) -> str:
    return name if len(name) <= _NAME else name[: _NAME - 1] + "…"


def _server_name(run: Run) -> str:
    if not run["draft_tokens"]:
        return "alone, end" if run["server"] == "baseline-again" else "alone"
    return f"{run['server']} {run['draft_tokens']}"


def _length(run: Run) -> str:
    acceptance = run.get("acceptance")
    if acceptance is None:
        return _UNAVAILABLE
    return f"{acceptance['length']:.3f}" + (f" ±{acceptance['error']:.3f}" if "error" in acceptance else "")


def _of(name: str, key: str, form: str) -> Callable[[Run], str]:
    """Return what tells a figure of a part of a run, where it has it."""
    def cell(run: Run) -> str:
        value = (run.get(name) or {}).get(key)
        return _ABSENT if value is None else format(value, form)

    return cell


def _same_replies(run: Run) -> str:
    """Return how many replies are the verifier's own and, where it was judged, how many of the others part by noise."""
    lossless = run.get("lossless")
    if not lossless:
        return _ABSENT
    margins = lossless.get("margins", {}).values()
    noise = sum(each["within_noise"] for each in margins)
    return f"{lossless['identical']} of {lossless['replies']}" + (f", {noise}/{len(margins)} noise" if margins else "")


def _number(value: float) -> str:
    """Return a figure with three significant digits, of large ones all before the point."""
    size = abs(value)
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2}f}"


def _spread(name: str, unit: str = "") -> Callable[[Run], str]:
    """Return what tells a figure with the smallest and largest of the repeats."""
    def cell(run: Run) -> str:
        value, ends = run.get(name), run["spread"].get(name)
        if value is None:
            return _ABSENT
        many = ends and (len(run["measurements"]) > 1 or name == "speedup")
        return _number(value) + unit + (f" [{_number(ends[0])}–{_number(ends[1])}]" if many else "")

    return cell


def _percentiles(name: str, scale: float) -> Callable[[Run], str]:
    def cell(run: Run) -> str:
        found = run.get(name)
        if not found:
            return _ABSENT
        return "/".join(_number(scale * found[key]) if key in found else _ABSENT
                        for key in ("median", "p95", "p99"))

    return cell


_LENGTH: list[Column] = [
    ("length", _length), ("predicted", _of("predicted", "length", ".3f")),
    ("diff.", lambda run: _ABSENT if run.get("difference") is None else
        f"{run['difference']:+.3f}" + " ←" * prediction_tables.is_far(run)),
    ("rounds", _of("acceptance", "drafts", ".0f")), ("used", _of("acceptance", "used", ".0%")),
    ("same replies", _same_replies),
]
_SPEED: list[Column] = [
    ("tokens/s", _spread("tokens_per_s")), ("per user", _spread("tokens_per_s_per_user")),
    ("speed-up", _spread("speedup", "×")), ("J/token", _spread("joules_per_token")),
]
_TIMES: list[Column] = [
    ("first token", _percentiles("first_token_s", 1)),
    ("whole request", _percentiles("latency_s", 1)),
    ("between tokens", _percentiles("between_tokens_s", 1000)),
    ("between chunks", _percentiles("between_chunks_s", 1000)),
    ("per chunk", lambda run: f"{run['tokens_per_chunk']:.2f}" if run.get("tokens_per_chunk") else _ABSENT),
]


def _by_position(where: Sequence[Column], runs: Sequence[Run]) -> pages.Table:
    """Return acceptance by position, a row each for measured, conditional and predicted."""
    deep = any(run["draft_tokens"] > _DEEP for run in runs)

    def shares(values: Sequence[float | None]) -> str:
        if deep:
            return " ".join(_ABSENT if value is None else f"{100 * value:2.0f}" for value in values)
        return "  ".join(_ABSENT if value is None else f"{value:.3f}" for value in values)

    rows = []
    for run in runs:
        measured = run.get("acceptance") or {}
        kinds = (("measured", measured.get("by_position")), ("conditional", measured.get("conditional")),
                 ("predicted", (run.get("predicted") or {}).get("by_position")))
        rows += [[*(cell(run) for _, cell in where), kind, shares(values)] for kind, values in kinds if values]
    return [*(head for head, _ in where), "", "position 1, 2, …" + " (%)" * deep], rows


# --- plots ------------------------------------------------------------------------------------------------


def _draw_acceptance(results: dict[str, Any]) -> Any:
    """Return a figure of acceptance by position, measured and predicted; None without any."""
    figure, axes = _figure()
    for run in results["runs"]:
        color = None
        for kind, line in (("acceptance", "o-"), ("predicted", "x--")):
            shares = (run.get(kind) or {}).get("by_position") or []
            if shares:
                label = f"{_load_name(run)}, {run['concurrency']} in flight"
                label += " (predicted)" if kind == "predicted" else ""
                plotted = axes.plot(range(1, len(shares) + 1), shares, line, label=label, color=color)
                color = plotted[0].get_color()
    axes.set(xlabel="draft position", ylabel="share of rounds that accept it", ylim=(0, 1), title="Acceptance")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if not axes.lines:
        return None
    axes.legend()
    return figure


def _draw_throughput(results: dict[str, Any]) -> Any:
    """Return a figure of tokens/s by concurrency, a line a server; None without measurements."""
    if not results["runs"]:
        return None
    figure, axes = _figure()
    servers: dict[str, list[tuple[int, float, float, float]]] = {}
    for run in results["runs"]:
        rate = run["tokens_per_s"]
        low, high = run["spread"].get("tokens_per_s", (rate, rate))
        servers.setdefault(_load_name(run), []).append((run["concurrency"], rate, rate - low, high - rate))
    for name, points in servers.items():
        places, rates, below, above = zip(*sorted(points), strict=True)
        axes.errorbar(places, rates, yerr=(below, above), fmt="o-", capsize=3, label=name)
    ticks = sorted({run["concurrency"] for run in results["runs"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set(xlabel="requests in flight", ylabel="output tokens/s", ylim=(0, None), title="Throughput")
    axes.legend()
    return figure


def _figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    return figure, figure.subplots()


def _load_name(run: Run) -> str:
    more = f", {_short(run['prompts'])}" * (run["prompts"] != "prompts") + f", T {run['temperature']:g}"
    return pages.label(_server_name(run) + more)


# --- page -------------------------------------------------------------------------------------------------


def _page(results: dict[str, Any], plots: list[Path]) -> str:
    parts = [part for title, table in tables(results).items() for part in (pages.heading(title), pages.table(*table))]
    verdict = results["control"]
    return pages.document(
        "Drafter benchmark",
        pages.definitions(_facts(results)),
        *([pages.paragraph(f"Control: {verdict['text']}")] if verdict else []),
        *parts,
        *map(pages.paragraph, prediction_tables.remarks(results)),
        *map(pages.paragraph, prediction_tables.serving_words(results)),
        *map(pages.image, plots),
        pages.paragraph(_NOTES),
    )


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
