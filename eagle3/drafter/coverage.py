"""How large a draft vocabulary should be: what each size covers of generated text, and what its head costs."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from eagle3.common import log, pages
from eagle3.common.charts import Series, line_chart
from eagle3.common.log import logger
from eagle3.drafter import vocab

if TYPE_CHECKING:
    import numpy as np

PAGE = "coverage.html"
_SIZES = (1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000)
# At few requests a draft token takes as long as its weights take to be read. NVIDIA's data sheet of the H200.
_READING = 4.8e12  # bytes a second
_BFLOAT16 = 2
WORSE = 0.01  # a taken vocabulary may cover this much less than a fresh one before it is worth a warning


@dataclass(frozen=True)
class Size:
    """One size of the draft vocabulary.

    Attributes:
        coverage: share of the counted tokens that it holds. held_out: of one half's by the choice from the other.
        head_bytes: of lm_head in bfloat16. head_share: of what is read for a draft token (layer and head).
        head_us: microseconds in which an H200 reads the head, an estimate.
    """

    size: int
    coverage: float
    held_out: float
    head_bytes: int
    head_share: float
    head_us: float


def by_size(halves: "np.ndarray", chosen: int, pinned: list[int], hidden: int, layer: int) -> list[Size]:
    """Return the usual sizes, the chosen one and the whole vocabulary, in order.

    Args:
        halves: [2, V] int64 counts. pinned: ids that go in first. hidden: of the drafter. layer: parameters of that.
    """
    whole = halves.shape[1]
    sizes = sorted({size for size in _SIZES if size < whole} | {chosen, whole})
    own = vocab.coverages(halves.sum(0), halves.sum(0), sizes, pinned)
    unseen = [vocab.coverages(halves[half], halves[1 - half], sizes, pinned) for half in (0, 1)]
    found = []
    for place, size in enumerate(sizes):
        head = size * hidden
        found.append(Size(size, own[place], (unseen[0][place] + unseen[1][place]) / 2, head * _BFLOAT16,
                          head / (head + layer), head * _BFLOAT16 / _READING * 1e6))
    return found


def as_json(sizes: list[Size]) -> list[dict[str, Any]]:
    """Return the sizes as JSON values."""
    return [asdict(each) for each in sizes]


def table(sizes: list[Size], chosen: int) -> pages.Table:
    """Return the sizes as a table."""
    head = ["draft vocabulary", "covers", "of held-out text", "head", "share of a draft token", "time on an H200"]
    return head, [[f"{each.size:,}{' (chosen)' * (each.size == chosen)}", f"{100 * each.coverage:.2f}%",
                   f"{100 * each.held_out:.2f}%", log.size(each.head_bytes), f"{100 * each.head_share:.0f}%",
                   f"{each.head_us:.0f} µs"] for each in sizes]


def page(sizes: list[Size], chosen: int, tokens: int) -> pages.Html:
    """Return the page: table and curve."""
    series: Series = {"these traces": [(each.size, 100 * each.coverage) for each in sizes],
                      "held out": [(each.size, 100 * each.held_out) for each in sizes]}
    taken = next(each for each in sizes if each.size == chosen)
    return pages.document(
        "Coverage of draft vocabularies",
        pages.lead(f"{chosen:,} tokens cover {100 * taken.coverage:.2f}% of {tokens:,} generated tokens, and "
                   f"{100 * taken.held_out:.2f}% of text that they were not chosen from."),
        pages.paragraph("What a draft vocabulary lacks is never accepted; what it has more costs time at each draft "
                        "token. Held out: the choice from one half of the traces, tried on the other half."),
        line_chart("Coverage (%) by size", series, "draft vocabulary", log_x=True, marks=True),
        pages.heading("What each size costs"), pages.table(*table(sizes, chosen)),
        pages.paragraph("Time and share are estimates for few requests at once, where a draft token takes as long as "
                        "its weights take to be read: the layer and the head in bfloat16, at the H200's 4.8 TB/s."))


def say_padding(counts: "np.ndarray", t2d: "np.ndarray", known: int) -> None:
    """Warn of rows that the model has and the tokenizer has not: generated ones are noise, chosen ones are wasted."""
    if padding := int(t2d[known:].sum()):
        logger.warning("%s places of the draft vocabulary are padding of the model: its tokenizer has only %s ids",
                       f"{padding:,}", f"{known:,}")
    if stray := int(counts[known:].sum()):
        logger.warning("%s generated tokens have ids from %s on, which the tokenizer does not know: is it the model's?",
                       f"{stray:,}", f"{known:,}")


def say(counts: "np.ndarray", t2d: "np.ndarray", figures: dict[str, float], controls: dict[str, bool],
           missing: list[dict[str, Any]], taken: bool) -> None:
    """Say what the draft vocabulary covers and lacks; warn where that will cost acceptance."""
    size, seen = int(t2d.sum()), int((counts > 0).sum())
    covered, fresh, unseen = (f"{100 * figures[name]:.2f}%"
                              for name in ("coverage", "fresh_coverage", "held_out_coverage"))
    holds = (f"draft vocabulary {size:,} of {len(t2d):,} tokens holds {covered} of these {counts.sum():,} generated "
             f"tokens ({seen:,} distinct)")
    if not taken:
        logger.info("%s and, chosen from half the traces, %s of the other half's: what it lacks is never accepted",
                    holds, unseen)
        if seen < size:
            logger.warning("only %s distinct tokens were generated: %s places go to the lowest ids; more traces would "
                           "choose better", f"{seen:,}", f"{size - seen:,}")
        return
    logger.info("%s; a fresh choice of this size would hold %s, and %s of traces that it was not chosen from", holds,
                fresh, unseen)
    if missing:
        logger.info("generated most of what it lacks: %s", ", ".join(
            f"{each['id']} {each['text'] or ''!r} {each['count']:,} times" for each in missing))
    if controls:
        logger.info("the tokens that end a turn and mark reasoning: %s", ", ".join(
            f"{text} is {'in it' if inside else 'NOT in it'}" for text, inside in controls.items()))
    outside = [text for text, inside in controls.items() if not inside]
    if outside:
        logger.warning("the drafter can never propose %s: each costs a rejected round; a fresh drafter would have them",
                       " and ".join(outside))
    if figures["coverage"] < figures["held_out_coverage"] - WORSE:
        logger.warning("it covers %.1f percentage points less than a fresh choice covers of unseen traces, and so much "
                       "is lost at every draft position; a fresh drafter (no --from-checkpoint) may end up better",
                       100 * (figures["held_out_coverage"] - figures["coverage"]))
