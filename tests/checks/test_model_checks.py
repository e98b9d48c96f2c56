"""Checks of engine and model, each on one made for it."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from support.examined import findings, subject
from support.fake_engine import install

from eagle3.checks import model_checks
from eagle3.checks.subject import look as examine
from eagle3.common import machine


def test_a_whole_model_is_ok_and_its_tokens_are_told(tiny_model):
    given = subject(model__path=str(tiny_model))
    found = findings(model_checks.check_model, given)
    assert (found[""].status, found["weights"].status) == ("ok", "ok")
    line = findings(model_checks.check_tokenizer, given)[""]
    assert "<|im_end|>" in line.found and "</think>" in line.found


@pytest.fixture
def model(tiny_model, tmp_path):
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_a_truncated_shard_is_named(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    line = findings(model_checks.check_model, subject(model__path=str(model)))["weights"]
    assert line.status == "fail" and "model.safetensors: not a whole" in line.found


def test_a_missing_shard_is_named(model):
    index = {"weight_map": {"model.embed_tokens.weight": "model.safetensors", "x": "model-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    line = findings(model_checks.check_model, subject(model__path=str(model)))["weights"]
    assert line.status == "fail" and "model-00002.safetensors: a file of weights is missing" in line.found


def test_weights_that_do_not_fit_are_told_before_loading(smi, model):
    smi(["0, Tiny, 0, 0, 580.1, 9.0, GPU-a0", "1, Tiny, 0, 0, 580.1, 9.0, GPU-b1"])
    assert "gpu memory" not in findings(model_checks.check_model, subject(model__path=str(model)))  # unknown memory
    with open(model / "model.safetensors", "rb") as file:
        megabytes = len(file.read()) / (1 << 20)
    smi([f"0, Tiny, {max(1, int(megabytes / 2))}, 0, 580.1, 9.0, GPU-a0"])
    line = findings(model_checks.check_model, subject(model__path=str(model)))["gpu memory"]
    assert line.status == "fail" and "tensor_parallel_size" in line.fix


def test_weights_that_do_not_fit_the_memory_of_a_machine_without_gpus(smi, model, monkeypatch):
    smi([])
    monkeypatch.setattr(machine, "memory", lambda: 1000)
    line = findings(model_checks.check_model, subject(model__path=str(model)))["memory"]
    assert line.status == "fail" and "1.0 kB of memory" in line.found


def test_a_shard_that_lacks_what_the_index_says_is_named(model):
    names = dict.fromkeys(["model.embed_tokens.weight", "model.layers.99.weight"], "model.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    line = findings(model_checks.check_model, subject(model__path=str(model)))["weights"]
    assert line.status == "fail" and "lacks 1 tensors of the index, such as model.layers.99.weight" in line.found


def test_a_tokenizer_that_does_not_load_is_a_failure(model):
    (model / "tokenizer.json").write_text("{")
    line = next(line for line in examine(subject(model__path=str(model)), [model_checks.check_tokenizer]))
    assert line.status == "fail" and "the tokenizer does not load" in line.found and str(model) in line.found


def test_a_model_that_is_no_folder_fails_under_offline_settings(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (line,) = examine(subject(model__path="org/name"), [model_checks.check_model])
    assert line.status == "fail" and "HF_HUB_OFFLINE" in line.found and "--model" in line.fix


def test_an_engine_that_may_go_online_is_a_warning(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert findings(model_checks.check_offline, subject())[""].status == "ok"
    line = findings(model_checks.check_offline, subject(engine__env={"HF_HUB_OFFLINE": "0"}))[""]
    assert line.status == "warn" and "HF_HUB_OFFLINE=0" in line.found


def test_known_faults_of_a_version_are_told(tiny_model, tmp_path):
    python = install(tmp_path, "0.5.9", "sglang")
    (tmp_path / "packages/sglang").mkdir()
    (tmp_path / "packages/sglang/__init__.py").touch()
    given = subject(model__path=str(tiny_model), engine__kind="sglang", engine__python=python)
    warned = [line for line in model_checks.check_engine(given) if line.name == "sglang 0.5.9"]
    assert any("layers.0.*" in line.found for line in warned)
    assert not any("Kimi" in line.found or "FlashInfer" in line.found for line in warned)  # of another family
    assert not [line for line in model_checks.check_engine(dataclasses.replace(given, speculates=False))
                if line.status != "ok"]
