"""Which setting to serve, from a benchmark's runs: the best draft-token counts, and the command with them."""

from typing import Any

from eagle3.benchmark import cost_model
from eagle3.benchmark.cost_model import Cell
from eagle3.benchmark.matrix import BASELINE, DRAFTER
from eagle3.common.log import logger
from eagle3.engines import speculation

_ALONE = 0  # the draft-token count of the verifier alone
Run = dict[str, Any]


def advise(runs: list[Run], *, model: str, drafter: str) -> list[dict[str, Any]]:
    """Return for each temperature and prompt set of the runs what `cost_model.recommend` does, and a `line`.

    What all runs have in common is not named. Those without the verifier alone, or without a drafter whose acceptance
    is known, have no answer; the verifier at the end and a control are no settings to serve.
    """
    runs = [run for run in runs if run["server"] in (BASELINE, DRAFTER)]
    several = [name for name in ("temperature", "prompts") if len({run[name] for run in runs}) > 1]

    def condition(run: Run) -> dict[str, Any]:
        return {name: run[name] for name in several}

    conditions: list[dict[str, Any]] = []
    for run in runs:
        if condition(run) not in conditions:
            conditions.append(condition(run))
    answers = []
    for each in conditions:
        there = [run for run in runs if condition(run) == each]
        cells = [cell for cell in map(_cell, there) if cell]
        if not {_ALONE} < {cell.draft_tokens for cell in cells}:
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
    if run["draft_tokens"] == _ALONE:
        return Cell(_ALONE, run["concurrency"], run["tokens_per_s"], 1.0)
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
