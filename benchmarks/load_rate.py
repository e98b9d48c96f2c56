"""Chunks/s that the load generator of stage 06 takes from servers that stream at once, and how late it is for them.

The servers send a packet a chunk, as fast as they can, each in a process of its own. The client is stage 06's, with its
record of every chunk's time. What an engine sends has to stay well below, or the client would be measured. The exit
code is 1 when the best rate is under --at-least.

  python benchmarks/load_rate.py
  python benchmarks/load_rate.py --concurrency 256 --processes 1 2 4 --servers 4
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import instant_server

from eagle3.benchmark import asking
from eagle3.benchmark.streaming import Job, Load, ask_all


def main() -> int:
    """Measure each number of processes; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=512, help="requests of each turn")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each reply, a chunk each")
    parser.add_argument("--concurrency", type=int, default=64, help="requests in flight")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="processes of the client")
    parser.add_argument("--servers", type=int, default=1, help="servers, when the client has several processes")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    parser.add_argument("--at-least", type=float, default=0, help="smallest best rate that is good, in chunks/s")
    given = parser.parse_args()
    best = 0.0
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(instant_server.running(given.tokens)) for _ in range(given.servers)]
        for processes in given.processes:
            rates, lates, busy = [], [], []
            for _ in range(given.rounds):
                found, seconds = asyncio.run(ask(given, processes, [server.url for server in servers]))
                chunks = sum(len(row.times) for row in found.rows)
                if chunks != given.requests * given.tokens:
                    raise SystemExit(f"{chunks} chunks came, not {given.requests * given.tokens}")
                rates.append(chunks / seconds)
                lates.append(sorted(found.late_s)[int(0.99 * (len(found.late_s) - 1))])
                busy.append(found.cpu_s / seconds)
            best = max(best, statistics.median(rates))
            print(json.dumps({"processes": processes, "in_flight": given.concurrency,
                              "chunks_per_s": round(statistics.median(rates)),
                              "late_ms_p99": round(1000 * statistics.median(lates), 1),
                              "cpu_share_of_the_busiest": round(statistics.median(busy), 2)}), flush=True)
    return 0 if best >= given.at_least else 1


async def ask(given: argparse.Namespace, processes: int, urls: list[str]) -> tuple[Load, float]:
    """Ask everything as stage 06 does; return what came and the seconds from the first request to the last answer."""
    bodies = [{"model": instant_server.MODEL, "messages": [{"role": "user", "content": f"Question {number}"}],
               "max_tokens": given.tokens, "stream": True} for number in range(given.requests)]
    jobs = [Job(url, bodies[k :: len(urls)], {"return_token_ids": True}, given.concurrency // len(urls), 600)
            for k, url in enumerate(urls)]
    if processes == 1 and len(jobs) == 1:
        loads = [await ask_all(jobs[0])]
    else:
        stage = SimpleNamespace(run_dir=Path(tempfile.gettempdir()), directory=Path("load_rate"),
                                check_stop=lambda: None)
        alive = SimpleNamespace(require_alive=lambda: None)
        loads = await asyncio.gather(*(asking.shared(job, max(1, processes // len(jobs)), alive, stage, lambda: None)
                                       for job in jobs))
    rows = [row for each in loads for row in each.rows]
    whole = Load(rows, [], max(each.cpu_s for each in loads), [late for each in loads for late in each.late_s])
    return whole, max(row.ended for row in rows) - min(row.started for row in rows)


if __name__ == "__main__":
    sys.exit(main())
