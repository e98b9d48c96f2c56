"""Peak memory of stage 01 on a small and on a large file of prompts.

Each run asks a server that answers at once and is stopped with SIGTERM after --seconds of asking, or when 80%
are asked, whichever comes first (so neither reaches the stage's end). Prints both peaks (VmHWM of the process,
in which the kernel keeps the highest resident size), and what a prompt costs: the difference by prompts.

  python benchmarks/generate_memory.py
  python benchmarks/generate_memory.py --large 5000000 --seconds 20
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import instant_server

ROOT = Path(__file__).resolve().parent.parent
_POLL_S = 0.05
_START_LIMIT_S = 900


def main() -> int:
    """Measure both sizes; return the exit code: 1 when a prompt costs more than --at-most bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=10_000, help="prompts of the small file")
    parser.add_argument("--large", type=int, default=1_000_000, help="prompts of the large file")
    parser.add_argument("--seconds", type=float, default=60, help="how long to ask")
    parser.add_argument("--concurrency", type=int, default=64, help="requests in flight")
    parser.add_argument("--at-most", type=float, default=400, help="bytes that a prompt may cost")
    given = parser.parse_args()
    peaks = {}
    for count in (given.small, given.large):
        with tempfile.TemporaryDirectory() as name, instant_server.running() as server:
            folder = Path(name)
            write_prompts(folder / "prompts.jsonl", count)
            found = measure(server, folder, count, given.seconds, given.concurrency)
            peaks[count] = found["peak"]
            print(f"{count:>9,} prompts: peak {found['peak'] / 1e6:.1f} MB ({found['before'] / 1e6:.1f} MB before the "
                  f"first request), {found['waited']:.1f} s until the first request, {found['asked']:,} asked, "
                  f"{found['rows']:,} rows, exit code {found['code']}", flush=True)
    cost = (peaks[given.large] - peaks[given.small]) / (given.large - given.small)
    print(json.dumps({"peak_bytes": peaks, "bytes_per_prompt": round(cost, 1)}))
    return 0 if cost <= given.at_most else 1


def write_prompts(path: Path, count: int) -> None:
    """Write short prompts that differ, as a stream."""
    with open(path, "w") as file:
        for number in range(count):
            file.write(f'{{"id": "p{number}", "prompt": "Tell me something about the number {number}."}}\n')


def measure(server: instant_server.Running, folder: Path, count: int, seconds: float, concurrency: int) -> dict:
    """Run stage 01 until it has asked for a while, stop it, and return what was seen (bytes, seconds)."""
    began, asking = time.monotonic(), 0.0
    before = peak = 0
    with open(folder / "stage.log", "w+") as log:
        process = subprocess.Popen(
            [sys.executable, ROOT / "01_generate_synthetic.py", "--endpoint", server.url, "--run-dir", folder / "run",
             "--prompts", folder / "prompts.jsonl", "--concurrency", str(concurrency)], stdout=log, stderr=log,
        )
        stopped = False
        while process.poll() is None:
            peak = max(peak, peak_of(process.pid))
            asked, now = server.get("stats")["count"], time.monotonic()
            if asked and not asking:
                asking, before = now, peak
            over = asking and (now - asking >= seconds or asked >= 0.8 * count)
            if (over or now - began > _START_LIMIT_S) and not stopped:
                process.send_signal(signal.SIGTERM)
                stopped = True
            time.sleep(_POLL_S)
        if process.returncode != 143 or not asking:
            log.seek(0)
            raise SystemExit(f"stage 01 ended with code {process.returncode} after {server.get('stats')['count']} "
                             f"requests:\n{log.read()[-3000:]}")
    with open(folder / "run/01_traces/traces.jsonl", "rb") as traces:
        rows = sum(line.endswith(b"\n") for line in traces)
    return {"peak": peak, "before": before, "waited": asking - began, "asked": server.get("stats")["count"],
            "rows": rows, "code": process.returncode}


def peak_of(pid: int) -> int:
    """Return the highest resident size of a process so far in bytes, 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = [line.split() for line in text.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0][1]) * 1024 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
