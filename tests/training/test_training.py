"""Stage 04 as a process."""

import shutil
import signal
import subprocess
import sys

import pytest
from support.pipeline import LAYERS, kill_midway, manifest, run_stage, tree
from support.project import ROOT

from eagle3.common import files
from eagle3.training import checkpoints


def train_arguments(run_dir, model, *more):
    return ["--run-dir", run_dir, "--model", model, "--layers", *LAYERS.split(), "--epochs", 2, "--lr", "1e-3",
            "--batch-tokens", 100, "--validation-fraction", 0.2, "--save-every-steps", 1, *more]


@pytest.fixture(scope="module")
def trained_run(prepared, tiny_model, tmp_path_factory):
    """A run of its own, since `prepared` is everyone's, whose stage 04 was not interrupted."""
    run_dir = shutil.copytree(prepared, tmp_path_factory.mktemp("trained") / "run")
    run_stage("04_train.py", *train_arguments(run_dir, tiny_model))
    return run_dir


@pytest.fixture(scope="module")
def undisturbed(trained_run):
    """The result of stage 04."""
    return trained_run / "04_train"


def test_the_result_is_what_the_design_says(undisturbed):
    result = manifest(undisturbed)
    assert result["status"] == "complete" and result["best"]["acceptance"]["length"] >= 1
    best = undisturbed / "checkpoints" / "best"
    assert (best / "config.json").exists() and (best / "model.safetensors").exists()
    rows = [row for _, row in files.read_jsonl(undisturbed / "metrics.jsonl")]
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, result["counts"]["done"] + 1))
    assert len([row for row in rows if row["kind"] == "validation"]) == 2


def test_the_same_again_does_nothing_and_new_flags_go_beside(trained_run, tiny_model, tmp_path):
    assert "complete already" in run_stage("04_train.py", *train_arguments(trained_run, tiny_model)).stderr
    refused = run_stage("04_train.py", *train_arguments(trained_run, tiny_model, "--lr", "5e-4"), check=3)
    assert "train.lr: 0.001 → 0.0005" in refused.stderr and "--out" in refused.stderr
    other = tmp_path / "04_train_lr5e-4"
    run_stage("04_train.py", *train_arguments(trained_run, tiny_model, "--lr", "5e-4", "--out", other))
    assert manifest(other)["status"] == "complete"


def test_sigkill_costs_nothing(undisturbed, prepared, tiny_model, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(prepared, run_dir, ignore=shutil.ignore_patterns("logs"))
    arguments = train_arguments(run_dir, tiny_model)
    metrics = run_dir / "04_train/metrics.jsonl"
    kill_midway("04_train.py", *arguments, done=lambda: metrics.read_bytes().count(b"\n") if metrics.exists() else 0)
    run_stage("04_train.py", *arguments)
    assert tree(run_dir / "04_train") == tree(undisturbed)


def test_sigterm_saves_and_exits_with_its_code(prepared, tiny_model, tmp_path):
    out = tmp_path / "04_train"
    arguments = train_arguments(prepared, tiny_model, "--out", out, "--epochs", 200, "--save-every-steps", 1000)
    process = subprocess.Popen([sys.executable, ROOT / "04_train.py", *map(str, arguments)], stderr=subprocess.PIPE,
                               text=True)
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "step 10/" in line:
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stderr.read()
    assert process.wait(timeout=60) == 143, "".join(lines) + rest
    assert manifest(out)["status"] == "interrupted"
    assert checkpoints.newest(out / "checkpoints") is not None
