"""Stage 01 killed a hundred times, and stage 01 against a server that fails three times in ten.

Kills: 60 prompts against a stub with small delays; stage 01 gets SIGKILL at random moments and is started again
until it is complete, then everything begins anew in a fresh directory, until all kills are done. After each
kill: whatever was finished is still there byte for byte, no id stands twice, nothing finished was asked again, and
at most `--concurrency` prompts were asked in vain. At the end of each directory: the same rows and skips as a run
that nobody disturbed.

Faults (--faults): 500 prompts, 30% of which meet an error. Every prompt must be asked exactly as often as the
table FAULTS says, and traces + skips + failures must be 500.

  python benchmarks/generate_crashes.py --kills 100
  python benchmarks/generate_crashes.py --faults
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.stub_server import Stub  # noqa: E402

from eagle3.common import files  # noqa: E402
from eagle3.traces import trace_rows  # noqa: E402

PROMPTS = 60
RETRIES = 2
SOON = {"retry-after-ms": "20"}
# kind: (steps of the stub, the last one repeats; calls; where the prompt ends up)
FAULTS: dict[str, tuple[list[dict[str, Any]], int, str]] = {
    "429 with Retry-After, once": ([{"status": 429, "headers": {"Retry-After": "1"}}, {}], 2, "traces"),
    "429 without Retry-After, once": ([{"status": 429}, {}], 2, "traces"),
    "429 always": ([{"status": 429, "headers": SOON}], 1 + RETRIES, "failures"),
    "500 once": ([{"status": 500}, {}], 2, "traces"),
    "500 always": ([{"status": 500, "headers": SOON}], 1 + RETRIES, "failures"),
    "reset twice": ([{"reset": True}, {"reset": True}, {}], 3, "traces"),
    "reset always": ([{"reset": True}], 1 + RETRIES, "failures"),
    "bad JSON once": ([{"raw": '{"choices": [{"mess'}, {}], 2, "traces"),
    "bad JSON always": ([{"raw": '{"choices": [{"mess'}], 1 + RETRIES, "failures"),
    "400": ([{"status": 400, "message": "not like this"}], 1, "failures"),
    "cut before the answer": ([{"content": None, "reasoning": "hm", "finish_reason": "length"}], 1, "skipped"),
}


def main() -> int:
    """Run one of the two; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="SIGKILLs in all")
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and of the faults")
    parser.add_argument("--faults", action="store_true", help="faults instead of kills")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if given.faults:
            return faults(Path(name), given.seed)
        return kills(Path(name), given.kills, given.concurrency, random.Random(given.seed))


def command(folder: Path, run_dir: Path, stub: Stub, *more: object) -> list[str]:
    """Return the command line of stage 01."""
    line = [sys.executable, ROOT / "01_generate_synthetic.py", "--endpoint", stub.url, "--prompts",
            folder / "prompts.jsonl", "--run-dir", run_dir, "--max-tokens", 64, *more]
    return [str(part) for part in line]


def write_prompts(path: Path, texts: list[str]) -> None:
    """Write prompts whose ids are their texts."""
    path.write_text("".join(json.dumps({"id": text, "prompt": text}) + "\n" for text in texts))


def require(condition: object, what: str) -> None:
    """Stop the benchmark when something that must hold does not."""
    if not condition:
        raise SystemExit(f"FAILED: {what}")


# --- kills ------------------------------------------------------------------------------------------------


def kills(folder: Path, wanted: int, concurrency: int, chance: random.Random) -> int:
    """Kill until there were enough; return 0, or stop with what did not hold."""
    texts = [f"prompt number {number}" for number in range(PROMPTS)]
    write_prompts(folder / "prompts.jsonl", texts)
    script = {"default": {"delay_s": 0.02},
              "replies": {texts[7]: [{"delay_s": 0.02, "content": None, "finish_reason": "length"}]}}
    with Stub(script) as stub:
        subprocess.run(command(folder, folder / "calm", stub, "--concurrency", concurrency), check=True,
                       capture_output=True)
    calm = by_id(folder / "calm")
    require(len(calm) == PROMPTS, f"the undisturbed run settled {len(calm)} of {PROMPTS} prompts")
    done = repeated = directories = 0
    while done < wanted:
        directories += 1
        with Stub(script) as stub:
            count, again = one_directory(folder, folder / f"run{directories}", stub, concurrency, wanted - done, chance)
        require(by_id(folder / f"run{directories}") == calm, "the rows differ from those of the undisturbed run")
        done, repeated = done + count, repeated + again
        print(f"directory {directories}: {count} kills, {again} prompts asked again, rows as undisturbed", flush=True)
    print(json.dumps({"kills": done, "directories": directories, "asked_again": repeated, "lost": 0, "twice": 0}))
    return 0


def one_directory(
    folder: Path, run_dir: Path, stub: Stub, concurrency: int, most: int, chance: random.Random
) -> tuple[int, int]:
    """Run to completion with at most `most` kills on the way; return (kills, prompts asked again)."""
    line = command(folder, run_dir, stub, "--concurrency", concurrency)
    count = 0
    while True:
        before, asked = finished_lines(run_dir), len(stub.calls)
        with open(folder / "stage.log", "wb") as log:
            process = subprocess.Popen(line, stdout=log, stderr=log)
            if count < most:
                wait_for_a_moment(process, stub, chance)
                process.kill()
            code = process.wait()
        require(code in (0, -9), f"exit code {code}:\n{(folder / 'stage.log').read_text()[-3000:]}")
        time.sleep(0.1)  # requests of the dead process that were on their way
        calls = stub.calls[asked:]
        check_after(run_dir, before, calls, concurrency)
        if code == 0:
            break
        count += 1
    again = len(stub.calls) - PROMPTS
    require(again <= count * concurrency, f"{again} prompts asked again after {count} kills")
    return count, again


def wait_for_a_moment(process: subprocess.Popen, stub: Stub, chance: random.Random) -> None:
    """Wait until a random moment: one time in five while it starts, else after a few more requests."""
    if chance.random() < 0.2:
        time.sleep(chance.uniform(0.0, 1.0))
        return
    target = len(stub.calls) + chance.randrange(1, 25)
    while len(stub.calls) < target and process.poll() is None:
        time.sleep(0.001)
    time.sleep(chance.uniform(0.0, 0.03))


def check_after(run_dir: Path, before: dict[str, list[bytes]], calls: list[str], concurrency: int) -> None:
    """Check one run, killed or not: what lay there before it, and what it asked."""
    after = finished_lines(run_dir)
    for name, lines in before.items():
        require(after[name][: len(lines)] == lines, f"{name}.jsonl lost or changed a finished row")
    old = {json.loads(line)["id"].removesuffix("#0") for lines in before.values() for line in lines}
    new = Counter(json.loads(line)["id"].removesuffix("#0") for lines in after.values() for line in lines)
    require(max(new.values(), default=1) == 1, f"twice: {[name for name, times in new.items() if times > 1]}")
    require(not old & set(calls), f"asked again though finished: {sorted(old & set(calls))}")
    require(len(set(calls)) == len(calls), "one run asked a prompt twice")
    in_vain = set(calls) - set(new)
    require(len(in_vain) <= concurrency, f"{len(in_vain)} prompts were asked in vain by one run")


def finished_lines(run_dir: Path) -> dict[str, list[bytes]]:
    """Return the whole lines of traces and skips; a torn last line is not finished."""
    found = {}
    for name in ("traces", "skipped"):
        path = run_dir / "01_traces" / f"{name}.jsonl"
        data = path.read_bytes() if path.exists() else b""
        found[name] = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    return found


def by_id(run_dir: Path) -> dict[str, dict]:
    """Return {id: row} of traces (each checked against its digest) and skips, sorted by id."""
    folder = run_dir / "01_traces"
    rows = {row["id"]: row for row in trace_rows.read_traces(folder / "traces.jsonl")}
    rows |= {row["id"]: row for _, row in files.read_jsonl(folder / "skipped.jsonl")}
    return dict(sorted(rows.items()))


# --- faults -----------------------------------------------------------------------------------------------


def faults(folder: Path, seed: int, count: int = 500) -> int:
    """Ask 500 prompts of a failing server and compare the calls with the table; return 0 or stop."""
    texts = [f"prompt number {number}" for number in range(count)]
    write_prompts(folder / "prompts.jsonl", texts)
    faulty = random.Random(seed).sample(texts, count * 3 // 10)
    kinds = {text: list(FAULTS)[number % len(FAULTS)] for number, text in enumerate(faulty)}
    with Stub({"replies": {text: FAULTS[kind][0] for text, kind in kinds.items()}}) as stub:
        result = subprocess.run(
            command(folder, folder / "run", stub, "--concurrency", 16, "--retries", RETRIES, "--max-failures", count,
                    "--max-consecutive-failures", count), capture_output=True, text=True)
    require(result.returncode == 0, f"exit code {result.returncode}:\n{result.stderr[-3000:]}")
    where = {row["id"].removesuffix("#0"): name for name in ("traces", "skipped", "failures")
             for _, row in files.read_jsonl(folder / f"run/01_traces/{name}.jsonl")}
    calls, wrong = Counter(stub.calls), []
    for text in texts:
        _, expected, target = FAULTS[kinds[text]] if text in kinds else ([], 1, "traces")
        if (calls[text], where.get(text)) != (expected, target):
            wrong.append(f"{text} ({kinds.get(text, 'no fault')}): {calls[text]} calls and {where.get(text)}, "
                         f"expected {expected} and {target}")
    by_kind: dict[str, set[int]] = {}
    for text, kind in kinds.items():
        by_kind.setdefault(kind, set()).add(calls[text])
    for kind, seen in by_kind.items():
        print(f"{kind:<32} {sum(k == kind for k in kinds.values()):>3} prompts, calls each: {sorted(seen)}, "
              f"expected {FAULTS[kind][1]}, then in {FAULTS[kind][2]}")
    settled = Counter(where.values())
    print(json.dumps({"prompts": count, "faulty": len(faulty), "calls": len(stub.calls), **settled}))
    require(not wrong, f"{len(wrong)} prompts differ from the table, such as:\n  " + "\n  ".join(wrong[:5]))
    require(settled.total() == count, f"{settled.total()} of {count} prompts are accounted for")
    return 0


if __name__ == "__main__":
    sys.exit(main())
