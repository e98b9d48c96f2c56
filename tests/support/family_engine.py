"""A family on vLLM: its states against transformers, its probabilities against ours, and a start with a drafter."""

import json
import os
import subprocess
import sys
from pathlib import Path

from support.captures import samples_of, stage_at
from support.families import FAMILIES
from support.pipeline import ROOT, write_export

LAYERS = [2, 4, 5, 7]
PATIENCE_S = 500
HANDED = "handed.safetensors"
# Greedy text with the drafter, and what was counted, in one JSON line; what the engine hands its drafter of the first
# pass goes into a file. In one process the scheduler sees all prompts before its first pass, as a capture does.
_SERVE = """
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from eagle3.states import engine_side
engine_side._let_llvmlite_be_looked_at()
model, drafter, dtype, prompts, handed = json.loads(sys.argv[1])
llm = LLM(model=model, dtype=dtype, max_model_len=256, enforce_eager=True, enable_prefix_caching=False,
          speculative_config={"model": drafter, "method": "eagle3", "num_speculative_tokens": 2},
          disable_log_stats=False, skip_tokenizer_init=True)
def watch(worker):
    proposer = worker.model_runner.drafter
    real = proposer.propose
    def propose(**given):
        if not os.path.exists(handed):
            names = {"tokens": "target_token_ids", "positions": "target_positions", "states": "target_hidden_states"}
            save_file({name: given[own].clone().contiguous() for name, own in names.items()}, handed)
        return real(**given)
    proposer.propose = propose
llm.collective_rpc(watch)
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
    from eagle3.common.options import EngineOptions, ModelOptions
    from eagle3.drafter import verifier
    from eagle3.states.agreement import AgreementCheck
    from eagle3.states.extraction import Capture, settings_for
    from eagle3.states.store import StateStore

    facts, store = verifier.read(model), StateStore(work / f"states_{backend}_{dtype}")
    engine = EngineOptions(args=["--skip-tokenizer-init"], env={"VLLM_CPU_KVCACHE_SPACE": "1"})
    settings = settings_for(facts, facts.layers(LAYERS), ModelOptions(path=str(model)), engine, backend=backend,
                            dtype=dtype, max_length=64, batch_tokens=512)
    samples = samples_of(dict(enumerate(prompts(facts.vocab_size))))
    with Capture(stage_at(work, store), engine, store, settings) as child:
        collected, said = child.run(samples), child.prove(samples)
    failed = [entry["error"] for entry in collected.entries if "error" in entry]
    assert not failed, failed
    check = AgreementCheck(facts, store, 0.0, dtype, dtype)
    check._largest = float("inf")  # to report, not to refuse
    check.add(collected.entries)
    check.add_prompts(said)
    check.add_rows(collected.entries, collected.rows, {sample.i: sample for sample in samples})
    return check.figures() | {"store": store, "bound": type(check)(facts, store, 0.0, dtype, dtype)._largest,
                              "capture": child.how}


def error_of(store, reference) -> float:
    """Return the median over tokens of the largest relative error of a captured stream, first tokens left out."""
    import torch

    pairs = [(store.load(i)[0][1:].float(), reference.load(i)[0][1:].float()) for i in range(8)]
    found = torch.cat([((a - b).norm(dim=-1) / b.norm(dim=-1)).amax(-1) for a, b in pairs])
    return float(found.median())


def handed(work: Path, store) -> list[tuple]:
    """Return (what vLLM gave its drafter, what was captured for it), [T, 3H] each, of every prompt."""
    from safetensors.torch import load_file

    given, pairs = load_file(work / HANDED), []
    starts = (given["positions"] == 0).nonzero()[:, 0].tolist()
    places = {tuple(given["tokens"][start:stop].tolist()): given["states"][start:stop]
              for start, stop in zip(starts, [*starts[1:], len(given["tokens"])], strict=True)}
    for i in range(8):
        states, ids = store.load(i)
        pairs.append((places[tuple(ids.tolist())], states[:, :3].flatten(1)))
    return pairs


def serve(model: Path, work: Path, dtype: str) -> dict:
    """Generate greedily in vLLM with an untrained drafter; return {tokens, drafts, accepted}."""
    from eagle3.common.options import EngineOptions
    from eagle3.drafter import verifier
    from eagle3.engines import defaults
    from eagle3.states.extraction import engine_environment

    engine, drafter = EngineOptions(), write_export(work / "export", model)
    question = json.dumps([str(model), str(drafter), dtype, prompts(verifier.read(model).vocab_size),
                           str(work / HANDED)])
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
