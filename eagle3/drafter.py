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
from eagle3.verifier import Verifier, load_shared_weights

ATTENTION = "eagle3_documents"
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
    attention: str = "documents",
) -> Any:
    """Return a fresh Eagle3DraftModel in float32 on the CPU with the verifier's shared weights in it.

    Args:
        layers: the four captured layers; all but the last are the auxiliary ids.
        d2t, t2d: the vocabulary mapping, int64 [D] and bool [V].
        shape: from `layer_shape`.
        attention: "documents" (block by block, any device) or "flex" (compiled, GPUs).
    """
    if len(t2d) != verifier.vocab_size:
        raise PreconditionError("the mapping is of another vocabulary", expected=f"{verifier.vocab_size} target ids",
                                found=f"{len(t2d)}", fix="run 03_build_vocab_mapping.py for this verifier")
    torch.manual_seed(seed)
    model = _empty_model(verifier, layers, len(d2t), shape, attention)
    model.load_vocab_mappings(t2d, d2t)
    shared = load_shared_weights(verifier, ("embed_tokens", "lm_head", "norm"))
    head = shared["lm_head"][t2d]
    with torch.no_grad():
        model.embed_tokens.weight.copy_(shared["embed_tokens"])
        model.lm_head.weight.copy_(head)
        model.verifier_lm_head.weight.copy_(head)
        model.verifier_norm.weight.copy_(shared["norm"])
        start_from_verifier(model, shared["norm"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    return model


def start_from_verifier(model: Any, norm: torch.Tensor) -> None:
    """Let a fresh drafter begin where the verifier leaves off instead of at noise.

    fc passes the deepest auxiliary state through, and the final norm is the verifier's, so that with lm_head
    (the verifier's rows) the residual stream means next tokens from the first step on. After three epochs on
    100 short replies that was 23.5% accuracy at the first step against 17.1% from random weights.
    """
    hidden = model.hidden_size
    model.fc.weight.normal_(0.0, 0.1 * model.config.transformer_layer_config.initializer_range)
    model.fc.weight[:, -hidden:] += torch.eye(hidden)
    model.norm.weight.copy_(norm)


def load(folder: Path, verifier: Verifier, *, attention: str = "documents") -> Any:
    """Return the drafter of a served checkpoint (flat config.json, `layers.0.` or `midlayer.` keys).

    The embedding comes from the verifier unless the checkpoint ships its own. PreconditionError names keys
    that are missing or unknown, and shapes that do not fit.
    """
    from safetensors.torch import load_file

    config = files.read_json(folder / "config.json", fix="name an exported drafter")
    tensors = {canonical_key(key): value for key, value in load_file(folder / "model.safetensors").items()}
    shape = {name: config[name] for name in layer_shape(verifier) if name in config}
    layers = [*config["eagle_aux_hidden_state_layer_ids"], verifier.num_layers - 1]
    model = build(verifier, layers, tensors["d2t"], tensors["t2d"], shape, attention=attention)
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


def _empty_model(verifier: Verifier, layers: list[int], draft_vocab_size: int, shape: dict, attention: str) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    _register_attention()
    layer_config = LlamaConfig(**shape)
    layer_config._attn_implementation = ATTENTION if attention == "documents" else "simple_flex_attention"
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
    model = Eagle3DraftModel(config)
    if attention == "documents":
        model.uses_full_attn = False  # no dense [T, steps x T] mask: the attention below needs none
    return model


def _register_attention() -> None:
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(ATTENTION, document_attention)


def document_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    document_lengths: list[int] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one TTT step, document by document.

    At step s the keys are those of the T true tokens followed by s blocks of T draft tokens. A query sees the
    true tokens of its document up to its own position, and of each draft block only its own position: a
    triangle and s diagonals. A dense mask would cost T x (s + 1) x T for what is T x document length.

    Args:
        query: [1, heads, T, d]; key, value: [1, KV heads, (s + 1) x T, d].
        document_lengths: lengths of the packed documents; what is past their sum is padding and gets zeros.
    Returns:
        ([1, T, heads, d], None).
    """
    tokens, groups = query.shape[2], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    keys, values = key.split(tokens, dim=2), value.split(tokens, dim=2)
    query = query * scaling
    pieces = []
    start = 0
    for length in document_lengths or [tokens]:
        span = slice(start, start + length)
        q = query[:, :, span]
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
        scores = (q @ keys[0][:, :, span].transpose(-1, -2)).masked_fill(hidden, float("-inf"))
        diagonals = [(q * block[:, :, span]).sum(-1, keepdim=True) for block in keys[1:]]
        weights = torch.cat([scores, *diagonals], dim=-1).softmax(-1, dtype=torch.float32).to(q.dtype)
        out = weights[..., :length] @ values[0][:, :, span]
        for step, block in enumerate(values[1:]):
            out = out + weights[..., length + step, None] * block[:, :, span]
        pieces.append(out)
        start += length
    if start < tokens:
        pieces.append(query.new_zeros(1, query.shape[1], tokens - start, query.shape[3]))
    return torch.cat(pieces, dim=2).transpose(1, 2).contiguous(), None


def run(model: Any, **inputs: Any) -> Any:
    """Call the drafter's forward: compiled with flex attention, else as it is.

    speculators compiles forward wherever it sees a GPU; block-by-block attention over documents of ever other
    lengths would be compiled anew for each batch.
    """
    if is_compiled(model):
        inputs.pop("document_lengths", None)
        return model(**inputs)
    with torch.compiler.set_stance("force_eager"):
        return model(**inputs)


def is_compiled(model: Any) -> bool:
    """Say whether the drafter runs compiled, so that batches must have one shape."""
    return bool(model._attn_impl != ATTENTION)


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
