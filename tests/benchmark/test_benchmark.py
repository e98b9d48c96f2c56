"""Stage 06 with a fake engine: measuring, resuming, attaching, stopping."""

import json
import signal
import subprocess
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from support.project import ROOT

from eagle3.common.options import EngineOptions
from eagle3.engines import launch

PROMPTS = 6


def test_measures_compares_and_reports(bench):
    result = bench.run(FAKE_CHANGE="3")
    assert result.returncode == 0, result.stderr
    runs = {run["name"]: run for run in bench.results()["runs"]}
    assert list(runs) == ["baseline_c1", "baseline_c4", "drafter-3_c1", "drafter-3_c4"]
    for run in runs.values():
        assert run["requests"] == PROMPTS and run["output_tokens"] == PROMPTS * 20
        assert run["tokens_per_s"] == pytest.approx(run["output_tokens"] / run["seconds"])
        assert run["latency_s"]["p95"] >= run["latency_s"]["median"] > 0
    assert runs["baseline_c1"]["acceptance"] is None
    drafted = runs["drafter-3_c4"]
    assert drafted["acceptance"]["drafts"] == 10 * PROMPTS  # neither warm-up nor the other concurrency
    assert drafted["acceptance"]["length"] == 2.5
    assert drafted["acceptance"]["by_position"] == pytest.approx([0.8, 0.5, 0.2])
    assert drafted["speedup"] == pytest.approx(drafted["tokens_per_s"] / runs["baseline_c4"]["tokens_per_s"])
    assert drafted["lossless"] == {"replies": 6, "identical": 5, "first_difference": {"p3#0": 5}}
    assert sum(not request["drafter"] for request in bench.requests()) == 2 + 2 * PROMPTS  # two of warm-up
    assert "2.500" in result.stderr and "report.html" in result.stderr and "tokens/s" in result.stderr
    assert bench.results()["engine"] == {
        "kind": "vllm", "version": "0.32.0", "attached": False,
        "speculation": {"draft_sample_method": "greedy", "rejection_sample_method": "standard"}}
    assert bench.results()["serving"][0]["line"].startswith("vllm serve") and "Serve with" in result.stderr
    assert bench.manifest()["status"] == "complete" and "report.html" in bench.manifest()["outputs"]
    first = json.loads((bench.out / "replies_drafter-3_c1.jsonl").read_text().splitlines()[0])
    assert first["prompt_token_ids"] == [1, 2, 3] and len(first["completion_token_ids"]) == 20


def test_second_run_does_nothing_and_a_damaged_reply_file_is_measured_again(bench):
    assert bench.run("--concurrency", "1").returncode == 0
    asked = len(bench.requests())
    again = bench.run("--concurrency", "1")
    assert again.returncode == 0 and "complete already" in again.stderr and len(bench.requests()) == asked
    (bench.out / "results.json").unlink()
    rebuilt = bench.run("--concurrency", "1")
    assert rebuilt.returncode == 0 and len(bench.requests()) == asked, rebuilt.stderr
    replies = bench.out / "replies_baseline_c1.jsonl"
    replies.write_bytes(replies.read_bytes()[:-9])
    (bench.out / "results.json").unlink()
    mended = bench.run("--concurrency", "1")
    assert mended.returncode == 0 and "measuring baseline_c1 again" in mended.stderr
    assert len(bench.requests()) == asked + 2 + PROMPTS


def test_other_options_are_refused(bench):
    assert bench.run("--concurrency", "1").returncode == 0
    changed = bench.run("--concurrency", "1", "--max-tokens", "21")
    assert changed.returncode == 3 and "benchmark.max_tokens: 20 → 21" in changed.stderr
    (bench.here / "drafter/model.safetensors").write_bytes(b"another")
    assert "input drafter" in bench.run("--concurrency", "1").stderr


def test_server_that_dies_midway_and_resume(bench):
    failed = bench.run("--concurrency", "1", "2", FAKE_MODE="die")
    assert failed.returncode == 3 and "Segmentation fault in fake kernel" in failed.stderr
    assert bench.manifest()["status"] == "failed" and not (bench.out / "results.json").exists()
    assert [path.stem for path in (bench.out / "runs").glob("*.json")] == ["baseline_c1"]
    resumed = bench.run("--concurrency", "1", "2", FAKE_MODE="die")
    assert resumed.returncode == 0, resumed.stderr
    assert "baseline_c1 is measured already" in resumed.stderr and "baseline_c2 is measured" not in resumed.stderr
    assert [run["name"] for run in bench.results()["runs"]] == ["baseline_c1", "baseline_c2", "drafter-3_c1",
                                                               "drafter-3_c2"]


def test_finished_measurements_survive_a_kill(bench):
    process = subprocess.Popen(bench.command(), cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (bench.out / "runs/baseline_c4.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = (bench.out / "runs/baseline_c4.json").read_bytes()
    resumed = bench.run()
    assert resumed.returncode == 0, resumed.stderr
    assert "baseline_c1 is measured already" in resumed.stderr
    assert (bench.out / "runs/baseline_c4.json").read_bytes() == before
    assert sum(not request["drafter"] for request in bench.requests()) == 2 + 2 * PROMPTS


def test_signal_stops_while_replies_are_awaited(bench):
    process = subprocess.Popen(bench.command(FAKE_MODE="deaf"), cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not bench.requests() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert bench.manifest()["status"] == "interrupted"


def test_missing_counters_are_unavailable(bench):
    result = bench.run("--concurrency", "1", FAKE_METRICS="no")
    assert result.returncode == 0 and "unavailable" in result.stderr
    assert bench.results()["runs"][1]["acceptance"] is None


def test_attached_servers_are_measured_and_left_running(bench):
    engine = EngineOptions(python=bench.python, env={"FAKE_LOG": str(bench.here / "requests")})
    stage = SimpleNamespace(run_dir=bench.here / "servers", check_stop=lambda: None)
    model = bench.here / "verifier"
    with ExitStack() as stack:
        plain = stack.enter_context(launch.serve(engine, model, stage=stage, label="plain"))
        speculative = {"model": "d", "num_speculative_tokens": 3}
        drafting = stack.enter_context(
            launch.serve(engine, model, stage=stage, label="drafting", speculative=speculative)
        )
        endpoints = ["--baseline-endpoint", plain.base_url, "--drafter-endpoint", drafting.base_url]
        result = bench.run(*endpoints, "--concurrency", "2")
        assert result.returncode == 0, result.stderr
        assert bench.results()["runs"][1]["acceptance"]["length"] == 2.5
        assert bench.results()["engine"]["attached"] is True
        assert plain.child.poll() is None and drafting.child.poll() is None
        two = bench.run(*endpoints, "--draft-tokens", "1", "3", "--out", str(bench.here / "two"))
        assert two.returncode == 2 and "one draft-token count" in two.stderr


def test_no_key_is_written_anywhere(bench, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "canary-7f3a")
    result = bench.run("--concurrency", "1", "--log-level", "debug")
    assert result.returncode == 0 and "canary" not in result.stderr
    assert {request["authorization"] for request in bench.requests()} == {"Bearer canary-7f3a"}
    written = [path for path in (bench.here / "run").rglob("*") if path.is_file()]
    assert written and not any(b"canary" in path.read_bytes() for path in written)
