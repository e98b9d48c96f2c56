"""The drafter: speculators' Eagle3DraftModel, built for a verifier or loaded from a served checkpoint.

fc, one decoder layer, the final norm and lm_head are trained; the embedding and the verifier's norm and head
(the teacher) are frozen. A fresh drafter starts from the verifier: see `start_from_verifier`.
"""

import json
from pathlib import Path
from typing import Any

import torch

from eagle3 import files
from eagle3.checkpoint import FROZEN, canonical_key
from eagle3.errors import PreconditionError
from eagle3.verifier import Verifier, load_layer_weights, load_shared_weights

_MLA_HEAD_DIM = 128


def layer_shape(verifier: Verifier, intermediate_size: int | None = None) -> dict[str, Any]:
    """Return the drafter's Llama configuration as keyword arguments of transformers' LlamaConfig.

    Heads follow the verifier. An MLA verifier's head sizes do not carry over: published drafters of that
    family use plain heads of 128 with as many KV heads as heads, and plain RoPE with the verifier's theta
    (YaRN's attention factor is read differently by transformers and vLLM, so it stays out).
    """
    config = verifier.config
    heads = int(config["num_attention_heads"])
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if verifier.mla:
        kv_heads, head_dim, rope = heads, _MLA_HEAD_DIM, {}
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
        "rope_parameters": {"rope_type": "default", **rope, "rope_theta": theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def build(
    verifier: Verifier,
    layers: list[int],
    d2t: torch.Tensor,
    t2d: torch.Tensor,
    shape: dict[str, Any],
    *,
    seed: int = 0,
) -> Any:
    """Return a fresh Eagle3DraftModel in float32 on the CPU with the verifier's shared weights in it.

    Args:
        layers: the four captured layers; all but the last are the auxiliary ids.
        d2t, t2d: the vocabulary mapping, int64 [D] and bool [V].
        shape: from `layer_shape`.
    """
    if len(t2d) != verifier.vocab_size:
        raise PreconditionError("the mapping is of another vocabulary", expected=f"{verifier.vocab_size} target ids",
                                found=f"{len(t2d)}", fix="run 03_build_vocab_mapping.py for this verifier")
    torch.manual_seed(seed)
    model = _empty_model(verifier, layers, len(d2t), shape)
    model.load_vocab_mappings(t2d, d2t)
    shared = load_shared_weights(verifier, ("embed_tokens", "lm_head", "norm"))
    head = shared["lm_head"][t2d]
    with torch.no_grad():
        model.embed_tokens.weight.copy_(shared["embed_tokens"])
        model.lm_head.weight.copy_(head)
        model.verifier_lm_head.weight.copy_(head)
        model.verifier_norm.weight.copy_(shared["norm"])
        start_from_verifier(model, verifier, shared["norm"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    return model


def start_from_verifier(model: Any, verifier: Verifier, norm: torch.Tensor) -> None:
    """Let a fresh drafter begin where the verifier leaves off instead of at noise.

    fc passes the deepest auxiliary state through, and the final norm is the verifier's, so that with lm_head
    (the verifier's rows) the residual stream means next tokens from the first step on. After three epochs on
    100 short replies that was 23.5% accuracy at the first step against 17.1% from random weights. The decoder
    layer starts as the verifier's last one where shapes are the same (not with MLA, experts or quantization),
    reading hidden states as that does; what it makes of embeddings is left to training.
    """
    hidden = model.hidden_size
    model.fc.weight.normal_(0.0, 0.1 * model.config.transformer_layer_config.initializer_range)
    model.fc.weight[:, -hidden:] += torch.eye(hidden)
    model.norm.weight.copy_(norm)

    layer, theirs = model.layers[0], load_layer_weights(verifier, verifier.num_layers - 1)
    projections = {name: getattr(layer.self_attn, name).weight for name in ("q_proj", "k_proj", "v_proj")}
    attention = {f"self_attn.{name}.weight": weight[:, hidden:] for name, weight in projections.items()}
    attention |= {"self_attn.o_proj.weight": layer.self_attn.o_proj.weight,
                  "input_layernorm.weight": layer.hidden_norm.weight}
    mlp = {f"mlp.{name}.weight": weight.weight for name, weight in layer.mlp.named_children() if name != "act_fn"}
    mlp["post_attention_layernorm.weight"] = layer.post_attention_layernorm.weight
    for block in (attention, mlp):
        if all(name in theirs and theirs[name].shape == weight.shape for name, weight in block.items()):
            for name, weight in block.items():
                weight.copy_(theirs[name])


def load(folder: Path, verifier: Verifier) -> Any:
    """Return the drafter of a served checkpoint (flat config.json, `layers.0.` or `midlayer.` keys).

    The embedding comes from the verifier unless the checkpoint ships its own. PreconditionError names keys
    that are missing or unknown, and shapes that do not fit.
    """
    from safetensors.torch import load_file

    config = files.read_json(folder / "config.json", fix="name an exported drafter")
    tensors = {canonical_key(key): value for key, value in load_file(folder / "model.safetensors").items()}
    shape = {name: config[name] for name in layer_shape(verifier) if name in config}
    layers = [*config["eagle_aux_hidden_state_layer_ids"], verifier.num_layers - 1]
    model = build(verifier, layers, tensors["d2t"], tensors["t2d"], shape)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()
                if not name.startswith(("verifier_", "embed_tokens"))}
    missing, unknown = expected.keys() - tensors.keys(), tensors.keys() - expected.keys() - {"embed_tokens.weight"}
    conflicts = [f"{name}: {tuple(tensors[name].shape)} instead of {tuple(size)}" for name, size in expected.items()
                 if name in tensors and tensors[name].shape != size]
    if missing or unknown or conflicts:
        raise PreconditionError(
            "the checkpoint does not fit this drafter",
            where=folder,
            found=f"missing {sorted(missing)}, unknown {sorted(unknown)}, shapes {conflicts}",
            fix="export it again with 05_fix_weight_keys.py",
        )
    model.load_state_dict(tensors, strict=False)
    return model.eval()


def _empty_model(verifier: Verifier, layers: list[int], draft_vocab_size: int, shape: dict) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer_config = LlamaConfig(**shape)
    layer_config._attn_implementation = "eager"  # only speculators' own forward asks; eagle3.ttt has its own
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=False,  # what SGLang always does
        eagle_aux_hidden_state_layer_ids=layers[:-1],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[verifier.architecture]),
        ),
    )
    return Eagle3DraftModel(config)


def served_config(model: Any, verifier: Verifier) -> dict[str, Any]:
    """Return the flat config.json with which engines load this drafter."""
    layer = model.config.transformer_layer_config
    rope = json.loads(json.dumps(dict(layer.rope_parameters)))
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": verifier.vocab_size,
        "draft_vocab_size": model.draft_vocab_size,
        **{name: getattr(layer, name) for name in layer_shape(verifier)
           if name not in ("rope_parameters", "vocab_size")},
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "eagle_aux_hidden_state_layer_ids": list(model.config.eagle_aux_hidden_state_layer_ids),
        "num_aux_hidden_states": len(model.config.eagle_aux_hidden_state_layer_ids),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }
