"""From a verifier's last residual stream to its logits: what a family does there beside an RMS norm and a matrix.

Read from the classes of transformers 5.19 and vLLM 0.32. Who does something unknown here is refused by name: a teacher
with wrong probabilities trains without a word.
"""

import re
from dataclasses import dataclass
from typing import Any

from eagle3.common.errors import PreconditionError

# Final norms that store their weight w as 1 + w.
OFFSET_NORMS = frozenset({
    "gemma", "gemma2", "gemma3_text", "vaultgemma", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron",
})  # fmt: skip
# Final norms that subtract the mean.
LAYER_NORMS = frozenset({
    "cohere", "cohere2", "cohere2_moe", "nemotron", "phimoe", "stablelm", "starcoder2", "persimmon", "jais2", "phi",
})  # fmt: skip
# Scales of the logits: key, and whether it divides.
SCALES: dict[str, tuple[str, bool]] = {
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared", "granitemoehybrid"), ("logits_scaling", True)),
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), ("logit_scale", False)),
    **dict.fromkeys(("minicpm", "minicpm3"), ("dim_model_base", False)),  # logits x dim_model_base / hidden_size
    "hyperclovax": ("logits_scaling", False),
    "falcon_h1": ("lm_head_multiplier", False),
}  # fmt: skip
SOFTCAP = "final_logit_softcapping"
SOFTCAPPED = frozenset({"gemma2", "gemma3_text", "gemma4_text", "vaultgemma", "nanochat"})
_REFUSED = {"gemma3n_text": "its residual stream has four parts (AltUp), of which the engines capture one"}
# A key that scales or caps logits, and one that only sounds so.
_SUSPICIOUS = re.compile(r"logit.*(scal|cap|mult)|lm_head_mult|output_mult|dim_model_base")
_HARMLESS = re.compile(r"router|att|moe|gate|query|init|vision|audio|index")


@dataclass(frozen=True)
class Output:
    """logits = cap(scale · head @ norm(x)), with cap(z) = softcap · tanh(z / softcap).

    Attributes:
        layer_norm: the norm subtracts the mean. norm_offset: what is added to the norm's stored weight.
        scale: of the logits. softcap: None without one.
    """

    layer_norm: bool = False
    norm_offset: float = 0.0
    scale: float = 1.0
    softcap: float | None = None

    def __str__(self) -> str:
        """Return what differs from an RMS norm and a matrix, empty if nothing does."""
        said = ["layer norm"] * self.layer_norm + ["1 + w in the norm"] * bool(self.norm_offset)
        said += [f"logits x {self.scale:.6g}"] * (self.scale != 1.0)
        return ", ".join(said + [f"soft cap {cap:g}" for cap in [self.softcap] if cap])


def keys_of(model_type: str) -> tuple[str, ...]:
    """Return the keys of config.json by which this family changes its logits."""
    scale = SCALES.get(model_type)
    return (*(scale[:1] if scale else ()), *([SOFTCAP] if model_type in SOFTCAPPED else ()))


def output_of(config: dict[str, Any], where: object) -> Output:
    """Return how a verifier with this text configuration makes logits; PreconditionError for a way not known here."""
    family = str(config.get("model_type"))
    if family in _REFUSED:
        raise PreconditionError("a drafter for this family cannot be trained here", where=where, found=family,
                                expected=f"another family: {_REFUSED[family]}")
    known = {*keys_of(family), SOFTCAP}
    strange = {key: value for key, value in config.items() if key not in known and _SUSPICIOUS.search(key)
               and not _HARMLESS.search(key) and value not in (None, False, 1, 1.0)}
    if strange:
        raise PreconditionError(
            "the verifier changes its logits in a way that is not known here", where=where,
            expected=f"a family of {', '.join(sorted({*SCALES} | SOFTCAPPED))}, or none of these keys",
            found=f"{family} with " + ", ".join(f"{key}: {value}" for key, value in strange.items()),
            fix="teacher probabilities would be wrong; add the family to eagle3/drafter/output.py")
    try:
        scale, softcap = _scale(config, family), float(config.get(SOFTCAP) or 0) or None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise PreconditionError("a scale of the logits is no number", where=where, found=error,
                                expected="numbers under " + ", ".join(sorted(known))) from None
    return Output(family in LAYER_NORMS, float(family in OFFSET_NORMS), scale, softcap)


def _scale(config: dict[str, Any], family: str) -> float:
    key, divides = SCALES.get(family, ("", False))
    value = config.get(key)
    if value is None:
        return 1.0
    if key == "dim_model_base":
        return float(value) / config["hidden_size"]
    return 1.0 / float(value) if divides else float(value)
