"""What a benchmark's report says of predictions and of what to serve: tables and lines, from its results alone."""

from typing import Any

from eagle3.common import pages

FAR = 0.03  # a prediction walks the very replies: it may differ by rounding and by a reply's last rounds
_ABSENT = "–"


def is_far(run: dict[str, Any]) -> bool:
    """Say whether a run's prediction is further from its measurement than it may be."""
    return abs(run.get("difference") or 0.0) > FAR


def is_strange(run: dict[str, Any]) -> bool:
    """Say whether a run's replies accept otherwise than the verifier's probabilities of their drafts let expect.

    Both are walked on the same rounds, so what lies between them is the luck of the draw: three standard errors of it.
    """
    figures = run.get("predicted") or {}
    expected = figures.get("expected")
    if not expected:
        return False
    apart = abs(figures["length"] - expected["length"])
    return bool(apart > max(FAR, 3 * figures["standard_error"]))


def remarks(results: dict[str, Any]) -> list[str]:
    """Return lines on what predictions show to be wrong; the command that looks for the cause begins with spaces."""
    strange = [f"{run['name']} ({run['predicted']['length']:.3f} by its tokens, "
               f"{run['predicted']['expected']['length']:.3f} by the verifier's probabilities)"
               for run in results["runs"] if is_strange(run)]
    far = [run for run in results["runs"] if is_far(run)]
    lines = [f"{run['name']} is not predicted: {run['not_predicted']}." for run in results["runs"]
             if run.get("not_predicted")]
    if strange:
        lines.append("The server does not draw from the verifier's distribution under the settings that were sent, so "
                     f"what it measures is of other text: {', '.join(strange)}. docs/low-acceptance.md names a release "
                     "that does so above temperature 0.")
    if far:
        names = ", ".join(f"{run['name']} ({run['difference']:+.3f})" for run in far)
        where = results.get("directory") or "06_bench"
        lines += [f"Predicted and measured length differ by more than {FAR:g} in {names}: what the engine loads or "
                  "feeds is not what was exported. Look for the cause:", f"  python -m eagle3.doctor --explain {where}"]
    return lines


def lengths(results: dict[str, Any]) -> pages.Table:
    """Return predicted lengths by draft-token count, a row for each of 1 to 16 that was predicted, of the last run
    with any at each condition."""
    head = ["predicted on", "draft tokens", "rounds", "acceptance length", "expected length", "conditional acceptance"]
    rows = []
    for name, figures in _predictions(results):
        for count, each in figures["by_draft_tokens"].items():
            expected = each.get("expected")
            rows.append([name, count, str(each["rounds"]), _with_error(each),
                         _with_error(expected) if expected else _ABSENT,
                         f"{expected['conditional'][-1]:.3f}" if expected else _ABSENT])
    return head, rows


def groups(results: dict[str, Any]) -> pages.Table:
    """Return predicted lengths by prompt set and by context, at the draft tokens of the run."""
    head = ["predicted on", "", "rounds", "acceptance length"]
    rows = []
    for name, figures in _predictions(results):
        count = str(len(figures["by_position"]))
        for kind, label in (("by_source", ""), ("by_context", "context of tokens ")):
            for group, lengths_there in (figures.get(kind) or {}).items():
                if count in lengths_there:
                    each = lengths_there[count]
                    rows.append([name, f"{label}{group}", str(each["rounds"]), _with_error(each)])
    return head, rows


def serving(results: dict[str, Any]) -> pages.Table:
    """Return the draft-token count to serve with by requests in flight."""
    head = ["to serve", "requests in flight", "draft tokens", "tokens/s", "speed-up", ""]
    rows = []
    for answer in results.get("serving") or []:
        for row in answer["by_concurrency"]:
            rows.append([_condition(answer), str(row["concurrency"]), str(row["draft_tokens"]),
                         f"{row['tokens_per_s']:.1f}", f"{row['speedup']:.2f}×",
                         "measured" if row["measured"] else "by the cost model"])
    return head, rows


def serving_words(results: dict[str, Any]) -> list[str]:
    """Return lines on what to serve, how far that can be believed, and the command, which begins with two spaces."""
    lines = []
    for answer in results.get("serving") or []:
        checked, line = answer["checked"], answer["line"]
        single = answer["draft_tokens"]
        words = f"with {single} draft tokens" if single else "without the drafter, which pays nowhere"
        if answer["scheduled"]:
            words = "with draft tokens by requests in flight, which is worth more than 3% somewhere"
        how = "Too few cells to check the cost model on others than it was fitted to."
        if checked:
            how = (f"Fitted to {checked['fitted']} cells, the cost model is {100 * checked['error']:.1f}% off on "
                   f"{checked['unseen']} others, and for {checked['near']} of {checked['choices']} loads chose a count "
                   "within 3% of the best measured one.")
        lines += [f"{_condition(answer)}Serve {words}. {how}", f"  {line}"]
    return lines


def _predictions(results: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, prediction) of the runs to show: at each sampling the one with the most draft tokens."""
    shown: dict[str, tuple[str, dict[str, Any]]] = {}
    for run in sorted(results["runs"], key=lambda run: run["draft_tokens"]):
        if (run.get("predicted") or {}).get("by_draft_tokens"):
            sent = (run.get("sampling") or {}).get("sent") or {}
            shown[str((run.get("prompts"), sent))] = run["name"], run["predicted"]
    return [*shown.values()]


def _with_error(figures: dict[str, Any]) -> str:
    return f"{figures['length']:.3f} ± {figures['standard_error']:.3f}"


def _condition(answer: dict[str, Any]) -> str:
    said = ", ".join(f"{name} {value}" for name, value in answer["condition"].items())
    return f"{said}: " if said else ""
