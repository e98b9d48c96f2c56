"""How often each token was generated: counted while traces are written, kept beside them, read by stage 03.

Traces are counted in two halves, the odd and the even lines of traces.jsonl, so that a vocabulary chosen from one half
can be tried on the other. Memory is that of the counts, whatever the number of traces.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.common import files
from eagle3.common.errors import PreconditionError

if TYPE_CHECKING:
    import numpy as np

FILE_NAME = "token_counts.safetensors"  # counts int64 [2, largest generated id + 1], traces int64 [1]
_LARGEST = 1 << 22  # an id above that is no token of any verifier, and would make the counts as long
_AT_ONCE = 1 << 16  # ids are collected before they are counted: a call for each trace would cost more than its ids


class TokenCounts:
    """Counts of generated ids by half.

    Attributes:
        traces: how many were added. possible: whether all ids can be token ids; else nothing is counted.
    """

    def __init__(self) -> None:
        self.traces, self.possible = 0, True
        self._waiting: tuple[list[int], list[int]] = [], []
        self._counted: list[np.ndarray | None] = [None, None]

    def add(self, ids: list[int]) -> None:
        """Count the generated ids of the next trace."""
        waiting = self._waiting[self.traces % 2]
        waiting += ids
        self.traces += 1
        if len(waiting) >= _AT_ONCE:
            self._count(waiting)

    def _count(self, waiting: list[int]) -> None:
        import numpy as np

        half = 0 if waiting is self._waiting[0] else 1
        self.possible &= max(waiting, default=0) < _LARGEST
        if not self.possible:
            return waiting.clear()
        before, more = self._counted[half], np.bincount(np.array(waiting, dtype=np.int64))
        if before is not None:
            size = max(len(before), len(more))
            more = np.pad(before, (0, size - len(before))) + np.pad(more, (0, size - len(more)))
        self._counted[half] = more
        return waiting.clear()

    def halves(self, size: int = 0) -> "np.ndarray":
        """Return int64 [2, V]: V is `size`, or as much as the largest id needs."""
        import numpy as np

        for waiting in self._waiting:
            self._count(waiting)
        found = [np.zeros(0, dtype=np.int64) if half is None else half for half in self._counted]
        size = max(size, *map(len, found))
        return np.stack([np.pad(half, (0, size - len(half))) for half in found])

    def write(self, path: Path) -> bool:
        """Put the counts on disk; False where there are none."""
        import numpy as np
        from safetensors.numpy import save

        counts = self.halves()
        if self.possible:
            files.write_bytes(path, save({"counts": counts.astype(np.int64), "traces": np.array([self.traces])}))
        return self.possible


def read(path: Path) -> "tuple[np.ndarray, int]":
    """Return (counts int64 [2, V], number of traces) of such a file; PreconditionError when it is none."""
    from safetensors.numpy import load

    try:
        tensors = load(path.read_bytes())
        counts, traces = tensors["counts"], int(tensors["traces"][0])
        if counts.ndim != 2 or len(counts) != 2 or counts.dtype.name != "int64" or (counts < 0).any():
            raise ValueError(f"counts {counts.dtype} {list(counts.shape)}")
    except Exception as error:
        raise PreconditionError("not the token counts of traces", where=path, found=error,
                                fix="run 01_generate_synthetic.py again: it counts anew") from error
    return counts, traces
