"""Two finished benchmarks side by side: what differs may only be the drafter and how it is served.

Everything else that a figure depends on has to be equal, or the difference would be of that. What one of the two did
not record cannot be compared, and is said.
"""

from typing import Any

from eagle3.benchmark.comparison import DRIFT
from eagle3.benchmark.matrix import BASELINE, DRAFTER
from eagle3.common import charts, pages
from eagle3.common.charts import Series
from eagle3.common.errors import PreconditionError

_ABSENT = "–"
_FREE = {"benchmark.drafter_endpoint", "benchmark.max_tokens"}  # the drafter's own; compared under another name
Run = dict[str, Any]
Facts = dict[str, Any]


def require_equal(one: Facts, other: Facts) -> list[str]:
    """Raise PreconditionError that names each unequal condition; return those that only one of the two recorded."""
    ours, theirs = _conditions(one), _conditions(other)
    names = sorted(ours.keys() | theirs.keys())
    unequal = [name for name in names if name in ours and name in theirs and ours[name] != theirs[name]]
    if unequal:
        raise PreconditionError(
            "the two were not measured under equal conditions: " + ", ".join(unequal),
            where=f"{one['directory']} and {other['directory']}",
            expected="\n".join(f"{name}: {ours[name]}" for name in unequal),
            found="\n".join(f"{name}: {theirs[name]}" for name in unequal),
            fix="measure the second drafter as the first was, with --drafter and --out of its own")
    if not _cells(one).keys() & _cells(other).keys():
        raise PreconditionError("the two have no load in common", where=f"{one['directory']} and {other['directory']}",
                                expected=", ".join(_loads(one)), found=", ".join(_loads(other)))
    return [name for name in names if (name in ours) != (name in theirs)]


def _conditions(results: Facts) -> Facts:
    """Return what has to be equal, by name, as far as it was recorded."""
    engine, settings, made = results["engine"], results["settings"], results.get("made_with") or {}
    found = {
        "verifier": results["model"]["identity"][:12],
        "engine": f"{engine['kind']} {engine['version'] or '(version unknown)'}",
        "server": "attached" if engine.get("attached") else "started by the stage",
        "max tokens": settings["max_tokens"],
        "hardware": ", ".join(settings["gpus"]) or "CPU",
        "temperatures": ", ".join(f"{each:g}" for each in sorted({run["temperature"] for run in results["runs"]})),
    }
    for each in results["sets"]:
        found[f"prompts {each['name']}"] = f"{each['prompts']} prompts, {each.get('identity', '')[:12]}".rstrip(", ")
    found["prompt sets"] = ", ".join(each["name"] for each in results["sets"])
    if "warmup_prompts" in settings:
        found["warm-up prompts"] = settings["warmup_prompts"]
    sampled = {str(_sampling(run)) for run in results["runs"] if run.get("sampling")}
    if sampled:
        found["sampling"] = "; ".join(sorted(sampled))
    if made:
        found["processor"] = made["processor"] or "unknown"
        found |= {name: value for name, value in made["deciding"].items() if name not in _FREE}
    return found


def _sampling(run: Run) -> Any:
    told = run["sampling"]
    return told | {"sent": {name: value for name, value in (told.get("sent") or {}).items() if name != "seed"}}


def _cells(results: Facts) -> dict[tuple[Any, ...], Run]:
    """Return the runs with ours and the verifier alone, by what they share with the other benchmark's."""
    return {(run["prompts"], run["temperature"], run["concurrency"], run["draft_tokens"]): run
            for run in results["runs"] if run["server"] in (BASELINE, DRAFTER)}


def _loads(results: Facts) -> list[str]:
    return [f"{k} draft tokens at {load} in flight" for _, _, load, k in _cells(results)]


def table(one: Facts, other: Facts) -> pages.Table:
    """Return the measurements of both, those of one alone too, by prompts, temperature, load and draft tokens."""
    ours, theirs = _cells(one), _cells(other)
    rows = []
    for key in sorted(ours.keys() | theirs.keys()):
        pair = ours.get(key), theirs.get(key)
        prompts, temperature, load, count = key
        rows.append([prompts[:14], f"{temperature:g}", str(load), str(count) if count else "alone", *(
            text for figure in (_length, _speedup, _rate) for text in (*map(figure, pair), _change(figure, *pair)))])
    figures = ("length", "speed-up", "tokens/s")
    head = [name for figure in figures for name in (f"{figure} A", "B", "B/A")]
    return ["prompts", "T", "in flight", "draft", *head], rows


def _length(run: Run | None) -> str:
    found = run and run.get("acceptance")
    return f"{found['length']:.3f}" if found else _ABSENT


def _speedup(run: Run | None) -> str:
    return f"{run['speedup']:.2f}×" if run and run.get("speedup") else _ABSENT


def _rate(run: Run | None) -> str:
    return f"{run['tokens_per_s']:.1f}" if run else _ABSENT


def _change(figure: Any, one: Run | None, other: Run | None) -> str:
    values = [figure(run).rstrip("×") for run in (one, other)]
    return "" if _ABSENT in values else f"{100 * (float(values[1]) / float(values[0]) - 1):+.1f}%"


def words(one: Facts, other: Facts, unrecorded: list[str]) -> list[str]:
    """Return what the two are, what the verifier alone says of the machine, and what could not be compared."""
    said = [f"{letter}: {each['drafter']['path']} ({each['drafter']['identity'][:12]}), {each['directory']}"
            for letter, each in (("A", one), ("B", other))]
    ours, theirs = _cells(one), _cells(other)
    shared = [key for key in ours if key in theirs and not key[3]]
    changes = [theirs[key]["tokens_per_s"] / ours[key]["tokens_per_s"] - 1 for key in shared]
    if changes and max(map(abs, changes)) > DRIFT:
        said.append(f"The verifier alone gave {100 * max(changes, key=abs):+.1f}% tokens/s in B: the machine was not "
                    "the same, so compare speed-ups, and those no closer than that.")
    if unrecorded:
        said.append(f"Recorded by one of the two only, so not compared: {', '.join(unrecorded)}.")
    return said


def lead(one: Facts, other: Facts) -> str:
    """Return the first line: at how many common loads which of the two is faster."""
    ours, theirs = _cells(one), _cells(other)
    pairs = [(ours[key], theirs[key]) for key in ours if key in theirs and key[3]]
    if not pairs:
        return "No draft-token count and load was measured in both; below is what each has."
    figure = "speedup" if all(run.get("speedup") for pair in pairs for run in pair) else "tokens_per_s"
    better = sum(theirs_one[figure] > ours_one[figure] for ours_one, theirs_one in pairs)
    ratios = [theirs_one[figure] / ours_one[figure] - 1 for ours_one, theirs_one in pairs]
    what = "speed-up" if figure == "speedup" else "tokens/s"
    return (f"B is ahead of A in {better} of {len(pairs)} common measurements; its {what} differs by "
            f"{100 * min(ratios):+.1f}% to {100 * max(ratios):+.1f}%.")


def page(one: Facts, other: Facts, unrecorded: list[str]) -> pages.Html:
    """Return the page of both."""
    speed: Series = {}
    for letter, results in (("A", one), ("B", other)):
        for (prompts, temperature, load, count), run in sorted(_cells(results).items()):
            if run.get("speedup"):
                name = f"{letter}, {count} draft tokens, {prompts}, T {temperature:g}"
                speed.setdefault(name, []).append((load, run["speedup"], *(run["spread"].get("speedup") or ())))
    facts = {name: str(value) for name, value in _conditions(one).items() if name not in unrecorded}
    return pages.document(
        "Two drafters side by side", pages.lead(lead(one, other)),
        *map(pages.paragraph, words(one, other, unrecorded)),
        charts.line_chart("Speed-up over the verifier alone", speed, "requests in flight", log_x=True, marks=True,
                          y_range=(0, None)),
        pages.heading("All measurements"), pages.table(*table(one, other)),
        pages.heading("Equal in both"), pages.definitions(facts))
