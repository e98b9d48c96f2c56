"""What is checked and chosen before a server is started."""

import subprocess
import sys

import pytest
from support.project import ROOT

from eagle3.benchmark import plan
from eagle3.common import config
from eagle3.common.errors import UsageError
from eagle3.common.options import BenchmarkOptions
from eagle3.engines import installed


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--drafter", "absent"], 3, "config.json is missing"),
        (["--model", "absent"], 3, "not a model folder"),
        (["--engine-python", "/absent/python"], 3, "does not run"),
        (["--prompts", "absent.jsonl"], 3, "prompts file is missing"),
        (["--concurrency", "0"], 2, "at least 1"),
        (["--draft-tokens", "3", "3"], 2, "different numbers"),
    ],
)
def test_preconditions_fail_in_a_dry_run(bench, arguments, code, message):
    result = bench.run("--dry-run", *arguments)
    assert result.returncode == code and message in result.stderr
    assert not (bench.here / "run").exists()


def test_unfinished_export_is_refused_and_dry_run_writes_nothing(bench):
    dry = bench.run("--dry-run")
    assert dry.returncode == 0 and "24 requests" in dry.stderr and not (bench.here / "run").exists()
    command = [part for part in bench.command() if part not in ("--drafter", str(bench.here / "drafter"))]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 3 and "05_fix_weight_keys.py" in result.stderr


def test_a_dry_run_says_what_the_prediction_takes_or_why_there_is_none(bench):
    command = [part for part in bench.command("--dry-run", "--temperature", "0.7") if part != "--no-predict"]
    dry = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert dry.returncode == 0, dry.stderr
    assert "predict the states of at most 120 generated tokens" in dry.stderr  # 6 prompts of 20, one count
    args = "--speculative-config.rejection_sample_method block"
    dry = subprocess.run([*command, f"--engine-args={args}"], cwd=ROOT, capture_output=True, text=True)
    assert "predicts nothing at temperature 0.7: with rejection_sample_method=block" in dry.stderr


def test_states_for_the_prediction_come_from_the_engine_that_serves_or_else_from_a_vllm(monkeypatch):
    options = BenchmarkOptions()
    assert plan.capture_engine(options) is options.engine
    options.benchmark.temperature = [0.7]
    assert plan.capture_engine(options) is options.engine
    options.engine.kind, options.engine.args = "sglang", ["--attention-backend", "triton"]
    found = plan.capture_engine(options)  # this interpreter has it
    assert (found.kind, found.args) == ("vllm", [])
    options.benchmark.capture_python = "/usr/bin/python3"
    assert plan.capture_engine(options) is None
    version = installed.engine_version
    monkeypatch.setattr(installed, "engine_version",
                        lambda engine: "0.5.17" if engine.kind == "sglang" else version(engine))
    options.benchmark.capture_python = None
    assert plan.capture_engine(options) is options.engine
    options.benchmark.capture_python = sys.executable  # named, so it is vLLM's to capture
    assert plan.capture_engine(options).kind == "vllm"


def test_a_temperature_may_be_one_number_as_it_once_was(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("benchmark: {temperature: 0.7, draft_tokens: [3]}")
    assert config.parse(BenchmarkOptions, ["--config", str(path)], "").benchmark.temperature == [0.7]
    path.write_text("benchmark: {draft_tokens: 3}")
    with pytest.raises(UsageError):
        config.parse(BenchmarkOptions, ["--config", str(path)], "")
    twice = config.parse(BenchmarkOptions, ["--model", "m", "--prompts", "p", "--temperature", "0", "0"], "")
    with pytest.raises(UsageError, match="different numbers"):
        plan.check_choices(twice)
