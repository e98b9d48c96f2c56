"""The load generator: requests sent with a fixed number in flight, every byte of the answers noted with its time.

While a load runs, nothing is parsed: a chunk costs a read and an entry in a list, so that the client is late for none
and the times are the server's. What the bytes say is read afterwards (`stream_reply`). One process is enough for what
most engines send; more share the requests where it is not, each with a part of those in flight:

  python -m eagle3.benchmark.streaming      (a job on stdin, rows on stdout: `load` starts it)
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from eagle3.benchmark import stream_reply
from eagle3.engines import servers

_REJECTED = (400, 422)  # the request is at fault: perhaps an optional field of it
_READ_BYTES = 1 << 16
_BEAT_S = 0.01


@dataclass
class Job:
    """A load on one server.

    Attributes:
        url: OpenAI-compatible root. bodies: the requests, without what is optional. optional: fields that are left out
            where the server refuses them. concurrency: requests in flight. timeout_s: for one request.
        numbers: the requests' own numbers, where this is a part of a larger job.
    """

    url: str
    bodies: list[dict[str, Any]]
    optional: dict[str, Any]
    concurrency: int
    timeout_s: float
    numbers: list[int] = field(default_factory=list)

    def split(self, parts: int) -> list["Job"]:
        """Return the job in parts that together have as many requests in flight."""
        parts = max(1, min(parts, self.concurrency, len(self.bodies)))
        whole, more = divmod(self.concurrency, parts)
        return [Job(self.url, self.bodies[k::parts], self.optional, whole + (k < more), self.timeout_s,
                    list(range(k, len(self.bodies), parts))) for k in range(parts)]


@dataclass
class Row:
    """What came of one request.

    Attributes:
        status: of HTTP; 0 where there was no answer, and then `text` says why.
        text: the body, of a stream as one chat completion. started, ended: seconds of the machine's monotonic clock.
        times: seconds from the start to each chunk that brought tokens. tokens: how many each brought, -1 where the
            server does not tell.
    """

    number: int
    status: int
    text: str
    started: float
    ended: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass
class Load:
    """What came of a job: rows in its order, optional fields that were refused, and how the client did.

    Attributes:
        cpu_s: processor time of the client while it asked. late_s: how late it was for a beat of its own, each 10 ms.
    """

    rows: list[Row]
    refused: list[str]
    cpu_s: float
    late_s: list[float]


async def ask_all(job: Job, done: Callable[[], None] = lambda: None) -> Load:
    """Ask everything; after the first request that fails none is begun. The rows of what was not asked are left out."""
    import aiohttp

    optional, refused = dict(job.optional), set[str]()
    notes: list[_Note] = []
    waiting = iter(enumerate(job.bodies))
    address = f"{job.url}/chat/completions"
    failed = False
    settings: dict[str, Any] = {"proxy": servers.proxy_for(job.url)}
    if job.url.startswith("https:"):
        settings["ssl"] = servers.tls_context()

    async def ask(session: "aiohttp.ClientSession", note: _Note, body: dict[str, Any]) -> None:
        sent = set(optional)
        async with session.post(address, json=body | optional, **settings) as response:
            note.status, read = response.status, response.content.read
            note.streamed = response.content_type == "text/event-stream"
            while data := await read(_READ_BYTES):
                note.arrivals.append((time.monotonic(), data))
        if note.status in _REJECTED:
            said = note.body().decode(errors="replace")
            if named := {name for name in sent if name in said}:
                refused.update(named)
                for name in named:
                    optional.pop(name, None)
                note.restart()
                await ask(session, note, body)

    async def work(session: "aiohttp.ClientSession") -> None:
        nonlocal failed
        for number, body in waiting:
            note = _Note(job.numbers[number] if job.numbers else number)
            notes.append(note)
            try:
                await ask(session, note, body)
            except TimeoutError:
                note.error = f"no whole reply in {job.timeout_s:g} s"
            except (aiohttp.ClientError, OSError) as error:
                note.error = f"{type(error).__name__}: {error}"
            note.ended = time.monotonic()
            failed = failed or bool(note.error) or note.status != 200
            done()
            if failed:
                return

    late: list[float] = []
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=600)
    limits = aiohttp.ClientTimeout(total=job.timeout_s)
    headers = {"Authorization": f"Bearer {servers.api_key()}"}
    before = time.process_time()
    async with aiohttp.ClientSession(connector=connector, timeout=limits, headers=headers, trust_env=False) as session:
        beat = asyncio.create_task(_beat(late))
        try:
            await asyncio.gather(*(work(session) for _ in range(min(job.concurrency, len(job.bodies)))))
        finally:
            beat.cancel()
    spent = time.process_time() - before
    return Load([note.row() for note in sorted(notes, key=lambda note: note.number)], sorted(refused), spent, late)


async def _beat(late: list[float]) -> None:
    """Note by how much a sleep of 10 ms is too long: so late may the time of a chunk be."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(_BEAT_S)
        late.append(max(0.0, time.monotonic() - began - _BEAT_S))


class _Note:
    """What is noted of a request while it runs."""

    def __init__(self, number: int) -> None:
        self.number, self.error, self.ended = number, "", 0.0
        self.restart()

    def restart(self) -> None:
        """Forget a request that was refused; the next one is measured anew."""
        self.status, self.streamed, self.started = 0, False, time.monotonic()
        self.arrivals: list[tuple[float, bytes]] = []

    def body(self) -> bytes:
        return b"".join(data for _, data in self.arrivals)

    def row(self) -> Row:
        row = Row(self.number, 0 if self.error else self.status, self.error, self.started, self.ended)
        if not self.error and self.streamed and self.status == 200:
            row.text, times, row.tokens = stream_reply.assembled(self.arrivals)
            row.times = [when - self.started for when in times]
        elif not self.error:
            row.text = self.body().decode(errors="replace")
        return row


def main() -> None:
    """Ask the job of the first line of stdin once a second line comes; a dot for each reply, then the load."""
    job = Job(**json.loads(sys.stdin.readline()))
    import aiohttp  # noqa: F401 - before the start, which is common to all parts

    print("ready", flush=True)
    if sys.stdin.readline():
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(asdict(asyncio.run(ask_all(job, lambda: print(".", flush=True))))), flush=True)


if __name__ == "__main__":
    main()
