"""What comes of comparing measurements: speed-up with its spread, equal replies, drift, and what a control says."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3.benchmark import figures, matrix, measurements
from eagle3.benchmark.matrix import AGAIN, BASELINE, CONTROL, DRAFTER
from eagle3.common.log import logger

DRIFT = 0.05  # a change of the verifier's own speed that is warned of
_LOW_FIRST = 0.2  # first draft tokens accepted: below, something is broken (the limit of stage 05's smoke test)
_SIGMAS, _LEAST = 3.0, 0.03  # by which an acceptance length has to be lower to be called so
Run = dict[str, Any]


def compare_replies(directory: Path, runs: Sequence[Run]) -> None:
    """Set `lossless` and `baseline` of each greedy first repeat with a drafter.

    Batches of another shape round differently in bfloat16, so a few greedy replies part ways after some tokens
    without anything being wrong; where they do is reported.
    """
    first = {matrix.group_of(run): run for run in runs if run["server"] == BASELINE and run["repeat"] == 1}
    for run in runs:
        reference = first.get(matrix.group_of(run))
        if run["draft_tokens"] and run["repeat"] == 1 and run["temperature"] == 0 and reference:
            run["baseline"] = reference["name"]
            run["lossless"] = measurements.agreement(measurements.replies_of(directory, reference),
                                                     measurements.replies_of(directory, run))


def cells(runs: Sequence[Run]) -> list[Run]:
    """Return one entry for the repeats of each measurement, with `speedup` and its spread, in the order of the runs.

    The verifier's speed is the median over all measurements of it alone under the same load, those at the end
    included; the spread of a speed-up reaches from the slowest drafter over the fastest verifier to the reverse, and is
    None where both were measured once. Servers that were asked with other sampling, or fall back on another, do other
    work: no speed-up is told then.
    """
    grouped: dict[Any, list[Run]] = {}
    for run in runs:
        grouped.setdefault(matrix.cell_of(run), []).append(run)
    found = [figures.pooled(group) for group in grouped.values()]
    for cell, group in zip(found, grouped.values(), strict=True):
        if cell["draft_tokens"]:
            _set_speedup(cell, group, [run for run in runs if not run["draft_tokens"]
                                       and matrix.group_of(run) == matrix.group_of(cell)])
    return found


def _set_speedup(cell: Run, group: Sequence[Run], alone: Sequence[Run]) -> None:
    alike = [run for run in alone if _sampling(run) == _sampling(cell)]
    cell.pop("speedup", None)
    if not alike:
        if alone:
            logger.warning("no speed-up is told of %s: it sampled with %s, %s with %s", cell["name"],
                           cell.get("sampling"), alone[0]["name"], alone[0].get("sampling"))
        return
    ours, theirs = [run["tokens_per_s"] for run in group], [run["tokens_per_s"] for run in alike]
    cell["speedup"] = statistics.median(ours) / statistics.median(theirs)
    if len(ours) + len(theirs) > 2:
        cell["spread"]["speedup"] = [min(ours) / max(theirs), max(ours) / min(theirs)]


def _sampling(run: Run) -> Any:
    """Return how a run was sampled, but for the seed, which is the repeat's."""
    told = run.get("sampling")
    return told and told | {"sent": {name: value for name, value in told["sent"].items() if name != "seed"}}


def drift(runs: Sequence[Run]) -> list[Run]:
    """Return by how much the verifier's own tokens/s changed from start to end, a load each, and warn of much."""
    start: dict[Any, list[float]] = {}
    end: dict[Any, Run] = {}
    for run in sorted(runs, key=lambda run: run["measured_at"]):
        if run["server"] == BASELINE:
            start.setdefault(matrix.group_of(run), []).append(run["tokens_per_s"])
        elif run["server"] == AGAIN:
            end[matrix.group_of(run)] = run
    told = []
    for group, run in end.items():
        if group not in start:
            continue
        before = statistics.median(start[group])
        change = run["tokens_per_s"] / before - 1
        told.append(dict(zip(matrix.GROUP, group, strict=True)) | {"start": before, "end": run["tokens_per_s"],
                                                                   "change": change})
        if abs(change) > DRIFT:
            logger.warning("the verifier alone, %d in flight, gave %+.1f%% tokens/s at the end: the machine drifted, "
                           "and a speed-up is no surer than that", run["concurrency"], 100 * change)
    return told


# --- a control --------------------------------------------------------------------------------------------


def verdict(found: Sequence[Run], directory: Path, control: str) -> Run | None:
    """Say what a control drafter tells of ours; None where the two have no measurement in common.

    Acceptance is pooled over the measurements that both have. Ours is low when it lies below the control's by more than
    three standard errors; either is where fewer than one in five first draft tokens is accepted.
    """
    by_role: dict[str, dict[Any, Run]] = {DRAFTER: {}, CONTROL: {}}
    for cell in found:
        if cell["server"] in by_role and cell.get("acceptance"):
            by_role[cell["server"]][(cell["draft_tokens"], *matrix.group_of(cell))] = cell
    shared = [key for key in by_role[DRAFTER] if key in by_role[CONTROL]]
    if not shared:
        return None
    ours, theirs = (_length([by_role[role][key]["acceptance"] for key in shared]) for role in (DRAFTER, CONTROL))
    tolerance = max(_LEAST, _SIGMAS * (ours["error"] ** 2 + theirs["error"] ** 2) ** 0.5)
    low = ours["first"] < _LOW_FIRST or theirs["length"] - ours["length"] > tolerance
    control_low = theirs["first"] < _LOW_FIRST
    doctor = f"python -m eagle3.doctor --explain {directory}"
    figures_said = (f"length {ours['length']:.3f} ±{ours['error']:.3f} against the control's {theirs['length']:.3f} "
                    f"±{theirs['error']:.3f}")
    if low and control_low:
        answer, said = "integration", (f"both drafters are low ({figures_said}): the engine loads or feeds something "
                                       f"else than they were trained on; {doctor}")
    elif low:
        answer, said = "training", (f"only ours is low ({figures_said}): the engine serves a drafter well, so look at "
                                    f"the export and the training; {doctor}")
    elif control_low:
        answer, said = "control", (f"only the control is low ({figures_said}): it does not suit this verifier or these "
                                   "prompts, and says nothing of ours")
    else:
        answer, said = "sound", f"neither drafter is low ({figures_said})"
    return {"answer": answer, "text": said, "control": control, "ours": ours, "theirs": theirs, "tolerance": tolerance,
            "cells": len(shared)}


def _length(parts: Sequence[Run]) -> dict[str, float]:
    """Return length, its standard error and the share of first draft tokens, pooled over all rounds."""
    rounds = sum(part["drafts"] for part in parts)
    shares = [part["drafts"] / rounds for part in parts]
    firsts = [part["by_position"][0] if part["by_position"] else 0.0 for part in parts]
    errors = [part.get("error", 0.0) for part in parts]
    return {"length": 1 + sum(part["accepted"] for part in parts) / rounds, "rounds": rounds,
            "error": sum((share * error) ** 2 for share, error in zip(shares, errors, strict=True)) ** 0.5,
            "first": sum(share * first for share, first in zip(shares, firsts, strict=True))}


def in_order(runs: Sequence[Run], plan: matrix.Matrix) -> list[Run]:
    """Return runs server by server as they are started (others after them by name), then by set, temperature, load."""
    roles = {(kind.role, kind.draft_tokens): k for k, kind in enumerate(plan.servers)}
    late = itertools.count(len(roles))
    order = roles | {key: next(late) for key in sorted({(run["server"], run["draft_tokens"]) for run in runs}
                                                       - roles.keys())}
    sets = [*plan.sets, *sorted({run["prompts"] for run in runs} - plan.sets.keys())]
    return sorted(runs, key=lambda run: (order[run["server"], run["draft_tokens"]], sets.index(run["prompts"]),
                                         run["temperature"], run["concurrency"], run["repeat"], run["measured_at"]))
