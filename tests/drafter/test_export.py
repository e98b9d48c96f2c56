"""Stage 05: names, bytes, configurations per engine and version, silent killers, loaders, a try on the engine."""

import contextlib
import copy
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import types
import typing
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.fake_engine import install
from support.pipeline import ROOT, manifest, run_stage

from eagle3.common import config, files, findings, tensor_files
from eagle3.common.errors import PreconditionError
from eagle3.common.options import ExportOptions
from eagle3.common.stage import Stage
from eagle3.common.versions import numbers
from eagle3.drafter import checkpoint, export_checks, export_files, flat_config, network, verifier, vocab
from eagle3.training import checkpoints

LAYERS = [2, 4, 5, 7]
IDS = flat_config.IDS
DRAFT_VOCAB = 128


@pytest.fixture(scope="module")
def facts(tiny_model):
    return verifier.read(tiny_model)


@pytest.fixture(scope="module")
def trained(facts, tmp_path_factory):
    """A run directory as stage 04 leaves it; the drafter is fresh."""
    import numpy as np

    run_dir = tmp_path_factory.mktemp("trained")
    counts = np.arange(facts.vocab_size)
    d2t, t2d = (torch.from_numpy(array) for array in vocab.build_mapping(counts, DRAFT_VOCAB))
    model = network.build(facts, LAYERS, d2t, t2d, network.layer_shape(facts))
    step = run_dir / "04_train" / "checkpoints" / "step_1"
    step.mkdir(parents=True)
    save_file(checkpoints.served_tensors(model), step / tensor_files.SINGLE, metadata={"format": "pt"})
    files.write_json(step / "config.json", network.served_config(model, facts))
    files.write_json(step / "trainer.json", {"step": 1, "layers": LAYERS})
    names = (tensor_files.SINGLE, "config.json", "trainer.json")
    files.write_json(step / "checksums.json", {name: files.sha256_file(step / name) for name in names})
    (step.parent / "best").symlink_to("step_1")
    return run_dir


@pytest.fixture
def published(trained, tmp_path):
    """A copy of the checkpoint outside any run, to be changed."""
    folder = tmp_path / "published"
    folder.mkdir()
    for name in (tensor_files.SINGLE, "config.json"):
        shutil.copy(trained / "04_train" / "checkpoints" / "best" / name, folder / name)
    return folder


def export(run_dir, model, *more, check=0):
    return run_stage("05_fix_weight_keys.py", "--run-dir", run_dir, "--model", model, *more, check=check)


def change(folder, *, tensors=None, config=None, drop=()):
    """Rewrite a checkpoint's tensors with a function, its config with a dictionary."""
    if tensors:
        content = load_file(folder / tensor_files.SINGLE)
        result = tensors(content)  # a new dictionary, or whatever a change of this one returns
        content = result if isinstance(result, dict) else content
        save_file({name: tensor.contiguous() for name, tensor in content.items()}, folder / tensor_files.SINGLE)
    written = files.read_json(folder / "config.json") | (config or {})
    files.write_json(folder / "config.json", {name: value for name, value in written.items() if name not in drop})


def subject(folder, facts, **changes):
    known = {"folder": folder, "raw": files.read_json(folder / "config.json"), "tensors": tensor_files.read(folder),
             "verifier": facts, "engine": "vllm", "version": "0.32.0", "serving_length": 2048}  # fmt: skip
    return checkpoint.Export(**known | changes)


def renamed(prefix, replacement):
    return lambda tensors: {replacement + name.removeprefix(prefix) if name.startswith(prefix) else name: tensor
                            for name, tensor in tensors.items()}


def raw_bytes(folder):
    """Return {canonical name: (dtype, shape, bytes)} of a folder."""
    return {checkpoint.canonical_key(name): (entry.dtype, entry.shape, b"".join(tensor_files.blocks(entry)))
            for name, entry in tensor_files.read(folder).items()}


# --- the script -------------------------------------------------------------------------------------------


def test_the_export_is_bit_identical_and_loads_again(trained, tiny_model, facts, tmp_path):
    out = tmp_path / "05_export"
    export(trained, tiny_model, "--out", out)
    best = trained / "04_train" / "checkpoints" / "best"
    assert raw_bytes(out / "vllm") == raw_bytes(best)
    assert "midlayer.self_attn.q_proj.weight" in tensor_files.read(out / "vllm")
    model = network.load(out / "vllm", facts)
    assert torch.equal(model.fc.weight.bfloat16(), load_file(best / tensor_files.SINGLE)["fc.weight"])
    assert manifest(out)["counts"] == {"expected": 15, "done": 15, "removed": 0}
    assert {check["status"] for check in manifest(out)["checks"]} == {"ok"}
    assert manifest(out)["trained"] == {"ids": LAYERS[:-1], "here": True, "norms": []}
    assert manifest(out)["patches"] == []
    assert "complete already" in export(trained, tiny_model, "--out", out).stderr
    changed = export(trained, tiny_model, "--out", out, "--to", "sglang", check=3)
    assert "export.to" in changed.stderr


def test_the_config_says_everything_explicitly(trained, tiny_model, tmp_path):
    out = tmp_path / "05_export"
    export(trained, tiny_model, "--out", out, "--to", "sglang", "--engine-version", "0.5.17", "--serving-length", 4096)
    config = json.loads((out / "sglang" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["tie_word_embeddings"] is False and config["num_hidden_layers"] == 1
    assert all(config[flag] is False for flag in flat_config.NORM_FLAGS)
    assert config["draft_vocab_size"] == DRAFT_VOCAB and config["vocab_size"] == verifier.read(tiny_model).vocab_size
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] and config["rope_scaling"] is None
    assert config["eagle_config"][IDS] == [1, 3, 4] and config[IDS] == [2, 4, 5]
    assert config["max_position_embeddings"] == 4096 and config["dtype"] == "bfloat16"


def test_check_prints_every_check_and_writes_nothing(trained, tiny_model, published, tmp_path):
    out = tmp_path / "out"
    result = export(trained, tiny_model, "--check", "--out", out, "--json")
    report = json.loads(result.stdout)
    names = [check["name"] for check in report["checks"]]
    assert len(names) == len(export_checks.HEADERS) + len(export_checks.VALUES) and len(set(names)) == len(names)
    assert all(f"{check['status']:<4} {check['name']}: " in result.stderr for check in report["checks"])
    assert all(check["reason"] for check in report["checks"])
    assert "is sound" in result.stderr and not out.exists()
    change(published, config={"norm_before_residual": True, "max_position_embeddings": 1024})
    failed = export(tmp_path / "run", tiny_model, "--checkpoint", published, "--check", "--json", "--to", "sglang",
                    "--engine-version", "0.5.12", check=3)
    status = {check["name"]: check["status"] for check in json.loads(failed.stdout)["checks"]}
    assert status["norm-flags-served"] == "fail" and status["positions-cover-serving"] == "warn"
    assert "sglang of a version that reads them (norm_before_residual: never)" in failed.stderr


def test_a_dry_run_shows_the_table_and_fails_where_the_run_would(trained, tiny_model, published, tmp_path):
    result = export(tmp_path / "run", tiny_model, "--checkpoint", published, "--dry-run")
    assert "layers.0.mlp.up_proj.weight → midlayer.mlp.up_proj.weight" in result.stderr
    assert not (tmp_path / "run").exists()
    change(published, config={IDS: [5, 4, 2]})
    failed = export(tmp_path / "run", tiny_model, "--checkpoint", published, "--dry-run", check=3)
    assert "ids-ascend-inside-the-verifier" in failed.stderr


@pytest.mark.parametrize(("tensors", "words"), [
    (lambda t: t.pop("lm_head.weight"), "lm_head.weight"),
    (lambda t: t | {"fc.weight": torch.full((64, 192), float("nan"))}, "NaN"),
])
def test_a_failed_check_is_an_error_and_nothing_is_written(tiny_model, published, tmp_path, tensors, words):
    change(published, tensors=tensors)
    result = export(tmp_path / "run", tiny_model, "--checkpoint", published, check=3)
    assert words in result.stderr and manifest(tmp_path / "run" / "05_export")["status"] == "failed"
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_a_full_disk_is_named_before_anything_is_written(facts, published, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    subject_, out = subject(published, facts), tmp_path / "out"
    with pytest.raises(PreconditionError, match="disk is too small"):
        export_files.write(subject_, out, export_files.files_to_write(subject_, out, False), False)
    assert not out.exists()


# --- in place ---------------------------------------------------------------------------------------------


def test_in_place_keeps_the_old_files_and_goes_both_ways(trained, tiny_model, published, tmp_path):
    run = tmp_path / "run"
    before, tensors = (published / tensor_files.SINGLE).read_bytes(), raw_bytes(published)
    # what a run killed at this point leaves
    os.link(published / tensor_files.SINGLE, published / f"{tensor_files.SINGLE}.bak")
    export(run, tiny_model, "--checkpoint", published, "--in-place")
    assert "midlayer.mlp.up_proj.weight" in tensor_files.read(published) and raw_bytes(published) == tensors
    assert (published / f"{tensor_files.SINGLE}.bak").read_bytes() == before
    again = export(run, tiny_model, "--checkpoint", published, "--in-place")
    assert "is what vllm loads already" in again.stderr
    blocked = export(run, tiny_model, "--checkpoint", published, "--in-place", "--to", "speculators", check=3)
    assert "an old file is kept there already" in blocked.stderr
    for name in (tensor_files.SINGLE, "config.json"):
        (published / f"{name}.bak").unlink()
    export(run, tiny_model, "--checkpoint", published, "--in-place", "--to", "speculators")
    assert "layers.0.mlp.up_proj.weight" in tensor_files.read(published)
    with_embedding = raw_bytes(published)
    assert with_embedding.pop("embed_tokens.weight")[1] == (402, 64) and with_embedding == tensors
    assert not list(published.glob(files.TEMPORARY_PREFIX + "*"))
    best = trained / "04_train" / "checkpoints" / "best"
    refused = export(trained, tiny_model, "--in-place", check=3)
    assert "training resumes from this folder" in refused.stderr and not list(best.glob("*.bak"))


def split(folder, count=3):
    """Turn a checkpoint's file into shards with an index."""
    tensors = load_file(folder / tensor_files.SINGLE)
    names, weight_map = sorted(tensors), {}
    for i in range(count):
        shard = f"model-{i + 1:05}-of-{count:05}.safetensors"
        save_file({name: tensors[name] for name in names[i::count]}, folder / shard)
        weight_map |= dict.fromkeys(names[i::count], shard)
    files.write_json(folder / tensor_files.INDEX, {"metadata": {}, "weight_map": weight_map})
    (folder / tensor_files.SINGLE).unlink()


def test_shards_become_one_file_or_stay_shards_in_place(tiny_model, published, tmp_path):
    tensors = raw_bytes(published)
    split(published)
    export(tmp_path / "run", tiny_model, "--checkpoint", published)
    assert raw_bytes(tmp_path / "run" / "05_export" / "vllm") == tensors
    assert len(load_file(tmp_path / "run" / "05_export" / "vllm" / tensor_files.SINGLE)) == len(tensors)
    export(tmp_path / "run2", tiny_model, "--checkpoint", published, "--in-place")
    assert raw_bytes(published) == tensors and "midlayer.mlp.up_proj.weight" in tensor_files.weight_map(published)
    assert len(list(published.glob("model-*.safetensors"))) == 3 and (published / f"{tensor_files.INDEX}.bak").exists()


# --- what was written, and what it was made of -----------------------------------------------------------


def flip(path, offset=-100):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", [tensor_files.SINGLE, "config.json", "trainer.json", "checksums.json"])
def test_a_checkpoint_that_is_not_what_training_wrote_is_refused(trained, tiny_model, tmp_path, name):
    folder = shutil.copytree(trained / "04_train" / "checkpoints" / "best", tmp_path / "step_1")
    flip(folder / name, -10)
    refused = export(tmp_path / "run", tiny_model, "--checkpoint", folder, check=3)
    assert str(folder / name) in refused.stderr or "is not what its stage wrote" in refused.stderr
    assert "Traceback" not in refused.stderr and "04_train.py" in refused.stderr and "fix:" in refused.stderr
    files.write_json(folder / "checksums.json", {})
    refused = export(tmp_path / "run", tiny_model, "--checkpoint", folder, check=3)
    assert "not whole" in refused.stderr and "Traceback" not in refused.stderr


def test_an_export_that_is_not_what_05_wrote_is_made_again_and_refused_by_06(trained, tiny_model, tmp_path):
    out = tmp_path / "05_export"
    export(trained, tiny_model, "--out", out)
    weights = out / "vllm" / tensor_files.SINGLE
    whole = weights.read_bytes()
    flip(weights)
    for given in (("--drafter", out / "vllm"), ()):
        refused = run_stage("06_benchmark.py", "--run-dir", tmp_path, "--model", tiny_model, "--prompts",
                            ROOT / "prompts" / "benchmark.jsonl", *given, "--dry-run", check=3).stderr
        assert str(weights) in refused and "SHA-256" in refused and "05_fix_weight_keys.py" in refused
    again = export(trained, tiny_model, "--out", out)
    assert "making it again" in again.stderr and weights.read_bytes() == whole


def written_wrong(monkeypatch, tiny_model, trained, tmp_path, spoil):
    """Run stage 05 in this process, with its files changed as soon as they are written; return the error."""
    from eagle3.drafter import export_files

    specification = importlib.util.spec_from_file_location("export_script", ROOT / "05_fix_weight_keys.py")
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    real = export_files.write

    def write(subject_, target, *more):
        made = real(subject_, target, *more)
        spoil(target)
        return made

    monkeypatch.setattr(export_files, "write", write)
    argv = ["05_fix_weight_keys.py", *map(str, ("--run-dir", trained, "--model", tiny_model, "--out", tmp_path / "o"))]
    options = config.parse(ExportOptions, argv[1:], "")
    stage = Stage("05_fix_weight_keys", options, argv)
    try:
        with pytest.raises(PreconditionError) as caught:
            script.run(options, stage)
    finally:
        stage.release()
    assert manifest(tmp_path / "o")["status"] != "complete"
    return str(caught.value)


@pytest.mark.parametrize(("spoil", "words"), [
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1e6}, "position 2047"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "RoPE per layer type"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "KeyError"),  # transformers' own word
    ({"eagle_config": {IDS: [3, 4, 5]}}, "eagle_config: [3, 4, 5]"),
    ({IDS: [2, 4, 6]}, "[2, 4, 6]"),
    ({"max_position_embeddings": 4}, "max_position_embeddings 4"),
    ({"norm_before_residual": True}, "norm-flags-match-training"),
    ({"intermediate_size": 64}, "shapes-fit-the-config"),
    ({"num_key_value_heads": 2}, "shapes-fit-the-config"),
    ({"rms_norm_eps": 0.5}, "rms_norm_eps 0.5"),
    ({"hidden_size": "64"}, "hidden_size: '64'"),
], ids=lambda value: "" if isinstance(value, str) else "-".join(value))
def test_what_is_checked_is_what_was_written(trained, tiny_model, tmp_path, monkeypatch, spoil, words):
    error = written_wrong(monkeypatch, tiny_model, trained, tmp_path, lambda target: change_config(target, spoil))
    assert words in error and str(tmp_path / "o" / "vllm") in error


def change_config(folder, values):
    files.write_json(folder / "config.json", files.read_json(folder / "config.json") | values)


def test_rope_that_training_took_from_a_published_drafter_is_exported(trained, tiny_model, tmp_path):
    folder = shutil.copytree(trained / "04_train" / "checkpoints" / "best", tmp_path / "step_1")
    change_config(folder, {"rope_theta": 5e3, "rope_parameters": {"rope_type": "default", "rope_theta": 5e3}})
    digests = files.read_json(folder / "checksums.json")
    files.write_json(folder / "checksums.json", digests | {"config.json": files.sha256_file(folder / "config.json")})
    export(tmp_path / "run", tiny_model, "--checkpoint", folder)
    assert files.read_json(tmp_path / "run" / "05_export" / "vllm" / "config.json")["rope_theta"] == 5e3


def test_what_was_written_has_the_tensors_that_were_to_be_shipped(trained, tiny_model, tmp_path, monkeypatch):
    def cast(target):
        change(target, tensors=lambda t: {name: each.float() if each.is_floating_point() else each
                                          for name, each in t.items()})

    error = written_wrong(monkeypatch, tiny_model, trained, tmp_path, cast)
    assert "tensors-as-planned" in error and "BF16" in error


# --- files ------------------------------------------------------------------------------------------------


def every_dtype():
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(0, 256, (64, 16), generator=generator, dtype=torch.uint8)
    wide = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    narrow = [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2]
    tensors = {f"layers.0.{dtype}": random.clone().view(dtype) for dtype in wide + narrow}
    return tensors | {
        "layers.0.mask": random[:, :3].contiguous() > 99, "layers.0.odd": torch.zeros(7, dtype=torch.bool),
        "empty": torch.zeros(0, 5, dtype=torch.bfloat16), "scalar": torch.tensor(3.5), "unicode·é": torch.ones(3),
    }  # fmt: skip


def test_every_dtype_survives_the_way_to_midlayer_and_back(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    save_file(every_dtype(), tmp_path / "a" / tensor_files.SINGLE)
    start = tensor_files.read(tmp_path / "a")
    there = {checkpoint.engine_key(name): entry for name, entry in start.items() if name != "layers.0.odd"}
    tensor_files.write(tmp_path / "b" / tensor_files.SINGLE, there)
    back = tensor_files.read(tmp_path / "b")
    assert "midlayer.mask" in back and back.keys() == there.keys()
    tensor_files.write(tmp_path / "c" / tensor_files.SINGLE, {checkpoint.canonical_key(n): e for n, e in back.items()})
    original, final = raw_bytes(tmp_path / "a"), raw_bytes(tmp_path / "c")
    assert final == {name: value for name, value in original.items() if name != "layers.0.odd"}
    for folder in ("b", "c"):
        path = tmp_path / folder / tensor_files.SINGLE
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
        filled = [entry for entry in tensor_files.read(tmp_path / folder).values() if entry.size]
        assert all(entry.start % entry.item_size == 0 for entry in filled)
        loaded = load_file(path)
        assert loaded["empty"].shape == (0, 5) and loaded["scalar"] == 3.5


def test_pieces_of_several_files_are_aligned(tmp_path):
    for i, name in enumerate(("x", "y")):
        tensors = {f"{name}.odd": torch.ones(5 + i, dtype=torch.bool), f"{name}.wide": torch.full((9,), i + 0.5)}
        save_file(tensors, tmp_path / name)

    parts = (tensor_files.read_header(tmp_path / name) for name in ("x", "y"))
    tensor_files.write(tmp_path / "both", {name: entry for part in parts for name, entry in part.items()})
    loaded = load_file(tmp_path / "both")
    assert loaded["y.wide"].tolist() == [1.5] * 9 and loaded["x.odd"].all() and len(loaded) == 4


@pytest.mark.parametrize(("damage", "words"), [
    (lambda folder: os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1),
     "not a whole"),
    (lambda folder: (folder / tensor_files.SINGLE).write_bytes(b"\xff" * 100), "not a whole"),
    (lambda folder: (folder / tensor_files.SINGLE).write_bytes(b"PK"), "not a whole"),
    (lambda folder: (folder / tensor_files.SINGLE).unlink(), "weights are missing"),
    (lambda folder: (folder / tensor_files.INDEX).write_text('{"weight_map": {}}'), "shards as well"),
    (lambda folder: split(folder) or (folder / "model-00002-of-00003.safetensors").unlink(), "is missing"),
    (lambda folder: split(folder) or shutil.copy(folder / "model-00001-of-00003.safetensors",
                                                 folder / "model-00002-of-00003.safetensors"), "what the index says"),
    (lambda folder: (folder / tensor_files.SINGLE).rename(folder / "x") and (folder / tensor_files.INDEX).write_text(
        '{"weight_map": {"a": "../x"}}'), "not an index"),
])
def test_damaged_files_are_named(published, damage, words):
    damage(published)
    with pytest.raises(PreconditionError, match=words):
        tensor_files.read(published)


# --- layouts ----------------------------------------------------------------------------------------------


def test_a_published_sglang_checkpoint(published, facts, tiny_model, tmp_path):
    """`midlayer.`, ids of outputs in eagle_config only, the older RoPE spelling, no flags: as AQ-MedAI publishes."""
    tensors = raw_bytes(published)
    change(published, tensors=renamed("layers.0.", "midlayer."), config={"eagle_config": {IDS: [1, 3, 4]}},
           drop=(IDS, "rope_parameters", "num_aux_hidden_states", "dtype", *flat_config.NORM_FLAGS))
    result = export(tmp_path / "run", tiny_model, "--checkpoint", published)
    config = files.read_json(tmp_path / "run" / "05_export" / "vllm" / "config.json")
    assert config[IDS] == [2, 4, 5] == config["eagle_config"][IDS]
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert raw_bytes(tmp_path / "run" / "05_export" / "vllm") == tensors
    assert "warn norm-flags-match-training" in result.stderr


def test_a_published_checkpoint_of_the_whole_vocabulary(published, facts, tiny_model, tmp_path):
    """No draft_vocab_size, no mapping, the verifier's embedding, a `model.` prefix."""
    own = verifier.load_shared_weights(facts, ("embed_tokens",))["embed_tokens"]
    head = torch.randn(facts.vocab_size, 64, dtype=torch.bfloat16)

    def whole(tensors):
        kept = {name: tensor for name, tensor in tensors.items() if name not in checkpoint.MAPPING}
        kept |= {"lm_head.weight": head, "embed_tokens.weight": own.bfloat16()}
        return {name if name == "lm_head.weight" else f"model.{name}": tensor for name, tensor in kept.items()}

    change(published, tensors=whole, drop=("draft_vocab_size",))
    export(tmp_path / "run", tiny_model, "--checkpoint", published, "--to", "sglang", "--engine-version", "0.5.9")
    out = tmp_path / "run" / "05_export"
    written = load_file(out / "sglang" / tensor_files.SINGLE)
    assert torch.equal(written["lm_head.weight"], head) and len(written) == 13
    assert files.read_json(out / "sglang" / "config.json")["draft_vocab_size"] == facts.vocab_size
    assert manifest(out)["removed"] == ["model.embed_tokens.weight"]


def test_speculators_loads_its_layout_and_its_own_files_come_back(trained, tiny_model, facts, tmp_path):
    from speculators import SpeculatorModel

    export(trained, tiny_model, "--to", "speculators", "--out", tmp_path / "a")
    model = SpeculatorModel.from_pretrained(tmp_path / "a" / "speculators")
    best = load_file(trained / "04_train" / "checkpoints" / "best" / tensor_files.SINGLE)
    state = model.state_dict()
    assert all(torch.equal(state[name].to(tensor.dtype), tensor) for name, tensor in best.items())
    assert model.config.eagle_aux_hidden_state_layer_ids == [2, 4, 5] and not model.config.norm_before_residual
    own = verifier.load_shared_weights(facts, ("embed_tokens",))["embed_tokens"]
    assert torch.equal(model.embed_tokens.weight, own.to(model.embed_tokens.weight.dtype))
    assert float(model.config.transformer_layer_config.rope_parameters["rope_theta"]) == 10000.0

    model.save_pretrained(tmp_path / "theirs")
    export(tmp_path / "run", tiny_model, "--checkpoint", tmp_path / "theirs", "--to", "vllm")
    assert raw_bytes(tmp_path / "run" / "05_export" / "vllm") == raw_bytes(trained / "04_train/checkpoints/best")
    config = files.read_json(tmp_path / "run" / "05_export" / "vllm" / "config.json")
    served = files.read_json(trained / "04_train" / "checkpoints" / "best" / "config.json")
    assert {name: config[name] for name in served} == served


# --- ids per engine ---------------------------------------------------------------------------------------


def family(facts, model_type, layers=30):
    return dataclasses.replace(facts, model_type=model_type, num_layers=layers)


@pytest.mark.parametrize(("engine", "version", "model_type", "nested"), [
    ("vllm", "0.32.0", "llama", [2, 15, 27]),
    ("sglang", "0.5.17", "llama", [1, 14, 26]),
    ("sglang", "0.5.17", "kimi_k2", [2, 15, 27]),
    ("sglang", None, "deepseek_v3", [2, 15, 27]),
    ("sglang", "0.5.12", "deepseek_v3", None),
    ("sglang", "0.5.12.post1", "deepseek_v3", None),
    ("sglang", "0.5.9", "kimi_k2", None),
])
def test_the_layer_ids_stand_where_each_engine_reads_them(facts, engine, version, model_type, nested):
    result = config_for(facts, engine, version, model_type, [2, 15, 27])
    assert result[IDS] == [2, 15, 27]
    assert result.get("eagle_config", {}).get(IDS) == nested
    assert flat_config.captured_ids(result, engine, version, family(facts, model_type)) == [2, 15, 27]


def config_for(facts, engine, version, model_type, ids):
    flat = flat_config.flat_config({IDS: ids})
    return flat_config.engine_config(flat | {IDS: ids}, engine=engine, version=version,
                                       verifier=family(facts, model_type), serving_length=4096)


# --- silent killers ---------------------------------------------------------------------------------------


def mixed(tensors):
    tensors["midlayer.mlp.up_proj.weight"] = tensors.pop("layers.0.mlp.up_proj.weight")


def random_embedding(tensors):
    tensors["embed_tokens.weight"] = torch.randn(len(tensors["t2d"]), 64)


# Values with an effect that an export does not carry over.
LOST = [
    ({"sliding_window": 512, "use_sliding_window": True}, "sliding_window: attention within a window"),
    ({"sliding_window": 512}, "sliding_window: attention within a window"),
    ({"sliding_window": 512, "layer_types": ["sliding_attention"]}, "layer_types"),
    ({"attention_bias": True}, "biases of attention"), ({"mlp_bias": True}, "biases of the MLP"),
    ({"hidden_act": "gelu"}, "another activation"), ({"logits_scaling": 8.0}, "scaled states or logits"),
    ({"final_logit_softcapping": 30.0}, "capped logits"), ({"partial_rotary_factor": 0.5}, "a part of each head"),
    ({"attention_multiplier": 0.5}, "another scale of attention"),
    ({"eagle_config": {"use_last_layernorm": False}}, "eagle_config.use_last_layernorm: no norm before the head"),
    ({"eagle_config": {"parallel_draft_step": 4}}, "eagle_config.parallel_draft_step: several tokens a step"),
]
# The same keys where they do nothing, as published configurations have them.
NOTHING_LOST = [
    {"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28},
    {"sliding_window": None, "use_sliding_window": True}, {"sliding_window": 2048}, {"sliding_window": 0},
    {"attention_bias": False, "mlp_bias": False, "attention_dropout": 0.1, "pretraining_tp": 4, "hidden_act": "silu"},
    {"quantization_config": None, "compression_config": {}}, {"layer_types": ["full_attention"]},
    {"logits_scaling": 1.0, "embedding_multiplier": 1, "attention_multiplier": 32 ** -0.5},
    {"final_logit_softcapping": None, "attn_logit_softcapping": 0.0, "partial_rotary_factor": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "num_beams": 4, "use_cache": False, "id2label": {"0": "a"}},
    {"eagle_config": {"use_aux_hidden_state": True, IDS: [2, 4, 5], "use_last_layernorm": True, "next_layer_regular":
                      True, "use_mtp_layernorm": False, "parallel_draft_step": 1}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}},
    {"original_max_position_embeddings": 1024},
]
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
READ_OTHERWISE = [
    (_YARN | {"attention_factor": 1.5}, {"engine": "sglang", "version": "0.5.17"}, "scaled by"),
    (_YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}, {"engine": "sglang", "version": "0.5.12"}, "scaled by"),
    ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, {"engine": "sglang", "version": "0.5.17"}, "part at"),
]
KILLERS = [
    ("keys-in-one-spelling", {"tensors": mixed}, {}, "mixes midlayer. and layers.0."),
    ("keys-in-one-spelling", {"tensors": lambda t: t | {"model.norm.weight": torch.ones(64)}}, {}, "model.norm.weight"),
    ("keys-known-and-complete", {"tensors": lambda t: t.pop("fc.weight")}, {}, "missing: fc.weight"),
    ("keys-known-and-complete", {"tensors": lambda t: t.pop("lm_head.weight")}, {}, "missing: lm_head.weight"),
    ("keys-known-and-complete", {"tensors": lambda t: t.pop("d2t")}, {}, "missing: d2t"),
    ("keys-known-and-complete", {"tensors": lambda t: t | {"layers.1.mlp.up_proj.weight": torch.zeros(1)}}, {},
     "unknown: layers.1.mlp.up_proj.weight"),
    ("keys-known-and-complete", {"config": {"fc_norm": True}}, {}, "missing: fc_norm.0.weight"),
    ("shapes-fit-the-config", {"tensors": lambda t: t | {"fc.weight": torch.zeros(64, 64)}}, {},
     "(64, 64) instead of (64, 192)"),
    ("shapes-fit-the-config", {"config": {"draft_vocab_size": 64}}, {}, "lm_head.weight: (128, 64) instead of (64,"),
    ("mapping-types", {"tensors": lambda t: t | {"d2t": t["d2t"].float()}}, {}, "'d2t': 'F32'"),
    ("architecture-known", {"config": {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}}, {}, "Eagle3DeepseekV2"),
    ("architecture-known", {"config": {"num_hidden_layers": 2}}, {}, "2 layers"),
    ("belongs-to-the-verifier", {"config": {"vocab_size": 99}}, {}, "another verifier"),
    ("config-understood", {"config": {"quantization_config": {"bits": 4}}}, {}, "quantization_config"),
    *[("config-understood", {"config": config}, {}, words) for config, words in LOST],
    ("auxiliary-states-counted", {"config": {"eagle_config": {"use_aux_hidden_state": False}}}, {},
     "reads no auxiliary states"),
    ("auxiliary-states-counted", {"config": {IDS: [2, 3, 4, 5]}, "drop": ("num_aux_hidden_states",)}, {},
     "ids 4, width of fc (192 of 64) 3"),
    ("auxiliary-states-counted", {"config": {"num_aux_hidden_states": 4}}, {}, "num_aux_hidden_states 4"),
    ("auxiliary-states-counted", {"tensors": lambda t: t | {"fc.weight": torch.zeros(64, 64)},
     "drop": (IDS, "num_aux_hidden_states")}, {}, "width of fc (64 of 64) 1"),
    ("auxiliary-states-counted", {"tensors": lambda t: t | {"fc.weight": torch.zeros(64, 200)}}, {}, "3.125"),
    ("weights-are-plain-numbers", {"tensors": lambda t: t | {"lm_head.weight": t["lm_head.weight"].to(
        torch.float8_e4m3fn)}}, {}, "lm_head.weight F8_E4M3"),
    ("ids-known", {"config": {"eagle_config": {IDS: [2, 4, 5]}}, "drop": (IDS,)}, {}, "engines number differently"),
    ("ids-agree", {}, {"given_ids": [3, 4, 5]}, "config.json: [2, 4, 5]"),
    ("ids-agree", {"config": {"eagle_config": {IDS: [3, 4, 6]}}}, {}, "eagle_config: [3, 4, 6]"),
    ("ids-match-the-manifest", {"config": {IDS: [3, 5, 6]}}, {"trained_ids": [2, 4, 5]}, "[3, 5, 6]"),
    ("ids-ascend-inside-the-verifier", {"config": {IDS: [2, 4, 8]}}, {}, "[2, 4, 8]"),
    ("ids-ascend-inside-the-verifier", {"config": {IDS: [2, 4]}}, {"version": "0.17.1"}, "2 layers"),
    ("ids-as-the-engine-reads-them", {"config": {IDS: [1, 4, 5]}}, {"engine": "sglang", "version": "0.5.17",
     "model_type": "kimi_k2"}, "would capture [2, 5, 6]"),
    ("norm-flags-served", {"config": {"norm_before_residual": True}}, {"engine": "sglang", "version": "0.5.17"},
     "norm_before_residual"),
    ("norm-flags-served", {"config": {"norm_output": True}}, {"engine": "sglang", "version": "0.5.11"}, "norm_output"),
    ("norm-flags-match-training", {"config": {"norm_before_residual": True}}, {"trained_here": True},
     "norm_before_residual"),
    ("rope-spellings-agree", {"config": {"rope_theta": 5e5}}, {}, "rope_theta 500000.0"),
    ("rope-spellings-agree", {"config": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}}, {}, "yarn"),
    ("rope-as-trained", {"config": {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}}},
     {"trained_here": True}, "500000.0"),
    ("rope-spellings-agree", {"config": {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}}, {},
     "RoPE per layer type"),
    *[("rope-as-the-engine-reads-it", {"config": {"rope_parameters": scaling, "rope_theta": 1e4,
                                                  "rope_scaling": scaling}}, engine, words)
      for scaling, engine, words in READ_OTHERWISE],
    ("positions-cover-serving", {"config": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}},
     {"serving_length": 1 << 20}, "RoPE that depends on it"),
    ("engine-serves-the-verifier", {}, {"engine": "sglang", "version": "0.5.9",
     "architecture": "KimiK25ForConditionalGeneration"}, "captures no states"),
    ("values-finite", {"tensors": lambda t: t["norm.weight"].fill_(float("inf"))}, {}, "norm.weight: 64 of 64"),
    ("values-finite", {"tensors": lambda t: t | {"fc.weight": t["fc.weight"].float() / 0}}, {}, "NaN or Inf in fc"),
    ("mapping-consistent", {"tensors": lambda t: t | {"d2t": t["d2t"] + 1}}, {}, "d2t and t2d"),
    ("mapping-consistent", {"tensors": lambda t: t["t2d"].fill_(True)}, {}, "128 draft ids, 402 marked"),
    ("embedding-is-the-verifiers", {"tensors": random_embedding}, {}, "not the verifier's"),
    ("embedding-is-the-verifiers", {"tensors": random_embedding}, {"engine": "sglang", "keeps_embedding": True},
     "not the verifier's"),
    ("embedding-is-the-verifiers", {}, {"keeps_embedding": True}, "not in the checkpoint"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "circumstances", "words"), KILLERS,
                         ids=[f"{name}-{words}" for name, _, _, words in KILLERS])
def test_a_silent_killer_fails_its_check(published, facts, name, damage, circumstances, words):
    change(published, **damage)
    given = dict(circumstances)
    of_verifier = {key: given.pop(key) for key in ("model_type", "architecture") if key in given}
    theirs = dataclasses.replace(facts, **of_verifier)
    found = {each.name: each for each in export_checks.run(subject(published, theirs, **given))}
    assert found[name].status == findings.FAIL, found[name].line()
    assert words in found[name].line() and found[name].reason and found[name].expected and found[name].fix
    with pytest.raises(PreconditionError, match=name):
        findings.require(list(found.values()), published)


@pytest.mark.parametrize("config", NOTHING_LOST, ids=lambda config: "-".join(config))
def test_a_key_that_does_nothing_is_no_fault(published, facts, config):
    change(published, config=config)
    found = {each.name: each for each in export_checks.run(subject(published, facts))}
    assert {name: each.line() for name, each in found.items() if each.status != findings.OK} == {}


@pytest.mark.parametrize(("scaling", "version"), [(_YARN, "0.5.12"), (_YARN | {"attention_factor": 1.5}, None),
                                                 (_YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}, "0.5.23")])
def test_scaled_rope_that_an_engine_reads_is_no_fault(published, facts, scaling, version):
    change(published, config={"rope_parameters": scaling, "rope_scaling": scaling})
    engine = {"engine": "sglang", "version": version} if version else {}
    found = {each.name: each for each in export_checks.run(subject(published, facts, **engine))}
    assert found["rope-as-the-engine-reads-it"].status == found["rope-spellings-agree"].status == findings.OK


def test_unknown_keys_and_switches_are_named(published, facts):
    change(published, config={"surprise": [1], "eagle_config": {"new_switch": 2, IDS: [2, 4, 5]}, "off": False})
    found = export_checks.finding_of(export_checks.config_understood, subject(published, facts))
    assert (found.status, found.found) == (findings.WARN, "eagle_config.new_switch, surprise")


def test_every_check_can_fail_or_warn():
    failing = {name for name, *_ in KILLERS}
    names = {check.__name__.replace("_", "-") for check in (*export_checks.HEADERS, *export_checks.VALUES)}
    assert names - failing == {"embeddings-untied", "engine-has-no-known-fault"}  # these only warn


@pytest.mark.parametrize(("name", "damage", "circumstances"), [
    ("embeddings-untied", {"config": {"tie_word_embeddings": True}}, {}),
    ("engine-has-no-known-fault", {}, {"engine": "sglang", "version": "0.5.10"}),
    ("engine-has-no-known-fault", {}, {"version": "0.16.0"}),
    ("ids-known", {"drop": (IDS, "num_aux_hidden_states")}, {}),
    ("rope-spellings-agree", {"drop": ("rope_theta", "rope_scaling", "rope_parameters")}, {}),
    ("positions-cover-serving", {}, {"serving_length": 9999}),
    ("config-understood", {"config": {"surprise": 1}}, {}),
    ("engine-serves-the-verifier", {}, {"version": "0.17.1", "model_type": "deepseek_v3"}),
])
def test_what_is_mended_is_said(published, facts, name, damage, circumstances):
    change(published, **damage)
    theirs = dataclasses.replace(facts, model_type=circumstances.pop("model_type", facts.model_type))
    exported = subject(published, theirs, **circumstances)
    found = {each.name: each for each in export_checks.run(exported)}
    assert found[name].status == findings.WARN and found[name].fix
    assert exported.config()["tie_word_embeddings"] is False


def test_a_trained_embedding_is_shipped_to_vllm(published, tiny_model, tmp_path):
    change(published, tensors=random_embedding)
    export(tmp_path / "run", tiny_model, "--checkpoint", published, "--trained-embedding")
    assert "embed_tokens.weight" in tensor_files.read(tmp_path / "run" / "05_export" / "vllm")


# --- SGLang's own code ------------------------------------------------------------------------------------

VERSIONS = ["0.5.9", "0.5.10", "0.5.12", "newest"]


@pytest.fixture(scope="module", params=VERSIONS)
def sglang(request):
    """A released wheel of SGLang as (version, read a module's source); downloaded once, no wheel is an error."""
    folder = Path(request.config.cache.mkdir("wheels")) / request.param
    if request.param == "newest" or not list(folder.glob("*.whl")):
        wanted = "sglang" if request.param == "newest" else f"sglang=={request.param}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), wanted]
        subprocess.run(command, check=True, timeout=300)
    wheel = max(folder.glob("*.whl"), key=lambda path: numbers(path.name.split("-")[1]))
    archive = zipfile.ZipFile(wheel)
    return SimpleNamespace(version=wheel.name.split("-")[1],
                           source=lambda module: archive.read(f"{module.replace('.', '/')}.py").decode())


def test_sglang_consumes_every_tensor_and_every_weight_is_filled(sglang, published, facts, tmp_path):
    for engine, stale in (("sglang", False), ("speculators", True)):  # the second keeps `layers.0.`
        exported = subject(published, facts, engine="sglang", version=sglang.version)
        config = types.SimpleNamespace(**exported.config())
        table = checkpoint.engine_names(exported.tensors, engine)
        with real_loader(sglang) as (model_class, calls):
            model = model_class(copy.deepcopy(config))
            skipped, weights = feed(model, published, table, calls)
        old = stale and numbers(sglang.version) < (0, 5, 12)
        layer = {name for name in weights if name.startswith("layers.0.")}
        assert skipped == {"t2d"} | (layer if old else set())  # SGLang's code says `continue` for t2d
        random = {name for name, parameter in model.named_parameters() if parameter.isnan().any()}
        assert random - {"model.embed_tokens.weight"} == set() or old  # the embedding is set from the target later
        assert len(random) == (1 if not old else 8)
        if not old:
            attention = next(m for name, m in model.named_modules() if name.endswith("self_attn"))
            parts = [weights[next(n for n in weights if n.endswith(f"{p}_proj.weight"))] for p in "qkv"]
            assert torch.equal(attention.qkv_proj.weight.bfloat16(), torch.cat(parts))
            targets = weights["d2t"] + torch.arange(DRAFT_VOCAB)
            assert torch.equal(model.hot_token_id, targets)


def feed(model, folder, table, calls):
    """Load the tensors one by one; return (names that no loader took, tensors by name)."""
    tensors = {table[name]: tensor for name, tensor in load_file(folder / tensor_files.SINGLE).items()}
    skipped = set()

    def one_by_one():
        for name, tensor in tensors.items():
            before, hot = len(calls), model.hot_token_id
            yield name, tensor
            if len(calls) == before and model.hot_token_id is hot:
                skipped.add(name)

    model.load_weights(one_by_one())
    return skipped, tensors


@contextlib.contextmanager
def real_loader(sglang):
    """Yield SGLang's LlamaForCausalLMEagle3 with its real llama.py on plain torch layers, and the list of loader calls.

    Everything else that the two modules import is made up: kernels, parallel groups, server arguments.
    """
    calls = []
    known = plain_layers(calls)
    real = ("sglang.srt.models.llama", "sglang.srt.models.llama_eagle3")

    class Finder:
        def find_spec(self, name, path=None, target=None):
            return importlib.util.spec_from_loader(name, self, is_package=True) if name.startswith("sglang") else None

        def create_module(self, spec):
            return MadeUp(spec.name)

        def exec_module(self, module):
            module.known = known
            if module.__name__ in real:
                exec(compile(sglang.source(module.__name__), module.__name__, "exec"), module.__dict__)

    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module(real[1]).LlamaForCausalLMEagle3, calls
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]


class MadeUp(types.ModuleType):
    """A module in which every name exists."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__["known"].get(name) or type(name, (Anything,), {})


class AnyAttribute(type):
    """Classes on which every attribute exists."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Anything(metaclass=AnyAttribute):
    """Takes every call; every attribute exists."""

    def __init__(self, *_, **__):
        pass

    def __call__(self, *_, **__):
        return Anything()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


def plain_layers(calls):
    """Return what the two modules need of SGLang to hold weights: NaN until a loader fills them."""

    def whole(parameter, tensor):
        assert parameter.shape == tensor.shape
        calls.append(tensor)
        parameter.data.copy_(tensor)

    class Layer(torch.nn.Module):
        def __init__(self, rows, columns=None, loader=None):
            super().__init__()
            shape = (rows,) if columns is None else (rows, columns)
            self.weight = torch.nn.Parameter(torch.full(shape, float("nan")), requires_grad=False)
            if loader:
                self.weight.weight_loader = loader

    def parts(sizes):
        starts = {part: (sum(list(sizes.values())[:i]), size) for i, (part, size) in enumerate(sizes.items())}

        def load(parameter, tensor, part):
            start, size = starts[part]
            assert tensor.shape == (size, parameter.shape[1])
            calls.append(tensor)
            parameter.data[start : start + size].copy_(tensor)

        return load

    def qkv(hidden, head_dim, heads, kv_heads, **_):
        sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        return Layer(sum(sizes.values()), hidden, parts(sizes))

    def merged(columns, rows, **_):
        return Layer(sum(rows), columns, parts(dict(enumerate(rows))))

    def table(rows, columns, **_):
        return Layer(rows, columns)

    parallel = SimpleNamespace(tp_size=1, tp_rank=0, pp_group=None)
    return {
        "QKVParallelLinear": qkv, "MergedColumnParallelLinear": merged, "ParallelLMHead": table,
        "RowParallelLinear": lambda columns, rows, **_: Layer(rows, columns), "VocabParallelEmbedding": table,
        "RMSNorm": lambda size, **_: Layer(size), "default_weight_loader": whole,
        "add_prefix": lambda name, prefix: f"{prefix}.{name}", "is_npu": lambda: False, "is_xpu": lambda: False,
        "get_tensor_model_parallel_world_size": lambda: 1, "get_parallel": lambda: parallel,
        "get_pp_group": lambda: None, "layer_stack": contextlib.nullcontext,
        "get_spec": lambda: SimpleNamespace(speculative_draft_window_size=None),
        "get_global_server_args": lambda: SimpleNamespace(speculative_draft_window_size=None),
    }  # fmt: skip


@pytest.mark.parametrize("ids", [[2, 15, 27], [3, 10, 20]])
def test_sglang_captures_the_trained_layers(sglang, facts, ids):
    for module, model_type in (("llama", "llama"), ("qwen3", "qwen3"), ("deepseek_v2", "kimi_k2")):
        config = config_for(facts, "sglang", sglang.version, model_type, ids)
        nested = config.get("eagle_config", {}).get(IDS)
        target = SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True), model=SimpleNamespace(),
                                 config=SimpleNamespace(num_hidden_layers=30))
        method_of(sglang, module)(target, nested)
        assert sorted(target.model.layers_to_capture) == ids, (module, nested)
        assert flat_config.captured_ids(config, "sglang", sglang.version, family(facts, model_type)) == ids


def test_sglang_captures_for_kimi_since_the_version_that_the_check_names(sglang, published, facts):
    theirs = dataclasses.replace(facts, architecture="KimiK25ForConditionalGeneration")
    export = subject(published, theirs, engine="sglang", version=sglang.version)
    check = export_checks.engine_serves_the_verifier(export)
    source = sglang.source("sglang.srt.models.kimi_k25")
    assert (check.status == findings.OK) == ("def set_eagle3_layers_to_capture" in source)


def method_of(sglang, module):
    """Return `set_eagle3_layers_to_capture` of a model, cut out of its source."""
    source = sglang.source(f"sglang.srt.models.{module}")
    pattern = r"^    def set_eagle3_layers_to_capture\(.*?(?=^    \S|^\S|\Z)"
    (text,) = re.findall(pattern, source, re.DOTALL | re.MULTILINE)
    names: dict = {"Optional": typing.Optional, "List": list}
    exec(textwrap.dedent(text), names)
    return names["set_eagle3_layers_to_capture"]


@pytest.mark.parametrize("flag", flat_config.NORM_FLAGS)
def test_norm_flags_are_in_the_versions_that_the_check_names(sglang, published, facts, flag):
    change(published, config={flag: True})
    exported = subject(published, facts, engine="sglang", version=sglang.version)
    reads = f'"{flag}"' in sglang.source("sglang.srt.models.llama_eagle3")
    assert (export_checks.norm_flags_served(exported).status == findings.OK) == reads


# --- on the engine ----------------------------------------------------------------------------------------


def test_smoke_fails_below_the_given_acceptance(trained, tiny_model, tmp_path, monkeypatch):
    log = tmp_path / "requests"

    def smoke(*more, check=0):
        return export(trained, tiny_model, "--out", tmp_path / "out", "--smoke", "--smoke-count", 3, "--engine-python",
                      python, "--engine-env", json.dumps({"FAKE_LOG": str(log)}), *more, check=check)

    python = install(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("FAKE_METRICS", "no")
    blind = smoke(check=3)
    assert "the engine does not count" in blind.stderr and manifest(tmp_path / "out")["status"] == "failed"
    monkeypatch.delenv("FAKE_METRICS")
    log.unlink()
    good = smoke()
    assert "accepted in 80.0% of 30 rounds" in good.stderr
    assert manifest(tmp_path / "out")["smoke"]["by_position"] == pytest.approx([0.8, 0.5, 0.2])
    requests = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(request["drafter"] for request in requests)
    again = smoke("--min-first-acceptance", 0.9, check=3)
    assert "complete already" in again.stderr and "80.0% of 30 rounds" in again.stderr
    assert len(log.read_text().splitlines()) == len(requests) + 3
    other = smoke("--to", "sglang", check=2)
    assert "--engine sglang" in other.stderr
