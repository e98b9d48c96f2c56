"""The draft vocabulary: which target tokens the drafter can propose.

`d2t[i] = target_id(i) - i` with target ids ascending, so a draft id plus its offset is the target id;
`t2d` marks the target tokens that are in. The two agree: nonzero(t2d) == d2t + arange(n).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.common import files, tensor_files
from eagle3.common.errors import PreconditionError
from eagle3.drafter.checkpoint import canonical_key

if TYPE_CHECKING:
    import numpy as np
    import torch

MAPPING = "vocab_mapping.safetensors"
COUNTS = "token_counts.safetensors"


def build_mapping(
    counts: "np.ndarray", draft_vocab_size: int, pinned: Iterable[int] = ()
) -> "tuple[np.ndarray, np.ndarray]":
    """Return (d2t int64 [D], t2d bool [V]) for the most frequent tokens.

    Args:
        counts: [V] int64, how often each target token was generated.
        draft_vocab_size: D, from 1 to V. Ties, and places that no seen token fills, go to the lowest ids.
        pinned: ids that go in before all others, however rare.
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
    pinned = sorted({*pinned})
    if len(pinned) > draft_vocab_size:
        raise PreconditionError(
            "more tokens have to be in the draft vocabulary than it has places", where="--draft-vocab-size",
            expected=f"at least {len(pinned):,}: special tokens that were generated, and those of --pin",
            found=f"{draft_vocab_size:,}", fix="give a larger one")
    chosen = np.sort(_order(counts, pinned)[:draft_vocab_size])
    t2d = np.zeros(size, dtype=bool)
    t2d[chosen] = True
    return chosen.astype(np.int64) - np.arange(draft_vocab_size), t2d


def _order(counts: "np.ndarray", pinned: list[int]) -> "np.ndarray":
    """Return all ids in the order in which they go into a draft vocabulary."""
    import numpy as np

    rank = counts.copy()
    rank[pinned] += counts.sum() + 1
    return np.argsort(-rank, kind="stable")


def coverages(chosen_from: "np.ndarray", covered: "np.ndarray", sizes: list[int], pinned: list[int]) -> list[float]:
    """Return the share of `covered` [V] that draft vocabularies of several sizes hold, chosen from counts [V]."""
    import numpy as np

    held = np.cumsum(covered[_order(chosen_from, pinned)])
    return [float(held[size - 1] / max(1, held[-1])) for size in sizes]


def coverage(counts: "np.ndarray", t2d: "np.ndarray") -> float:
    """Return the share of generated tokens that the draft vocabulary holds: the ceiling of acceptance."""
    total = int(counts.sum())
    return float(counts[t2d].sum()) / total if total else 0.0


def held_out_coverage(halves: "np.ndarray", draft_vocab_size: int, pinned: Iterable[int] = ()) -> float:
    """Return the coverage of text that the vocabulary was not chosen from.

    Each half of the traces is covered by the vocabulary that the other half chooses; with all of them it will
    be somewhat better. `coverage` itself says little while few tokens were seen: it counts what was counted.

    Args:
        halves: [2, V] int64 counts.
    """
    pinned = list(pinned)
    shares = [coverage(halves[1 - k], build_mapping(halves[k], draft_vocab_size, pinned)[1]) for k in (0, 1)]
    return sum(shares) / len(shares)


def most_frequent_missing(counts: "np.ndarray", t2d: "np.ndarray", limit: int = 10) -> list[tuple[int, int]]:
    """Return (id, count) of the generated tokens that the draft vocabulary lacks, the most frequent first."""
    import numpy as np

    lacking = np.where(t2d, 0, counts)
    order = np.argsort(-lacking, kind="stable")[:limit]
    return [(int(token), int(lacking[token])) for token in order if lacking[token]]


def published_mapping(folder: Path, vocab_size: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return (d2t int64 [D], t2d bool [V]) of a published drafter of any layout, reading those two tensors only.

    A drafter without a mapping proposes every token: D is V then, and the mapping is the identity.

    Args:
        vocab_size: V, of the verifier.
    Raises:
        PreconditionError when the mapping is of another verifier, of other types, or contradicts itself.
    """
    import torch

    found = {canonical_key(name): entry for name, entry in tensor_files.read(folder).items()}
    config = files.read_json(folder / "config.json", fix="name the folder of a drafter")
    theirs = (config.get("transformer_layer_config") or config).get("vocab_size", vocab_size)
    head, parts = found.get("lm_head.weight"), [name for name in ("d2t", "t2d") if name in found]
    size = head.shape[0] if head and head.shape else config.get("draft_vocab_size") or vocab_size
    if not parts and size == theirs == vocab_size:
        return torch.zeros(vocab_size, dtype=torch.int64), torch.ones(vocab_size, dtype=torch.bool)
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {"d2t": ("I64", (size,)), "t2d": ("BOOL", (vocab_size,))}
    given: dict[str, tuple[str, tuple[int, ...]]] = {name: (found[name].dtype, found[name].shape) for name in parts}
    if given != wanted or theirs != vocab_size:
        raise PreconditionError(
            "the drafter's vocabulary mapping does not fit this verifier and its own head", where=folder,
            expected=f"vocab_size {vocab_size}; " + _types(wanted) + f" (or neither, and a head of {vocab_size} rows)",
            found=f"vocab_size {theirs}; " + (_types(given) or "no mapping") + f"; a head of {size} rows",
            fix="check --model, or name a complete drafter of this verifier",
        )
    d2t, t2d = (torch.frombuffer(bytearray(b"".join(tensor_files.blocks(found[name]))), dtype=kind)
                for name, kind in (("d2t", torch.int64), ("t2d", torch.bool)))
    check_mapping(d2t, t2d, folder, fix="name a drafter whose mapping is whole")
    return d2t, t2d


def _types(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {dtype} {list(shape)}" for name, (dtype, shape) in tensors.items())


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


def check_mapping(d2t: "torch.Tensor", t2d: "torch.Tensor", where: object, fix: str = "") -> None:
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
            fix=fix or "build the mapping again with 03_build_vocab_mapping.py",
        )
