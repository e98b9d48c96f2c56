"""The draft vocabulary: which target tokens the drafter can propose.

`d2t[i] = target_id(i) - i` with target ids ascending, so a draft id plus its offset is the target id;
`t2d` marks the target tokens that are in. The two agree: nonzero(t2d) == d2t + arange(n).
"""

from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.errors import PreconditionError

if TYPE_CHECKING:
    import numpy as np
    import torch

MAPPING = "vocab_mapping.safetensors"
COUNTS = "token_counts.safetensors"


def build_mapping(counts: "np.ndarray", draft_vocab_size: int) -> "tuple[np.ndarray, np.ndarray]":
    """Return (d2t int64 [D], t2d bool [V]) for the most frequent tokens.

    Args:
        counts: [V] int64, how often each target token was generated.
        draft_vocab_size: D, from 1 to V. Ties, and places that no seen token fills, go to the lowest ids.
    Raises:
        PreconditionError when D is out of its range.
    """
    import numpy as np

    size = len(counts)
    if not 1 <= draft_vocab_size <= size:
        raise PreconditionError(
            "the draft vocabulary does not fit the verifier's",
            where="--draft-vocab-size",
            expected=f"from 1 to {size:,}",
            found=f"{draft_vocab_size:,}",
        )
    chosen = np.sort(np.argsort(-counts, kind="stable")[:draft_vocab_size])
    t2d = np.zeros(size, dtype=bool)
    t2d[chosen] = True
    return chosen.astype(np.int64) - np.arange(draft_vocab_size), t2d


def coverage(counts: "np.ndarray", t2d: "np.ndarray") -> float:
    """Return the share of generated tokens that the draft vocabulary holds: the ceiling of acceptance."""
    total = int(counts.sum())
    return float(counts[t2d].sum()) / total if total else 0.0


def held_out_coverage(halves: "np.ndarray", draft_vocab_size: int) -> float:
    """Return the coverage of text that the vocabulary was not chosen from.

    Each half of the traces is covered by the vocabulary that the other half chooses; with all of them it will
    be somewhat better. `coverage` itself says little while few tokens were seen: it counts what was counted.

    Args:
        halves: [2, V] int64 counts.
    """
    shares = [coverage(halves[1 - k], build_mapping(halves[k], draft_vocab_size)[1]) for k in (0, 1)]
    return sum(shares) / len(shares)


def load_mapping(path: Path) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return (d2t int64 [D], t2d bool [V]) of a mapping file; PreconditionError when they disagree."""
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
        d2t, t2d = tensors["d2t"], tensors["t2d"]
    except Exception as error:
        raise PreconditionError(
            "not a vocabulary mapping", where=path, found=error, fix="run 03_build_vocab_mapping.py first"
        ) from error
    check_mapping(d2t, t2d, path)
    return d2t, t2d


def check_mapping(d2t: "torch.Tensor", t2d: "torch.Tensor", where: object) -> None:
    """Raise PreconditionError unless nonzero(t2d) == d2t + arange(D)."""
    import torch

    targets = d2t + torch.arange(len(d2t))
    marked = t2d.bool().nonzero().flatten()
    if len(marked) != len(targets) or not torch.equal(marked, targets):
        wrong = "different lengths" if len(marked) != len(targets) else f"{int((marked != targets).sum())} ids differ"
        raise PreconditionError(
            "d2t and t2d do not belong together",
            where=where,
            expected="nonzero(t2d) == d2t + arange(n)",
            found=f"{len(targets)} draft ids, {len(marked)} marked target ids: {wrong}",
            fix="build the mapping again with 03_build_vocab_mapping.py",
        )
