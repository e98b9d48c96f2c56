"""Stage 06 with a fake engine: measuring, resuming, attaching, stopping."""

import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from support.pages import is_harmless
from support.project import ROOT

from eagle3.common import files
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
    page = is_harmless(bench.out / "report.html").text
    for text in ("06_benchmark.py --model", '"max_tokens": 20', sys.version.split()[0], "threads", "pays"):
        assert text in page, text  # command, resolved configuration, versions, hardware, the first line
    deciding = bench.results()["made_with"]["deciding"]
    assert (deciding["benchmark.warmup_prompts"], deciding["engine.tensor_parallel_size"]) == (2, 1)
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


def test_another_draft_token_count_keeps_what_is_measured(bench):
    arguments = ("--concurrency", "1", "--baseline-again")
    first = bench.run(*arguments)
    assert first.returncode == 0, first.stderr
    assert [run["name"] for run in bench.results()["runs"]] == ["baseline_c1", "drafter-3_c1", "baseline-again_c1"]
    before = {path.name: path.read_bytes() for path in (bench.out / "runs").iterdir()}
    asked = len(bench.requests())
    foreseen = bench.run(*arguments, "--draft-tokens", "3", "5", "--dry-run")
    assert "2 measurements (2 are done): 12 requests, at most 240 tokens" in foreseen.stderr, foreseen.stderr
    assert foreseen.stderr.count("INFO    starts") == 2 and "drafter-5" in foreseen.stderr
    wider = bench.run(*arguments, "--draft-tokens", "3", "5")
    assert wider.returncode == 0, wider.stderr
    assert "drafter-3_c1 is measured already" in wider.stderr
    results = bench.results()
    assert [run["name"] for run in results["runs"]] == ["baseline_c1", "drafter-3_c1", "drafter-5_c1",
                                                       "baseline-again_c1"]
    assert results["runs"][3]["measurements"] == ["baseline-again_c1", "baseline-again_c1-2"]
    assert all((bench.out / "runs" / name).read_bytes() == content for name, content in before.items())
    assert len(bench.requests()) == asked + 2 * (2 + PROMPTS)  # the new drafter, and the end once more
    assert results["drift"][0]["change"] == pytest.approx(
        json.loads((bench.out / "runs/baseline-again_c1-2.json").read_text())["tokens_per_s"]
        / results["runs"][0]["tokens_per_s"] - 1)
    assert bench.run(*arguments, "--draft-tokens", "3", "5", "--max-tokens", "21").returncode == 3
    as_of_an_earlier_version(bench)
    asked = len(bench.requests())
    kept = bench.run("--concurrency", "1", "--draft-tokens", "3", "5")
    assert kept.returncode == 0 and len(bench.requests()) == asked, kept.stderr
    assert {run["draft_tokens"] for run in bench.results()["runs"]} == {0, 3, 5}


def as_of_an_earlier_version(bench):
    """Rewrite a finished stage as it was when its measurements carried the fingerprint of the whole."""
    manifest = bench.manifest()
    identity = json.loads((bench.out / "runs/baseline_c1.json").read_text())["prompts_identity"]
    axes = {"benchmark.draft_tokens": [3, 5], "benchmark.concurrency": [1], "benchmark.temperature": 0.0,
            "benchmark.prompts": "prompts.jsonl", "benchmark.predict": False, "input prompts": identity}
    manifest["fingerprint_basis"] |= axes
    manifest["fingerprint"] = files.sha256_json(manifest["fingerprint_basis"])
    (bench.out / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if k != "seal"}))
    for path in (bench.out / "runs").iterdir():
        run = json.loads(path.read_text())
        if run["server"] == "baseline-again":
            path.unlink()
            continue
        new = ("server", "temperature", "prompts", "prompts_identity", "control_identity", "repeat", "measured_at")
        old = {name: value for name, value in run.items() if name not in new}
        path.write_text(json.dumps(old | {"fingerprint": manifest["fingerprint"]}))


def test_a_matrix_with_repeats_sets_and_a_control_in_one_run(bench):
    questions = "".join(json.dumps({"question": f"What is {k} + {k}?", "answer": str(2 * k)}) + "\n" for k in range(3))
    (bench.here / "test.jsonl").write_text(questions)
    control = bench.here / "control"
    control.mkdir()
    for path in (bench.here / "drafter").iterdir():
        (control / path.name).write_bytes(path.read_bytes() + b" ")
    arguments = ("--concurrency", "2", "--temperature", "0", "0.7", "--repeats", "2", "--prompt-sets",
                 f"gsm8k={bench.here / 'test.jsonl'}", "--control", str(control))
    result = bench.run(*arguments, FAKE_PAUSE_S="0.002")
    assert result.returncode == 0, result.stderr
    results = bench.results()
    names = [run["name"] for run in results["runs"]]
    each = ["_c2", "_c2_t0.7", "_c2_gsm8k", "_c2_t0.7_gsm8k"]
    assert names == [server + load for server in ("baseline", "drafter-3", "control-3") for load in each]
    assert [len(run["measurements"]) for run in results["runs"]] == [2] * 12
    asked = [request for request in bench.requests() if request["max_tokens"] == 20]
    assert {(request["temperature"], request["seed"]) for request in asked} == {(0, 0), (0, 1), (0.7, 0), (0.7, 1)}
    for run in results["runs"]:
        assert run["requests"] == (3 if run["prompts"] == "gsm8k" else PROMPTS)
        low, high = run["spread"]["tokens_per_s"]
        assert low <= run["tokens_per_s"] <= high
        assert 0 < run["first_token_s"]["median"] < run["latency_s"]["median"] <= run["latency_s"]["p99"]
        chunks = 10 if run["draft_tokens"] else 19  # after the first, for 19 tokens
        assert run["between_tokens_s"]["mean"] == pytest.approx(run["between_chunks_s"]["mean"] * chunks / 19)
        if run["draft_tokens"]:
            assert run["spread"]["speedup"][0] <= run["speedup"] <= run["spread"]["speedup"][1]
            assert run["acceptance"]["drafts"] == 2 * 10 * run["requests"]
            assert run["acceptance"]["error_from"] == "replies"  # whose chunks are as many as the rounds
            assert 1.8 < run["tokens_per_chunk"] < 2 and ("lossless" in run) == (run["temperature"] == 0)
        else:
            assert run["tokens_per_chunk"] == 1
    assert results["control"]["answer"] == "sound" and results["control"]["ours"]["length"] == 2.5
    assert [(each["name"], each["prompts"]) for each in results["sets"]] == [("prompts", PROMPTS), ("gsm8k", 3)]
    table = result.stderr.partition("INFO    results\n")[2].partition("INFO    report")[0]
    assert "control 3" in table and "gsm8k" in table and "±" in table
    # a command stays whole
    lines = [line for line in table.splitlines()[:-1] if not line.startswith(("  ", "Control:"))]
    assert max(map(len, lines)) <= 120
    kept = json.loads((bench.out / "runs/drafter-3_c2_t0.7_r2.json").read_text())
    assert kept["sampling"]["sent"]["seed"] == 1 and kept["control_identity"] == ""


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
