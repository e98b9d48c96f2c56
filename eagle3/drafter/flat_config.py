"""Drafter configurations: what published ones mean, and what each engine has to read.

Engines differ in where they read the auxiliary layer ids and in how they number layers. Read from the sources of
vLLM 0.16–0.32, SGLang 0.5.9–0.5.23 and speculators 0.9.
"""

from typing import TYPE_CHECKING, Any

from eagle3.common import versions
from eagle3.drafter.rope import fresh_rope, rope_of

if TYPE_CHECKING:
    from eagle3.common.tensor_files import Entry
    from eagle3.drafter.verifier import Verifier

NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
TRAINED_NORMS = NORM_FLAGS[1:]  # those that stage 04 begins with if asked to: SGLang never reads the first
IDS = "eagle_aux_hidden_state_layer_ids"
# What transformers' LlamaConfig takes when a config.json leaves it out, as configs of speculators do.
LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
LAYER_FIELDS = (*LLAMA_DEFAULTS, "num_key_value_heads", "head_dim")
_MLA_HEAD_DIM = 128
# SGLang adds 1 to each nested id; for DeepSeek-type targets it does so up to 0.5.12, later only if the first is 1.
NO_OFFSET = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25")
_ALWAYS_ADDS_ONE_UP_TO = (0, 5, 12)
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def flat_config(raw: dict[str, Any], tensors: "dict[str, Entry] | None" = None) -> dict[str, Any]:
    """Return a published config (flat, or nested as speculators saves it) as a flat one with nothing left to defaults.

    `tensors`, by canonical name, tell what a config may leave out: draft vocabulary, captured layers, precision.
    """
    tensors = tensors or {}
    layer = raw.get("transformer_layer_config") or raw
    flat = dict(LLAMA_DEFAULTS) | {name: layer[name] for name in LAYER_FIELDS if layer.get(name) is not None}
    flat["num_key_value_heads"] = flat.get("num_key_value_heads") or flat["num_attention_heads"]
    flat["head_dim"] = flat.get("head_dim") or flat["hidden_size"] // flat["num_attention_heads"]
    flat["rope_parameters"] = rope_of(layer)
    nested = raw.get("eagle_config") or {}
    flat |= {name: bool(raw.get(name, nested.get(name, False))) for name in NORM_FLAGS}
    flat["target_hidden_size"] = raw.get("target_hidden_size")
    head, fc = tensors.get("lm_head.weight"), tensors.get("fc.weight")
    flat["draft_vocab_size"] = raw.get("draft_vocab_size") or (head.shape[0] if head else flat["vocab_size"])
    ids = raw.get(IDS) or nested.get(IDS)
    by_shape = fc.shape[1] // (flat["target_hidden_size"] or flat["hidden_size"]) if fc and len(fc.shape) > 1 else 3
    flat["num_aux_hidden_states"] = raw.get("num_aux_hidden_states") or (len(ids) if ids else by_shape)
    flat["dtype"] = _DTYPES.get(head.dtype if head else "", raw.get("dtype") or raw.get("torch_dtype") or "bfloat16")
    return flat


def layer_shape(verifier: "Verifier", intermediate_size: int | None = None) -> dict[str, Any]:
    """Return the drafter's Llama configuration as keyword arguments of transformers' LlamaConfig.

    Heads follow the verifier. An MLA verifier's head sizes do not carry over: published drafters of that
    family use plain heads of 128 with as many KV heads as heads.
    """
    config = verifier.config
    heads = int(config["num_attention_heads"])
    if verifier.mla:
        kv_heads, head_dim = heads, _MLA_HEAD_DIM
    else:
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or verifier.hidden_size // heads)
    return {
        "vocab_size": verifier.vocab_size,
        "hidden_size": verifier.hidden_size,
        "intermediate_size": intermediate_size or int(config["intermediate_size"]),
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": verifier.max_positions,
        "rms_norm_eps": verifier.rms_norm_eps,
        "rope_parameters": fresh_rope(config, mla=verifier.mla),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def ids_of(raw: dict[str, Any], num_layers: int) -> list[int] | None:
    """Return the auxiliary ids that a published config means, in the project's convention; None if ambiguous.

    Only a nested list starting with 1 is unambiguous there: it numbers the layers' outputs, to which SGLang adds 1.
    Without any list engines take 2, N//2 and N-3.
    """
    nested = (raw.get("eagle_config") or {}).get(IDS)
    if raw.get(IDS):
        return list(raw[IDS])
    if nested:
        return [layer + 1 for layer in nested] if nested[0] == 1 else None
    return default_ids(num_layers)


def default_ids(num_layers: int) -> list[int]:
    """Return what engines capture when nothing is said."""
    return [2, num_layers // 2, num_layers - 3]


def nested_ids(ids: list[int], engine: str, version: str | None, verifier: "Verifier") -> list[int] | None:
    """Return the list for `eagle_config` from which this engine captures the layers `ids`; None for no list."""
    if engine != "sglang":
        return ids
    if not _always_adds_one(version, verifier):
        return ids
    if verifier.model_type in NO_OFFSET and ids == default_ids(verifier.num_layers):
        return None
    return [layer - 1 for layer in ids]


def captured_ids(config: dict[str, Any], engine: str, version: str | None, verifier: "Verifier") -> list[int]:
    """Return the layers that an engine feeds a drafter with this config, as its code reads it."""
    nested = (config.get("eagle_config") or {}).get(IDS)
    if engine != "sglang":
        return sorted(config.get(IDS) or nested or default_ids(verifier.num_layers))
    if nested is None:
        return default_ids(verifier.num_layers)
    adds_one = _always_adds_one(version, verifier) or nested[:1] == [1]
    return sorted(layer + adds_one for layer in nested)


def _always_adds_one(version: str | None, verifier: "Verifier") -> bool:
    old = version is not None and versions.numbers(version) <= _ALWAYS_ADDS_ONE_UP_TO
    return old or verifier.model_type not in NO_OFFSET


def engine_config(
    flat: dict[str, Any], *, engine: str, version: str | None, verifier: "Verifier", serving_length: int,
    keeps_embedding: bool = False,
) -> dict[str, Any]:
    """Return the config.json with which this engine, at this version and for this verifier, loads the drafter.

    Args:
        flat: from `flat_config`, with the ids in the project's convention.
        serving_length: tokens that max_position_embeddings has to cover (silent garbage past it).
    """
    rope, ids = flat["rope_parameters"], list(flat[IDS])
    layer = {name: flat[name] for name in LAYER_FIELDS} | {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "max_position_embeddings": max(serving_length, flat["max_position_embeddings"]),
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
    }
    shared: dict[str, Any] = {name: flat[name] for name in ("draft_vocab_size", *NORM_FLAGS)}
    shared |= {IDS: ids, "torch_dtype": flat["dtype"], "dtype": flat["dtype"]}
    if flat.get("target_hidden_size"):
        shared["target_hidden_size"] = flat["target_hidden_size"]
    if engine == "speculators":
        return shared | _speculators_part(layer, verifier, version, keeps_embedding)
    nested = nested_ids(ids, engine, version, verifier)
    if nested is not None:
        shared["eagle_config"] = {"use_aux_hidden_state": True, IDS: nested}
    return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **shared, "num_aux_hidden_states": len(ids)}


def _speculators_part(
    layer: dict[str, Any], verifier: "Verifier", version: str | None, keeps_embedding: bool
) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        **({"speculators_version": version} if version else {}),
        "transformer_layer_config": layer,
        "embed_requires_grad": keeps_embedding,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": str(verifier.folder.resolve()), "architectures": [verifier.architecture]},
        },
    }
