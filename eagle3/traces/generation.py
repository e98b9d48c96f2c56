"""Generation: ask for many conversations at once and write each finished reply durably.

A worker takes a conversation, asks for its replies in turn, hands each result to one writer and goes on only
when it is on disk. So a process killed at any moment has at most `concurrency` prompts to ask again. The writer
takes whatever waits, so many results share one fsync without any of them waiting for company.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from eagle3.common.errors import FailureLimitError
from eagle3.common.files import encode_line
from eagle3.common.log import Progress, logger
from eagle3.common.options import GenerateSection
from eagle3.traces.chat import Chat, TemplateRefusal
from eagle3.traces.client import RequestFailed
from eagle3.traces.endpoints import Pool
from eagle3.traces.one_fault import FOLLOWS, HeldBack
from eagle3.traces.replies import Reply, reason_to_fail
from eagle3.traces.trace_making import NoTrace, TraceMaker
from eagle3.traces.trace_rows import SKIPPED, Ledger, assistant_message
from eagle3.traces.worklist import ConversationWork, Request

_LOOK_EVERY_S = 0.1


class Generator:
    """Turns conversations into traces, skips and failures of a ledger.

    Attributes:
        came_of_it: how many prompts of this run became "traces", "failures", or were skipped, by "skipped: reason";
            and how many replies were "tagged", with reasoning in their content.
        maker: makes rows of replies, and knows what their token ids were held against.
    """

    def __init__(
        self,
        section: GenerateSection,
        ledger: Ledger,
        *,
        pool: Pool,
        chat: Chat | None,
        limit: int | None,
        progress: Progress,
    ) -> None:
        """Take what is to be asked how.

        Args:
            chat: the verifier's template; None leaves token ids and prompt lengths to the server.
            limit: longest prompt plus reply in tokens, or None.
        """
        self.section, self.ledger, self.pool = section, ledger, pool
        self.chat, self.limit, self.progress = chat, limit, progress
        self.model = pool.served.name
        self.came_of_it: Counter[str] = Counter()
        self.maker = TraceMaker(section, chat, self.model)
        self._failed_in_row, self._answered = 0, False
        self._held = HeldBack(ledger.settings)
        self._rows: list[tuple[str, dict[str, Any]]] = []
        self._tokens, self._started = 0, time.monotonic()
        self._said: set[str] = set()
        self._queue: asyncio.Queue[tuple[str, dict[str, Any], asyncio.Future[None]] | None] = asyncio.Queue()

    async def run(self, todo: Iterator[ConversationWork], look: Callable[[], None]) -> None:
        """Ask for everything; `look` is called ten times a second and stops the run by raising.

        Raises what stopped it: Interrupted, FailureLimitError (failures in a row), PreconditionError (key
        refused, one fault in all replies, disk full, …). What was finished is on disk in any case.
        """
        writer = asyncio.create_task(self._write())
        workers = asyncio.create_task(self._work_together(todo))
        watcher = asyncio.create_task(watch(look))
        tasks = (workers, watcher, writer)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (workers, watcher):
                task.cancel()
            await asyncio.gather(workers, watcher, return_exceptions=True)
            self._queue.put_nowait(None)
            await asyncio.gather(writer, return_exceptions=True)
            await self.pool.close()
        for task in (writer, watcher, workers):
            if not task.cancelled() and (error := task.exception()):
                raise first_problem(error)

    # --- workers ---

    async def _work_together(self, todo: Iterator[ConversationWork]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self.section.concurrency):
                group.create_task(self._work(todo))
        await self._keep_contradicting()
        for record in self._held.left():
            await self._record("skipped", record)

    async def _work(self, todo: Iterator[ConversationWork]) -> None:
        for work in todo:
            await self._converse(work)

    async def _converse(self, work: ConversationWork) -> None:
        """Ask for the missing replies of a conversation, each with the generated ones before it as history."""
        for request in work.requests():
            if work.broken:
                await self._leave_out(request, work.broken)
                continue
            reply = await self._settle(request)
            if isinstance(reply, str):
                work.broken = reply
            else:
                work.went_on(request, assistant_message(reply.reasoning, reply.content, reply.tool_calls))

    async def _leave_out(self, request: Request, broken: str) -> None:
        """Record a reply that cannot be asked for, since an earlier one of its conversation is missing."""
        if broken == "failed":  # it is asked again when that one succeeds
            await self._fail(request, RequestFailed("an earlier turn failed", "", rejected=True))
        else:
            await self._skip(request, FOLLOWS)

    async def _settle(self, request: Request) -> Reply | str:
        """Ask for one reply and record what came of it; return it, or "skipped" or "failed" when it gave no trace."""
        prompt_ids: list[int] | None = None
        if self.chat is not None:
            try:
                arguments = request.setting.chat_template_kwargs
                prompt_ids = self.chat.prompt_ids(request.messages, request.tools, arguments)
            except TemplateRefusal as refusal:
                return await self._skip(request, "template", str(refusal))
        max_tokens = self._room(prompt_ids, request.setting.max_tokens)
        if max_tokens < 1:
            length = len(prompt_ids or [])
            return await self._skip(request, "prompt too long", f"{length} {'>' if max_tokens else '='} {self.limit}")
        try:
            reply = await self.pool.ask(request.messages, request.tools, request.setting, max_tokens)
        except RequestFailed as failure:
            return await self._fail(request, failure)
        problem = reason_to_fail(reply)
        beyond = "" if problem else self.maker.proof.beyond_vocabulary(reply)
        if problem or beyond:
            return await self._fail(request, RequestFailed(problem or "token ids beyond the vocabulary", beyond or (
                f"after {reply.tokens} tokens")))
        self._failed_in_row, self._answered = 0, True
        self._tokens += reply.tokens
        self.came_of_it["tagged"] += reply.tagged
        try:
            row, contradicts = self.maker.row(request, reply, prompt_ids, max_tokens)
        except NoTrace as none:
            return await self._skip(request, none.reason, none.detail, finish_reason=reply.finish_reason,
                                    tokens=reply.tokens)
        if contradicts:
            self._rows.append((request.setting.name, row))
        else:
            await self._keep(request.setting.name, row)
        if self.maker.proof.texts_judged:
            await self._keep_contradicting()
        return reply

    async def _keep(self, setting: str, row: dict[str, Any]) -> None:
        """Record a trace; what was skipped with its setting before are single cases then, and recorded too."""
        for held in self._held.release(setting):
            await self._record("skipped", held)
        await self._record("traces", row)

    async def _keep_contradicting(self) -> None:
        """Record the traces whose text contradicts their ids; the first wait until it shows that they are few."""
        waiting, self._rows = self._rows, []
        for setting, row in waiting:
            await self._keep(setting, row)

    def _room(self, prompt_ids: list[int] | None, wanted: int) -> int:
        """Return the longest reply to ask for; 0 or less when the prompt leaves no room."""
        if self.limit is None or prompt_ids is None or len(prompt_ids) + wanted <= self.limit:
            return wanted
        room = self.limit - len(prompt_ids)
        if room > 0:
            logger.debug("reply clamped from %d to %d tokens: prompt of %d, limit %d",
                         wanted, room, len(prompt_ids), self.limit)
            self._say_once("clamped", f"replies to long prompts are clamped: prompt of {len(prompt_ids)} + {wanted} "
                           f"asked > {self.limit}, so {room} (once shown; the others are in each trace's sampling)")
        return room

    # --- what becomes of a prompt ---

    async def _skip(self, request: Request, reason: str, detail: str = "", **more: Any) -> str:
        record = {"id": request.id, "key": request.key, "source": request.source, "model": self.model,
                  "reason": reason, "detail": detail} | more
        if self._held.holds(request.setting.name, record):
            return "skipped"
        await self._record("skipped", record)
        return "skipped"

    async def _fail(self, request: Request, failure: RequestFailed) -> str:
        record = {"id": request.id, "key": request.key, "source": request.source, "reason": failure.reason,
                  "detail": failure.detail}
        await self._record("failures", record)
        if not (failure.rejected and self._answered):  # a server that answers others is not gone
            self._failed_in_row += 1
        logger.debug("%s failed: %s", request.id, failure)
        if self._failed_in_row >= self.section.max_consecutive_failures:
            raise FailureLimitError(
                f"{self._failed_in_row} prompts failed in a row; the finished traces are kept",
                found=failure,
                fix="see that the server is well and run the same command again, or raise --max-consecutive-failures",
            )
        return "failed"

    async def _record(self, target: str, record: dict[str, Any]) -> None:
        """Hand a record to the writer and wait until it is on disk."""
        written = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((target, record, written))
        await written
        self.came_of_it[SKIPPED + record["reason"] if target == "skipped" else target] += 1
        rate = self._tokens / max(1e-9, time.monotonic() - self._started)
        cut = self.ledger.counts["truncated"]
        note = f"{rate:.0f} tok/s, {cut} truncated, {self.ledger.skips} skipped"
        failed = target == "failures"
        self.progress.update(0 if failed else 1, failed=int(failed), note=note)

    async def _write(self) -> None:
        while True:
            batch = [await self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            entries = [entry for entry in batch if entry is not None]
            lines: dict[str, bytes] = {}
            for target, record, _ in entries:
                lines[target] = lines.get(target, b"") + encode_line(record)
            await asyncio.to_thread(self.ledger.write, lines)
            for target, record, written in entries:
                self.ledger.count(target, record)
                if not written.done():  # its worker may have been cancelled
                    written.set_result(None)
            if None in batch:
                return

    def _say_once(self, kind: str, message: str) -> None:
        """Warn once about each kind of thing."""
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s", message)


async def watch(look: Callable[[], None]) -> None:
    """Call `look` ten times a second until it raises."""
    while True:
        look()
        await asyncio.sleep(_LOOK_EVERY_S)


def first_problem(error: BaseException) -> BaseException:
    """Return the first plain exception in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
