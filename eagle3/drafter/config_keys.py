"""What each key of a published drafter's config.json does, and for which values an export loses nothing.

A key is judged by its effect: a window that is switched off is none, whatever stands in `sliding_window`. Values are of
unknown origin, so `read` refuses by name what has the wrong type before anything computes with it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.common import files
from eagle3.common.errors import PreconditionError
from eagle3.drafter.flat_config import IDS, NORM_FLAGS

Config = dict[str, Any]
_LARGEST = 1 << 40  # of a size or a length
_LAYERS = 10_000

# --- types ------------------------------------------------------------------------------------------------

_COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
           "num_key_value_heads", "head_dim", "max_position_embeddings", "draft_vocab_size", "target_hidden_size",
           "num_aux_hidden_states")  # fmt: skip
_OBJECTS = ("eagle_config", "transformer_layer_config", "rope_parameters", "rope_scaling")
_TEXTS = ("model_type", "hidden_act", "dtype", "torch_dtype")
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_aux_hidden_state", *NORM_FLAGS)


def read(folder: Path, fix: str = "name the folder of a drafter") -> Config:
    """Return a drafter's config.json; PreconditionError naming every value of a type that it cannot have."""
    path = folder / "config.json"
    config = files.read_json(path, fix=fix)
    require_types(config, path, fix)
    return config


def require_types(config: Any, where: object, fix: str = "") -> None:
    """Raise PreconditionError naming every value that is no value of its key; None is as good as left out."""
    if not isinstance(config, dict):
        raise PreconditionError("not a configuration", where=where, expected="a JSON object",
                                found=type(config).__name__, fix=fix)
    wrong = _wrong(config, "")
    for name in ("eagle_config", "transformer_layer_config"):
        if isinstance(config.get(name), dict):
            wrong |= _wrong(config[name], f"{name}.")
    if wrong:
        raise PreconditionError("the drafter's config.json has values that are none", where=where,
                                expected="\n".join(f"{name}: {kind}" for name, (kind, _) in wrong.items()),
                                found="\n".join(f"{name}: {value!r:.80}" for name, (_, value) in wrong.items()),
                                fix=fix)


def _wrong(config: Config, prefix: str) -> dict[str, tuple[str, Any]]:
    found = {}
    for names, kind, fits in _TYPES:
        for name in names:
            if config.get(name) is not None and not fits(config[name]):
                found[prefix + name] = kind, config[name]
    return found


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGEST


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, int) and not isinstance(each, bool) and 0 <= each < _LAYERS for each in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LARGEST


_TYPES: tuple[tuple[tuple[str, ...], str, Callable[[Any], bool]], ...] = (
    (_COUNTS, "a positive whole number", _is_count),
    (_OBJECTS, "an object", lambda value: isinstance(value, dict)),
    (_TEXTS, "a text", lambda value: isinstance(value, str)),
    (_SWITCHES, "true or false", lambda value: isinstance(value, bool)),
    (("rms_norm_eps", "rope_theta"), "a positive number", _is_number),
    ((IDS,), "a list of layer numbers", _are_ids),
    (("architectures",), "a list of texts",
     lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value)),
)

# --- effects ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effect:
    """What a key does that an export does not carry over. `none` says of (value, whole config) that it does nothing."""

    what: str
    none: Callable[[Any, Config], bool]


def lost(config: Config, positions: int) -> tuple[dict[str, str], list[str]]:
    """Return ({key: what is lost} of values with an effect, unknown keys) of a config, nested ones with their path.

    Args:
        positions: tokens that the drafter will see at most.
    """
    layer = config.get("transformer_layer_config") or {}
    whole = config | layer | {"max_position_embeddings": max(positions, layer.get("max_position_embeddings") or 0,
                                                             config.get("max_position_embeddings") or 0)}
    effects = {name: _EFFECTS[name].what for name, value in whole.items()
               if name in _EFFECTS and value is not None and not _EFFECTS[name].none(value, whole)}
    unknown = [name for name, value in whole.items() if name not in _EFFECTS and name not in _CARRIED
               and name not in _WITHOUT and not _is_nothing(value)]
    nested, switches = config.get("eagle_config") or {}, _SWITCHES_OF_EAGLE
    effects |= {f"eagle_config.{name}": switches[name].what for name, value in nested.items()
                if name in switches and value is not None and not switches[name].none(value, nested)}
    unknown += [f"eagle_config.{name}" for name, value in nested.items() if name not in switches
                and name not in (IDS, *NORM_FLAGS) and not _is_nothing(value)]
    return effects, sorted(unknown)


def _is_nothing(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _is_off(value: Any, _: Config) -> bool:
    return _is_nothing(value) or value == 0


def _is(*neutral: Any) -> Callable[[Any, Config], bool]:
    return lambda value, _: any(value == each and isinstance(value, bool) == isinstance(each, bool)
                                for each in neutral)


def _no_window(value: Any, config: Config) -> bool:
    """A window does nothing when it is switched off, or when it is as long as the sequences."""
    long = isinstance(value, int) and value >= config["max_position_embeddings"]
    return _is_off(value, config) or config.get("use_sliding_window") is False or long


def _full_attention(value: Any, config: Config) -> bool:
    return value in ([], ["full_attention"]) or _no_window(config.get("sliding_window"), config)


def _told_in_rope(value: Any, config: Config) -> bool:
    """Only scaled RoPE needs it, and takes it from its own object first."""
    ropes = [rope for name in ("rope_parameters", "rope_scaling") if (rope := config.get(name))]
    return all(rope.get("rope_type", rope.get("type")) in (None, "default", "linear", "dynamic")
               or rope.get("original_max_position_embeddings") == value for rope in ropes)


def _usual_scale(value: Any, config: Config) -> bool:
    """Attention's usual scale is one over the root of the head's size."""
    heads = config.get("num_attention_heads") or 1
    head_dim = config.get("head_dim") or (config.get("hidden_size") or 0) / heads
    return isinstance(value, int | float) and bool(head_dim) and abs(value - head_dim ** -0.5) < 1e-6


_WINDOW = "attention within a window"
_SCALED = "scaled states or logits"
_CAPPED = "capped logits"
_QUANTIZED = "quantized weights"
_EFFECTS: dict[str, Effect] = {
    "attention_bias": Effect("biases of attention", _is_off),
    "qkv_bias": Effect("biases of attention", _is_off),
    "o_bias": Effect("a bias of attention", _is_off),
    "bias": Effect("biases", _is_off),
    "mlp_bias": Effect("biases of the MLP", _is_off),
    "hidden_act": Effect("another activation, which SGLang refuses", _is("silu", "swish")),
    "quantization_config": Effect(_QUANTIZED, _is_off),
    "compression_config": Effect(_QUANTIZED, _is_off),
    "sliding_window": Effect(_WINDOW, _no_window),
    "use_sliding_window": Effect(_WINDOW, lambda value, config: _is_off(value, config)
                                 or _no_window(config.get("sliding_window"), config)),
    "max_window_layers": Effect(_WINDOW, lambda _, config: _no_window(config.get("sliding_window"), config)),
    "layer_types": Effect(_WINDOW, _full_attention),
    "attention_chunk_size": Effect("attention within chunks", _is_off),
    "partial_rotary_factor": Effect("RoPE on a part of each head", _is(1, 1.0)),
    "original_max_position_embeddings": Effect("the length before RoPE's scaling", _told_in_rope),
    "rope_interleaved": Effect("RoPE of neighbouring elements", _is_off),
    "rope_is_neox_style": Effect("RoPE of neighbouring elements", _is(True)),
    "logit_scale": Effect(_SCALED, _is(1, 1.0)),
    "logits_scaling": Effect(_SCALED, _is(1, 1.0)),
    "embedding_multiplier": Effect(_SCALED, _is(1, 1.0)),
    "residual_multiplier": Effect(_SCALED, _is(1, 1.0)),
    "scale_emb": Effect(_SCALED, _is(1, 1.0)),
    "scale_depth": Effect(_SCALED, _is_off),
    "attention_multiplier": Effect("another scale of attention", _usual_scale),
    "query_pre_attn_scalar": Effect("another scale of attention",
                                    lambda value, config: value == config.get("head_dim")),
    "final_logit_softcapping": Effect(_CAPPED, _is_off),
    "attn_logit_softcapping": Effect(_CAPPED, _is_off),
    "use_qk_norm": Effect("norms of queries and keys", _is_off),
    "qk_norm": Effect("norms of queries and keys", _is_off),
    "num_experts": Effect("experts", _is_off),
    "num_local_experts": Effect("experts", _is_off),
    "parallel_draft_step": Effect("several tokens a step", _is(1)),
}
# Of NVIDIA's Model-Optimizer; vLLM reads the first of them.
_SWITCHES_OF_EAGLE: dict[str, Effect] = {
    "use_aux_hidden_state": Effect("no auxiliary states: EAGLE-1's single one", _is(True)),
    "use_last_layernorm": Effect("no norm before the head", _is(True)),
    "use_input_layernorm_in_first_layer": Effect("no norm of the embeddings", _is(True)),
    "use_mtp_layernorm": Effect("other norms", _is_off),
    "next_layer_regular": Effect("another layout of layers", _is(True)),
    "parallel_draft_step": _EFFECTS["parallel_draft_step"],
}
# What `flat_config` reads and an export says anew. `hidden_act` and the biases are judged above as well.
_CARRIED = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps",
    "max_position_embeddings", "tie_word_embeddings", "num_key_value_heads", "head_dim", "rope_parameters",
    "rope_theta", "rope_scaling", "architectures", "model_type", "draft_vocab_size", "eagle_config", IDS,
    "num_aux_hidden_states", "target_hidden_size", "dtype", "torch_dtype", "transformer_layer_config",
    "speculators_model_type", "speculators_version", "speculators_config", "embed_requires_grad", *NORM_FLAGS,
})  # fmt: skip
# What changes nothing when a drafter is served, whatever its value: training, generation, bookkeeping.
_WITHOUT = frozenset({
    "transformers_version", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id",
    "decoder_start_token_id", "initializer_range", "pretraining_tp", "attention_dropout", "hidden_dropout",
    "resid_pdrop", "embd_pdrop", "_name_or_path", "auto_map", "name_or_path", "return_dict", "output_hidden_states",
    "output_attentions", "output_scores", "is_encoder_decoder", "is_decoder", "id2label", "label2id", "num_labels",
    "problem_type", "chunk_size_feed_forward", "has_no_defaults_at_init", "tie_encoder_decoder",
    "target_model_type", "modal_type", "target_vocab_size", "add_cross_attention", "bad_words_ids",
    "begin_suppress_tokens", "cross_attention_hidden_size", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "prefix", "pruned_heads", "remove_invalid_values", "repetition_penalty",
    "return_dict_in_generate", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
    "tokenizer_class", "top_k", "top_p", "torchscript", "typical_p", "use_bfloat16", "attn_implementation",
    "_attn_implementation",
})  # fmt: skip
