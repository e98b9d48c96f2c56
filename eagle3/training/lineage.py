"""Whether what training reads belongs together. Knows no torch: a dry run asks it too."""

from pathlib import Path
from typing import Any

from eagle3.common import files
from eagle3.common.errors import PreconditionError, StaleError
from eagle3.common.log import logger
from eagle3.drafter.verifier import Verifier, without_weights


def check_lineage(upstream: dict[str, dict[str, Any]], facts: Verifier, states: Path, mapping: Path, *,
                  mapping_named: bool = False) -> None:
    """Refuse states that are not of this verifier, and a mapping of another verifier or of other traces.

    Args:
        upstream: the manifests of "states" and "vocab". states, mapping: their folders.
        mapping_named: the user named the mapping; then other traces are only worth a warning.
    Raises:
        PreconditionError: another verifier. StaleError: the mapping was chosen from other traces than the states'.
    """
    if upstream["states"]["hidden_size"] != facts.hidden_size:
        raise PreconditionError("the states are of another model", where=states,
                                expected=f"hidden size {facts.hidden_size}",
                                found=upstream["states"]["hidden_size"], fix="check --model and --states")
    if upstream["vocab"]["vocab_size"] != facts.vocab_size:
        raise PreconditionError("the mapping is of another model", where=mapping,
                                expected=f"{facts.vocab_size} target tokens",
                                found=upstream["vocab"]["vocab_size"], fix="check --model and --vocab")
    _check_verifier(upstream["states"], facts, states)
    _check_traces(upstream, states, mapping, mapping_named)


def _check_verifier(manifest: dict[str, Any], facts: Verifier, states: Path) -> None:
    """Compare configuration and weights with those that the states came from; tokenizer and template play no part."""
    recorded = (manifest.get("inputs") or {}).get("model")
    if not isinstance(recorded, dict) or without_weights(facts.folder):
        return
    now = files.model_identity(facts.folder)
    names = [name for name in sorted(recorded.keys() | now.keys())
             if name == "config.json" or "safetensors" in name]
    if changed := [name for name in names if recorded.get(name) != now.get(name)]:
        raise PreconditionError(
            "the states are of another model: its files differ", where=states,
            expected=f"{facts.folder} as it was captured",
            found=", ".join(f"{name} {'differs' if name in recorded and name in now else 'is new or gone'}"
                            for name in changed[:5]),
            fix="name the model of the states with --model, or capture this one's with 02_extract_hidden_states.py")


def _check_traces(upstream: dict[str, dict[str, Any]], states: Path, mapping: Path, named: bool) -> None:
    captured = upstream["states"].get("traces_identity")
    counted = (upstream["vocab"].get("inputs") or {}).get("traces")
    if not captured or not counted or captured == counted or upstream["vocab"].get("from_checkpoint"):
        return
    what = "the draft vocabulary was chosen from other traces than the states are of"
    if named:
        logger.warning("%s (%s)", what, mapping)
        return
    raise StaleError(
        what, where=mapping, expected=f"the traces of {states} ({captured[:12]}…)", found=f"{counted[:12]}…",
        fix="choose it anew with 03_build_vocab_mapping.py and the same options --restart (after 02 if traces have "
        f"grown), or say that it is meant: --vocab {mapping}")
