"""What a benchmark comes to, in one line, from its measurements: whether the drafter pays, up to which load, with what.

It says as plainly when it does not pay, when nothing was there to compare with, and when something is missing.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from eagle3.benchmark.matrix import BASELINE, DRAFTER

Run = dict[str, Any]


def lines(results: dict[str, Any]) -> list[str]:
    """Return a line for each temperature and prompt set, and one on what was not measured."""
    runs = [run for run in results["runs"] if run["server"] in (BASELINE, DRAFTER)]
    told_first = sorted(runs, key=lambda run: not run["draft_tokens"])
    conditions = list(dict.fromkeys((run["prompts"], run["temperature"]) for run in told_first))
    told = []
    for prompts, temperature in conditions:
        there = [run for run in runs if (run["prompts"], run["temperature"]) == (prompts, temperature)]
        said = [prompts] * (len({prompts for prompts, _ in conditions}) > 1)
        said += [f"temperature {temperature:g}"] * (len({temperature for _, temperature in conditions}) > 1)
        told.append((", ".join(said) + ": " if said else "") + _line(there, _advice(results, prompts, temperature)))
    return [*(told or ["Nothing was measured with a drafter."]), *_partial(runs)]


def _line(runs: Sequence[Run], advice: Run | None) -> str:
    drafted = [run for run in runs if run["draft_tokens"]]
    if not drafted:
        return "Nothing was measured with a drafter."
    compared = [run for run in drafted if run.get("speedup")]
    if not compared:
        why = ("its sampling was another" if any(not run["draft_tokens"] for run in runs)
               else "the verifier alone was not measured")
        return f"No speed-up can be told: {why}. {_lengths(drafted)}"
    by_count = {count: {run["concurrency"]: run for run in compared if run["draft_tokens"] == count}
                for count in {run["draft_tokens"] for run in compared}}
    count = advice["draft_tokens"] if advice else 0
    if count not in by_count:
        count = max(sorted(by_count), key=lambda each: _mean(by_count[each].values()))
    ours = by_count[count]
    first, paying = min(ours), [*itertools.takewhile(lambda load: _pays(ours[load]), sorted(ours))]
    start = f"{_times(ours[first])} at {_in_flight(first)}"
    if not paying:
        later = [load for load in sorted(ours) if _pays(ours[load])]
        if not later:
            if any(map(_pays, compared)):
                return f"With {_drafts(count)} it does not pay ({start}); with another number it does: see Speed."
            return f"Does not pay: {start} with {_drafts(count)}; serve without the drafter."
        pays = f"does not pay there, but at {', '.join(map(str, later))}"
    elif len(paying) == len(ours):
        pays = f"pays up to {paying[-1]} in flight, the most that was measured" if len(ours) > 1 else "pays there"
    else:
        pays = f"pays up to {paying[-1]} in flight, not at {sorted(ours)[len(paying)]}"
    return f"{start} with {_drafts(count)}, {pays}; {_serve(advice, count)}."


def _serve(advice: Run | None, count: int) -> str:
    """Return what to serve with: what the cost model advises where it could be fitted, else what was measured best."""
    if advice is None:
        return f"serve with {_drafts(count)}"
    if advice["scheduled"]:
        return "serve with draft tokens by requests in flight (below)"
    if not advice["draft_tokens"]:
        return "over all measured loads the verifier alone is better"
    unmeasured = ", by the cost model: it was not measured" * (advice["draft_tokens"] != count)
    return f"serve with {_drafts(advice['draft_tokens'])}{unmeasured}"


def _advice(results: dict[str, Any], prompts: str, temperature: float) -> Run | None:
    here = {"prompts": prompts, "temperature": temperature}
    return next((each for each in results.get("serving") or [] if each["condition"].items() <= here.items()), None)


def _partial(runs: Sequence[Run]) -> list[str]:
    """Return a line on the combinations of what was measured that are missing, none without any."""
    loads = {(run["prompts"], run["temperature"], run["concurrency"]) for run in runs}
    kinds = {run["draft_tokens"] for run in runs} | {0}
    there = {(run["draft_tokens"], run["prompts"], run["temperature"], run["concurrency"]) for run in runs}
    prompts, temperatures, in_flight = ({*values} for values in zip(*loads, strict=True)) if loads else ((), (), ())
    wanted = len(kinds) * len(prompts) * len(temperatures) * len(in_flight)
    if len(there) == wanted:
        return []
    return [f"Partial: {len(there)} of {wanted} combinations of draft tokens (none among them), prompts, temperature "
            "and load were measured."]


def _pays(run: Run) -> bool:
    """Say whether a run is faster than the verifier alone, by the low end of its spread where it was repeated."""
    return bool((run["spread"].get("speedup") or [run.get("speedup") or 0.0])[0] > 1.0)


def _mean(runs: Any) -> float:
    return math.exp(math.fsum(math.log(run["speedup"]) for run in runs) / len(runs))


def _lengths(drafted: Sequence[Run]) -> str:
    known = [run for run in drafted if run.get("acceptance")]
    if not known:
        return "Nor does the engine tell acceptance."
    best = max(known, key=lambda run: run["acceptance"]["length"])
    return f"Acceptance length {best['acceptance']['length']:.2f} with {_drafts(best['draft_tokens'])}."


def _times(run: Run) -> str:
    return f"{run['speedup']:.1f}×" if abs(run["speedup"] - 1) >= 0.05 else f"{run['speedup']:.2f}×"


def _in_flight(load: int) -> str:
    return "one request" if load == 1 else f"{load} requests in flight"


def _drafts(count: int) -> str:
    return f"{count} draft token" + "s" * (count != 1)
