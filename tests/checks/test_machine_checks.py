"""Checks of the machine, each on one made for it."""

import os
import socket
import subprocess

import pytest
from support.examined import findings, subject

from eagle3.checks import machine_checks
from eagle3.common import machine
from eagle3.engines import installed
from eagle3.engines.installed import Torch

H200 = "0, NVIDIA H200, 143771, 12, 580.1, 9.0, GPU-a0"
SECOND = "1, NVIDIA H200, 143771, 12, 580.1, 9.0, GPU-b1"


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
