"""Which optimizer steps are skipped: those whose loss or gradient is not finite, or whose gradient is a spike.

All processes know the same loss and norm of a step, so all skip alike. What is remembered stands in the checkpoint's
counters: a resumed run skips what an undisturbed one would.
"""

import math
import statistics
from typing import Any

import numpy as np

WINDOW = 100  # steps whose median norm says what is usual
_FEWEST = 20  # of them; before that only what is not finite is skipped


def limit(norms: list[float], factor: float) -> float:
    """Return the gradient norm above which a step is skipped, given those of the steps before it; a float32, as GPUs
    compare it."""
    return float(np.float32(factor * statistics.median(norms))) if factor and len(norms) >= _FEWEST else math.inf


def reason(loss: float, norm: float, largest: float) -> str:
    """Say why a step is skipped, "" if it is not."""
    if not math.isfinite(loss) or not math.isfinite(norm):
        return f"not finite: loss {loss}, gradient norm {norm}"
    return f"a spike: gradient norm {norm:.4g}, at most {largest:.4g} is usual" if norm > largest else ""


def remember(counters: dict[str, Any], norm: float, why: str) -> None:
    """Count a step: `norms` of those that were done, `skipped_steps`, and how many of them in a row."""
    if why:
        counters["skipped_steps"] = counters.get("skipped_steps", 0) + 1
        counters["skipped_in_a_row"] = counters.get("skipped_in_a_row", 0) + 1
        return
    counters["skipped_in_a_row"] = 0
    if norm > 0:  # else there was nothing to learn
        counters["gradient_norms"] = [*counters.get("gradient_norms", []), norm][-WINDOW:]
