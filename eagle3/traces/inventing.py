"""Sampling what a verifier says as the user, many requests at a time, until enough of it is usable."""

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from typing import Any

from eagle3.common.errors import FailureLimitError
from eagle3.common.files import Appender, encode_line
from eagle3.common.log import Progress, logger
from eagle3.traces.chat import Chat
from eagle3.traces.client import RequestFailed
from eagle3.traces.endpoints import Pool
from eagle3.traces.generation import first_problem, watch
from eagle3.traces.prompt_cleaning import Cleaner, Hearing
from eagle3.traces.self_prompts import ATTEMPTS, Plan, Record
from eagle3.traces.user_turn import UserTurn, user_turn

_LEAST_YIELD = 500  # attempts in a row of which one at least must be usable


class Inventor:
    """Asks for attempts and judges them in the order of their numbers.

    Attributes:
        usable: numbers of the usable ones. judged: attempts that were looked at, from number 0.
    """

    def __init__(self, record: Record, pool: Pool, chat: Chat, progress: Progress) -> None:
        """Take what is there already; what was judged before is judged again, which gives the same."""
        self.record, self.plan, self._pool, self._progress = record, record.plan, pool, progress
        self.cleaner = Cleaner(self.plan.held_out, self.plan.tokens)
        self.usable: list[int] = []
        self.judged = 0
        self._turns = turns_of(self.plan, chat)
        self._hear = Hearing(chat)
        self._lines: list[bytes] = []
        self._writing: asyncio.Future[None] | None = None
        self._again: list[int] = []  # numbers whose requests have failed
        self._failed_in_row, self._fruitless = 0, 0
        self._judge()

    async def run(self, look: Callable[[], None]) -> None:
        """Ask until enough is usable; `look` is called ten times a second and stops the run by raising.

        Raises what stopped it: Interrupted, FailureLimitError (failures in a row, hardly anything usable),
        PreconditionError. What has been said is on disk in any case.
        """
        self._new = (number for number in count() if number not in self.record.attempts)
        self._lock = asyncio.Lock()
        self._file = Appender(self.record.directory / ATTEMPTS)
        tasks = [asyncio.create_task(self._work_together()), asyncio.create_task(watch(look))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, *filter(None, [self._writing]), return_exceptions=True)
            await self._pool.close()
            self._file.close()
        for task in reversed(tasks):
            if not task.cancelled() and (error := task.exception()):
                raise first_problem(error)

    @property
    def enough(self) -> bool:
        """Whether as many prompts are usable as are wanted."""
        return len(self.usable) >= self.plan.count

    async def _work_together(self) -> None:
        """Ask until there is enough; what is in flight then is dropped."""
        workers = [asyncio.create_task(self._work()) for _ in range(self.plan.section.concurrency)]
        try:
            await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for worker in workers:
                worker.cancel()
            ended = await asyncio.gather(*workers, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _work(self) -> None:
        while not self.enough:
            number = heapq.heappop(self._again) if self._again else next(self._new)
            turn = self._turns[number % len(self._turns)]
            try:
                said = await self._pool.complete(turn.ids, self._fields(number, turn))
            except RequestFailed as failure:
                self._fail(number, failure)
                continue
            self._failed_in_row = 0
            attempt = self._hear(number, turn, said)
            await self._write(encode_line(asdict(attempt)))
            self.record.attempts[number] = attempt
            self._judge()

    def _fields(self, number: int, turn: UserTurn) -> dict[str, Any]:
        section, room = self.plan.section, self.plan.tokens[1] + 1
        if self._pool.served.limit:
            room = min(room, self._pool.served.limit - len(turn.ids))
        return {"max_tokens": max(1, room), "temperature": section.self_temperature, "top_p": section.self_top_p,
                "seed": self.plan.seed(number), "stop_token_ids": list(turn.end_ids), "skip_special_tokens": False,
                } | ({"stop": [turn.end_text]} if turn.end_text else {})

    async def _write(self, line: bytes) -> None:
        """Return when the line is on disk; lines that wait for the disk share one write."""
        self._lines.append(line)
        async with self._lock:
            if self._lines:
                lines, self._lines = self._lines, []
                self._writing = asyncio.ensure_future(asyncio.to_thread(self._file.append_lines, b"".join(lines)))
                await asyncio.shield(self._writing)

    def _judge(self) -> None:
        """Judge what is there without a gap, in order, up to the last prompt that is needed."""
        while not self.enough and (attempt := self.record.attempts.get(self.judged)):
            self.judged += 1
            good = self.cleaner.usable(attempt)
            self._fruitless = 0 if good else self._fruitless + 1
            if good:
                self.usable.append(attempt.number)
                self._progress.update(1, note=f"{100 * len(self.usable) / self.judged:.0f}% usable")
            if self._fruitless >= _LEAST_YIELD:
                raise FailureLimitError(
                    f"of {self._fruitless} attempts in a row none is a usable prompt", where=self.record.directory,
                    found="; ".join(f"{each['attempts']:,} {reason}, such as {each['example']!r}"
                                    for reason, each in self.cleaner.figures().items()),
                    fix="look at what it says; change --self-temperature, --self-tokens, --self-openings or "
                    "--self-systems, or give a prompts file")

    def _fail(self, number: int, failure: RequestFailed) -> None:
        heapq.heappush(self._again, number)
        self._failed_in_row += 1
        logger.debug("attempt %d failed: %s", number, failure)
        if failure.rejected or self._failed_in_row >= self.plan.section.max_consecutive_failures:
            raise FailureLimitError(
                "the server does not complete the user's turn" if failure.rejected else
                f"{self._failed_in_row} requests failed in a row; what was said before is kept",
                found=failure, fix="see that the server is well and takes token ids at /v1/completions, and run the "
                "same command again; or give a prompts file with --prompts")


def turns_of(plan: Plan, chat: Chat) -> list[UserTurn]:
    """Return the user's turn of each kind; PreconditionError where the template has none."""
    arguments = plan.section.chat_template_kwargs
    return [user_turn(chat, system=kind.system, opening=kind.opening, arguments=arguments) for kind in plan.kinds]


def invent(record: Record, pool: Pool, chat: Chat, progress: Progress, look: Callable[[], None]) -> None:
    """Complete a folder of invented prompts through the servers of a pool."""
    record.directory.mkdir(parents=True, exist_ok=True)
    inventor = Inventor(record, pool, chat, progress)
    record.begin()
    if not inventor.enough:
        asyncio.run(inventor.run(look))
    record.finish(inventor.usable, inventor.cleaner, inventor.judged)
