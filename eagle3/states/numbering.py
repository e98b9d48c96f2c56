"""Which trace has which number in a store: given once, never again to another trace.

A trace is known by its id and its digest. Known ones keep their number, new ones follow behind the highest number ever
given, in the order of their ids, not of completion, so that it does not depend on how stage 01 was scheduled. A trace
that is gone from traces.jsonl leaves a gap: its number is retired, its file stays, and its row in the dataset carries
no loss. Should the very same trace come back, it takes its number up again.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.common.errors import PreconditionError, StaleError
from eagle3.common.log import logger
from eagle3.states.store import Sample

_LOST_SHARE = 0.5  # of the captured traces; with more of them gone these are other traces, not an edited file
_NAMED = 5


@dataclass
class Numbered:
    """What is to be in a store.

    Attributes:
        samples: by number. skipped: traces left out, by reason.
        retired: index entries of captured traces that are gone now. revived: of retired ones that are back.
    """

    samples: list[Sample] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=lambda: {"too_long": 0, "nothing_generated": 0})
    retired: list[dict[str, Any]] = field(default_factory=list)
    revived: list[dict[str, Any]] = field(default_factory=list)

    def changes(self) -> dict[int, dict[str, Any]]:
        """Return the index entries that are to be other than they are, by number."""
        entries = [entry | {"retired": True} for entry in self.retired]
        entries += [{name: value for name, value in entry.items() if name != "retired"} for entry in self.revived]
        return {entry["i"]: entry for entry in entries}


def number_traces(
    rows: list[tuple[str, str, list[int], list[int], str]], index: dict[int, dict[str, Any]], where: Path, *,
    max_length: int, limit: int | None = None,
) -> Numbered:
    """Give each trace its number.

    Args:
        rows: (id, digest, token ids [T], loss mask [T], source) of each trace, in any order.
        index: of the store, {number: entry}. where: the traces, for messages.
        limit: take only the first so many by id, and those that are captured already.
    Raises:
        StaleError: a captured trace has changed, or most captured ones are gone. PreconditionError: none is left.
    """
    result = Numbered()
    known = {entry["id"]: entry for _, entry in sorted(index.items()) if not entry.get("retired")}
    retired = {(entry["id"], entry["digest"]): entry for entry in index.values() if entry.get("retired")}
    changed, fresh = [], []
    for place, (name, digest, ids, mask, source) in enumerate(sorted(rows)):
        if len(ids) > max_length or not any(mask):
            result.skipped["too_long" if len(ids) > max_length else "nothing_generated"] += 1
            continue
        before = known.pop(name, None) or retired.get((name, digest))
        if before is None:
            if limit is None or place < limit:
                fresh.append((name, digest, ids, mask, source))
        elif before["digest"] != digest:
            changed.append(name)
        else:
            result.samples.append(Sample(before["i"], name, digest, ids, mask, source))
            if before.get("retired"):
                result.revived.append(before)
    result.retired = [*known.values()]
    _refuse(changed, result, where)
    first = 1 + max(index, default=-1)
    result.samples += [Sample(first + k, *row) for k, row in enumerate(fresh)]
    result.samples.sort(key=lambda sample: sample.i)
    if not result.samples:
        raise PreconditionError("no trace can be captured", where=where, found=f"skipped: {result.skipped}")
    _tell(result, max_length)
    return result


def _refuse(changed: list[str], result: Numbered, where: Path) -> None:
    ways = "capture into another directory with --out, or start anew with --restart"
    if changed:
        more = " …" * (len(changed) > _NAMED)
        raise StaleError(
            f"{len(changed)} traces have changed since their states were captured", where=where,
            found=f"ids {', '.join(changed[:_NAMED])}{more}",
            fix=f"{ways}; or give changed prompts new ids, and their old states are left out")
    captured = len(result.retired) + len(result.samples)
    if result.retired and len(result.retired) > _LOST_SHARE * captured:
        raise StaleError(
            "most of the captured traces are not among these", where=where, expected=f"{captured} captured traces",
            found=f"{len(result.samples)} of them", fix=f"name the traces of these states with --traces, or {ways}")


def _tell(result: Numbered, max_length: int) -> None:
    if any(result.skipped.values()):
        logger.warning("skipped traces: %s (limit %d tokens)", result.skipped, max_length)
    if result.retired:
        logger.warning("%d captured traces are gone from traces.jsonl, such as %s: their states are left out, their "
                       "files stay", len(result.retired), result.retired[0]["id"])
