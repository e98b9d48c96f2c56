"""Stage 05: keys, configurations per engine and version, silent killers."""

import json
import shutil

import pytest
import torch
from pipeline import LAYERS, manifest, run_stage, write_traces
from safetensors.torch import load_file, save_file

from eagle3 import checkpoint, drafter, verifier


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    """A run directory with one epoch of training."""
    run_dir = tmp_path_factory.mktemp("trained")
    write_traces(run_dir, tiny_model, count=6)
    common = ["--run-dir", run_dir, "--model", tiny_model]
    layers = ["--layers", *LAYERS.split()]
    run_stage("02_extract_hidden_states.py", *common, *layers, "--backend", "hf", "--max-length", 64)
    run_stage("03_build_vocab_mapping.py", *common, "--draft-vocab-size", 128)
    run_stage("04_train.py", *common, *layers, "--epochs", 1, "--batch-tokens", 100, "--validation-fraction", 0.2)
    return run_dir


def export(run_dir, model, *more, check=0):
    return run_stage("05_fix_weight_keys.py", "--run-dir", run_dir, "--model", model, *more, check=check)


def test_the_export_is_bit_identical_and_loads_again(trained, tiny_model, tmp_path):
    out = tmp_path / "05_export"
    export(trained, tiny_model, "--out", out)
    source = load_file(trained / "04_train" / "checkpoints" / "best" / "model.safetensors")
    written = load_file(out / "vllm" / "model.safetensors")
    assert {checkpoint.canonical_key(key): key for key in written}.keys() == source.keys()
    assert all(torch.equal(source[checkpoint.canonical_key(key)], tensor) for key, tensor in written.items())
    assert "midlayer.self_attn.q_proj.weight" in written and "embed_tokens.weight" not in written
    model = drafter.load(out / "vllm", verifier.read(tiny_model))
    assert torch.equal(model.fc.weight.bfloat16(), source["fc.weight"])
    assert manifest(out)["counts"]["done"] == len(source)
    assert "complete already" in export(trained, tiny_model, "--out", out).stderr


@pytest.mark.parametrize(("engine", "version", "family", "nested"), [
    ("vllm", "0.32.0", "llama", [2, 15, 27]),
    ("sglang", "0.5.17", "llama", [1, 14, 26]),
    ("sglang", "0.5.17", "kimi_k2", [2, 15, 27]),
    ("sglang", None, "deepseek_v3", [2, 15, 27]),
    ("sglang", "0.5.12", "deepseek_v3", None),
    ("sglang", "0.5.9", "kimi_k2", None),
])
def test_the_layer_ids_stand_where_each_engine_reads_them(engine, version, family, nested):
    config = {"eagle_aux_hidden_state_layer_ids": [2, 15, 27], "max_position_embeddings": 2048}
    result = checkpoint.engine_config(config, engine=engine, version=version, target_model_type=family,
                                      serving_length=4096)
    assert result["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert result.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids") == nested
    assert result["max_position_embeddings"] == 4096


def test_the_config_says_everything_explicitly(trained, tiny_model, tmp_path):
    out = tmp_path / "05_export"
    export(trained, tiny_model, "--out", out, "--to", "sglang", "--engine-version", "0.5.17", "--serving-length", 4096)
    config = json.loads((out / "sglang" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["tie_word_embeddings"] is False and config["norm_before_residual"] is False
    assert config["draft_vocab_size"] == 128 and config["vocab_size"] == verifier.read(tiny_model).vocab_size
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config["max_position_embeddings"] == 4096


def damaged(trained, tmp_path, change):
    folder = tmp_path / "checkpoint"
    shutil.copytree(trained / "04_train" / "checkpoints" / "best", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def mixed(tensors):
    tensors["midlayer.mlp.up_proj.weight"] = tensors.pop("layers.0.mlp.up_proj.weight")


def not_a_number(tensors):
    tensors["fc.weight"][0, 0] = float("nan")


@pytest.mark.parametrize(("change", "words"), [
    (lambda t: t.pop("lm_head.weight"), "lm_head.weight"),
    (lambda t: t.pop("fc.weight"), "fc.weight"),
    (lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.zeros(1)}), "layers.1.mlp.up_proj.weight"),
    (lambda t: t.update({"fc.weight": torch.zeros(64, 64)}), "(64, 64) instead of (64, 192)"),
    (lambda t: t.update({"d2t": t["d2t"] + 1}), "d2t and t2d"),
    (lambda t: t.update({"embed_tokens.weight": torch.randn(len(t["t2d"]), 64)}), "not the verifier's"),
    (mixed, "mixes"),
    (not_a_number, "NaN"),
])
def test_silent_killers_are_errors(trained, tiny_model, tmp_path, change, words):
    folder = damaged(trained, tmp_path, change)
    result = export(trained, tiny_model, "--checkpoint", folder, "--out", tmp_path / "out", check=3)
    assert words in result.stderr
    assert not list(tmp_path.glob("out/*/*.safetensors"))


def test_the_verifiers_own_embedding_is_left_out(trained, tiny_model, tmp_path):
    own = verifier.load_shared_weights(verifier.read(tiny_model), ("embed_tokens",))["embed_tokens"]
    folder = damaged(trained, tmp_path, lambda tensors: tensors.update({"embed_tokens.weight": own}))
    export(trained, tiny_model, "--checkpoint", folder, "--out", tmp_path / "out")
    assert "embed_tokens.weight" not in load_file(tmp_path / "out" / "vllm" / "model.safetensors")


def test_check_reports_and_writes_nothing(trained, tiny_model, tmp_path):
    result = export(trained, tiny_model, "--check", "--out", tmp_path / "out")
    assert "is sound" in result.stderr and not (tmp_path / "out" / "vllm").exists()
