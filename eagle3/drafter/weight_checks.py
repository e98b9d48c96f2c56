"""Checks that read a checkpoint's weights, a few MiB at a time: values, the mapping, the embedding."""

from collections.abc import Callable
from typing import Any

from eagle3.common import tensor_files
from eagle3.common.findings import FAIL, OK, WARN, Finding
from eagle3.drafter.checkpoint import EMBEDDING, FROZEN, MAPPING, Export, canonical_key, embedding_of

# Bits that are all set in NaN and Inf only (NaN only where a type has no Inf).
_NOT_FINITE = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000),
               "F64": ("<u8", 0x7FF0000000000000), "F8_E5M2": ("u1", 0x7C), "F8_E4M3": ("u1", 0x7F)}  # fmt: skip
_ROUNDING = 2.0**-8  # of bfloat16, the narrowest type that weights are compared in


def values_finite(export: Export) -> Finding:
    """One NaN in a weight makes every draft token NaN, and argmax of that is token 0."""
    import numpy as np

    bad = []
    for name, entry in export.tensors.items():
        if entry.dtype not in _NOT_FINITE or canonical_key(name).startswith(FROZEN[1:]):
            continue
        kind, mask = _NOT_FINITE[entry.dtype]
        count = sum(int(((np.frombuffer(block, kind) & np.array(mask, kind)) == mask).sum())
                    for block in tensor_files.blocks(entry))
        if count:
            bad.append(f"{name}: {count} of {int(np.prod(entry.shape))}")
    if bad:
        return Finding(FAIL, "NaN or Inf in " + "; ".join(bad), "finite weights", "export an earlier checkpoint")
    return Finding(OK, "all weights")


def mapping_consistent(export: Export) -> Finding:
    """d2t[i] is target id − i; offsets that contradict the mask propose other tokens than were trained."""
    import numpy as np

    tensors = export.canonical
    types = [tensors[name].dtype for name in MAPPING if name in tensors]
    if types != ["I64", "BOOL"]:
        return Finding(FAIL if export.reduced else OK, "no usable mapping", "d2t I64, t2d BOOL" * export.reduced)
    d2t = np.frombuffer(b"".join(tensor_files.blocks(tensors["d2t"])), "<i8")
    marked = np.flatnonzero(np.frombuffer(b"".join(tensor_files.blocks(tensors["t2d"])), "u1"))
    targets = d2t + np.arange(len(d2t))
    if len(marked) != len(targets) or not np.array_equal(marked, targets):
        wrong = "" if len(marked) != len(targets) else f", {int((marked != targets).sum())} differ"
        found = f"d2t and t2d do not belong together: {len(targets)} draft ids, {len(marked)} marked{wrong}"
        return Finding(FAIL, found, "nonzero(t2d) == d2t + arange(n)", "take the mapping of the training (stage 03)")
    return Finding(OK, f"{len(d2t)} of {tensors['t2d'].shape[0]} tokens")


def embedding_is_the_verifiers(export: Export) -> Finding:
    """vLLM uses a drafter's own embedding, SGLang always the verifier's: a random table kills acceptance on vLLM."""
    own = export.canonical.get(EMBEDDING)
    if own is None:
        needed = export.keeps_embedding
        return Finding(FAIL if needed else OK, "not in the checkpoint", "the trained embedding" * needed,
                       "leave --trained-embedding out" * needed)
    equal = _equal(own, embedding_of(export.verifier.folder))
    if equal and not export.keeps_embedding:
        return Finding(OK, "equal" + ", so it is left out" * (export.engine != "speculators"))
    if export.keeps_embedding and export.engine != "sglang":
        return Finding(OK, "declared as trained, so it is shipped")
    if equal:
        return Finding(WARN, "equal although declared as trained", "", "leave --trained-embedding out")
    return Finding(FAIL, "an embedding that is not the verifier's", "no embed_tokens.weight, or the verifier's",
                   "a trained one can be served by vLLM only, with --trained-embedding; remove an untrained one")


def _equal(own: tensor_files.Entry, theirs: tensor_files.Entry) -> bool:
    """Say whether two weights are equal, up to the rounding of the narrower type when types differ."""
    import numpy as np

    if own.shape != theirs.shape:
        return False
    if own.dtype == theirs.dtype:
        return all(a == b for a, b in zip(tensor_files.blocks(own), tensor_files.blocks(theirs), strict=True))
    rows = zip(_floats(own), _floats(theirs), strict=True)
    return all(bool((np.abs(a - b) <= _ROUNDING * np.abs(b)).all()) for a, b in rows)


def _floats(entry: tensor_files.Entry) -> Any:
    """Yield a tensor's values as float32, the same number of elements at a time for every type."""
    import numpy as np

    count = 1 << 20
    for block in tensor_files.blocks(entry, block=int(entry.item_size) * count):
        if entry.dtype == "BF16":
            yield (np.frombuffer(block, "<u2").astype("<u4") << 16).view("<f4")
        else:
            yield np.frombuffer(block, {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[entry.dtype]).astype("<f4")


VALUES: tuple[Callable[[Export], Finding], ...] = (values_finite, mapping_consistent, embedding_is_the_verifiers)
