"""Whether what training reads belongs together. Knows no torch: a dry run asks it too."""

from pathlib import Path
from typing import Any

from eagle3.common.errors import PreconditionError
from eagle3.drafter.verifier import Verifier


def check_lineage(upstream: dict[str, dict[str, Any]], facts: Verifier, states: Path, mapping: Path) -> None:
    """Refuse states or a mapping that are not of this verifier.

    Args:
        upstream: the manifests of "states" and "vocab". states, mapping: their folders.
    Raises:
        PreconditionError: their hidden size or their target vocabulary is another.
    """
    if upstream["states"]["hidden_size"] != facts.hidden_size:
        raise PreconditionError("the states are of another model", where=states,
                                expected=f"hidden size {facts.hidden_size}",
                                found=upstream["states"]["hidden_size"], fix="check --model and --states")
    if upstream["vocab"]["vocab_size"] != facts.vocab_size:
        raise PreconditionError("the mapping is of another model", where=mapping,
                                expected=f"{facts.vocab_size} target tokens",
                                found=upstream["vocab"]["vocab_size"], fix="check --model and --vocab")
