"""Stage 06 with a fake engine: measuring, resuming, comparing, predicting."""

import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fake_engine import install
from support.pages import block_matplotlib
from support.project import ROOT

from eagle3.benchmark import measurements, plan, prediction
from eagle3.common import files
from eagle3.common.options import BenchmarkOptions, EngineOptions
from eagle3.engines import launch
from eagle3.training.acceptance import Acceptance

PROMPTS = 6


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A verifier, a drafter, prompts, a fake engine, and `run(*arguments, **engine environment)`."""
    for name in ("verifier", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    rows = [{"id": f"p{i}", "messages": [{"role": "user", "content": f"{'long ' * i}{i}"}]} for i in range(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = tmp_path / "requests"
    python = install(tmp_path)
    monkeypatch.setenv("PYTHONPATH", block_matplotlib(tmp_path))  # seconds a run; the report's tests have it

    def command(*arguments, **env):
        engine_env = {"FAKE_LOG": str(log)} | env
        return [
            sys.executable, "06_benchmark.py", "--model", str(tmp_path / "verifier"), "--prompts",
            str(tmp_path / "prompts.jsonl"), "--run-dir", str(tmp_path / "run"), "--engine-python", python,
            "--drafter", str(tmp_path / "drafter"), "--concurrency", "1", "4", "--max-tokens", "20",
            "--no-predict", "--no-preflight", "--engine-env", json.dumps(engine_env), *arguments,
        ]  # fmt: skip

    def run(*arguments, **env):
        return subprocess.run(command(*arguments, **env), cwd=ROOT, capture_output=True, text=True, timeout=120)

    out = tmp_path / "run/06_bench"
    return SimpleNamespace(
        run=run, command=command, out=out, here=tmp_path, python=python,
        results=lambda: json.loads((out / "results.json").read_text()),
        manifest=lambda: json.loads((out / "manifest.json").read_text()),
        requests=lambda: [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else [],
    )  # fmt: skip


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
    assert bench.results()["engine"] == {"kind": "vllm", "version": "0.32.0", "attached": False}
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
    measured = sorted(path.stem for path in (bench.out / "runs").glob("*.json"))
    resumed = bench.run("--concurrency", "1", "2")
    assert resumed.returncode == 0, resumed.stderr
    assert all(f"{name} is measured already" in resumed.stderr for name in measured)
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


def test_attached_servers_are_checked_and_left_running(bench):
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
def test_preconditions_fail_in_a_dry_run_too(bench, arguments, code, message):
    result = bench.run("--dry-run", *arguments)
    assert result.returncode == code and message in result.stderr
    assert not (bench.here / "run").exists()


def test_unfinished_export_is_refused_and_dry_run_writes_nothing(bench):
    dry = bench.run("--dry-run")
    assert dry.returncode == 0 and "24 requests" in dry.stderr and not (bench.here / "run").exists()
    command = [part for part in bench.command() if part not in ("--drafter", str(bench.here / "drafter"))]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 3 and "05_fix_weight_keys.py" in result.stderr


def test_no_key_is_written_anywhere(bench, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "canary-7f3a")
    result = bench.run("--concurrency", "1", "--log-level", "debug")
    assert result.returncode == 0 and "canary" not in result.stderr
    written = [path for path in (bench.here / "run").rglob("*") if path.is_file()]
    assert written and not any(b"canary" in path.read_bytes() for path in written)


# --- prediction and comparison ----------------------------------------------------------------------------


def test_predictions_are_made_on_the_measured_replies_at_once_and_kept(tmp_path, monkeypatch):
    calls = []

    def predict_measurements(stage, model, engine, drafter, measured):
        calls.append((drafter, measured))
        return {name: (Acceptance(7, [5, 4]), {"b": {"margin": 0.1, "within_noise": True}}) for name in measured}

    monkeypatch.setattr(prediction, "predict_measurements", predict_measurements)

    def write(name, *completions):
        replies = [{"id": key, "text": "", "prompt_token_ids": [1], "completion_token_ids": ids}
                   for key, ids in zip("abc", completions, strict=True)]
        files.write_bytes(tmp_path / f"replies_{name}.jsonl", b"".join(map(files.encode_line, replies)))

    write("baseline_c1", [2, 3], [2, 3, 4], [2])
    write("drafter-2_c1", [2, 3], [2, 9, 9], [2])
    write("drafter-4_c1", [2, 3], [2, 3, 4], [2])
    stage = SimpleNamespace(directory=tmp_path, check_stop=lambda: None)

    def predicted(**changes):
        runs = [{"name": f"drafter-{count}_c1", "draft_tokens": count, "fingerprint": "f", "replies": "r",
                 "concurrency": 1, "acceptance": {"length": 2.0}, "lossless": {"first_difference": parted}} | changes
                for count, parted in ((2, {"b": 1}), (4, {}))]
        options = BenchmarkOptions()
        prediction.predict_runs(stage, options.model, options.engine, Path("d"), runs, baseline="baseline_c1")
        return runs

    runs = predicted()
    replies = [([1], [2, 3]), ([1], [2, 9, 9])]
    assert calls == [(Path("d"), {
        "drafter-2_c1": measurements.Measured(2, ["a", "b"], replies, {1: (1, 3)}),
        "drafter-4_c1": measurements.Measured(4, ["a", "b"], [replies[0], ([1], [2, 3, 4])], {})})]
    assert runs[0]["predicted"] == {"length": pytest.approx(1 + 9 / 7), "by_position": [5 / 7, 4 / 7], "rounds": 7}
    assert runs[0]["difference"] == pytest.approx(9 / 7 - 1)
    assert runs[0]["lossless"]["margins"]["b"]["within_noise"]
    assert predicted()[0] == runs[0] and len(calls) == 1
    assert "difference" not in predicted(acceptance=None)[0]
    predicted(replies="measured again")
    assert len(calls) == 2


def test_states_for_the_prediction_come_from_a_vllm():
    options = BenchmarkOptions()
    assert plan.capture_engine(options) is options.engine
    options.benchmark.temperature = 0.7
    assert plan.capture_engine(options) is None
    options.benchmark.temperature = 0.0
    options.engine.kind, options.engine.args = "sglang", ["--attention-backend", "triton"]
    found = plan.capture_engine(options)  # this interpreter has it
    assert (found.kind, found.args) == ("vllm", [])
    options.benchmark.capture_python = "/usr/bin/python3"
    assert plan.capture_engine(options) is None


def test_a_margin_is_noise_when_rounding_could_have_turned_it(tiny_model):
    import torch

    from eagle3.drafter import teacher, verifier

    facts = verifier.read(tiny_model)
    head = teacher.TeacherHead(facts)
    state = torch.randn(facts.hidden_size, generator=torch.Generator().manual_seed(0))
    normed = head.normed(state[None])[0]
    logits = normed @ head.rows(list(range(facts.vocab_size))).T
    first, last = int(logits.argmax()), int(logits.argmin())
    far = prediction.margin(head, state, first, last)
    assert far["margin"] == pytest.approx(float(logits[first] - logits[last]), rel=1e-5) and not far["within_noise"]
    assert prediction.margin(head, state, first, first)["within_noise"]
    # the noise is what relative errors of 1% in the state really do to the difference
    shaken = normed + 0.01 * normed.norm() / len(normed) ** 0.5 * torch.randn(4000, len(normed))
    apart = head.rows([first])[0] - head.rows([last])[0]
    assert far["noise"] == pytest.approx(float((shaken @ apart).std()), rel=0.1)


def test_agreement_finds_the_first_difference():
    def reply(name, ids, text=""):
        return {"id": name, "completion_token_ids": ids, "text": text}

    expected = [reply("a", [1, 2, 3]), reply("b", [1, 2, 3]), reply("c", [1, 2]), reply("d", [], "same x")]
    found = [reply("a", [1, 2, 3]), reply("b", [1, 9, 3]), reply("c", [1, 2, 4]), reply("d", [], "same y")]
    assert measurements.agreement(expected, found) == {
        "replies": 4, "identical": 1, "first_difference": {"b": 1, "c": 2, "d": 5}
    }  # fmt: skip
