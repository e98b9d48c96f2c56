"""How long stage 03 takes to count generated tokens on one core, and in how much memory.

Writes traces of random ids (the rarest of a vocabulary as rare as in text), has stage 01's ledger keep its counts, and
runs stage 03 as a process on one core: once with those counts (target: 10 s for 100 million tokens), once from
traces.jsonl alone (target: 60 s). Rows and digests are those of stage 01. Seconds are of the processor, so other work
on the machine counts little; what ten traces take (the start of Python, torch and tokenizer) is said and taken off.

  python benchmarks/vocab_rate.py                       # 100 million tokens, 1.2 GB of disk, 6 minutes
  python benchmarks/vocab_rate.py --tokens 5000000
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

LENGTH = 1000  # generated tokens of a trace
VOCABULARY = 163840
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 7168,
          "num_hidden_layers": 8, "num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 18432,
          "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_theta": 10000.0}
TARGETS = {"counts kept by stage 01": 10.0, "traces.jsonl": 60.0}  # seconds for 100 million tokens


def main() -> int:
    """Write traces, time both ways, print a JSON line; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000_000, help="generated tokens (default: 100 million)")
    parser.add_argument("--scratch", type=Path, help="where the traces are written (default: a temporary folder)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.scratch) as name:
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "model/config.json").write_text(json.dumps(CONFIG))
        started = time.monotonic()
        write_traces(folder / "01_traces", given.tokens // LENGTH)
        print(f"wrote {given.tokens:,} tokens in {time.monotonic() - started:.0f} s", flush=True)
        write_traces(folder / "few/01_traces", 10)
        start, _ = stage_03(folder / "few", folder / "model", "03_vocab")
        print(f"ten traces: {start:.1f} s", flush=True)
        results = {}
        for what, target in TARGETS.items():
            if what == "traces.jsonl":
                forget_counts(folder / "01_traces")
            seconds, peak = stage_03(folder, folder / "model", what.split()[0])
            seconds, allowed = seconds - start, target * given.tokens / 100e6
            results[what] = {"seconds": round(seconds, 1), "target": round(allowed, 1), "peak_mb": round(peak)}
            print(f"{what}: {seconds:.1f} s more (target {allowed:.1f}), peak {peak:,.0f} MB", flush=True)
    print(json.dumps({"tokens": given.tokens, "start_seconds": round(start, 1), **results}))
    return int(any(each["seconds"] > each["target"] for each in results.values()))


def write_traces(folder: Path, count: int) -> None:
    """Write a finished 01_traces."""
    import numpy as np

    from eagle3.common import files
    from eagle3.traces import token_counts, trace_rows

    rng, ledger = np.random.default_rng(0), trace_rows.Ledger(folder, read=False)
    folder.mkdir(parents=True)
    with open(folder / trace_rows.FILE_NAME, "wb") as file:
        for number in range(count):
            ids = (rng.zipf(1.2, LENGTH) % VOCABULARY).tolist()
            row = trace_rows.sealed({
                "id": f"trace-{number}", "key": f"key-{number}", "source": "benchmark", "model": "m",
                "prompt": {"messages": [{"role": "user", "content": "Why is the sky blue? " * 20}]},
                "chat_template_kwargs": {}, "sampling": {}, "reasoning": None, "tool_calls": [],
                "content": "Light is scattered. " * 200,
                "finish_reason": "stop", "prompt_token_ids": ids[:100], "completion_token_ids": ids,
                "token_source": "server", "usage": {}})
            ledger.count("traces", row)
            file.write(files.encode_line(row))
    counts, traces = folder / token_counts.FILE_NAME, folder / trace_rows.FILE_NAME
    ledger.tokens.write(counts)
    outputs = {name: {"path": path.name, "bytes": path.stat().st_size, "sha256": files.sha256_file(path)}
               for name, path in (("traces", traces), ("token_counts", counts))}
    files.write_json(folder / "manifest.json", {"stage": "01_traces", "status": "complete", "fingerprint": "f",
                                                "identity": ledger.content, "outputs": outputs,
                                                "counts": {"done": count}})


def forget_counts(folder: Path) -> None:
    """Leave traces as older versions did."""
    from eagle3.common import files

    written = files.read_json(folder / "manifest.json")
    del written["outputs"]["token_counts"]
    files.write_json(folder / "manifest.json", written)


def stage_03(folder: Path, model: Path, out: str) -> tuple[float, float]:
    """Run stage 03 on one core; return its seconds of the processor and its peak memory in MB."""
    core = min(os.sched_getaffinity(0))
    process = subprocess.Popen(
        [sys.executable, ROOT / "03_build_vocab_mapping.py", "--run-dir", folder, "--model", model, "--out",
         folder / out, "--log-level", "error"], preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"stage 03 ended with status {status}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
