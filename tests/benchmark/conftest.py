"""Stage 06 with a fake engine."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from support.fake_engine import install
from support.project import ROOT

PROMPTS = 6


@pytest.fixture
def bench(tmp_path):
    """A verifier, a drafter, prompts, a fake engine, and `run(*arguments, **engine environment)`."""
    for name in ("verifier", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    rows = [{"id": f"p{i}", "messages": [{"role": "user", "content": f"{'long ' * i}{i}"}]} for i in range(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = tmp_path / "requests"
    python = install(tmp_path)

    def command(*arguments, **env):
        engine_env = {"FAKE_LOG": str(log)} | env
        return [
            sys.executable, "06_benchmark.py", "--model", str(tmp_path / "verifier"), "--prompts",
            str(tmp_path / "prompts.jsonl"), "--run-dir", str(tmp_path / "run"), "--engine-python", python,
            "--drafter", str(tmp_path / "drafter"), "--concurrency", "1", "4", "--max-tokens", "20",
            "--no-predict", "--no-preflight", "--no-baseline-again", "--engine-env", json.dumps(engine_env), *arguments,
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
