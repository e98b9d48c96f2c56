"""Checkpoint keys and configurations: what each engine loads, and the checks that keep it from lying.

Engines differ in the layer's prefix (`midlayer.` or `layers.0.`), in where they read the auxiliary layer ids,
and in what they do with names they do not know: SGLang up to 0.5.10 skips them silently.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.errors import PreconditionError

if TYPE_CHECKING:
    import torch

# Parameters of Eagle3DraftModel that are the verifier's and never trained or shipped.
FROZEN = ("embed_tokens.", "verifier_norm.", "verifier_lm_head.")
_LAYER_KEYS = (
    "input_layernorm.weight",
    "hidden_norm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
REQUIRED = ("fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", *(f"layers.0.{key}" for key in _LAYER_KEYS))
OPTIONAL = ("embed_tokens.weight",)
# SGLang reads nested ids only; for Llama and Qwen3 targets it adds 1 to each, for DeepSeek-type targets it
# does not, and up to 0.5.12 it always added 1 there, where its default (no list) is right.
_SGLANG_NO_OFFSET = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25")
_SGLANG_DEFAULT_UP_TO = (0, 5, 12)


def canonical_key(key: str) -> str:
    """Return a tensor name in this project's spelling (`layers.0.`, no `model.` prefix)."""
    key = key.removeprefix("model.")
    return "layers.0." + key.removeprefix("midlayer.") if key.startswith("midlayer.") else key


def engine_key(key: str) -> str:
    """Return a canonical name as every engine version accepts it: `midlayer.` for the decoder layer."""
    return "midlayer." + key.removeprefix("layers.0.") if key.startswith("layers.0.") else key


def rename_table(keys: list[str], where: Path) -> dict[str, str]:
    """Return {name in the file: name for the engines}; PreconditionError for unknown, mixed or missing keys."""
    if any(key.startswith("midlayer.") for key in keys) and any(key.startswith("layers.0.") for key in keys):
        raise PreconditionError("the checkpoint mixes `midlayer.` and `layers.0.` keys", where=where,
                                expected="one of the two", fix="keep the set that belongs to the last training")
    canonical = {key: canonical_key(key) for key in keys}
    missing = sorted(set(REQUIRED) - set(canonical.values()))
    unknown = sorted(key for key, name in canonical.items() if name not in REQUIRED + OPTIONAL)
    if missing or unknown:
        raise PreconditionError(
            "the checkpoint's keys are not those of an EAGLE-3 drafter",
            where=where,
            expected="missing: " + (", ".join(missing) or "none"),
            found="unknown: " + (", ".join(unknown) or "none"),
            fix="name a checkpoint that 04_train.py wrote; an engine would load this one without a word",
        )
    return {key: engine_key(name) for key, name in canonical.items()}


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return {canonical name: shape} for a flat drafter config."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    auxiliary = config.get("num_aux_hidden_states", 3)
    layer = {
        **dict.fromkeys(_LAYER_KEYS[:3], (hidden,)),
        "self_attn.q_proj.weight": (heads * head_dim, 2 * hidden),
        "self_attn.k_proj.weight": (kv_heads * head_dim, 2 * hidden),
        "self_attn.v_proj.weight": (kv_heads * head_dim, 2 * hidden),
        "self_attn.o_proj.weight": (hidden, heads * head_dim),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    return {
        "fc.weight": (hidden, auxiliary * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
        "d2t": (config["draft_vocab_size"],),
        "t2d": (config["vocab_size"],),
        "embed_tokens.weight": (config["vocab_size"], hidden),
        **{f"layers.0.{name}": shape for name, shape in layer.items()},
    }


def check_tensors(tensors: "dict[str, torch.Tensor]", config: dict[str, Any], where: Path) -> None:
    """Raise PreconditionError when a shape, the mapping or a value (NaN, Inf) is wrong.

    `tensors` has canonical names.
    """
    import torch

    from eagle3.vocab import check_mapping

    shapes = expected_shapes(config)
    wrong = [f"{name}: {tuple(tensor.shape)} instead of {shapes[name]}" for name, tensor in tensors.items()
             if tuple(tensor.shape) != shapes[name]]
    if wrong:
        raise PreconditionError("tensors do not fit config.json", where=where, found="\n".join(wrong))
    check_mapping(tensors["d2t"], tensors["t2d"], where)
    bad = [name for name, tensor in tensors.items()
           if tensor.is_floating_point() and not torch.isfinite(tensor).all()]
    if bad:
        raise PreconditionError("tensors hold NaN or Inf", where=where, found=", ".join(bad),
                                fix="export an earlier checkpoint (--checkpoint)")


def engine_config(
    config: dict[str, Any], *, engine: str, version: str | None, target_model_type: str, serving_length: int
) -> dict[str, Any]:
    """Return a drafter config with the auxiliary ids where this engine, version and target read them.

    Args:
        config: flat config with top-level `eagle_aux_hidden_state_layer_ids` in the project's convention.
        version: the engine's version; None means the newest.
        target_model_type: model_type of the verifier's text config.
        serving_length: tokens that max_position_embeddings has to cover (silent garbage past it).
    """
    ids = list(config["eagle_aux_hidden_state_layer_ids"])
    result = {**config, "max_position_embeddings": max(serving_length, config["max_position_embeddings"])}
    nested: list[int] | None = ids
    if engine == "sglang":
        if target_model_type not in _SGLANG_NO_OFFSET:
            nested = [layer - 1 for layer in ids]
        elif version is not None and parse_version(version) <= _SGLANG_DEFAULT_UP_TO:
            nested = None
    if nested is not None:
        result["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": nested}
    return result


def parse_version(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 0.5.12.post1 is (0, 5, 12)."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
