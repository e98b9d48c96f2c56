"""A family on vLLM: its states against transformers, its probabilities against ours, and a start with a drafter."""

import json
import os
import subprocess
import sys
from pathlib import Path

from support.families import FAMILIES
from support.pipeline import ROOT, write_export

LAYERS = [2, 4, 5, 7]
PATIENCE_S = 500
# Greedy text with the drafter, and what was counted; one JSON line.
_SERVE = """
import json, sys
from vllm import LLM, SamplingParams
from eagle3.states import engine_side
engine_side._let_llvmlite_be_looked_at()
model, drafter, dtype, prompts = json.loads(sys.argv[1])
llm = LLM(model=model, dtype=dtype, max_model_len=256, enforce_eager=True, enable_prefix_caching=False,
          speculative_config={"model": drafter, "method": "eagle3", "num_speculative_tokens": 2},
          disable_log_stats=False, skip_tokenizer_init=True)
sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
counts = {m.name: m.value for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode") and hasattr(m, "value")}
print("\\n" + json.dumps({"tokens": sum(len(out.outputs[0].token_ids) for out in outputs)} | counts))
"""


def build(name: str, folder: Path) -> Path:
    """Write a family's model; those of MLA with the ranks that engines know (tiny Kimi)."""
    if name in ("kimi-k2.5", "deepseek-v3"):
        from tiny_kimi import model

        model.write(folder, text_only=name == "deepseek-v3")
        return folder
    return FAMILIES[name].build(folder)


def prompts(vocab_size: int) -> list[list[int]]:
    """Return eight random sequences of 20 to 48 tokens."""
    import numpy as np

    rng = np.random.default_rng(0)
    return [rng.integers(2, min(500, vocab_size), 20 + 4 * i).tolist() for i in range(8)]


def states(model: Path, work: Path, backend: str, dtype: str) -> dict:
    """Capture in a child as stage 02 does; return agreement, difference of log-probabilities, and the store."""
    from eagle3.common.options import EngineOptions
    from eagle3.drafter import verifier
    from eagle3.engines import defaults
    from eagle3.states.extraction import AgreementCheck, engine_environment
    from eagle3.states.settings import CONVENTION, CaptureSettings
    from eagle3.states.store import StateStore

    facts, store, engine = verifier.read(model), StateStore(work / f"states_{backend}_{dtype}"), EngineOptions()
    store.files.mkdir(parents=True)
    own = [*defaults.mla_on_cpu_args(engine, model), "--skip-tokenizer-init"] if backend == "vllm" else []
    settings = CaptureSettings(
        backend=backend, model=str(model), trust_remote_code=False, layers=tuple(facts.layers(LAYERS)),
        num_layers=facts.num_layers, dtype=dtype, states_dtype="auto", max_length=64, batch_tokens=512,
        tensor_parallel_size=1, engine_args=tuple(own), directory=str(store.files), metadata={"capture": CONVENTION})
    jobs = [[i, ids] for i, ids in enumerate(prompts(facts.vocab_size))]
    lines = [settings.to_json(), json.dumps({"jobs": jobs, "write": [i for i, _ in jobs]}), json.dumps({"prove": jobs})]
    _, entries, said = _run([sys.executable, "-m", "eagle3.states.engine_side"], engine_environment(engine),
                            work / f"capture-{backend}.log", "\n".join([*lines, ""]))
    failed = [entry["error"] for entry in entries["entries"] if "error" in entry]
    assert not failed, failed
    check = AgreementCheck(facts, store, 0.0, dtype, dtype)
    check._largest = float("inf")  # to report, not to refuse
    check.add(entries["entries"])
    check.add_prompts({int(number): found for number, found in said["logprobs"].items()})
    return check.figures() | {"store": store, "bound": type(check)(facts, store, 0.0, dtype, dtype)._largest}


def error_of(store, reference) -> float:
    """Return the median over tokens of the largest relative error of a captured stream, first tokens left out."""
    import torch

    pairs = [(store.load(i)[0][1:].float(), reference.load(i)[0][1:].float()) for i in range(8)]
    found = torch.cat([((a - b).norm(dim=-1) / b.norm(dim=-1)).amax(-1) for a, b in pairs])
    return float(found.median())


def serve(model: Path, work: Path, dtype: str) -> dict:
    """Generate greedily in vLLM with an untrained drafter; return {tokens, drafts, accepted}."""
    from eagle3.common.options import EngineOptions
    from eagle3.drafter import verifier
    from eagle3.engines import defaults
    from eagle3.states.extraction import engine_environment

    engine, drafter = EngineOptions(), write_export(work / "export", model)
    question = json.dumps([str(model), str(drafter), dtype, prompts(verifier.read(model).vocab_size)])
    said = _run([sys.executable, "-c", _SERVE, question],
                engine_environment(engine) | defaults.mla_on_cpu_env(engine, model), work / "serve.log", "")[-1]
    return {"tokens": said["tokens"], "drafts": said.get("vllm:spec_decode_num_drafts", 0),
            "accepted": said.get("vllm:spec_decode_num_accepted_tokens", 0)}


def _run(command: list[str], environment: dict[str, str], log: Path, text: str) -> list:
    """Run a child with the project in its path; return the JSON values that it printed. Its log is kept."""
    env = os.environ | environment | {"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"}
    with open(log, "w", encoding="utf-8") as file:
        result = subprocess.run(command, input=text, stdout=subprocess.PIPE, stderr=file, text=True, env=env,
                                timeout=PATIENCE_S)
    assert result.returncode == 0, _why(log)
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def _why(log: Path) -> str:
    """Return the last line of a log that names an error."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), (lines or ["no output"])[-1])[-400:]
