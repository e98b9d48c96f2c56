"""One spelling of a verifier: what its class says, weights by role, RoPE as angles, logits as the family makes them."""

import json
import random
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.checks import model_checks, preflight
from eagle3.checks.subject import Subject, look
from eagle3.common import tensor_files
from eagle3.common.errors import PreconditionError
from eagle3.common.findings import FAIL, OK
from eagle3.common.options import ModelOptions
from eagle3.drafter import angles, flat_config, model_config, output, rope, verifier

SHARED = ("embed_tokens", "lm_head", "norm")


@pytest.fixture
def variant(tiny_model, tmp_path):
    """Make a copy of the tiny Llama with another config.json and other tensors."""
    raw, tensors = json.loads((tiny_model / "config.json").read_text()), load_file(tiny_model / "model.safetensors")

    def make(config=None, rename=lambda name: name, drop=(), add=None, without=(), **changes):
        folder = tmp_path / f"variant-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tiny_model, folder)
        written = {k: v for k, v in (config or raw | changes).items() if k not in without}
        (folder / "config.json").write_text(json.dumps(written))
        kept = {rename(name): tensor for name, tensor in tensors.items() if name not in drop}
        save_file(kept | (add or {}), folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    make.raw, make.tensors = raw, tensors
    return make


def doctor(folder):
    return look(Subject(model=ModelOptions(path=str(folder))), [model_checks.check_model])


def loads(folder):
    """Load all that stages 02, 04 and 06 need; the doctor must have found the same."""
    assert [line.status for line in doctor(folder)] == [OK] * 3, doctor(folder)
    facts = verifier.read(folder)
    shared = verifier.load_shared_weights(facts, SHARED)
    assert verifier.load_layer_weights(facts, facts.num_layers - 1).keys() >= {"mlp.up_proj.weight"}
    return facts, shared


def refused(folder, *words):
    """Say that the doctor and whoever loads the weights refuse a folder with these words."""
    found = " ".join(line.found for line in doctor(folder) if line.status == FAIL)
    with pytest.raises(PreconditionError) as raised:
        verifier.load_shared_weights(verifier.read(folder), SHARED)
    for word in words:
        assert word in found and word in str(raised.value)


# --- case 50: where weights are, what a class has by default ------------------------------------------------


def inside(name):
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def wrapped(raw, **outside):
    text = {k: v for k, v in raw.items() if k != "architectures"}
    return {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "text_config": text,
            "vision_config": {"depth": 1}, **outside}


@pytest.mark.parametrize("rename", [
    inside, lambda name: "language_model." + name, lambda name: name.replace("model.", "language_model.", 1),
    lambda name: name.removeprefix("model.")])
def test_weights_are_found_under_every_prefix(variant, rename):
    vision = {f"model.visual.blocks.layers.{k}.weight": torch.zeros(2, 2) for k in range(8)}
    _, shared = loads(variant(wrapped(variant.raw), rename, add=vision))
    for role, name in zip(SHARED, ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"), strict=True):
        assert torch.equal(shared[role], variant.tensors[name])


def test_a_head_that_the_files_lack_is_the_embedding(variant):
    gemma = variant(architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", without=["tie_word_embeddings"],
                    drop=["lm_head.weight"])
    outside = variant(wrapped(variant.raw, tie_word_embeddings=True), lambda name: "language_model." + name,
                      drop=["lm_head.weight"])
    for folder in (gemma, outside):
        _, shared = loads(folder)
        assert torch.equal(shared["lm_head"], shared["embed_tokens"])
        assert "which is the embedding" in doctor(folder)[2].found
    assert verifier.read(gemma).tied_embeddings  # the class says so


def test_what_a_config_leaves_out_is_what_its_class_has(variant):
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 8, "intermediate_size": 128,
            "vocab_size": 503, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    facts = verifier.read(variant({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
                                   "text_config": text}))
    assert (facts.max_positions, facts.rms_norm_eps, facts.tied_embeddings) == (131072, 1e-6, True)
    assert [facts.config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")] == [8, 4, 256]
    assert facts.config["rope_parameters"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    without = verifier.read(variant(model_type="cohere", without=["rms_norm_eps", "rope_parameters"]))
    assert (without.output.scale, without.config["rope_theta"]) == (0.0625, 500000.0) and without.output.layer_norm


def test_a_class_is_asked_only_for_what_is_left_open(variant, monkeypatch):
    asked = []
    monkeypatch.setattr(model_config, "class_says", lambda parts, names: asked.append(names) or {})
    verifier.read(variant())
    assert not asked
    verifier.read(variant(without=["head_dim"]))
    assert asked == [["head_dim"]]


def test_what_nobody_knows_is_named_all_at_once(variant):
    with pytest.raises(PreconditionError) as raised:
        verifier.read(variant(model_type="unheard_of", without=["vocab_size", "rms_norm_eps", "intermediate_size"]))
    assert "vocab_size, intermediate_size, rms_norm_eps" in str(raised.value) and "unheard_of" in str(raised.value)


def test_a_head_that_is_not_plain_numbers_is_refused_by_name(variant):
    packed = {"lm_head.weight_packed": torch.zeros(4, 4, dtype=torch.int32), "lm_head.weight_scale": torch.ones(4, 1)}
    refused(variant(drop=["lm_head.weight"], add=packed), "lm_head.weight_packed, lm_head.weight_scale")
    eight = variant.tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    refused(variant(add={"lm_head.weight": eight}), "F8_E4M3")
    refused(variant(add={"lm_head.bias": torch.zeros(503)}), "lm_head.bias")


def test_files_that_contradict_the_config_are_refused(variant):
    refused(variant(num_hidden_layers=9), "layers.0 to 8")
    refused(variant(vocab_size=600), "model.embed_tokens.weight", "600")
    refused(variant(drop=["model.norm.weight"]), "no final norm")
    refused(variant(add={"model.norm.bias": torch.zeros(64)}), "has a bias")
    facts, _ = loads(variant(add={"model.layers.8.eh_proj.weight": torch.zeros(2)}))  # multi-token prediction
    assert facts.num_layers == 8


def test_training_is_refused_before_it_starts_as_well(variant, tmp_path):
    stage = SimpleNamespace(run_dir=tmp_path, common=SimpleNamespace(dry_run=False, preflight=True))
    options = SimpleNamespace(train=SimpleNamespace(gpus=1), model=ModelOptions(path=str(variant(vocab_size=600))))
    with pytest.raises(PreconditionError, match="is not as its config.json says"):
        preflight.before_training(options, stage)


# --- case 51: RoPE ------------------------------------------------------------------------------------------

PER_TYPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e6}}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 4, 4], "mrope_interleaved": True}


@pytest.mark.parametrize("changes", [
    {"rope_parameters": PER_TYPE}, {"rope_parameters": MROPE},
    {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [8, 4, 4]}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
    {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e6, "short_factor": [1.0] * 16,
                         "long_factor": [2.0] * 16}},
])
def test_a_fresh_drafter_has_plain_rope_of_the_verifiers_theta(variant, changes):
    shape = flat_config.layer_shape(verifier.read(variant(**changes)))
    assert shape["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}


SCALED = [
    {"rope_type": "default", "rope_theta": 5e4},
    {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
     "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512},
]


@pytest.mark.parametrize("given", SCALED)
def test_rope_is_the_same_angles_trained_written_and_read_in_either_spelling(variant, given):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    facts = verifier.read(variant(rope_parameters=given))
    shape = flat_config.layer_shape(facts)
    written = flat_config.engine_config(flat_config.flat_config({"draft_vocab_size": 64, **shape}) | {
        flat_config.IDS: [2, 4, 5]}, engine="vllm", version=None, verifier=facts, serving_length=2048,
        keeps_embedding=False)
    both = [rope.rope_of({name: written[name] for name in names})
            for names in (["rope_parameters"], ["rope_theta", "rope_scaling"])]
    module = LlamaRotaryEmbedding(LlamaConfig(**shape))  # what is trained
    for spelling in both:
        inverse, factor = angles.frequencies(spelling, 32)
        np.testing.assert_allclose(inverse, module.inv_freq.double().numpy(), rtol=1e-5)
        assert factor == pytest.approx(module.attention_scaling)
        assert angles.same(spelling, rope.rope_of(facts.config), 32, 2048)


def test_other_angles_are_not_the_same():
    for one, other in zip(SCALED, [*SCALED[1:], SCALED[0]], strict=True):
        assert not angles.same(one, other, 32, 2048)
    partial = SCALED[0] | {"partial_rotary_factor": 0.5}
    assert not angles.same(SCALED[0], partial, 32, 2048)


@pytest.mark.engine
@pytest.mark.parametrize("given", SCALED)
def test_vllm_reads_the_same_angles(given):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        table = get_rope(32, 2048, rope_parameters=dict(given), dtype=torch.float32).cos_sin_cache
    inverse, factor = angles.frequencies(given, 32)
    turned = torch.arange(64, dtype=torch.float64)[:, None] * torch.tensor(inverse, dtype=torch.float64)
    expected = torch.cat([turned.cos(), turned.sin()], dim=-1) * factor
    torch.testing.assert_close(table[:64].double(), expected, atol=1e-4, rtol=1e-4)


# --- case 52: what a family does to its logits --------------------------------------------------------------

CLASSES = {  # model_type: module and class of its final norm in transformers
    "gemma": ("gemma", "GemmaRMSNorm"), "gemma2": ("gemma2", "Gemma2RMSNorm"),
    "gemma3_text": ("gemma3", "Gemma3RMSNorm"),
    "vaultgemma": ("vaultgemma", "VaultGemmaRMSNorm"), "qwen3_next": ("qwen3_next", "Qwen3NextRMSNorm"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5RMSNorm"), "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeRMSNorm"),
    "nemotron": ("nemotron", "NemotronLayerNorm1P"), "cohere": ("cohere", "CohereLayerNorm"),
    "cohere2": ("cohere2", "Cohere2LayerNorm"), "llama": ("llama", "LlamaRMSNorm"),
    "gpt_oss": ("gpt_oss", "GptOssRMSNorm"),
}  # fmt: skip


@pytest.mark.parametrize("family", CLASSES)
def test_final_norms_are_those_of_the_classes(family):
    import importlib

    from eagle3.drafter import teacher

    module, name = CLASSES[family]
    norm = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)(16, eps=1e-5)
    torch.manual_seed(0)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    states, how = torch.randn(5, 16), output.output_of({"model_type": family, "hidden_size": 16}, "here")
    head = teacher.TeacherHead.__new__(teacher.TeacherHead)
    head._norm, head._bias, head._eps, head._how = norm.weight + how.norm_offset, getattr(norm, "bias", None), 1e-5, how
    torch.testing.assert_close(head.normed(states), norm(states))


def test_an_unknown_scale_of_the_logits_is_refused_by_name(variant):
    strange = variant(model_type="llama", logits_mup_multiplier=0.3)
    found = doctor(strange)[0]
    assert found.status == FAIL and "logits_mup_multiplier: 0.3" in found.found
    verifier.read(variant(router_logits_scaling=2.0, attn_logit_softcapping=50.0, logits_scaling=1.0))  # none of them
    with pytest.raises(PreconditionError, match="AltUp"):
        verifier.read(variant(model_type="gemma3n_text"))
    with pytest.raises(PreconditionError, match="is no number"):
        verifier.read(variant(model_type="granite", logits_scaling="eight"))


def test_a_fresh_drafter_starts_from_the_families_own_norms(variant):
    """1 + w where the family stores w, and the norm before the MLP where post_attention_layernorm is another."""
    from eagle3.drafter import network

    extra = {f"model.layers.{k}.pre_feedforward_layernorm.weight": torch.full((64,), 0.25) for k in range(8)}
    facts = verifier.read(variant(model_type="gemma3_text", add=extra))
    t2d = torch.zeros(facts.vocab_size, dtype=torch.bool)
    t2d[:64] = True
    model = network.build(facts, [2, 4, 5, 7], torch.zeros(64, dtype=torch.int64), t2d, flat_config.layer_shape(facts))
    assert torch.equal(model.norm.weight, 1 + variant.tensors["model.norm.weight"])
    assert torch.equal(model.layers[0].hidden_norm.weight, 1 + variant.tensors["model.layers.7.input_layernorm.weight"])
    assert (model.layers[0].post_attention_layernorm.weight == 1.25).all()


# --- case 53: few layers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 4, 6])
def test_default_layers_of_a_shallow_model_are_refused_with_a_way_on(tiny_model, layers):
    facts = replace(verifier.read(tiny_model), num_layers=layers)
    with pytest.raises(PreconditionError, match=f"--layers A B C {layers - 1}"):
        facts.layers([])


def test_seven_layers_are_enough_and_named_ones_are_taken(tiny_model):
    assert replace(verifier.read(tiny_model), num_layers=7).layers([]) == [2, 3, 4, 6]
    assert replace(verifier.read(tiny_model), num_layers=4).layers([1, 2, 3, 3]) == [1, 2, 3, 3]


# --- the reader against nonsense ----------------------------------------------------------------------------

_NONSENSE = [None, True, False, 0, -1, 1, 2.5, 64.0, 1e400, float("nan"), "64", "", "x" * 50, [], [1], {}, {"a": 1},
             {"rope_type": "yarn"}, {"rope_type": ["yarn"], "factor": "x"}, {"full_attention": 3},
             {"full_attention": {"rope_theta": "a"}}, {"rope_theta": -1}, {"type": "llama3", "factor": 0},
             {"rope_type": "yarn", "factor": -1, "rope_theta": 1.0}, ["Llama"], {"model_type": 5}]  # fmt: skip


def test_config_json_of_nonsense_is_a_verifier_or_an_error_that_says_so(tiny_model, tmp_path, monkeypatch):
    raw, rng = json.loads((tiny_model / "config.json").read_text()), random.Random(0)
    monkeypatch.setattr(model_config, "class_says", lambda parts, names: {})
    content = {}
    monkeypatch.setattr(model_config.files, "read_json", lambda path, fix="": content["json"])
    keys = [*raw, "rope_scaling", "rope_theta", "text_config", "kv_lora_rank", "logits_scaling", "logit_scale",
            "final_logit_softcapping", "dim_model_base", "head_dim", "layer_norm_eps"]
    outcomes = {True: 0, False: 0}
    for _ in range(10_000):
        made = dict(raw)
        for key in rng.sample(keys, rng.randint(1, 4)):
            made[key] = rng.choice([*_NONSENSE, "granite", "cohere", "minicpm3", "gemma2"])
            if rng.random() < 0.2:
                del made[key]
        content["json"] = rng.choice(_NONSENSE) if rng.random() < 0.05 else {"text_config": made} \
            if rng.random() < 0.3 else made
        try:
            facts = verifier.read(tmp_path)
            flat_config.layer_shape(facts)
            outcomes[True] += 1
        except PreconditionError:
            outcomes[False] += 1
    assert min(outcomes.values()) > 500, outcomes


def test_an_index_of_nonsense_is_a_set_of_names_or_an_error(tiny_model):
    facts, rng = verifier.read(tiny_model), random.Random(0)
    names = [*tensor_files.read_header(tiny_model / "model.safetensors")]
    outcomes = {True: 0, False: 0}
    for _ in range(10_000):
        chosen = list(names)
        for _ in range(rng.randint(0, 3)):
            place = rng.randrange(len(chosen))
            chosen[place] = rng.choice(["", "layers.", "layers.x.", chosen[place] + ".bias", "layers.99999999999.w",
                                        "lm_head.", chosen[place].replace(".", ""), "model.layers.0."])  # fmt: skip
        rng.shuffle(chosen)
        try:
            assert verifier.shared_names(chosen, facts).keys() >= set(SHARED)
            outcomes[True] += 1
        except PreconditionError:
            outcomes[False] += 1
    assert min(outcomes.values()) > 100, outcomes
