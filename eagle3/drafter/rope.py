"""RoPE in one flat spelling; what it is in the end, angles, is in `eagle3.drafter.angles`.

Configurations spell it as rope_theta beside rope_scaling, as rope_parameters, or as rope_parameters of each layer type.
"""

from typing import Any

DEFAULT_THETA = 10000.0
OLD_TYPES = {"mrope": "default", "su": "longrope"}
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
    rope["rope_type"] = OLD_TYPES.get(kind, kind)
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
