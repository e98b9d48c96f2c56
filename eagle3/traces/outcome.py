"""What came of asking: said in the log, judged, and shown in a data report."""

from collections import Counter
from pathlib import Path
from typing import Any

from eagle3.common import files
from eagle3.common.errors import FailureLimitError
from eagle3.common.log import logger
from eagle3.traces import data_report
from eagle3.traces.trace_rows import Ledger

TRUNCATED_WARNING = 0.05  # share of replies lost to max_tokens above which the user should know


def say(ledger: Ledger, figures: dict[str, Any], tagged: int) -> None:
    """Say what came of it.

    Args:
        figures: as `Survey.figures` gives them. tagged: replies of this run with their reasoning in the content.
    """
    lost, kept = figures["skipped"].get("truncated", 0), ledger.counts["truncated"]
    answers = ledger.counts["traces"] + lost
    logger.info("%d traces (%d generated tokens), %d with reasoning; skipped: %s; failed: %d",
                ledger.counts["traces"], ledger.counts["completion_tokens"], ledger.counts["with_reasoning"],
                figures["skipped"] or "none", figures["failed"])
    if tagged:
        logger.warning("%d replies had their reasoning inside the content; it was moved out. A reasoning parser on the "
                       "server does that itself (vLLM: --reasoning-parser NAME)", tagged)
    if lost or kept:
        log = logger.warning if lost > TRUNCATED_WARNING * answers else logger.info
        log("cut at max_tokens: %d of %d replies lost (%.1f%%), %d kept%s", lost, answers, 100 * lost / answers, kept,
            "; raise --max-tokens" if log is logger.warning else "")
    if others := ledger.counts["traces"] - figures["done"]:
        logger.info("%d traces are of prompts outside this file or --limit; they stay", others)


def require_enough(directory: Path, figures: dict[str, Any], max_failures: int) -> None:
    """Raise FailureLimitError when too many prompts failed or none gave a trace."""
    failed = figures["failed"]
    if failed > max_failures or not figures["done"]:
        reasons = directory / ("failures.jsonl" if failed else "skipped.jsonl")
        raise FailureLimitError(
            f"{failed} prompts failed" if failed else "no prompt gave a trace",
            where=reasons,
            expected=f"at most {max_failures} failures and at least one trace",
            found=first_reason(reasons),
            fix="the traces so far are kept; the same command asks the failed ones again",
        )


def first_reason(path: Path) -> str:
    """Return the most frequent reason in a file of records, with one example of its detail."""
    counted: Counter[str] = Counter()
    details: dict[str, str] = {}
    for _, record in files.read_jsonl(path):
        counted[record["reason"]] += 1
        details.setdefault(record["reason"], record["detail"])
    if not counted:
        return ""
    reason, number = counted.most_common(1)[0]
    return f"{number} × {reason}" + (f", such as: {details[reason]}" if details[reason] else "")


def write_data_report(directory: Path, closing_id: int | None) -> None:
    """Write the data report; a trace is not worth less for a page that failed."""
    try:
        data_report.write(directory, closing_id=closing_id)
        logger.info("data report: %s", directory / "data_report.html")
    except Exception as error:  # noqa: BLE001 - whatever a strange text brings about
        logger.warning("no data report: %s: %s", type(error).__name__, error)
