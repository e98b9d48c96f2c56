"""One table of the trainer on one GPU: rates, memory beside its estimate, long texts, bf16 moments, the peer.

Every row is a process of its own, so a row that fails or takes too long costs no other; the table is printed after
each row.
Random weights of a drafter of Kimi-K2.5's size and random states, three TTT steps. The peer is speculators' own
compiled step; the products are the bare matrix products of a step with a trained head, 8,192 rows.

  python benchmarks/train_table.py                # an H200, about 4 minutes
  python benchmarks/train_table.py --minutes 3 --rows products frozen 'frozen, bf16 moments'

Exits with 1 when a row has failed.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

LONG = {"frozen": True, "steps": 2}
# In the order in which they are run: what is wanted most first, the peer, which compiles for more than a minute, before
# the longest texts.
ROWS: dict[str, dict[str, Any]] = {
    "products": {"kind": "products"},
    "frozen": {"frozen": True},
    "trained": {},
    "frozen, bf16 moments": {"frozen": True, "moments": "bf16"},
    "frozen, fp8": {"frozen": True, "matmul": "fp8"},
    "trained, fp8": {"matmul": "fp8"},
    "frozen, recomputed": {"frozen": True, "recompute": "on"},
    "frozen, 32k": {**LONG, "tokens": 32768},
    "frozen, 32k recomputed": {**LONG, "tokens": 32768, "recompute": "on"},
    "frozen, 65k recomputed": {**LONG, "tokens": 65536, "recompute": "on"},
    "peer, frozen": {"kind": "peer", "frozen": True},
    "frozen, 65k": {**LONG, "tokens": 65536},
}


def main() -> int:
    """Run the rows, each in a process; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=[*ROWS], choices=[*ROWS], help="which, in this order")
    parser.add_argument("--minutes", type=float, default=9.0, help="rows that have not begun by then are left out")
    parser.add_argument("--row-seconds", type=float, default=150.0, help="longest a row may take")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measured(given.one)))
        return 0
    started, found = time.monotonic(), dict[str, dict[str, Any]]()
    for name in given.rows:
        left = 60 * given.minutes - (time.monotonic() - started)
        found[name] = run(name, min(left, given.row_seconds)) if left > 10 else {"failed": "no time was left"}
        print("\n" + table(found), flush=True)
    print(json.dumps(found))
    return int(any("failed" in figures for figures in found.values()))


def run(name: str, seconds: float) -> dict[str, Any]:
    """Return the figures of a row, measured in a process of its own, or why there are none."""
    try:
        result = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True,
                                timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {seconds:.0f} s"}
    lines = result.stdout.strip().splitlines()
    if result.returncode == 0 and lines:
        return json.loads(lines[-1])  # type: ignore[no-any-return]
    said = result.stderr.strip().splitlines() or ["no message"]
    print(result.stderr[-3000:], file=sys.stderr, flush=True)
    return {"failed": said[-1][:160]}


def measured(name: str) -> dict[str, Any]:
    """Measure a row in this process."""
    import torch
    import train_against_speculators as sides

    from eagle3.common.options import TrainSection
    from eagle3.training.trainer import Processes, step_of

    usual = {"kind": "ours", "tokens": 8192, "steps": 8, "frozen": False, "moments": "float32", "recompute": "off",
             "matmul": "bf16"}
    row = usual | ROWS[name]
    given = argparse.Namespace(hidden=7168, draft_vocab=32000, tokens=row["tokens"], prompt=0, ttt_steps=3,
                               document=max(2048, row["tokens"] if row["tokens"] > 8192 else 0), steps=row["steps"])
    processes, estimate = Processes.start(), None
    with sides.cleared():
        if row["kind"] == "ours":
            options = TrainSection(batch_tokens=given.tokens, ttt_steps=3, draft_tokens=3, moments=row["moments"],
                                   recompute=row["recompute"], matmul=row["matmul"])
            figures, trainer = sides.ours(given, processes, trained_head=not row["frozen"], options=options)
            estimate = step_of(trainer.model).peak(
                given.tokens, 3, moments=4 if row["moments"] == "bf16" else 8, recompute=trainer.recompute,
                fp8=row["matmul"] == "fp8") / 1e9
        else:
            act = sides.products if row["kind"] == "products" else sides.peer
            figures = act(given, processes, **({"trained_head": True} if row["kind"] == "products" else {}))
    return figures | {"rate": given.tokens / figures["seconds"], "tokens": given.tokens, "estimate_gb": estimate,
                      "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the rows so far as a table in Markdown."""
    lines = ["| row | tokens | ms a step | tokens/s | of products | over peer | peak GB | estimate GB | first step s |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]

    def over(rate: float, name: str) -> str:
        other = found.get(name, {}).get("rate")
        return f"{rate / other:.3f}" if other else ""

    for name, figures in found.items():
        if "failed" in figures:
            lines.append(f"| {name} | failed: {figures['failed'].replace('|', '/')} |" + " |" * 7)
            continue
        estimate = "" if figures["estimate_gb"] is None else f"{figures['estimate_gb']:.1f}"
        lines.append(f"| {name} | {figures['tokens']:,} | {1000 * figures['seconds']:.1f} | {figures['rate']:,.0f} | "
                     f"{over(figures['rate'], 'products')} | {over(figures['rate'], 'peer, frozen')} | "
                     f"{figures['peak_gb']:.1f} | {estimate} | {figures['first']:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
