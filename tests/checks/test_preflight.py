"""Before a model is loaded: each stage stops in seconds where the engine would fail after loading, and says why."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fake_engine import install
from support.pipeline import change_tensors, manifest, run_stage, shift_offsets, write_traces
from support.project import ROOT

from eagle3.checks import preflight
from eagle3.checks.subject import Subject
from eagle3.common.errors import PreconditionError
from eagle3.common.findings import said
from eagle3.common.options import ModelOptions

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
PROMPTS = ROOT / "prompts" / "benchmark.jsonl"


@pytest.fixture
def python(tmp_path):
    """The interpreter of a fake vLLM for CPUs."""
    return install(tmp_path / "engine", engine="vllm_cpu")


def stage_for(tmp_path, **common):
    given = SimpleNamespace(**{"dry_run": False, "preflight": True} | common)
    return SimpleNamespace(common=given, run_dir=tmp_path)


def started(run_dir):
    """Return the logs of engines that were started."""
    return sorted(path.name for path in (run_dir / "logs").glob("*-*.log"))


# --- what findings do -------------------------------------------------------------------------------------


def check_all(subject):
    yield said("ok", "first", "fine")
    yield said("warn", "second", "odd", "mend it")
    yield said("fail", "third", "broken", "replace it")
    yield said("fail", "", "broken too")


def test_all_failures_are_told_at_once_with_their_fixes(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "eagle3"), pytest.raises(PreconditionError) as error:
        preflight.require(stage_for(tmp_path), Subject(), [check_all])
    assert error.value.exit_code == 3
    text = str(error.value)
    assert all(part in text for part in ("2 of 4 checks fail", "third: broken", "all: broken too", "third: replace it"))
    assert "--no-preflight" in text and "fine" not in text
    assert [record.message for record in caplog.records] == ["before starting: second: odd (mend it)"]


def test_without_preflight_failures_are_warnings(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "eagle3"):
        preflight.require(stage_for(tmp_path, preflight=False), Subject(), [check_all])
    assert "before starting: third: broken (replace it)" in [record.message for record in caplog.records]


def test_a_plan_for_another_machine_is_not_held_against_this_one(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-1.safetensors"}}')
    subject = Subject(model=ModelOptions(path=str(folder)))
    preflight.require(stage_for(tmp_path, dry_run=True), subject, [check_all])
    with pytest.raises(PreconditionError):
        preflight.require(stage_for(tmp_path), subject, [check_all])
    (folder / "model-1.safetensors").touch()
    with pytest.raises(PreconditionError):
        preflight.require(stage_for(tmp_path, dry_run=True), subject, [check_all])


def test_it_imports_neither_torch_nor_an_engine_and_takes_seconds(tiny_model, drafter, tmp_path):
    program = (
        "import pathlib, sys, types\n"
        "from eagle3.checks import preflight\n"
        "from eagle3.common.options import BenchmarkOptions\n"
        "options = BenchmarkOptions()\n"
        f"options.model.path, here = {str(tiny_model)!r}, pathlib.Path({str(tmp_path)!r})\n"
        "stage = types.SimpleNamespace(common=options.common, run_dir=here)\n"
        f"preflight.before_engine(options, stage, speculates=True, drafter=pathlib.Path({str(drafter)!r}))\n"
        "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])\n"
    )
    before = os.times().children_user
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
    assert os.times().children_user - before < 3  # processor time: other work on the machine does not count


# --- stages -----------------------------------------------------------------------------------------------


def benchmark(run_dir, model, python, *more, check=0):
    return run_stage("06_benchmark.py", "--run-dir", run_dir, "--model", model, "--prompts", PROMPTS, "--limit", 2,
                     "--engine-python", python, "--concurrency", 2, "--max-tokens", 8, "--no-predict", *more,
                     check=check, env=NO_GPU)


def test_06_refuses_a_broken_drafter_before_the_first_server(tiny_model, drafter, python, tmp_path):
    run_dir = tmp_path / "run"
    change_tensors(drafter, shift_offsets)
    for more in ((), ("--dry-run",)):
        refused = benchmark(run_dir, tiny_model, python, *more, check=3)
        assert "mapping-consistent" in refused.stderr and "d2t and t2d do not belong together" in refused.stderr
        assert "--no-preflight" in refused.stderr and started(run_dir) == []
        assert "before starting" not in refused.stderr  # no GPU, and none is wanted: nothing to warn of
    assert manifest(run_dir / "06_bench")["status"] == "failed"
    changed = benchmark(run_dir, tiny_model, python, "--no-preflight", "--max-tokens", 9)  # nothing there is stale yet
    assert "before starting: drafter mapping-consistent" in changed.stderr
    assert started(run_dir) == [f"06_bench-{server}-server.log" for server in
                                ("baseline-again", "baseline", "drafter-3")]
    recorded = manifest(run_dir / "06_bench")
    assert recorded["engine"] == {"kind": "vllm", "version": "0.32.0"}
    assert recorded["patches"] and {patch["state"] for patch in recorded["patches"]} == {"not needed"}


def test_01_and_02_stop_before_an_engine_without_enough_gpus(tiny_model, python, tmp_path):
    write_traces(tmp_path / "captured", tiny_model, count=2)
    shared = ("--model", tiny_model, "--engine-python", python, "--tensor-parallel-size", 8)
    commands = (
        ("01_generate_synthetic.py", "--run-dir", tmp_path / "run", "--prompts", PROMPTS, "--limit", 2, "--serve"),
        ("02_extract_hidden_states.py", "--run-dir", tmp_path / "captured", "--layers", 2, 4, 5, 7, "--max-length", 99),
    )
    for script, *rest in commands:
        for more in ((), ("--dry-run",)):
            result = run_stage(script, *rest, *shared, *more, check=3, env=NO_GPU)
            assert "no NVIDIA GPU is visible" in result.stderr and "tensor_parallel_size is 8" in result.stderr
    assert started(tmp_path / "run") == started(tmp_path / "captured") == []
    script, *rest = commands[1]  # a corrected command is not stale, since nothing was captured
    result = run_stage(script, *rest[:-1], 98, *shared, check=3, env=NO_GPU)
    assert "tensor_parallel_size is 8" in result.stderr


def test_02_stops_at_a_model_that_was_cut_off(tiny_model, python, tmp_path):
    import shutil

    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    write_traces(tmp_path / "run", tiny_model, count=2)
    with open(model / "model.safetensors", "r+b") as file:
        file.truncate((model / "model.safetensors").stat().st_size - 100)
    result = run_stage("02_extract_hidden_states.py", "--run-dir", tmp_path / "run", "--model", model, "--layers", 2, 4,
                       5, 7, "--engine-python", python, check=3, env=NO_GPU)
    assert "model.safetensors: not a whole safetensors file" in result.stderr and "download" in result.stderr
    assert started(tmp_path / "run") == []


def test_04_wants_a_gpu_for_each_process(tiny_model, tmp_path, monkeypatch):
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    row = "0, NVIDIA H200, 143771, 12, 580.1, 9.0, GPU-a0"
    smi.write_text(f"#!/bin/sh\ncase \"$*\" in *query-gpu*) echo '{row}' ;; esac\n")
    smi.chmod(0o755)
    config = json.loads((tiny_model / "config.json").read_text())
    common = {"status": "complete", "identity": "i", "counts": {"done": 4, "tokens": 400}}
    for name, facts in {"02_states": {"hidden_size": config["hidden_size"], "layers": [2, 4, 5, 7]},
                        "03_vocab": {"vocab_size": config["vocab_size"], "draft_vocab_size": 64}}.items():
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "manifest.json").write_text(json.dumps(common | facts))
    for more in ((), ("--dry-run",)):
        result = run_stage("04_train.py", "--run-dir", tmp_path / "run", "--model", tiny_model, "--gpus", 2, *more,
                           check=3, env={"PATH": f"{smi.parent}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "0,1"})
        assert "1 × NVIDIA H200" in result.stderr and "train.gpus is 2" in result.stderr
    assert not (tmp_path / "run/04_train").exists()


def test_smoke_looks_at_engine_and_drafter_first(tiny_model, drafter, python, tmp_path):
    shared = ("--run-dir", tmp_path / "run", "--out", tmp_path / "out", "--checkpoint", drafter, "--model", tiny_model,
              "--engine-python", python, "--smoke", "--smoke-count", 2, "--smoke-tokens", 8)
    refused = run_stage("05_fix_weight_keys.py", *shared, "--tensor-parallel-size", 8, check=3, env=NO_GPU)
    assert "tensor_parallel_size is 8" in refused.stderr and not (tmp_path / "out").exists()
    (drafter.parent / "manifest.json").unlink()  # a checkpoint from elsewhere
    sound = run_stage("05_fix_weight_keys.py", *shared, env=NO_GPU)
    assert "unknown provenance" in sound.stderr
    recorded = manifest(tmp_path / "out")
    assert {patch["state"] for patch in recorded["patches"]} == {"not needed"}
    change_tensors(tmp_path / "out/vllm", shift_offsets)  # the export is damaged after it was made
    again = run_stage("05_fix_weight_keys.py", *shared, env=NO_GPU)
    assert "model.safetensors is missing or damaged" in again.stderr and "smoke: first draft token" in again.stderr
