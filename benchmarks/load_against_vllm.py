"""Stage 06's load against vLLM's own load generator, on one vLLM server, with the same prompts.

For a machine with a GPU and vLLM. Starts one server without prefix caching, warms it, and runs in turns
`vllm bench serve` and a measurement of stage 06 with equal prompts, longest reply, requests in flight and sampling
(greedy). Output tokens are the server's own count for both; the time is what each reports, from its first request to
its last answer. Beside it stand the medians of time to first token and between tokens, as each tells them. The last
line is JSON; the exit code is 1 when the rates differ by more than --within.

  python benchmarks/load_against_vllm.py --model models/SmolLM2-135M-Instruct
  python benchmarks/load_against_vllm.py --model /models/X --python /opt/vllm/bin/python --count 1000 \\
      --max-tokens 512 --concurrency 128 --server-args "--max-model-len 8192"
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import generate_against_vllm as peer

from eagle3.benchmark import load
from eagle3.common import files
from eagle3.common.options import BenchmarkSection
from eagle3.engines import servers
from eagle3.traces.prompts import read_prompts


def main() -> int:
    """Run everything and print the JSON line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--python", default=sys.executable, help="interpreter that holds vLLM")
    parser.add_argument("--count", type=int, default=1000, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest reply in tokens")
    parser.add_argument("--concurrency", type=int, default=128, help="requests in flight")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    parser.add_argument("--within", type=float, default=0.03, help="largest difference of the rates that is good")
    parser.add_argument("--server-args", default="", help="more arguments for the server, as one text")
    parser.add_argument("--trust-remote-code", action="store_true", help="the model folder's own code may run")
    parser.add_argument("--out", type=Path, help="folder for prompts, logs and results; default: a temporary one")
    given = parser.parse_args()
    turns: dict[str, list[dict[str, Any]]] = {"bench serve": [], "stage 06": []}
    with contextlib.ExitStack() as stack:
        out = given.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        out.mkdir(parents=True, exist_ok=True)
        prompts = peer.make_prompts(given.count)
        files.write_bytes(out / "prompts.jsonl", b"".join(files.encode_line(prompt) for prompt in prompts))
        with peer.serving(given, out) as server:
            peer.warm_up(server, given)
            for number in range(given.rounds):
                for name, client in (("bench serve", run_bench), ("stage 06", run_stage)):
                    before = peer.tokens_so_far(server)
                    turn = client(server, given, out, number)
                    turn["tokens"] = peer.tokens_so_far(server) - before
                    turn["tokens_per_s"] = turn["tokens"] / turn["seconds"]
                    turns[name].append(turn)
                    print(f"{name:<12} {turn}", flush=True)
    told = {name: {key: round(statistics.median(turn[key] for turn in part), 4) for key in part[0]}
            for name, part in turns.items()}
    ratio = told["stage 06"]["tokens_per_s"] / told["bench serve"]["tokens_per_s"]
    good = abs(ratio - 1) <= given.within
    print(json.dumps({"medians": told, "ratio": round(ratio, 4), "within": given.within, "good": good}))
    return 0 if good else 1


def run_bench(server: servers.Server, given: argparse.Namespace, out: Path, number: int) -> dict[str, Any]:
    """Run `vllm bench serve`; return what it reports."""
    turn = peer.run_bench(server, given, out, number)
    report = files.read_json(out / f"bench{number}.json")
    return {"seconds": turn["seconds"], "first_token_s": report["median_ttft_ms"] / 1000,
            "between_tokens_s": report["median_tpot_ms"] / 1000}


def run_stage(server: servers.Server, given: argparse.Namespace, out: Path, number: int) -> dict[str, Any]:
    """Make a measurement as stage 06 does; return its figures."""
    progress = SimpleNamespace(update=lambda: None, close=lambda: None)
    stage = SimpleNamespace(run_dir=out, directory=out / f"06_{number}", check_stop=lambda: None,
                            progress=lambda *_: progress,
                            options=SimpleNamespace(model=SimpleNamespace(path=str(given.model))))
    section = BenchmarkSection(max_tokens=given.max_tokens)
    told, _ = load.measure(server, read_prompts(out / "prompts.jsonl"), section, given.concurrency, stage, "load")
    return {"seconds": told["seconds"], "first_token_s": told["first_token_s"]["median"],
            "between_tokens_s": told["between_tokens_s"]["median"], "client_cpu_share": told["client"]["cpu_share"]}


if __name__ == "__main__":
    sys.exit(main())
