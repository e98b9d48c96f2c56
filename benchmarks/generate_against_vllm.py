"""Stage 01 against vLLM's own load generator, on one vLLM server, with the same prompts; then every row verified.

For a machine with a GPU and vLLM. Starts one server without prefix caching, warms it, and runs in turns
`vllm bench serve` and 01_generate_synthetic.py with equal prompts, longest reply, concurrency and sampling
(greedy). Output tokens are the server's own count for both. The time of `bench serve` is the one it reports
(first request to last answer; its imports and tokenizing excluded); the time of stage 01 is from its first
requests to the moment its last row was written.

Then every row of every stage-01 run is checked with the model's tokenizer: its prompt ids are the template's,
its completion ids decode to its texts, the end token is in (unless the reply was cut), the loss mask covers
exactly the completion; and traces + skips + failures are all prompts. The last line is JSON; the exit code is 1
when the ratio is under --at-least or any check failed.

  python benchmarks/generate_against_vllm.py --model models/SmolLM2-135M-Instruct
  python benchmarks/generate_against_vllm.py --model /models/X --python /opt/vllm/bin/python --count 2000 \\
      --max-tokens 512 --concurrency 256 --server-args "--max-model-len 8192 --reasoning-parser kimi_k2"
"""

import argparse
import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import row_checks  # noqa: E402

from eagle3.common import files  # noqa: E402
from eagle3.common.options import EngineOptions  # noqa: E402
from eagle3.common.processes import Child  # noqa: E402
from eagle3.engines import counters, defaults, launch, servers  # noqa: E402

TOKENS_COUNTER = "vllm:generation_tokens_total"
LOCAL = {"no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost"}
# What `vllm bench serve` runs; the command itself wants a distribution named vllm, and CPU builds have another name.
BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
TEMPLATES = (
    "Give me {n} short facts about {topic}.",
    "Explain {topic} to a child of {age}, in a few sentences.",
    "Write a story in which {topic} matters to a person named Number {n}.",
    "Which {n} mistakes do beginners make with {topic}, and how are they avoided?",
    "Compare {topic} today with {topic} {n} decades ago.",
    "I have {n} minutes to learn something useful about {topic}. Where do I start?",
    "Write a dialogue of {n} lines between two neighbours who disagree about {topic}.",
    "Make a plan for {n} days around {topic}, one line a day.",
    "Write a poem of {n} lines about {topic}. It need not rhyme.",
    "What would change in a town of {n} thousand people without {topic}?",
    "Summarise in one paragraph what an expert on {topic} does all day; mention the number {n}.",
    "Write a Python function that sorts {n} records about {topic} by name, and explain it line by line.",
    "List {n} questions for a quiz on {topic}, with the answers at the end.",
    "Someone says that {topic} is overrated and gives {n} reasons. Invent the reasons and answer each of them.",
    "Draft a letter to a museum that wants to show {n} objects connected with {topic}.",
    "How would you measure the quality of {topic} on a scale from 1 to {n}?",
    "A class of {n} pupils visits a place known for {topic}. Describe the day in the order of events.",
    "Name {n} words from the vocabulary of {topic} and define each in half a sentence.",
    "If {n} of 100 people prefer {topic} to everything else, what do the others like? Speculate politely.",
    "Translate into plain language, with {n} examples: why {topic} is harder than it looks.",
)
TOPICS = (
    "growing tomatoes", "tide tables", "repairing bicycles", "the history of paper", "baking bread", "bird migration",
    "sailing knots", "night trains", "public libraries", "volcanoes", "chess openings", "beekeeping", "old maps",
    "street lamps", "mountain weather", "violin making", "sorting algorithms", "cheese", "the game of go", "windmills",
    "sign language", "desert plants", "ice skating", "radio telescopes", "carpentry", "tea ceremonies", "fire brigades",
    "crossword puzzles", "coral reefs", "glass blowing", "marathon training", "typewriters", "snow avalanches",
    "canal locks", "stage lighting", "compilers", "dry stone walls", "vaccines", "kites", "lighthouses",
)


def main() -> int:
    """Run everything and print the JSON line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--python", default=sys.executable, help="interpreter that holds vLLM")
    parser.add_argument("--count", type=int, default=2000, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest reply in tokens")
    parser.add_argument("--concurrency", type=int, default=256, help="requests in flight, at least 2")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each")
    parser.add_argument("--at-least", type=float, default=0.98, help="smallest ratio that is good")
    parser.add_argument("--server-args", default="", help="more arguments for the server, as one text")
    parser.add_argument("--trust-remote-code", action="store_true", help="the model folder's own code may run")
    parser.add_argument("--out", type=Path, help="folder for prompts, logs and results; default: a temporary one")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        out = given.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        out.mkdir(parents=True, exist_ok=True)
        prompts = make_prompts(given.count)
        files.write_bytes(out / "prompts.jsonl", b"".join(files.encode_line(prompt) for prompt in prompts))
        with serving(given, out) as server:
            warm_up(server, given)
            turns = take_turns(server, given, out)
        judge = row_checks.load_judge(given.model, trust_remote_code=given.trust_remote_code)
        checks = [row_checks.verify(out / f"run{number}/01_traces", prompts, judge) for number in range(given.rounds)]
    return conclude(turns, checks, given)


def conclude(turns: dict[str, list[dict[str, Any]]], checks: list[dict[str, Any]], given: argparse.Namespace) -> int:
    """Print what was found, the last line as JSON; return the exit code."""
    rates = {name: sum(turn["tokens"] for turn in part) / sum(turn["seconds"] for turn in part)
             for name, part in turns.items()}
    ratio = rates["stage 01"] / rates["bench serve"]
    wrong = sum(check["errors"] for check in checks)
    for check in checks:
        print(f"{check['kept']} kept rows verified, {check['skipped']} skipped {check['reasons']}, {check['failed']} "
              f"failed, {check['errors']} errors {check['by_kind']}", *check["examples"], sep="\n  ")
    good = ratio >= given.at_least and not wrong
    print(json.dumps({"tokens_per_s": {name: round(rate, 1) for name, rate in rates.items()}, "ratio": round(ratio, 4),
                      "at_least": given.at_least, "turns": turns, "checks": checks, "good": good}))
    return 0 if good else 1


def make_prompts(count: int) -> list[dict[str, str]]:
    """Return prompts {"id", "prompt"} that all differ: each template with each topic, then with other numbers."""
    found = []
    for number in range(count):
        again, pair = divmod(number, len(TEMPLATES) * len(TOPICS))
        template, topic = TEMPLATES[pair % len(TEMPLATES)], TOPICS[pair // len(TEMPLATES)]
        n = 3 + 7 * pair % 20 + 20 * again
        age = 5 + n if "{age}" in template else 0
        found.append({"id": f"p{number:05}", "prompt": template.format(topic=topic, n=n, age=age)})
    if len({prompt["prompt"] for prompt in found}) != count:
        raise SystemExit("the prompts do not differ")
    return found


# --- the server -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(given: argparse.Namespace, out: Path) -> Iterator[servers.Server]:
    """Start vLLM, yield it when it answers, stop it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line, environment = server_command(given, port)
    began = time.monotonic()
    with Child(line, log_path=out / "server.log", env=environment) as child:
        while True:
            with contextlib.suppress(*servers.NO_ANSWER):
                servers.get(f"http://127.0.0.1:{port}/health")
                server = servers.identify(f"http://127.0.0.1:{port}", given.model, child)
                break
            if child.poll() is not None:
                raise SystemExit(f"the server ended:\n{child.tail(40)}")
            time.sleep(0.25)
        print(f"vllm {server.version} is ready after {time.monotonic() - began:.0f} s", flush=True)
        yield server


def server_command(given: argparse.Namespace, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the server's command line and environment."""
    remote = ["--trust-remote-code"] if given.trust_remote_code else []
    engine = EngineOptions(python=given.python, args=[*shlex.split(given.server_args), *remote])
    line = launch.command(engine, given.model, port, defaults.no_prefix_caching(engine))
    return line, defaults.one_process_on_cpu(engine) | defaults.default_env(engine) | LOCAL


def warm_up(server: servers.Server, given: argparse.Namespace) -> None:
    """Ask as many short replies at once as will be asked later, so that nothing is compiled while measuring."""

    def ask(number: int) -> None:
        body = {"model": server.model_name, "max_tokens": 32, "temperature": 0,
                "messages": [{"role": "user", "content": f"Count upwards from {number}."}]}
        request = urllib.request.Request(f"{server.base_url}/chat/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=300) as response:
            response.read()

    began = time.monotonic()
    with ThreadPoolExecutor(given.concurrency) as pool:
        list(pool.map(ask, range(given.concurrency)))
    print(f"warmed up in {time.monotonic() - began:.1f} s", flush=True)


# --- the two clients --------------------------------------------------------------------------------------


def take_turns(server: servers.Server, given: argparse.Namespace, out: Path) -> dict[str, list[dict[str, Any]]]:
    """Run both clients in turns; return {client: [{"seconds", "tokens", …}]}."""
    turns: dict[str, list[dict[str, Any]]] = {"bench serve": [], "stage 01": []}
    for number in range(given.rounds):
        for name, client in (("bench serve", run_bench), ("stage 01", run_stage)):
            before, began = tokens_so_far(server), time.monotonic()
            turn = client(server, given, out, number)
            turn["tokens"] = tokens_so_far(server) - before
            turns[name].append(turn)
            print(f"{name:<12} {turn['tokens']:,} tokens in {turn['seconds']:.2f} s = "
                  f"{turn['tokens'] / turn['seconds']:,.0f} tokens/s ({time.monotonic() - began:.1f} s in all); {turn}",
                  flush=True)
    return turns


def tokens_so_far(server: servers.Server) -> int:
    """Return the tokens that the server has generated, once its counter rests."""
    last = -1.0
    while True:
        now = counters.read_total(server, TOKENS_COUNTER)
        if now is None:
            raise SystemExit(f"the server's /metrics has no {TOKENS_COUNTER}")
        if now == last:
            return int(now)
        last = now
        time.sleep(0.3)


def run_bench(server: servers.Server, given: argparse.Namespace, out: Path, number: int) -> dict[str, Any]:
    """Run `vllm bench serve`; return what it reports."""
    result = out / f"bench{number}.json"
    run(bench_command(server, given, out, result.name), out / f"bench{number}.log", defaults.default_env(
        EngineOptions(python=given.python)) | LOCAL)
    report = files.read_json(result)
    if report["completed"] != given.count:
        raise SystemExit(f"bench serve completed {report['completed']} of {given.count}; see {out}/bench{number}.log")
    return {"seconds": report["duration"], "own_tokens": report["total_output_tokens"],
            "own_tokens_per_s": report["output_throughput"]}


def bench_command(server: servers.Server, given: argparse.Namespace, out: Path, result: str) -> list[str]:
    """Return the command line of `vllm bench serve` for the same load.

    Its custom dataset renders the chat template itself, and a chat endpoint would then render it again around
    that; so it is told not to, and both clients send the same user message.
    """
    options: dict[str, Any] = {
        "--backend": "openai-chat", "--base-url": server.root_url, "--endpoint": "/v1/chat/completions",
        "--model": server.model_name, "--tokenizer": given.model, "--dataset-name": "custom",
        "--dataset-path": out / "prompts.jsonl", "--num-prompts": given.count,
        "--custom-output-len": given.max_tokens, "--max-concurrency": given.concurrency, "--temperature": 0,
        "--top-p": 1, "--result-dir": out, "--result-filename": result,
    }
    flags = [skip_template_flag(given.python), "--disable-shuffle", "--disable-tqdm", "--save-result"]
    flags += ["--trust-remote-code"] if given.trust_remote_code else []
    words = [str(word) for option in options.items() for word in option]
    return [given.python, "-c", BENCH_SERVE, *words, *flags]


def skip_template_flag(python: str) -> str:
    """Return what this vLLM calls the option that leaves the chat template to the server (it was renamed)."""
    program = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    asked = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    sources = sorted(Path(asked.stdout.strip().splitlines()[-1], "benchmarks").rglob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    return next(flag for flag in ("--skip-chat-template", "--custom-skip-chat-template") if f'"{flag}"' in text)


def run_stage(server: servers.Server, given: argparse.Namespace, out: Path, number: int) -> dict[str, Any]:
    """Run stage 01 into a fresh directory; return its seconds from the first requests to the last row."""
    log_path, port = out / f"stage{number}.log", int(server.root_url.rpartition(":")[2])
    with open(log_path, "wb") as log:
        launched = time.time()
        process = subprocess.Popen(stage_command(server, given, out, number), stdout=log, stderr=log,
                                   env=os.environ | LOCAL)
        while connections(port) < 2 and process.poll() is None:  # one alone is the look at /v1/models
            time.sleep(0.005)
        first = time.time()
        code = process.wait()
    if code:
        raise SystemExit(f"stage 01 ended with code {code}:\n{log_path.read_text(errors='replace')[-4000:]}")
    folder = out / f"run{number}/01_traces"
    written = [folder / f"{name}.jsonl" for name in ("traces", "skipped", "failures")]
    last = max(path.stat().st_mtime for path in written if path.exists())
    return {"seconds": last - first, "seconds_of_start": first - launched, "seconds_of_end": time.time() - last}


def stage_command(server: servers.Server, given: argparse.Namespace, out: Path, number: int) -> list[str]:
    """Return the command line of stage 01."""
    line = [sys.executable, ROOT / "01_generate_synthetic.py", "--endpoint", server.base_url, "--model", given.model,
            "--prompts", out / "prompts.jsonl", "--run-dir", out / f"run{number}", "--max-tokens", given.max_tokens,
            "--concurrency", given.concurrency, "--temperature", 0]
    return [str(word) for word in line] + (["--trust-remote-code"] if given.trust_remote_code else [])


def connections(port: int) -> int:
    """Return how many established connections lead to a port of this machine."""
    with open("/proc/net/tcp") as table:
        next(table)
        fields = [line.split() for line in table]
    return sum(field[3] == "01" and field[2].endswith(f":{port:04X}") for field in fields)


def run(line: list[str], log_path: Path, environment: dict[str, str]) -> None:
    """Run a command with its output in a file; stop with the end of it when it fails."""
    with open(log_path, "wb") as log:
        code = subprocess.call(line, stdout=log, stderr=log, env=os.environ | environment)
    if code:
        raise SystemExit(f"{shlex.join(line)}\nended with code {code}:\n{log_path.read_text(errors='replace')[-4000:]}")


if __name__ == "__main__":
    sys.exit(main())
