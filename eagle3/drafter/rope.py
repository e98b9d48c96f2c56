"""RoPE in one flat spelling, and as what it is in the end: angles.

Configurations spell it as rope_theta beside rope_scaling, as rope_parameters, or as rope_parameters of each layer type.
"""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

DEFAULT_THETA = 10000.0
_OLD_TYPES = {"mrope": "default", "su": "longrope"}
# What a type of scaling is made of. A fresh drafter gets these and nothing else: all that is left has one meaning in
# transformers and in both engines. Scalings that depend on the length of the text (dynamic, longrope) do not.
_MADE_OF: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
}


def rope_of(layer: dict[str, Any]) -> dict[str, Any]:
    """Return rope_parameters (rope_type, rope_theta, what scaling needs), flat, from any spelling or several.

    Where layer types have RoPE of their own, that of full attention is returned, which is the drafter's. M-RoPE's
    sections are left out: a text position is the same number in each of them, so that it is plain RoPE.
    """
    rope = {**_full_attention(layer.get("rope_scaling")), **_full_attention(layer.get("rope_parameters"))}
    old, kind = rope.pop("type", None), rope.get("rope_type")
    kind = str(kind or old or "default")
    rope["rope_type"] = _OLD_TYPES.get(kind, kind)
    rope["rope_theta"] = float(rope.get("rope_theta") or layer.get("rope_theta") or DEFAULT_THETA)
    return {name: value for name, value in rope.items() if not name.startswith("mrope_")}


def _full_attention(rope: Any) -> dict[str, Any]:
    """Return the entry of full attention of a dictionary by layer type, any other dictionary as it is."""
    if not isinstance(rope, dict):
        return {}
    by_type = {name: value for name, value in rope.items() if isinstance(value, dict)}
    if not by_type:
        return rope
    return dict(by_type.get("full_attention") or next(iter(by_type.values())))


def fresh_rope(config: dict[str, Any], *, mla: bool = False) -> dict[str, Any]:
    """Return rope_parameters of a fresh drafter of the verifier whose text configuration this is.

    The verifier's theta over the whole head, and its scaling where that is one for all lengths. With MLA the scaling
    stays out: it is made for heads that the drafter does not have.
    """
    rope = rope_of(config)
    kind = "default" if mla or rope["rope_type"] not in _MADE_OF else rope["rope_type"]
    if kind in ("yarn", "llama3"):
        rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    scaling = {name: rope[name] for name in _MADE_OF[kind] if rope.get(name) is not None}
    return {"rope_type": kind, **scaling, "rope_theta": rope["rope_theta"]}


def angles(rope: dict[str, Any], head_dim: int) -> "tuple[np.ndarray, float] | None":
    """Return (angle of each pair at position 1, float64 [rotated / 2]; factor of cosines and sines).

    The formulas are those of the papers (RoPE, position interpolation, YaRN) and, for llama3, of Meta's code, as
    transformers has them in modeling_rope_utils. None for a scaling that depends on the length of the text.
    """
    import numpy as np

    kind, theta = rope["rope_type"], rope["rope_theta"]
    if kind not in _MADE_OF:
        return None
    rotated = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
    plain = 1.0 / theta ** (np.arange(0, rotated, 2) / rotated)
    if kind == "default":
        return plain, 1.0
    if not rope["factor"] > 0:
        raise ValueError(f"a RoPE factor of {rope['factor']}")
    slow = plain / rope["factor"]
    if kind == "linear":
        return slow, 1.0
    original = rope["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = np.clip((original * plain / (2 * math.pi) - low) / (high - low), 0, 1)
        return (1 - keep) * slow + keep * plain, 1.0
    return _yarn(rope, plain, slow, original), _yarn_factor(rope)


def _yarn(rope: dict[str, Any], plain: "np.ndarray", slow: "np.ndarray", original: float) -> "np.ndarray":
    import numpy as np

    rotated = 2 * len(plain)

    def pair(turns: float) -> float:
        """The pair (a fraction) that turns so often within the original length."""
        return rotated * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = pair(rope.get("beta_fast") or 32), pair(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    ramp = np.clip((np.arange(len(plain)) - low) / (high - low or 0.001), 0, 1)
    return slow * ramp + plain * (1 - ramp)


def _yarn_factor(rope: dict[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(factor: float = 1.0) -> float:
        return 1.0 if rope["factor"] <= 1 else 0.1 * factor * math.log(rope["factor"]) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale()


def same(one: dict[str, Any], other: dict[str, Any], head_dim: int) -> bool:
    """Say whether two flat spellings turn every pair of a head by the same angle (to float32's precision)."""
    import numpy as np

    ours, theirs = angles(one, head_dim), angles(other, head_dim)
    if ours is None or theirs is None:
        return one == other
    return (ours[0].shape == theirs[0].shape and bool(np.allclose(ours[0], theirs[0], rtol=1e-5, atol=0))
            and math.isclose(ours[1], theirs[1], rel_tol=1e-5))
