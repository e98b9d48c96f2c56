"""On the real engine: captured states against transformers, and the whole pipeline through run.sh.

Slow (minutes); `./test.sh` runs these last.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from support.pipeline import manifest, run_stage
from support.project import ROOT

from eagle3.common import files
from eagle3.states.store import StateStore
from eagle3.traces import trace_rows

pytestmark = pytest.mark.engine
SMOLLM = ROOT / "models" / "smollm2-135m"


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The embedded model, converted once."""
    subprocess.run([sys.executable, "-m", "eagle3.embedded", "--out", SMOLLM], cwd=ROOT, check=True)
    return SMOLLM


@pytest.fixture(scope="session")
def tiny_deepseek(tiny_model, tmp_path_factory) -> Path:
    """A random DeepSeek-V3: MLA with the real ranks, 6 layers, experts from layer 1 on, 500 tokens."""
    from transformers import AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

    folder = tmp_path_factory.mktemp("deepseek") / "tiny-deepseek"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, moe_intermediate_size=128,
        num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, n_shared_experts=1,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=128, kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, routed_scaling_factor=1.0, norm_topk_prob=True,
        max_position_embeddings=1024, initializer_range=0.05, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id,
    )
    DeepseekV3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    path = folder / "config.json"
    # vLLM wants these two spelled out
    path.write_text(json.dumps(json.loads(path.read_text()) | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}))
    return folder


def write_sequences(run_dir: Path, vocab_size: int, count: int = 12) -> None:
    """Write traces of random tokens; two share a prefix of 64, one is longer than the others."""
    generator = torch.Generator().manual_seed(0)
    lengths = [40 + 13 * k for k in range(count)]
    rows = [torch.randint(5, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    rows[3][:64] = rows[5][:64]
    with files.Appender(run_dir / "01_traces" / trace_rows.FILE_NAME) as appender:
        appender.append(
            trace_rows.sealed({
                "id": f"trace-{number:03}", "key": "k", "source": "test", "model": "m", "prompt": {},
                "chat_template_kwargs": {}, "sampling": {}, "reasoning": None, "content": "", "tool_calls": [],
                "finish_reason": "length", "prompt_token_ids": ids[:10], "completion_token_ids": ids[10:],
                "token_source": "server", "usage": {},
            })
            for number, ids in enumerate(rows)
        )
    files.write_json(run_dir / "01_traces" / "manifest.json", {
        "stage": "01_traces", "status": "complete", "fingerprint": "f", "identity": "i",
        "counts": {"done": count, "prompt_tokens": 10 * count, "completion_tokens": sum(lengths)}})


def states_of(run_dir: Path, model: Path, layers: list[int], backend: str, dtype: str) -> list[torch.Tensor]:
    """Capture with a backend and return the states [T, 4, H] of each sample in float32."""
    out = run_dir / f"02_states_{backend}_{dtype}"
    run_stage("02_extract_hidden_states.py", "--run-dir", run_dir, "--out", out, "--model", model, "--layers", *layers,
              "--backend", backend, "--dtype", dtype, "--max-length", 512, "--batch-tokens", 1024,
              "--min-agreement", 0.8, env={"OMP_NUM_THREADS": "2"})
    store = StateStore(out)
    return [store.load(i)[0].float() for i in range(12)]


def errors(states: list[torch.Tensor], reference: list[torch.Tensor]) -> torch.Tensor:
    """Return per-token relative errors [tokens, 4], first tokens excluded (their norm dwarfs all others)."""
    pairs = [(a[1:], b[1:]) for a, b in zip(states, reference, strict=True)]
    return torch.cat([(a - b).norm(dim=-1) / b.norm(dim=-1) for a, b in pairs])


def worst_ratio(candidate: torch.Tensor, accepted: torch.Tensor) -> float:
    """Return the largest ratio of median and 99th percentile over the slots."""
    quantiles = torch.tensor([0.5, 0.99])
    return float((candidate.quantile(quantiles, dim=0) / accepted.quantile(quantiles, dim=0)).max())


@pytest.mark.parametrize(("name", "layers", "shifted"), [
    ("smollm", [2, 15, 27, 29], [3, 16, 28, 29]),
    ("tiny_deepseek", [2, 3, 4, 5], [1, 2, 3, 5]),
])
def test_vllm_states_agree_with_transformers(name, layers, shifted, request, tmp_path):
    model = request.getfixturevalue(name)
    write_sequences(tmp_path, 300)
    reference = states_of(tmp_path, model, layers, "hf", "float32")
    bf16 = errors(states_of(tmp_path, model, layers, "hf", "bfloat16"), reference)
    vllm = errors(states_of(tmp_path, model, layers, "vllm", "bfloat16"), reference)
    ratio = worst_ratio(vllm, bf16)
    print(f"{name}: median {vllm.quantile(0.5, dim=0).tolist()}, p99 {vllm.quantile(0.99, dim=0).tolist()}, "
          f"against transformers bf16 {ratio:.2f}x")
    assert ratio <= 1.5

    run = tmp_path / "shifted"
    write_sequences(run, 300)
    off_by_one = errors(states_of(run, model, shifted, "hf", "bfloat16"), reference)[:, :3]
    assert worst_ratio(off_by_one, bf16[:, :3]) > 1.5


def test_the_whole_pipeline_and_a_second_run(smollm, tmp_path):
    config = yaml.safe_load((ROOT / "configs" / "smollm2-135m.yaml").read_text())
    prompts = tmp_path / "bench.jsonl"
    prompts.write_text("".join((ROOT / "prompts" / "benchmark.jsonl").read_text().splitlines(keepends=True)[:6]))
    train_prompts = tmp_path / "train.jsonl"
    train_prompts.write_text("".join((ROOT / "prompts" / "train.jsonl").read_text().splitlines(keepends=True)[:24]))
    config["generate"] |= {"prompts": str(train_prompts), "max_tokens": 32}
    config["train"] |= {"epochs": 2, "batch_tokens": 512, "validation_fraction": 0.1}
    config["benchmark"] |= {"prompts": str(prompts), "max_tokens": 32, "concurrency": [4], "baseline_again": False}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(config))
    run_dir = tmp_path / "run"
    command = [ROOT / "run.sh", "--python", sys.executable, "--config", path, "--run-dir", run_dir, "--model", smollm]
    first = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ)
    assert first.returncode == 0, first.stderr[-6000:]
    stages = ("01_traces", "02_states", "03_vocab", "04_train", "05_export", "06_bench")
    assert all(manifest(run_dir / stage)["status"] == "complete" for stage in stages)
    assert manifest(run_dir / "02_states")["agreement"] >= 0.9
    (run,) = [run for run in json.loads((run_dir / "06_bench" / "results.json").read_text())["runs"]
              if run["draft_tokens"] == 3]
    assert 1.0 <= run["acceptance"]["length"] <= 4.0
    assert abs(run["difference"]) <= 0.1, run  # a few rounds only; the default run is held to 0.03
    assert (run_dir / "06_bench" / "report.html").exists()

    second = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ)
    assert second.returncode == 0 and second.stderr.count("complete already") == len(stages), second.stderr[-4000:]


def test_the_tiny_kimi_reasons_and_its_drafter_is_accepted(tmp_path):
    """MLA, experts, the multimodal wrapper, a reasoning parser: the big one's path, held to the figures it promises."""
    config = yaml.safe_load((ROOT / "configs" / "tiny-kimi.yaml").read_text())
    lines = {name: (ROOT / config[name]["prompts"]).read_text().splitlines(keepends=True)
             for name in ("generate", "benchmark")}
    for name, count in (("generate", 300), ("benchmark", 44)):
        config[name]["prompts"] = str(tmp_path / f"{name}.jsonl")
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[name][:count]))
    config["benchmark"]["baseline_again"] = False
    path, run_dir = tmp_path / "tiny.yaml", tmp_path / "run"
    path.write_text(yaml.safe_dump(config))
    command = [ROOT / "run.sh", "--python", sys.executable, "--config", path, "--run-dir", run_dir]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ)
    assert done.returncode == 0, done.stderr[-6000:]

    rows = list(trace_rows.read_traces(run_dir / "01_traces" / trace_rows.FILE_NAME))
    assert len(rows) == 300 and all(row["reasoning"] and row["token_source"] == "server" for row in rows)
    assert not any("<think>" in row["content"] or "</think>" in row["content"] for row in rows)

    answers = {row["id"]: row["answer"] for row in map(json.loads, lines["benchmark"][:44])}
    replies = [json.loads(line) for line in (run_dir / "06_bench" / "replies_drafter-3_c32.jsonl").open()]
    right = [reply["text"].endswith(answers[reply["id"].partition("#")[0]]) for reply in replies]
    assert sum(right) >= 0.9 * len(right)

    (run,) = [run for run in json.loads((run_dir / "06_bench" / "results.json").read_text())["runs"]
              if run["draft_tokens"] == 3]
    print(f"tiny Kimi: measured {run['acceptance']}, predicted {run['predicted']}, {sum(right)} of {len(right)} right")
    assert run["acceptance"]["by_position"][0] >= 0.75
    assert abs(run["difference"]) <= 0.03
    assert run["lossless"]["identical"] == run["lossless"]["replies"] == 44
