"""The drafter: speculators' Eagle3DraftModel, built for a verifier or loaded from a served checkpoint.

fc, one decoder layer, the final norm and lm_head are trained; the embedding and the verifier's norm and head
(the teacher) are frozen. A fresh drafter starts from the verifier: see `start_from_verifier`.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from eagle3.common import findings, tensor_files
from eagle3.common.errors import PreconditionError
from eagle3.drafter import config_keys, export_checks, weight_checks
from eagle3.drafter.checkpoint import (
    EMBEDDING,
    FROZEN,
    MAPPING,
    Export,
    canonical_key,
    expected_shapes,
    training_record,
)
from eagle3.drafter.flat_config import IDS, NORM_FLAGS, default_ids, layer_shape
from eagle3.drafter.teacher import fit_modules
from eagle3.drafter.verifier import NORM_BIAS, Verifier, load_layer_weights, load_shared_weights
from eagle3.drafter.vocab import published_mapping

_WEIGHT_TYPES = ("BF16", "F16", "F32")
# Gemma's norm before the MLP; its post_attention_layernorm norms what attention gives.
_NORM_BEFORE_MLP = "pre_feedforward_layernorm.weight"


def build(
    verifier: Verifier,
    layers: list[int],
    d2t: torch.Tensor,
    t2d: torch.Tensor,
    shape: dict[str, Any],
    *,
    norms: tuple[str, ...] = (),
    seed: int = 0,
) -> Any:
    """Return a fresh Eagle3DraftModel in float32 on the CPU with the verifier's shared weights in it.

    Args:
        layers: the four captured layers; all but the last are the auxiliary ids.
        d2t, t2d: the vocabulary mapping, int64 [D] and bool [V].
        shape: from `layer_shape`.
        norms: those of NORM_FLAGS that it has.
    """
    if len(t2d) != verifier.vocab_size:
        raise PreconditionError("the mapping is of another vocabulary", expected=f"{verifier.vocab_size} target ids",
                                found=f"{len(t2d)}", fix="run 03_build_vocab_mapping.py for this verifier")
    torch.manual_seed(seed)
    model = _empty_model(verifier, layers, len(d2t), shape, norms)
    model.load_vocab_mappings(t2d, d2t)
    shared = load_shared_weights(verifier, ("embed_tokens", "lm_head", "norm"))
    head = shared["lm_head"][t2d] if model.use_draft_vocab else shared["lm_head"]
    with torch.no_grad():
        model.embed_tokens.weight.copy_(shared["embed_tokens"])
        model.lm_head.weight.copy_(head)
        model.verifier_lm_head.weight.copy_(head)
        model.verifier_norm.weight.copy_(shared["norm"])
        if NORM_BIAS in shared:
            model.verifier_norm.bias.copy_(shared[NORM_BIAS])
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
    if _NORM_BEFORE_MLP in theirs:
        theirs["post_attention_layernorm.weight"] = theirs[_NORM_BEFORE_MLP]
    mlp["post_attention_layernorm.weight"] = layer.post_attention_layernorm.weight
    for block in (attention, mlp):
        if all(name in theirs and theirs[name].shape == weight.shape for name, weight in block.items()):
            for name, weight in block.items():
                weight.copy_(theirs[name])


def load(folder: Path, verifier: Verifier) -> Any:
    """Return the drafter of a checkpoint of any published layout, in float32, for predictions.

    The embedding comes from the verifier unless the checkpoint ships its own. PreconditionError names keys
    that are missing or unknown, and shapes that do not fit.
    """
    export = published(folder, verifier)
    layers = [*(export.ids or default_ids(verifier.num_layers)), verifier.num_layers - 1]
    return _from_checkpoint(export, layers, own_embedding=EMBEDDING in export.canonical).eval()


def continue_from(folder: Path, verifier: Verifier, layers: list[int]) -> Any:
    """Return a published drafter to be trained further, in float32; `check_start` has found it fit.

    What is frozen is the verifier's own. Heads, sizes, RoPE and positions are those of the checkpoint.
    """
    return _from_checkpoint(published(folder, verifier), layers, own_embedding=False)


def published(folder: Path, verifier: Verifier) -> Export:
    """Return what a drafter's folder holds, from headers and config.json.

    Raises PreconditionError when it is no whole Llama-type drafter of this verifier.
    """
    trained_ids, trained_here = training_record(folder)
    export = Export(folder=folder, raw=config_keys.read(folder),
                    tensors=tensor_files.read(folder), verifier=verifier, engine="vllm", version=None,
                    serving_length=verifier.max_positions, trained_ids=trained_ids, trained_here=trained_here)
    sizes = {"hidden_size": verifier.hidden_size, "vocab_size": verifier.vocab_size, "target_hidden_size": None}
    wrong = [f"{name}: {list(export.canonical[name].shape)} instead of {list(shape)}"
             for name, shape in expected_shapes(export.flat | sizes).items()
             if name in export.canonical and export.canonical[name].shape != shape]
    if wrong:
        raise PreconditionError(
            "the drafter's tensors do not fit this verifier and its own config.json", where=folder,
            expected=f"hidden size {verifier.hidden_size}, vocabulary {verifier.vocab_size}", found="\n".join(wrong),
            fix="check --model; config.json and weights have to be of one drafter of this verifier")
    _require(export, export_checks.keys_in_one_spelling, export_checks.keys_known_and_complete,
             export_checks.shapes_fit_the_config)
    types = {name: entry.dtype for name, entry in export.canonical.items()
             if name not in MAPPING and entry.dtype not in _WEIGHT_TYPES}
    if types:
        raise PreconditionError("the drafter's weights are quantized or of an unknown type", where=folder,
                                expected=" or ".join(_WEIGHT_TYPES), found=types)
    return export


def check_start(
    folder: Path, verifier: Verifier, layers: list[int], t2d: torch.Tensor, intermediate_size: int | None = None, *,
    norms: dict[str, bool | None] | None = None, fix: str = "",
) -> list[str]:
    """Check that training can continue from a published drafter; return what the user should know of it.

    Args:
        layers: the four captured layers of the states.
        t2d: [V] bool, the draft vocabulary of stage 03.
        intermediate_size: what the user asks for; None leaves it to the drafter. norms: the same by name.
        fix: how to build that vocabulary from this drafter.
    Raises:
        PreconditionError when captured layers or the vocabulary differ, naming both sides.
    """
    export = published(folder, verifier)
    _require(export, export_checks.architecture_known, export_checks.config_understood,
             export_checks.rope_spellings_agree, weight_checks.values_finite)
    for name, wanted in (norms or {}).items():
        if wanted not in (None, export.flat[name]):
            raise PreconditionError("the drafter has other norms", where=f"--{name.replace('_', '-')}",
                                    expected=f"{str(export.flat[name]).lower()} (or nothing), as in {folder}",
                                    found=str(wanted).lower(), fix="leave it out, or train a fresh drafter")
    if intermediate_size not in (None, export.flat["intermediate_size"]):
        raise PreconditionError("the drafter's MLP has another width", where="--intermediate-size",
                                expected=f"{export.flat['intermediate_size']} (or nothing), as in {folder}",
                                found=intermediate_size, fix="leave --intermediate-size out")
    notes = _check_layers(export, layers[:-1])
    theirs = published_mapping(folder, verifier.vocab_size)[1]
    if not torch.equal(theirs, t2d):
        raise PreconditionError(
            "the draft vocabulary of stage 03 is not the drafter's", where=folder,
            expected=f"the drafter's {int(theirs.sum()):,} tokens",
            found=f"{int(t2d.sum()):,} tokens, of which {int((t2d & ~theirs).sum()):,} are not the drafter's",
            fix=fix or f"run 03_build_vocab_mapping.py --from-checkpoint {folder}")
    if EMBEDDING in export.canonical and weight_checks.embedding_is_the_verifiers(export).status == findings.FAIL:
        notes.append("its own embedding is not the verifier's: the verifier's is used, as SGLang always does")
    return notes


def _require(export: Export, *checks: Callable[[Export], findings.Finding]) -> None:
    findings.require([export_checks.finding_of(check, export) for check in checks], export.folder)


def _check_layers(export: Export, captured: list[int]) -> list[str]:
    """Compare the layers that a drafter reads with those captured; return notes on how its config was understood."""
    top, nested = export.raw.get(IDS), (export.raw.get("eagle_config") or {}).get(IDS)
    if nested and not export.ids and captured in (nested, [layer + 1 for layer in nested]):
        return [f"its config has the layer ids {nested} in eagle_config only, which engines number differently; taken "
                f"as {captured}, which the states hold: the accuracy of step 0 tells whether that is right"]
    if export.ids != captured:
        raise PreconditionError(
            "the drafter reads other layers than were captured", where=export.folder,
            expected=f"states of layers {export.ids or nested} (the stream entering each)",
            found=f"layers {captured} in the states",
            fix="capture the drafter's: 02_extract_hidden_states.py --layers "
            f"{' '.join(map(str, export.ids)) or '…'} {export.verifier.num_layers - 1}")
    if not (top or nested or export.trained_ids):
        return [f"its config names no layer ids: taken as the engines' default {captured}"]
    return []


def _from_checkpoint(export: Export, layers: list[int], *, own_embedding: bool) -> Any:
    """Return the drafter with the weights of a checkpoint, each tensor read once: a float32 model is all it takes."""
    verifier, flat = export.verifier, export.flat
    d2t, t2d = published_mapping(export.folder, verifier.vocab_size)
    fixed = {"vocab_size": verifier.vocab_size, "num_hidden_layers": 1, "tie_word_embeddings": False}
    shape = {name: flat[name] for name in layer_shape(verifier)} | fixed
    with torch.device("meta"):
        model = _empty_model(verifier, layers, len(d2t), shape, [name for name in NORM_FLAGS if flat[name]])
    model.rotary_emb = type(model.rotary_emb)(model.rotary_emb.config)  # the one part that is computed, not loaded
    if model.use_draft_vocab:
        model.d2t, model.t2d = d2t, t2d
    names = {canonical_key(name): name for name in export.tensors}
    shared = load_shared_weights(verifier, ("embed_tokens", "lm_head", "norm"))
    ours = {EMBEDDING: shared["embed_tokens"], "verifier_norm.weight": shared["norm"],
            "verifier_norm.bias": shared.get(NORM_BIAS, torch.zeros(0)),
            "verifier_lm_head.weight": shared["lm_head"][t2d] if model.use_draft_vocab else shared["lm_head"]}
    for name in [name for name, _ in model.named_parameters()]:
        if name.startswith(FROZEN) and not (own_embedding and name == EMBEDDING):
            weight = ours[name]
        else:
            with safe_open(export.canonical[name].file, framework="pt") as file:
                weight = file.get_tensor(names[name])
        module, _, attribute = name.rpartition(".")
        value = weight.to(torch.float32, copy=True)
        trained = not name.startswith(FROZEN)
        setattr(model.get_submodule(module), attribute, torch.nn.Parameter(value, requires_grad=trained))
    return model


def _empty_model(verifier: Verifier, layers: list[int], draft_vocab_size: int, shape: dict, norms: Iterable[str]
                 ) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer_config = LlamaConfig(**shape)
    layer_config._attn_implementation = "eager"  # only speculators' own forward asks; eagle3.training.ttt has its own
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config,
        draft_vocab_size=draft_vocab_size,
        **{name: name in norms for name in NORM_FLAGS},
        eagle_aux_hidden_state_layer_ids=layers[:-1],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[verifier.architecture]),
        ),
    )
    model = Eagle3DraftModel(config)
    fit_modules(model, verifier)
    return model


def norms_of(model: Any) -> list[str]:
    """Return those of NORM_FLAGS that a drafter has."""
    return [name for name in NORM_FLAGS if getattr(model.config, name)]


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
        **{name: name in norms_of(model) for name in NORM_FLAGS},
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }
