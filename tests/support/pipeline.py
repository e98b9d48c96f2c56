"""Small inputs for the stages after 01: traces that a tiny model really generated, and stages run as processes."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from eagle3.common import files
from eagle3.traces import trace_rows
from support.processes import wait_for
from support.project import ROOT

LAYERS = "2 4 5 7"


def run_stage(script: str, *arguments: object, check: int | None = 0, **keywords) -> subprocess.CompletedProcess:
    """Run a stage script as a process on one thread and compare its exit code."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | keywords.pop("env", {})
    result = subprocess.run([sys.executable, ROOT / script, *map(str, arguments)], capture_output=True, text=True,
                            env=environment, timeout=300, **keywords)
    assert check is None or result.returncode == check, result.stderr[-4000:]
    return result


def write_traces(run_dir: Path, model: Path, count: int = 12, new_tokens: int = 20, first: int = 0) -> Path:
    """Write a finished 01_traces of greedy replies of `model`, ids trace-000 and up; return its folder."""
    import torch
    from transformers import AutoModelForCausalLM

    verifier = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rows = []
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(number)
        prompt = torch.randint(5, 400, (1, 6 + number % 5), generator=generator)
        with torch.inference_mode():
            output = verifier.generate(prompt, max_new_tokens=new_tokens + number % 7, do_sample=False)[0].tolist()
        completion = output[prompt.shape[1] :]
        rows.append(trace_rows.sealed({
            "id": f"trace-{number:03}", "key": f"key-{number}", "source": "test", "model": "tiny", "prompt": {},
            "chat_template_kwargs": {}, "sampling": {}, "reasoning": None, "content": "", "tool_calls": [],
            "finish_reason": "length", "prompt_token_ids": prompt[0].tolist(), "completion_token_ids": completion,
            "token_source": "server", "usage": {},
        }))
    folder = run_dir / "01_traces"
    with files.Appender(folder / trace_rows.FILE_NAME) as appender:
        appender.append(rows)
    total = sum(1 for _ in trace_rows.read_traces(folder / trace_rows.FILE_NAME))
    files.write_json(folder / "manifest.json", {
        "stage": "01_traces", "status": "complete", "fingerprint": "options-of-01",
        "identity": trace_rows.content_identity(trace_rows.read_traces(folder / trace_rows.FILE_NAME)),
        "counts": {"done": total, "prompt_tokens": 100, "completion_tokens": 300},
    })
    return folder


def kill_midway(script: str, *arguments: object, done: Callable[[], int]) -> None:
    """Start a stage EAGLE3_KILLS times (default 3) and SIGKILL it soon after `done()`, units that count, has grown.

    AssertionError when every one of them had ended by itself: then nothing was interrupted.
    """
    rng, killed = random.Random(0), 0
    for _ in range(int(os.environ.get("EAGLE3_KILLS", "3"))):
        before = done()
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen([sys.executable, ROOT / script, *map(str, arguments)], stderr=errors,
                                       env=os.environ | {"OMP_NUM_THREADS": "1"})
            wait_for(lambda process=process, before=before: process.poll() is not None or done() > before, 300)
            time.sleep(rng.uniform(0, 0.02))
            process.kill()
            errors.seek(0)
            assert process.wait() in (0, -signal.SIGKILL), errors.read()[-4000:]
        killed += process.returncode == -signal.SIGKILL
    assert killed, "it had ended each time"


def manifest(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def tree(folder: Path) -> dict[str, str]:
    """Return {relative path: hash} of what a stage leaves behind, without what names the run and its speed."""
    skip = {"manifest.json", "progress.json", ".lock"}
    hashes = {
        str(path.relative_to(folder)): files.sha256_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in skip
    }
    if "metrics.jsonl" in hashes:
        rows = [row for _, row in files.read_jsonl(folder / "metrics.jsonl")]
        hashes["metrics.jsonl"] = files.sha256_json([row | {"speed": None} for row in rows])
    return hashes


def write_export(folder: Path, model: Path) -> Path:
    """Write a finished 05_export for vLLM of an untrained drafter of `model`; return the drafter's folder."""
    import numpy as np
    import torch
    from safetensors.torch import save_file

    from eagle3.drafter import flat_config, network, verifier, vocab
    from eagle3.drafter.checkpoint import engine_names
    from eagle3.training import checkpoints

    facts = verifier.read(model)
    layers = [int(layer) for layer in LAYERS.split()]
    counts = np.random.default_rng(0).integers(1, 100, facts.vocab_size)
    d2t, t2d = (torch.from_numpy(array) for array in vocab.build_mapping(counts, 64))
    built = network.build(facts, layers, d2t, t2d, flat_config.layer_shape(facts))
    tensors = checkpoints.served_tensors(built)
    names = engine_names(tensors, "vllm")
    (folder / "vllm").mkdir(parents=True)
    save_file({names[name]: tensor for name, tensor in tensors.items()}, folder / "vllm/model.safetensors",
              metadata={"format": "pt"})
    config = network.served_config(built, facts)
    config["eagle_config"] = {flat_config.IDS: config[flat_config.IDS]}
    files.write_json(folder / "vllm/config.json", config)
    files.write_json(folder / "manifest.json", {
        "stage": "05_export", "status": "complete", "identity": "e", "trained": {"ids": layers[:-1], "here": True},
    })
    return folder / "vllm"


def change_config(folder: Path, **values: object) -> None:
    """Change keys of a drafter's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(folder: Path, change: Callable[[dict], object]) -> None:
    """Let `change` change the dictionary of a drafter's tensors."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shift_offsets(tensors: dict) -> None:
    """Make the mapping of a drafter point one token further."""
    tensors["d2t"] = tensors["d2t"] + 1


def random_embedding(tensors: dict) -> None:
    """Give a drafter an embedding that nobody trained."""
    import torch

    tensors["embed_tokens.weight"] = torch.randn(tensors["t2d"].shape[0], tensors["norm.weight"].shape[0])
