"""The tables of a benchmark, for its page and a terminal."""

from collections.abc import Callable, Sequence
from typing import Any

from eagle3.benchmark import prediction_tables
from eagle3.common import pages

ACCEPTANCE, BY_POSITION, SPEED = "Acceptance", "Acceptance by position", "Speed"
TIMES = "Times, median/p95/p99: first token and whole request in s, between tokens and chunks in ms"
SERVING = "Which setting to serve"
ORDER = (SPEED, ACCEPTANCE, BY_POSITION, TIMES, SERVING)
_ABSENT = "–"
_UNAVAILABLE = "unavailable"
_DEEP = 6  # positions beyond which shares are told in whole percent, so that a row fits a terminal
_NAME = 14  # characters of a prompt set's name in a table
Run = dict[str, Any]

# A column: its head, and what stands in it for a run.
Column = tuple[str, Callable[[Run], str]]


def tables(results: dict[str, Any]) -> dict[str, pages.Table]:
    """Return every table by its title; those without a row are left out."""
    runs = results["runs"]
    columns = where(runs)
    drafted = [run for run in runs if run["draft_tokens"]]
    found = {
        ACCEPTANCE: _table([*columns, *_LENGTH], drafted),
        BY_POSITION: _by_position(columns, drafted),
        SPEED: _table([*columns, *_SPEED], runs),
        TIMES: _table([*columns, *_TIMES], runs),
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
              SERVING: prediction_tables.serving(results)}
    return {title: table for title, table in found.items() if table[1]}


def _table(columns: Sequence[Column], runs: Sequence[Run]) -> pages.Table:
    return [head for head, _ in columns], [[cell(run) for _, cell in columns] for run in runs]


def where(runs: Sequence[Run]) -> list[Column]:
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


def _by_position(columns: Sequence[Column], runs: Sequence[Run]) -> pages.Table:
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
        rows += [[*(cell(run) for _, cell in columns), kind, shares(values)] for kind, values in kinds if values]
    return [*(head for head, _ in columns), "", "position 1, 2, …" + " (%)" * deep], rows
