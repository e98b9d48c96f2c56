"""The doctor: each finding on a machine, engine, model and drafter made for it."""

import dataclasses
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.fake_engine import install
from support.pipeline import change_config, change_tensors, write_export
from support.project import ROOT

from eagle3 import doctor
from eagle3.checks import drafter_checks, machine_checks, model_checks
from eagle3.checks.drafter_checks import check_drafter
from eagle3.checks.subject import Subject
from eagle3.checks.subject import look as examine
from eagle3.common import files, machine
from eagle3.common.findings import Finding
from eagle3.common.options import ModelOptions
from eagle3.doctor import DoctorOptions
from eagle3.engines import fatbin, installed
from eagle3.engines.installed import Torch

H200 = "0, NVIDIA H200, 143771, 12, 580.1, 9.0, GPU-a0"
SECOND = "1, NVIDIA H200, 143771, 12, 580.1, 9.0, GPU-b1"


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


def subject(**changes) -> Subject:
    """Return what is examined: engine__args and the like go into its sections."""
    own = {name: value for name, value in changes.items() if "__" not in name}
    given = options(**{name: value for name, value in changes.items() if "__" in name})
    return Subject(given.engine, given.model, **own)


def findings(check, given) -> dict[str, Finding]:
    return {line.name: line for line in check(given)}


# --- the machine ------------------------------------------------------------------------------------------


def test_gpus_are_read_with_memory_and_capability(smi):
    smi([H200, SECOND])
    assert [gpu.index for gpu in machine.gpus()] == [0, 1]
    assert machine.gpus()[0] == machine.Gpu(0, "NVIDIA H200", 143771, 12, "580.1", (9, 0), "GPU-a0")
    assert findings(machine_checks.check_gpus, subject(engine__tensor_parallel_size=2))[""].status == "ok"


@pytest.mark.parametrize(("visible", "indexes"), [
    ("1", [1]), ("1,0", [1, 0]), ("GPU-b", [1]), ("0,7,1", [0]), ("", []),
])
def test_only_visible_gpus_count(smi, monkeypatch, visible, indexes):
    smi([H200, SECOND])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in machine.gpus()] == indexes
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [gpu.index for gpu in subject(engine__env={"CUDA_VISIBLE_DEVICES": visible}).gpus] == indexes


def test_too_few_gpus_fail(smi):
    smi([H200])
    line = findings(machine_checks.check_gpus, subject(engine__tensor_parallel_size=8))[""]
    assert line.status == "fail" and "tensor_parallel_size is 8" in line.fix
    training = findings(machine_checks.check_gpus, subject(engine__tensor_parallel_size=8, trains=True))[""]
    assert training.status == "fail" and "train.gpus is 8" in training.fix


def test_no_gpu_is_a_warning_unless_several_are_wanted(smi, monkeypatch):
    smi([])
    for for_cpus, level in ((True, "ok"), (False, "warn")):
        monkeypatch.setattr(installed, "is_for_cpus", lambda engine, answer=for_cpus: answer)
        assert findings(machine_checks.check_gpus, subject())[""].status == level
        assert findings(machine_checks.check_gpus, subject(engine__tensor_parallel_size=8))[""].status == "fail"
    for processes, level in ((1, "ok"), (2, "warn")):  # training takes the CPU
        line = findings(machine_checks.check_gpus, subject(engine__tensor_parallel_size=processes, trains=True))[""]
        assert line.status == level


def test_who_holds_a_gpu_is_named(smi):
    held = "0, NVIDIA H200, 143771, 90000, 580.1, 9.0, GPU-a0"
    with subprocess.Popen(["sleep", "60"]) as holder:
        smi([held], [f"{holder.pid}, 89000"])
        line = findings(machine_checks.check_gpus, subject())["gpu memory held"]
        holder.kill()
    assert line.status == "fail" and f"pid {holder.pid} of " in line.found and "sleep 60" in line.found
    smi([held])
    assert "cannot be seen" in findings(machine_checks.check_gpus, subject())["gpu memory held"].found
    smi([SECOND, held])  # not among those that the engine takes
    assert findings(machine_checks.check_gpus, subject())["gpu memory held"].status == "warn"


@pytest.mark.parametrize(("arguments", "refused"), [
    ([], True), (["--gpu-memory-utilization", "0.85"], False), (["--gpu-memory-utilization=0.95"], True),
    (["--mem-fraction-static", "0.5"], False),
])
def test_an_engine_that_leaves_memory_to_others_may_share(smi, arguments, refused):
    smi(["0, NVIDIA H200, 100000, 10000, 580.1, 9.0, GPU-a0"])
    assert ("gpu memory held" in findings(machine_checks.check_gpus, subject(engine__args=arguments))) == refused


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
    smi([f"0, GPU, 1000, 1, 580.1, {capability}, GPU-a0"])
    monkeypatch.setattr(installed, "torch_of", lambda engine: Torch(True, "13.0", tuple(compiled)))
    found = findings(machine_checks.check_architecture, subject())
    assert found[""].status == level
    assert ("blackwell sm120" in found) == (capability == "12.0")


@pytest.mark.parametrize(("kernels", "level", "words"), [
    ({"sm_90", "sm_120"}, "ok", "sm_120"), ({"sm_90", "compute_80"}, "warn", "may be missing"),
    ({"sm_90"}, "fail", "sm_90"),
])
def test_vllm_must_have_code_for_the_gpu_as_well(smi, monkeypatch, kernels, level, words):
    smi(["0, GPU, 1000, 1, 580.1, 12.0, GPU-a0"])
    monkeypatch.setattr(installed, "torch_of", lambda engine: Torch(True, "13.0", ("sm_120",)))
    monkeypatch.setattr(installed, "kernel_architectures", lambda engine: kernels)
    line = next(line for line in machine_checks.check_architecture(subject()) if "vLLM has" in line.found)
    assert line.status == level and words in line.found


@pytest.mark.parametrize(("cuda", "words"), [("13.0", "built for CUDA 13.0"), (None, "built for CPUs")])
def test_a_torch_that_sees_no_gpu_where_there_is_one(smi, monkeypatch, cuda, words):
    smi([H200])
    monkeypatch.setattr(installed, "torch_of", lambda engine: Torch(False, cuda, ()))
    line = findings(machine_checks.check_architecture, subject())[""]
    assert line.status == "fail" and words in line.found and "580.1" in line.found


def fat_library(path, *containers):
    """Write an ELF file whose device code has these (kind, architecture) entries, a list a container."""
    code = b""
    for entries in containers:
        body = b"".join(struct.pack("<HHIQ12xI32x", kind, 0x101, 64, 24, number) + b"x" * 24
                        for kind, number in entries)
        code += struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body + b"\0" * 8  # padding between them
    names = b"\0.text\0.nv_fatbin\0.shstrtab\0"
    rows = [(0, 0, 0), (1, 64, 4), (7, 68, len(code)), (18, 68 + len(code), len(names))]
    sections = b"".join(struct.pack("<II16xQQ24x", name, 1, start, size) for name, start, size in rows)
    table = 68 + len(code) + len(names)
    header = b"\x7fELF\x02" + b"\0" * 35 + struct.pack("<Q", table) + b"\0" * 10 + struct.pack("<HHH", 64, len(rows), 3)
    path.write_bytes(header.ljust(64, b"\0")[:64] + b"text" + code + names + sections)
    return path


def test_device_code_is_read_from_a_library(tmp_path):
    library = fat_library(tmp_path / "_C.so", [(2, 90), (1, 80)], [(2, 120), (64, 75)])
    assert fatbin.architectures(library) == {"sm_90", "compute_80", "sm_120"}
    assert fatbin.architectures(fat_library(tmp_path / "none.so")) == set()
    (tmp_path / "text.so").write_text("no library")
    assert fatbin.architectures(tmp_path / "text.so") == set()


def test_many_gpus_without_nvlink_are_a_warning(smi, monkeypatch):
    monkeypatch.setattr(installed, "torch_of", lambda engine: Torch(True, "13.0", ("sm_90",)))
    rows = [f"{i}, NVIDIA H200, 143771, 12, 580.1, 9.0, GPU-{i}" for i in range(4)]
    smi(rows)
    assert findings(machine_checks.check_architecture, subject())["links"].status == "warn"
    smi(rows, links="GPU0 GPU1\nGPU0 X NV18\nGPU1 NV18 X")
    assert "links" not in findings(machine_checks.check_architecture, subject())


def test_who_holds_the_engines_port_is_named(tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = str(server.getsockname()[1])
        line = findings(machine_checks.check_ports, subject(serve_args=["--port", port]))["port"]
        assert line.status == "fail" and f"{port} is held by pid {os.getpid()} of " in line.found
    assert findings(machine_checks.check_ports, subject(engine__args=[f"--port={port}"]))["port"].status == "ok"
    assert findings(machine_checks.check_ports, subject()) == {}


def test_little_shared_memory_fails_when_workers_need_it(monkeypatch):
    monkeypatch.setattr(machine, "shared_memory", lambda: 64 << 20)
    assert findings(machine_checks.check_shared_memory, subject())[""].status == "ok"
    several = findings(machine_checks.check_shared_memory, subject(engine__tensor_parallel_size=8))[""]
    assert several.status == "fail" and "--shm-size" in several.fix


def test_low_limits_and_a_wrong_clock_are_warnings(monkeypatch):
    monkeypatch.setattr(machine, "open_file_limit", lambda: 1024)
    monkeypatch.setattr(machine, "process_limit", lambda: 1000)
    monkeypatch.setattr(machine, "clock_skew", lambda directory: 90.0)
    found = findings(machine_checks.check_resources, subject())
    assert found["open files"].status == found["processes"].status == "warn" and "+90 s" in found["clock"].found
    monkeypatch.setattr(machine, "clock_skew", lambda directory: 0.2)
    monkeypatch.setattr(machine, "process_limit", lambda: -1)
    found = findings(machine_checks.check_resources, subject())
    assert (found["clock"].status, found["processes"].status) == ("ok", "ok")


# --- engine and model -------------------------------------------------------------------------------------


def test_a_missing_engine_is_a_failure_with_its_interpreter():
    lines = [line for line in doctor.examine(options(engine__kind="sglang")) if line.name == "engine"]
    assert [line.status for line in lines] == ["fail"] and sys.executable in lines[0].found


def test_a_whole_model_is_ok_and_its_tokens_are_told(tiny_model):
    given = subject(model__path=str(tiny_model))
    found = findings(model_checks.check_model, given)
    assert (found[""].status, found["weights"].status) == ("ok", "ok")
    line = findings(model_checks.check_tokenizer, given)[""]
    assert "<|im_end|>" in line.found and "</think>" in line.found


@pytest.fixture
def model(tiny_model, tmp_path):
    import shutil

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


# --- the drafter ------------------------------------------------------------------------------------------


@pytest.fixture
def drafter(tiny_model, tmp_path):
    return write_export(tmp_path / "run/05_export", tiny_model)


def look(drafter, tiny_model, **more):
    return list(drafter_checks.check_drafter(subject(model__path=str(tiny_model), drafter=drafter, **more)))


def named(lines, level="fail"):
    return {line.name.removeprefix("drafter "): line.found for line in lines if line.status == level}


def test_a_sound_drafter_is_ok(drafter, tiny_model):
    given = options(model__path=str(tiny_model), doctor__drafter=str(drafter))
    found = [line for line in doctor.examine(given) if line.name.startswith("drafter")]
    assert len(found) > 20 and {line.status for line in found} == {"ok"}


@pytest.mark.parametrize(("values", "level", "name"), [
    ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "eagle_config": None}, "fail", "ids-match-the-manifest"),
    ({"vocab_size": 7}, "fail", "belongs-to-the-verifier"),
    ({"hidden_size": 128}, "fail", "belongs-to-the-verifier"),
    ({"max_position_embeddings": 16}, "warn", "positions-cover-serving"),
])
def test_a_config_that_costs_acceptance_is_found(drafter, tiny_model, values, level, name):
    change_config(drafter, **values)
    assert name in named(look(drafter, tiny_model), level)


def shift_offsets(tensors):
    tensors["d2t"] = tensors["d2t"] + 1


def random_embedding(tensors):
    import torch

    tensors["embed_tokens.weight"] = torch.randn(tensors["t2d"].shape[0], tensors["norm.weight"].shape[0])


@pytest.mark.parametrize(("change", "name", "words"), [
    (lambda tensors: tensors.pop("lm_head.weight"), "keys-known-and-complete", "lm_head.weight"),
    (shift_offsets, "mapping-consistent", "do not belong together"),
    (random_embedding, "embedding-is-the-verifiers", "not the verifier's"),
])
@pytest.mark.parametrize("small", [True, False])
def test_weights_that_cost_acceptance_are_found(drafter, tiny_model, monkeypatch, change, name, words, small):
    change_tensors(drafter, change)
    monkeypatch.setattr(drafter_checks, "_SMALL", 1 << 30 if small else 0)
    assert words in named(look(drafter, tiny_model))[name]


def test_a_foreign_drafter_is_of_unknown_provenance(drafter, tiny_model):
    (drafter.parent / "manifest.json").unlink()
    line = next(line for line in look(drafter, tiny_model) if line.name == "drafter provenance")
    assert line.status == "warn" and "unknown provenance" in line.found and "[2, 4, 5]" in line.found
    assert "05_fix_weight_keys.py --smoke" in line.fix


def test_trained_ids_come_from_the_exports_manifest_else_from_the_checkpoint_itself(drafter):
    def write(folder, content):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").write_text(json.dumps(content))

    def training():
        found = drafter_checks.training_of(drafter)
        return found["trained_ids"], found["trained_here"], found["keeps_embedding"]

    assert training() == ([2, 4, 5], True, False)
    write(drafter.parent, {"stage": "05_export", "options": {"export": {"trained_embedding": True}},
                           "trained": {"ids": [1, 2, 3], "here": True}})
    assert training() == ([1, 2, 3], True, True)
    write(drafter.parent, {"stage": "another"})
    assert training() == (None, False, False)
    (drafter / "trainer.json").write_text(json.dumps({"step": 1}))  # of an older version
    assert training() == (None, True, False)
    (drafter / "trainer.json").write_text(json.dumps({"step": 1, "layers": [1, 2, 4, 7]}))
    assert training() == ([1, 2, 4], True, False)


def test_an_older_compile_cache_is_a_warning_where_the_engine_does_not_see_ids(drafter, tiny_model, tmp_path):
    cache = tmp_path / "cache" / "torch_compile_cache" / "abc"
    cache.mkdir(parents=True)
    os.utime(cache, (time.time() - 3600,) * 2)

    def lines(version, **env):
        here = tmp_path / "-".join([version, *env])
        here.mkdir()
        given = subject(model__path=str(tiny_model), drafter=drafter, engine__python=install(here, version),
                        engine__env={"VLLM_CACHE_ROOT": str(tmp_path / "cache")} | env)
        return [line.status for line in drafter_checks.check_drafter(given) if line.name == "compile cache"]

    assert lines("0.16.0") == ["warn"]
    assert lines("0.17.1") == lines("0.16.0", VLLM_DISABLE_COMPILE_CACHE="1") == []


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


def test_a_tokenizer_other_than_the_trainings_is_a_failure_and_a_template_a_warning(drafter, tiny_model, tmp_path):
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    files.write_json(tmp_path / "run/02_states/manifest.json", {"inputs": {"model": files.model_identity(model)}})

    def levels():
        subject = Subject(model=ModelOptions(path=str(model)), run_dir=tmp_path / "run", drafter=drafter)
        return {line.name: line.status for line in check_drafter(subject)
                if line.name in ("drafter tokenizer", "drafter chat_template")}

    assert levels() == {}
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert levels() == {"drafter chat_template": "warn"}
    path = model / "tokenizer.json"
    path.write_text(path.read_text().replace('"the"', '"thy"') + " ")
    assert levels() == {"drafter chat_template": "warn", "drafter tokenizer": "fail"}
