"""Tables, plots and the report page of a benchmark, from its results.json alone."""

from pathlib import Path
from typing import Any

from eagle3.benchmark import prediction_tables
from eagle3.common import files, pages
from eagle3.common.errors import PreconditionError

_SCHEMA_VERSION = 1
_ABSENT = "–"
_UNAVAILABLE = "unavailable"
_NOTES = """Acceptance length is 1 + accepted draft tokens / draft rounds, from the engine's counters over the
measured requests. Acceptance by position is the share of all rounds that accepted that position and every one
before it. Predicted values walk the same replies offline in draft rounds; expected ones take the verifier's probability
of each draft instead of the tokens that it happened to draw. Time per token is a request's whole
time over its tokens, the prompt included."""


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
    """Return the results of a benchmark after checking their schema version."""
    path = directory / "results.json"
    results = files.read_json(path, fix="name the directory of a finished benchmark")
    version = results.get("schema_version") if isinstance(results, dict) else None
    if version != _SCHEMA_VERSION:
        raise PreconditionError(
            "results of another schema version", where=path, expected=_SCHEMA_VERSION, found=version
        )
    return results | {"directory": str(directory)}


# --- tables -----------------------------------------------------------------------------------------------


def speed_table(results: dict[str, Any]) -> pages.Table:
    """Return tokens/s, speed-up and times, a row a measurement."""
    head = ["server", "requests in flight", "tokens/s", "speed-up", "request mean / median / p95 (s)",
            "time per token mean / median / p95 (ms)", "same replies"]
    rows = []
    for run in results["runs"]:
        latency, token = run["latency_s"], run["s_per_token"]
        lossless = run.get("lossless")
        rows.append([
            _server_name(run),
            str(run["concurrency"]),
            f"{run['tokens_per_s']:.1f}",
            f"{run['speedup']:.2f}×" if run.get("speedup") else _ABSENT,
            " / ".join(f"{latency[name]:.2f}" for name in ("mean", "median", "p95")),
            " / ".join(f"{1000 * token[name]:.1f}" for name in ("mean", "median", "p95")),
            _same_replies(lossless) if lossless else _ABSENT,
        ])
    return head, rows


def _same_replies(lossless: dict[str, Any]) -> str:
    """Return how many replies are the verifier's own and, where it was judged, how many of the others part by noise."""
    margins = lossless.get("margins", {}).values()
    noise = sum(each["within_noise"] for each in margins)
    judged = f" ({noise} of the other {len(margins)} part within bf16 noise)" if margins else ""
    return f"{lossless['identical']} of {lossless['replies']}{judged}"


def acceptance_table(results: dict[str, Any]) -> pages.Table:
    """Return acceptance length and acceptance by position, measured and predicted, a row a drafter run."""
    drafted = [run for run in results["runs"] if run["draft_tokens"]]
    depth = max((run["draft_tokens"] for run in drafted), default=0)
    head = ["server", "requests in flight", "", "acceptance length", *(f"position {i + 1}" for i in range(depth))]
    rows = []
    for run in drafted:
        name = [_server_name(run), str(run["concurrency"])]
        rows.append([*name, "measured", *_acceptance_cells(run.get("acceptance"), depth)])
        if run.get("predicted"):
            rows.append([*name, "predicted", *_acceptance_cells(run["predicted"], depth)])
        if run.get("difference") is not None:
            mark = " ← too far" if prediction_tables.is_far(run) else ""
            rows.append([*name, "difference", f"{run['difference']:+.3f}{mark}", *[""] * depth])
    return head, rows


def text_table(results: dict[str, Any]) -> str:
    """Return the tables as aligned text, and what to do about them."""
    tables = (acceptance_table(results), speed_table(results), prediction_tables.lengths(results),
              prediction_tables.serving(results))
    lines = [*prediction_tables.remarks(results), *prediction_tables.serving_words(results)]
    return "\n\n".join([*(pages.text_table(*table) for table in tables if table[1]), *lines])


def _acceptance_cells(acceptance: dict[str, Any] | None, depth: int) -> list[str]:
    if acceptance is None:
        return [_UNAVAILABLE, *[_UNAVAILABLE] * depth]
    shares = [f"{share:.3f}" for share in acceptance["by_position"]]
    return [f"{acceptance['length']:.3f}", *shares, *[_ABSENT] * (depth - len(shares))]


def _server_name(run: dict[str, Any]) -> str:
    return f"drafter, {run['draft_tokens']} draft tokens" if run["draft_tokens"] else "verifier alone"


# --- plots ------------------------------------------------------------------------------------------------


def _draw_acceptance(results: dict[str, Any]) -> Any:
    """Return a figure of acceptance by position, measured and predicted; None without any."""
    figure, axes = _figure()
    for run in results["runs"]:
        color = None
        for kind, line in (("acceptance", "o-"), ("predicted", "x--")):
            shares = (run.get(kind) or {}).get("by_position") or []
            if shares:
                label = f"{_server_name(run)}, {run['concurrency']} in flight"
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
    servers: dict[str, list[tuple[int, float]]] = {}
    for run in results["runs"]:
        servers.setdefault(_server_name(run), []).append((run["concurrency"], run["tokens_per_s"]))
    for name, points in servers.items():
        axes.plot(*zip(*sorted(points), strict=True), "o-", label=name)
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


# --- page -------------------------------------------------------------------------------------------------


def _page(results: dict[str, Any], plots: list[Path]) -> str:
    return pages.document(
        "Drafter benchmark",
        pages.definitions(_facts(results)),
        pages.heading("Acceptance"),
        pages.table(*acceptance_table(results)),
        *map(pages.paragraph, prediction_tables.remarks(results)),
        pages.heading("Speed"),
        pages.table(*speed_table(results)),
        *prediction_tables.sections(results),
        *map(pages.image, plots),
        pages.paragraph(_NOTES),
    )


def _facts(results: dict[str, Any]) -> dict[str, str]:
    engine, settings = results["engine"], results["settings"]
    return {
        "Verifier": results["model"]["path"],
        "Drafter": f"{results['drafter']['path']} (identity {results['drafter']['identity'][:12]})",
        "Engine": f"{engine['kind']} {engine['version'] or '(version unknown)'}",
        "Hardware": ", ".join(settings["gpus"]) or "CPU",
        "Load": f"{settings['prompts']} prompts, at most {settings['max_tokens']} tokens each, "
                f"temperature {settings['temperature']:g}",
    }
