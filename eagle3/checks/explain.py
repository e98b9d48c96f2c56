"""Why is acceptance low? Works through the known causes with what a run left behind; nothing is started or loaded.

Low means below what was to be expected, so it first compares three figures: what stage 06 measured, what it
predicted on the very same replies with the exported drafter, and what stage 04 found on its validation samples. A
measurement below its prediction is a matter of what the engine loads or feeds; a prediction below training's figure
is one of the exported files or of the data, since the prediction is made with these files.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3.checks import causes
from eagle3.checks.causes import FOUND, OUT, REMAINS, Item
from eagle3.checks.measured_run import Figures, Run, gather
from eagle3.common.errors import PreconditionError

ENGINE, FILES = "what the engine loads or feeds", "the exported files and the data"
BOTH = "engine, files and data; a prediction would tell them apart"
_LEAST = 0.03  # of an acceptance length; below it two measurements of one thing differ by rounding


@dataclass(frozen=True)
class Gap:
    """How far one figure lies below another, and how far it may.

    Attributes:
        side: what lies in between (ENGINE, FILES or BOTH). why: of the tolerance.
    """

    low: str
    high: str
    size: float
    tolerance: float
    side: str
    why: str

    @property
    def open(self) -> bool:
        """Whether there is something to explain."""
        return self.size > self.tolerance


@dataclass(frozen=True)
class Cause:
    """One of the known causes, by its place in the order of suspicion, and what speaks for and against it."""

    number: int
    name: str
    status: str
    on_engine: bool
    evidence: list[Item]


@dataclass(frozen=True)
class Explanation:
    """The answer: a line, the figures and gaps behind it, and every cause, found ones first."""

    answer: str
    low: bool
    figures: dict[str, Figures]
    gaps: list[Gap]
    causes: list[Cause]
    notes: list[str]

    @property
    def exit_code(self) -> int:
        """0 when acceptance is as it should be and no fault is known, else 3."""
        return PreconditionError.exit_code if self.low or self.causes[0].status == FOUND else 0

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "schema_version": 1,
            "answer": self.answer,
            "low": self.low,
            "figures": {name: asdict(found) for name, found in self.figures.items()},
            "gaps": [asdict(gap) | {"open": gap.open} for gap in self.gaps],
            "causes": [asdict(cause) for cause in self.causes],
            "notes": self.notes,
        }


def explain(path: Path, *, model: str = "", drafter: str | None = None) -> Explanation:
    """Judge every known cause by what the run in `path` left behind (see `evidence.gather`)."""
    run = gather(path, model=model, drafter=drafter)
    figures = _figures(run)
    gaps = _gaps(figures)
    run.predicted_low = any(gap.open for gap in gaps if gap.side != ENGINE)
    judged = [judge(number, cause, run) for number, cause in enumerate(causes.CAUSES, start=1)]
    rank = {FOUND: 0, REMAINS: 1, OUT: 2}
    judged.sort(key=lambda cause: (rank[cause.status], cause.number))
    low = any(gap.open for gap in gaps) or "measured" not in figures
    return Explanation(_answer(run, figures, gaps, judged), low, figures, gaps, judged, run.changed)


def judge(number: int, cause: Any, run: Run) -> Cause:
    """Return a cause with its evidence: one found item makes it found, else one that remains keeps it open."""
    items = list(cause(run))
    status = next((each for each in (FOUND, REMAINS) if any(item.status == each for item in items)), OUT)
    name = " ".join((cause.__doc__ or "").split())
    return Cause(number, name, status, cause in causes.ENGINE_SIDE, [item for item in items if item.status == status])


# --- figures ----------------------------------------------------------------------------------------------


def _figures(run: Run) -> dict[str, Figures]:
    """Return measured, predicted and promised, as far as they are known, over the draft tokens that all of them have.

    An engine may leave out positions at which nothing was accepted, so the measurement has as many as were drafted.
    """
    found = {"measured": run.figures("acceptance"), "predicted": run.figures("predicted"), "promised": run.promised}
    known = {name: figures for name, figures in found.items() if figures}
    drafted = [run.main["draft_tokens"]] if run.main else []
    told = [len(figures.by_position) for name, figures in known.items() if name != "measured" and figures.by_position]
    positions = min([*drafted, *told], default=0)
    return {name: figures.over(positions) for name, figures in known.items()}


def _gaps(figures: dict[str, Figures]) -> list[Gap]:
    """Compare neighbours: what is measured with the prediction, that (or, without one, the former) with training.

    The same replies were walked for a prediction, so it may only differ by rounding and a reply's last rounds: one
    standard error is generous. Training validated on other text: three, since the rounds of one reply are alike.
    """
    gaps = []
    measured, predicted, promised = (figures.get(name) for name in ("measured", "predicted", "promised"))
    if measured and predicted:
        size, tolerance = predicted.length - measured.length, max(_LEAST, measured.error)
        gaps.append(Gap("measured", "predicted", size, tolerance, ENGINE,
                        f"the same replies: one standard error of {measured.rounds:.0f} rounds, at least {_LEAST}"))
    name, lower = ("predicted", predicted) if predicted else ("measured", measured)
    if lower and promised:
        tolerance = max(_LEAST, 3 * (lower.error**2 + promised.error**2) ** 0.5)
        why = f"other text: three standard errors of {lower.rounds:.0f} and {promised.rounds:.0f} rounds"
        gaps.append(Gap(name, "promised", promised.length - lower.length, tolerance,
                        FILES if predicted else BOTH, f"{why}, at least {_LEAST}"))
    return gaps


# --- the answer -------------------------------------------------------------------------------------------


def _answer(run: Run, figures: dict[str, Figures], gaps: list[Gap], judged: list[Cause]) -> str:
    """Return the line that comes first: the most likely cause, or that there is nothing to explain."""
    found = [cause for cause in judged if cause.status == FOUND]
    likely = f"{found[0].number} {found[0].name}: {found[0].evidence[0].text}" if found else ""
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    if "measured" not in figures:
        reason = run.log.error or (run.manifest.get("error") or "the stage did not get that far").splitlines()[0]
        return f"nothing was measured ({reason}); " + (f"most likely {likely}{more}" if found else _left(gaps, judged))
    if not any(gap.open for gap in gaps):
        compared = " and ".join(f"{gap.low} is as {gap.high}" for gap in gaps) or "there is nothing to compare with"
        return f"acceptance is not low: {compared}" + (f"; yet a fault: {likely}{more}" if found else "")
    return f"most likely {likely}{more}" if found else _left(gaps, judged)


def _left(gaps: list[Gap], judged: list[Cause]) -> str:
    """Say which causes remain, those first that would open the gap that is open."""
    on_engine = not any(gap.open and gap.side == FILES for gap in gaps)
    remaining = [cause for cause in judged if cause.status == REMAINS]
    remaining.sort(key=lambda cause: (cause.on_engine != on_engine, cause.number))
    if remaining:
        return "no cause is proven; not ruled out: " + ", ".join(f"{cause.number} {cause.name}" for cause in remaining)
    if on_engine:
        return ("all known causes are ruled out, and the engine accepts less than its files allow: try another version "
                "of it, or 05_fix_weight_keys.py --smoke with fewer arguments")
    return ("all known causes are ruled out, and drafter and engine are what training made: these prompts are harder "
            "than its validation samples, or those too few (train.validation_fraction)")


def text(explanation: Explanation) -> str:
    """Return the explanation as lines for a terminal."""
    lines = [explanation.answer, ""]
    for name, found in explanation.figures.items():
        shares = "  ".join(f"{share:6.1%}" for share in found.by_position) or "not told"
        lines.append(f"{name:<10} length {found.length:.3f}; accepted by position {shares}; {found.rounds:.0f} rounds")
    for gap in explanation.gaps:
        verdict = f"LOW, look at {gap.side}" if gap.open else "as it should be"
        lines.append(f"{gap.low} − {gap.high}: {-gap.size:+.3f}, may be {-gap.tolerance:.3f} ({gap.why}): {verdict}")
    lines += [f"note: {note}" for note in explanation.notes] + [""]
    for cause in explanation.causes:
        if cause.status == OUT:
            lines.append(f"{OUT:<10} {cause.number:>2} {cause.name}: {'; '.join(item.text for item in cause.evidence)}")
            continue
        lines.append(f"{cause.status:<10} {cause.number:>2} {cause.name}")
        for item in cause.evidence:
            lines += [f"{'':<14}{item.text}", *([f"{'':<14}→ {item.fix}"] if item.fix else [])]
    return "\n".join(lines)


def run(path: Path, *, model: str = "", drafter: str | None = None, as_json: bool = False) -> int:
    """Print the explanation of a run and return the exit code: 0 nothing to explain and no fault, else 3."""
    explanation = explain(path, model=model, drafter=drafter)
    print(json.dumps(explanation.as_json(), indent=2) if as_json else text(explanation))
    return explanation.exit_code
