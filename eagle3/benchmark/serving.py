"""Which setting to serve, from a benchmark's runs: the best draft-token counts, and the command with them."""

from collections.abc import Callable
from typing import Any

from eagle3.benchmark import cost_model
from eagle3.benchmark.cost_model import Cell
from eagle3.benchmark.measurements import BASELINE
from eagle3.common.log import logger
from eagle3.engines import speculation

Run = dict[str, Any]


def advise(
    runs: list[Run], *, model: str, drafter: str, condition: Callable[[Run], dict[str, Any]] = lambda run: {},
) -> list[dict[str, Any]]:
    """Return for each condition of the runs (such as a temperature) what `cost_model.recommend` does, and a `line`.

    Conditions without the verifier alone, or without a drafter whose acceptance is known, have no answer.
    """
    conditions: list[dict[str, Any]] = []
    for run in runs:
        if condition(run) not in conditions:
            conditions.append(condition(run))
    answers = []
    for each in conditions:
        there = [run for run in runs if condition(run) == each]
        cells = [cell for cell in map(_cell, there) if cell]
        if not {BASELINE} < {cell.draft_tokens for cell in cells}:
            continue
        answer = cost_model.recommend(cells, _lengths(there))
        engine = there[-1]["engine"]
        takes_one = engine["kind"] == "vllm" and speculation.has_schedules(engine["version"])
        scheduled = answer["schedule_pays"] and takes_one
        line = speculation.serve_line(engine["kind"], model, drafter, answer["draft_tokens"],
                                      answer["schedule"] if scheduled else None)
        answers.append({"condition": each} | answer | {"line": line, "scheduled": scheduled})
        logger.debug("to serve: %s", answers[-1])
    return answers


def _cell(run: Run) -> Cell | None:
    """Return what a run measured, None of a drafter whose acceptance is not known."""
    if run["draft_tokens"] == BASELINE:
        return Cell(BASELINE, run["concurrency"], run["tokens_per_s"], 1.0)
    found = run.get("acceptance") or run.get("predicted")
    return Cell(run["draft_tokens"], run["concurrency"], run["tokens_per_s"], found["length"]) if found else None


def _lengths(runs: list[Run]) -> dict[int, float]:
    """Return the acceptance length by draft-token count: predicted ones, and measured ones where they were measured."""
    lengths: dict[int, float] = {}
    for run in runs:
        for count, figures in ((run.get("predicted") or {}).get("by_draft_tokens") or {}).items():
            lengths[int(count)] = figures.get("expected", figures)["length"]
    for run in runs:
        if run["draft_tokens"] and run.get("acceptance"):
            lengths[run["draft_tokens"]] = run["acceptance"]["length"]
    return lengths
