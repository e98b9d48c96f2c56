"""Requests/s of stage 01 against a server that answers at once, as a share of the bare `openai` client's.

Both ask the same prompts at the same concurrency, in turns, in one run, so that the ratio holds whatever else
the machine does; stage 01 makes every row durable before it counts. Both are timed by the server: from the
first request to the last. The exit code is 1 when the ratio of the medians is under --at-least.

  python benchmarks/generate_rate.py
  python benchmarks/generate_rate.py --prompts 20000 --concurrency 256 --rounds 5
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import instant_server

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Measure both in turns; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4000, help="prompts of each turn")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each reply")
    parser.add_argument("--concurrency", type=int, default=64, help="requests in flight")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    parser.add_argument("--at-least", type=float, default=0.8, help="smallest ratio that is good")
    given = parser.parse_args()
    rates: dict[str, list[float]] = {"bare client": [], "stage 01": []}
    with tempfile.TemporaryDirectory() as name, instant_server.running(given.tokens) as server:
        folder = Path(name)
        prompts = write_prompts(folder / "prompts.jsonl", given.prompts)
        for number in range(given.rounds):
            for who in rates:
                server.get("reset")
                began = time.monotonic()
                if who == "bare client":
                    asyncio.run(ask_bare(server.url, prompts, given.concurrency))
                    extra = ""
                else:
                    rows = run_stage(server.url, folder, number, given.concurrency)
                    extra = f", {rows} rows durable"
                rate = rate_of(server.get("stats"), given.prompts)
                rates[who].append(rate)
                print(f"{who:<12} {rate:7.0f} requests/s, {time.monotonic() - began:.1f} s in all{extra}", flush=True)
    median = {who: statistics.median(values) for who, values in rates.items()}
    ratio = median["stage 01"] / median["bare client"]
    print(json.dumps({"requests_per_s": median, "ratio": round(ratio, 3), "at_least": given.at_least}))
    return 0 if ratio >= given.at_least else 1


def write_prompts(path: Path, count: int) -> list[str]:
    """Write prompts that differ and return their texts."""
    texts = [f"Question {number}: what is {number} times {number % 97 + 3}, and how do you see it?"
             for number in range(count)]
    path.write_text("".join(json.dumps({"id": f"p{number}", "prompt": text}) + "\n"
                            for number, text in enumerate(texts)))
    return texts


async def ask_bare(url: str, prompts: list[str], concurrency: int) -> None:
    """Ask everything with the openai client as it is, a worker a request in flight."""
    import openai

    # The environment's proxy is not for servers on this machine.
    client = openai.AsyncOpenAI(base_url=url, api_key="EMPTY",
                                http_client=openai.DefaultAsyncHttpxClient(trust_env=False))
    todo = iter(prompts)

    async def work() -> None:
        for prompt in todo:
            reply = await client.chat.completions.create(
                model=instant_server.MODEL, messages=[{"role": "user", "content": prompt}], max_tokens=2048,
                temperature=0.0, top_p=1.0, seed=0, extra_body={"return_token_ids": True},
            )
            if not reply.choices[0].message.content:
                raise SystemExit("the bare client got no reply")

    await asyncio.gather(*(work() for _ in range(concurrency)))
    await client.close()


def run_stage(url: str, folder: Path, number: int, concurrency: int) -> int:
    """Run stage 01 as a process into a fresh directory; return its rows."""
    run_dir = folder / f"run{number}"
    with open(folder / "stage.log", "w+") as log:
        code = subprocess.call(
            [sys.executable, ROOT / "01_generate_synthetic.py", "--endpoint", url, "--run-dir", run_dir,
             "--prompts", folder / "prompts.jsonl", "--concurrency", str(concurrency)], stdout=log, stderr=log,
        )
        if code:
            log.seek(0)
            raise SystemExit(f"stage 01 ended with code {code}:\n{log.read()[-3000:]}")
    with open(run_dir / "01_traces/traces.jsonl", "rb") as traces:
        return sum(line.endswith(b"\n") for line in traces)


def rate_of(stats: dict, expected: int) -> float:
    """Return requests/s as the server saw them; stop when it saw another number than expected."""
    if stats["count"] != expected:
        raise SystemExit(f"the server got {stats['count']} requests, not {expected}")
    return (stats["count"] - 1) / (stats["last"] - stats["first"])


if __name__ == "__main__":
    sys.exit(main())
