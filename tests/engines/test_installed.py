"""Which engine there is, whether it fits the model, and what suits it here."""

import json
import os
import subprocess
import sys

import pytest
from support.fake_engine import install
from support.project import ROOT

from eagle3.common.errors import PreconditionError
from eagle3.common.options import EngineOptions
from eagle3.engines import defaults, installed


def test_missing_engine_names_the_interpreter(tmp_path):
    python = install(tmp_path, engine="something-else")
    with pytest.raises(PreconditionError) as error:
        installed.check(EngineOptions(kind="sglang", python=python))
    assert python in str(error.value) and "sglang" in str(error.value)
    with pytest.raises(PreconditionError, match="does not run"):
        installed.check(EngineOptions(python=str(tmp_path / "absent")))


@pytest.mark.parametrize(
    ("version", "model_type", "fits"),
    [("0.17.1", "kimi_k25", False), ("0.18.0", "kimi_k25", True), ("0.17.1", "llama", True),
     ("0.17.1", "deepseek_v3", False)],
)
def test_old_vllm_is_refused_for_kimi_and_deepseek(tmp_path, model, version, model_type, fits):
    (model / "config.json").write_text(json.dumps({"model_type": "x", "text_config": {"model_type": model_type}}))
    engine = EngineOptions(python=install(tmp_path, version))
    if fits:
        assert installed.check(engine, model) == version
    else:
        with pytest.raises(PreconditionError, match="patches"):
            installed.check(engine, model)


def test_environment_defaults_give_way_to_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    python = install(tmp_path)
    env = defaults.default_env(EngineOptions(python=python, startup_timeout_min=90))
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "2" and "HF_HUB_OFFLINE" not in env
    assert env["VLLM_ENGINE_READY_TIMEOUT_S"] == "5400"
    given = defaults.default_env(EngineOptions(python=python, env={"VLLM_CPU_KVCACHE_SPACE": "8"}))
    assert given["VLLM_CPU_KVCACHE_SPACE"] == "8"


def test_module_imports_no_engine():
    code = ("import sys; from eagle3.engines import installed, launch, servers, counters; "
            "print([m for m in ('vllm', 'torch') if m in sys.modules])")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert result.stdout.strip() == "[]", result.stderr


def test_facts_of_a_missing_engine(tmp_path):
    python = install(tmp_path / "other", engine="something-else")
    assert installed.facts(EngineOptions(kind="sglang", python=python)) == {
        "engine": {"kind": "sglang", "version": None}, "patches": []}
