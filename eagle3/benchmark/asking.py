"""Running a load: in this process or in several, watched for a server that dies and a signal to stop."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from eagle3.benchmark.streaming import Job, Load, Row, ask_all
from eagle3.common.errors import PreconditionError
from eagle3.common.processes import Child
from eagle3.common.stage import Stage
from eagle3.engines.servers import Server

_IN_ONE_PROCESS = 128  # requests in flight: docs/speed.md has the chunks/s that one process takes


def processes(given: int | None, concurrency: int) -> int:
    """Return how many processes ask: as given, else what the requests in flight want and half of the cores allow."""
    if given is not None:
        return given
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores // 2, -(-concurrency // _IN_ONE_PROCESS)))


def run(job: Job, count: int, server: Server, stage: Stage, name: str) -> Load:
    """Run a load, giving up within a second when the stage or the server stops."""
    progress = stage.progress(name, len(job.bodies), "requests")
    try:
        if count > 1 and min(job.concurrency, len(job.bodies)) > 1:
            return asyncio.run(shared(job, count, server, stage, progress.update))
        return asyncio.run(_watched(ask_all(job, progress.update), server, stage))
    finally:
        progress.close()


async def _watched(work: Any, server: Server, stage: Stage) -> Any:
    """Return what some work gives; raise as soon as the server dies or a signal comes."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=0.5))[0]:
            stage.check_stop()
            server.require_alive()
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def shared(job: Job, count: int, server: Server, stage: Stage, done: Callable[[], None]) -> Load:
    """Run a load in several processes, which begin together."""
    command = [sys.executable, "-m", "eagle3.benchmark.streaming"]
    log = stage.run_dir / "logs" / f"{stage.directory.name}-load.log"
    children = [Child(command, log_path=log, piped=True) for _ in range(count)]

    def converse(child: Child) -> Load:
        for line in iter(child.stdout.readline, b""):
            if line.startswith(b"{"):
                answer = json.loads(line)
                return Load(**answer | {"rows": [Row(**row) for row in answer["rows"]]})
            done()
        raise PreconditionError("a process of the load generator ended", where=log, found=child.tail(5))

    async def begin() -> list[Load]:
        parts = job.split(count)
        used = children[: len(parts)]
        for child, part in zip(used, parts, strict=True):
            child.stdin.write(json.dumps(part.__dict__).encode() + b"\n")
            child.stdin.flush()
        await asyncio.gather(*(asyncio.to_thread(child.stdout.readline) for child in used))
        for child in used:
            child.stdin.write(b"go\n")
            child.stdin.flush()
        loads: list[Load] = []
        for each in asyncio.as_completed([asyncio.to_thread(converse, child) for child in used]):
            loads.append(await each)
            if any(row.status != 200 for row in loads[-1].rows):
                return loads[-1:]  # the others ask for nothing
        return loads

    try:
        loads = await _watched(begin(), server, stage)
    finally:
        for child in children:
            child.stop()
    rows = sorted((row for load in loads for row in load.rows), key=lambda row: row.number)
    return Load(rows, sorted({name for load in loads for name in load.refused}), max(load.cpu_s for load in loads),
                [late for load in loads for late in load.late_s])
