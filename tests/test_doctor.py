"""The doctor: each finding on a machine, engine, model and drafter made for it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3 import doctor, engines, machine
from eagle3.doctor import DoctorOptions

ROOT = Path(__file__).resolve().parent.parent
H200 = "0, NVIDIA H200, 143771, 12, 580.1, 9.0"


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Put an nvidia-smi on the path that prints what it is told; return the function that tells it."""

    def tell(gpus, processes=(), links="GPU0 GPU1\nGPU0 X PHB\nGPU1 PHB X"):
        script = tmp_path / "bin" / "nvidia-smi"
        script.parent.mkdir(exist_ok=True)
        answers = {"gpu": "\n".join(gpus), "apps": "\n".join(processes), "topo": links}
        for name, text in answers.items():
            (tmp_path / name).write_text(text + "\n")
        script.write_text(f"""#!/bin/sh
case "$*" in
  *query-gpu*) cat '{tmp_path}/gpu' ;;
  *query-compute-apps*) cat '{tmp_path}/apps' ;;
  *) cat '{tmp_path}/topo' ;;
esac
""")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")

    return tell


def options(**changes) -> DoctorOptions:
    result = DoctorOptions()
    for name, value in changes.items():
        section, key = name.split("__")
        setattr(getattr(result, section), key, value)
    return result


def findings(check, given) -> dict[str, doctor.Line]:
    return {line.check: line for line in check(given)}


# --- the machine ------------------------------------------------------------------------------------------


def test_gpus_are_read_with_memory_and_capability(smi):
    smi([H200, "1, NVIDIA H200, 143771, 12, 580.1, 9.0"])
    assert [gpu.index for gpu in machine.gpus()] == [0, 1]
    assert machine.gpus()[0] == machine.Gpu(0, "NVIDIA H200", 143771, 12, "580.1", (9, 0))
    assert findings(doctor.check_gpus, options(engine__tensor_parallel_size=2))[""].level == "ok"


def test_too_few_gpus_fail(smi):
    smi([H200])
    line = findings(doctor.check_gpus, options(engine__tensor_parallel_size=8))[""]
    assert line.level == "fail" and "tensor_parallel_size is 8" in line.fix


def test_no_gpu_is_a_warning_unless_several_are_wanted(smi):
    smi([])
    assert findings(doctor.check_gpus, options())[""].level == "warn"
    assert findings(doctor.check_gpus, options(engine__tensor_parallel_size=8))[""].level == "fail"


def test_who_holds_a_gpu_is_named(smi):
    smi(["0, NVIDIA H200, 143771, 90000, 580.1, 9.0"], [f"{os.getpid()}, 89000"])
    line = findings(doctor.check_gpus, options())["gpu memory"]
    assert line.level == "fail" and f"pid {os.getpid()} of " in line.found and "python" in line.found
    smi(["0, NVIDIA H200, 143771, 90000, 580.1, 9.0"])
    assert "cannot be seen" in findings(doctor.check_gpus, options())["gpu memory"].found


@pytest.mark.parametrize(("compiled", "capability", "level"), [
    (["sm_80", "sm_90"], "9.0", "ok"),
    (["sm_80", "sm_86"], "8.9", "ok"),  # a binary of the same major version
    (["sm_80", "sm_90"], "12.0", "fail"),
    (["sm_90", "compute_90"], "12.0", "ok"),  # PTX is compiled for newer GPUs
    (["sm_100", "sm_120"], "12.0", "ok"),
    (["sm_90a"], "9.0", "ok"),
    ([], "9.0", "fail"),  # a torch without CUDA
])
def test_the_engines_torch_must_have_code_for_the_gpu(smi, monkeypatch, compiled, capability, level):
    smi([f"0, GPU, 1000, 1, 580.1, {capability}"])
    monkeypatch.setattr(engines, "compiled_architectures", lambda engine: compiled)
    found = findings(doctor.check_architecture, options())
    assert found[""].level == level
    assert ("blackwell sm120" in found) == (capability == "12.0")


def test_many_gpus_without_nvlink_are_a_warning(smi, monkeypatch):
    monkeypatch.setattr(engines, "compiled_architectures", lambda engine: ["sm_90"])
    rows = [f"{i}, NVIDIA H200, 143771, 12, 580.1, 9.0" for i in range(4)]
    smi(rows)
    assert findings(doctor.check_architecture, options())["links"].level == "warn"
    smi(rows, links="GPU0 GPU1\nGPU0 X NV18\nGPU1 NV18 X")
    assert "links" not in findings(doctor.check_architecture, options())


def test_little_shared_memory_fails_when_workers_need_it(monkeypatch):
    monkeypatch.setattr(machine, "shared_memory", lambda: 64 << 20)
    assert findings(doctor.check_resources, options())["shared memory"].level == "ok"
    several = findings(doctor.check_resources, options(engine__tensor_parallel_size=8))["shared memory"]
    assert several.level == "fail" and "--shm-size" in several.fix


def test_few_open_files_and_a_wrong_clock_are_warnings(monkeypatch):
    monkeypatch.setattr(machine, "open_file_limit", lambda: 1024)
    monkeypatch.setattr(machine, "clock_skew", lambda directory: 90.0)
    found = findings(doctor.check_resources, options())
    assert found["open files"].level == "warn" and "+90 s" in found["clock"].found
    monkeypatch.setattr(machine, "clock_skew", lambda directory: 0.2)
    assert findings(doctor.check_resources, options())["clock"].level == "ok"


# --- engine and model -------------------------------------------------------------------------------------


def test_a_missing_engine_is_a_failure_with_its_interpreter():
    lines = [line for line in doctor.examine(options(engine__kind="sglang")) if line.check == "engine"]
    assert [line.level for line in lines] == ["fail"] and sys.executable in lines[0].found


def test_a_whole_model_is_ok_and_its_tokens_are_told(tiny_model):
    given = options(model__path=str(tiny_model))
    found = findings(doctor.check_model, given)
    assert (found[""].level, found["weights"].level) == ("ok", "ok")
    line = findings(doctor.check_tokenizer, given)[""]
    assert "<|im_end|>" in line.found and "</think>" in line.found


@pytest.fixture
def model(tiny_model, tmp_path):
    import shutil

    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_a_truncated_shard_is_named(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    line = findings(doctor.check_model, options(model__path=str(model)))["weights"]
    assert line.level == "fail" and "model.safetensors: not a whole" in line.found


def test_a_missing_shard_is_named(model):
    index = {"weight_map": {"model.embed_tokens.weight": "model.safetensors", "x": "model-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    line = findings(doctor.check_model, options(model__path=str(model)))["weights"]
    assert line.level == "fail" and "model-00002.safetensors: a file of weights is missing" in line.found


def test_weights_that_do_not_fit_are_told_before_loading(smi, model):
    smi(["0, Tiny, 0, 0, 580.1, 9.0", "1, Tiny, 0, 0, 580.1, 9.0"])
    assert "gpu memory" not in findings(doctor.check_model, options(model__path=str(model)))  # unknown memory
    with open(model / "model.safetensors", "rb") as file:
        megabytes = len(file.read()) / (1 << 20)
    smi([f"0, Tiny, {max(1, int(megabytes / 2))}, 0, 580.1, 9.0"])
    line = findings(doctor.check_model, options(model__path=str(model)))["gpu memory"]
    assert line.level == "fail" and "tensor_parallel_size" in line.fix


def test_a_model_that_is_no_folder_fails_under_offline_settings(monkeypatch):
    monkeypatch.setattr(engines, "check", lambda engine, model: "0.33.0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    line = findings(doctor.check_engine, options(model__path="org/name"))["model folder"]
    assert line.level == "fail" and "HF_HUB_OFFLINE" in line.found


# --- the drafter ------------------------------------------------------------------------------------------


@pytest.fixture
def drafter(tiny_model, tmp_path):
    """An exported drafter of the tiny model, as stage 04 writes it."""
    import numpy as np
    import torch
    from safetensors.torch import save_file

    from eagle3 import drafter as drafters
    from eagle3 import trainstate, verifier, vocab

    facts = verifier.read(tiny_model)
    d2t, t2d = (torch.from_numpy(a) for a in vocab.build_mapping(np.ones(facts.vocab_size, dtype=np.int64), 64))
    built = drafters.build(facts, [2, 4, 5, 7], d2t, t2d, drafters.layer_shape(facts))
    folder = tmp_path / "drafter"
    folder.mkdir()
    save_file(trainstate.served_tensors(built), folder / "model.safetensors", metadata={"format": "pt"})
    config = drafters.served_config(built, facts)
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def look(drafter, tiny_model):
    given = options(model__path=str(tiny_model), model__layers=[2, 4, 5, 7], doctor__drafter=str(drafter))
    return [line for line in doctor.examine(given) if line.check.startswith("drafter")]


def test_a_sound_drafter_is_ok(drafter, tiny_model):
    found = look(drafter, tiny_model)
    assert len(found) > 10 and {line.level for line in found} == {"ok"}


@pytest.mark.parametrize("values", [
    {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "eagle_config": None},
    {"vocab_size": 7},
    {"hidden_size": 128},
    {"max_position_embeddings": 16},
])
def test_a_config_that_costs_acceptance_is_found(drafter, tiny_model, values):
    change_config(drafter, **values)
    assert [line for line in look(drafter, tiny_model) if line.level != "ok"]


def test_missing_tensors_fail(drafter, tiny_model):
    from safetensors.torch import load_file, save_file

    tensors = load_file(drafter / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, drafter / "model.safetensors", metadata={"format": "pt"})
    failed = [line for line in look(drafter, tiny_model) if line.level == "fail"]
    assert any("lm_head.weight" in line.found for line in failed)


def test_an_older_compile_cache_is_a_warning(drafter, tiny_model, tmp_path, monkeypatch):
    cache = tmp_path / "cache" / "torch_compile_cache" / "abc"
    cache.mkdir(parents=True)
    os.utime(cache, (time.time() - 3600,) * 2)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    given = options(model__path=str(tiny_model), model__layers=[2, 4, 5, 7], doctor__drafter=str(drafter))
    assert findings(doctor.check_drafter, given)["compile cache"].level == "warn"


# --- as a command -----------------------------------------------------------------------------------------


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "eagle3.doctor", *map(str, arguments)], capture_output=True, text=True,
                          cwd=ROOT, env=os.environ)


def test_the_command_says_it_line_by_line_and_as_json(tiny_model):
    result = run("--model", tiny_model, "--json")
    lines = {line["check"]: line for line in json.loads(result.stdout)["lines"]}
    assert {"model", "weights", "tokenizer", "engine", "disk", "clock"} <= lines.keys()
    assert result.returncode == (3 if any(line["level"] == "fail" for line in lines.values()) else 0)


def test_wrong_options_are_exit_2():
    result = run("--modle", "x")
    assert result.returncode == 2 and "--model" in result.stderr


def test_a_failure_is_exit_3(tmp_path):
    result = run("--model", tmp_path / "nowhere")
    assert result.returncode == 3 and "→" in result.stdout
