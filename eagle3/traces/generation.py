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

from eagle3.common.errors import FailureLimitError, PreconditionError
from eagle3.common.files import encode_line
from eagle3.common.log import Progress, logger
from eagle3.common.options import GenerateSection
from eagle3.traces.chat import Chat, TemplateRefusal
from eagle3.traces.client import Reply, RequestFailed, reason_to_skip
from eagle3.traces.endpoints import Pool
from eagle3.traces.token_check import TokenCheck
from eagle3.traces.trace_rows import SKIPPED, Ledger, assistant_message, sealed
from eagle3.traces.worklist import ConversationWork, Request

_REPLIES_WITHOUT_REASONING = 20  # then reasoning that is required will not come
_LOOK_EVERY_S = 0.1


class Generator:
    """Turns conversations into traces, skips and failures of a ledger.

    Attributes:
        came_of_it: how many prompts of this run became "traces", "failures", or were skipped, by "skipped: reason";
            and how many replies were "tagged", with reasoning in their content.
        token_check: what comparing the server's ids with the template's has shown.
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
        self.token_check = TokenCheck(chat, section.check_tokens)
        self._failed_in_row, self._answered = 0, False
        self._reasoning_seen = ledger.counts["with_reasoning"] > 0
        self._without_reasoning: list[dict[str, Any]] = []
        self._tokens, self._started = 0, time.monotonic()
        self._said: set[str] = set()
        self._queue: asyncio.Queue[tuple[str, dict[str, Any], asyncio.Future[None]] | None] = asyncio.Queue()

    async def run(self, todo: Iterator[ConversationWork], look: Callable[[], None]) -> None:
        """Ask for everything; `look` is called ten times a second and stops the run by raising.

        Raises what stopped it: Interrupted, FailureLimitError (failures in a row), PreconditionError (key
        refused, no reasoning, disk full, …). What was finished is on disk in any case.
        """
        writer = asyncio.create_task(self._write())
        workers = asyncio.create_task(self._work_together(todo))
        watcher = asyncio.create_task(_watch(look))
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
                raise _first(error)
        if self._without_reasoning:
            raise _no_reasoning(len(self._without_reasoning))

    # --- workers ---

    async def _work_together(self, todo: Iterator[ConversationWork]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self.section.concurrency):
                group.create_task(self._work(todo))

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
            await self._skip(request, "an earlier turn was skipped")

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
        self._failed_in_row, self._answered = 0, True
        self._tokens += reply.tokens
        self.came_of_it["tagged"] += reply.tagged
        await self._note_reasoning(reply)
        reason = reason_to_skip(reply, request.setting.reasoning)
        if reason:
            return await self._skip(request, reason, finish_reason=reply.finish_reason, tokens=reply.tokens)
        await self._record("traces", self._trace(request, reply, prompt_ids, max_tokens))
        return reply

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

    def _trace(self, request: Request, reply: Reply, prompt_ids: list[int] | None, max_tokens: int) -> dict[str, Any]:
        if reply.exact:
            source, known, completion = "server", reply.prompt_ids, reply.completion_ids
            self._compare(prompt_ids, known or [])
            self.token_check.compare(reply, prompt_ids)
        elif self.chat is not None and prompt_ids is not None:
            source, known = "template", prompt_ids
            completion = self.chat.completion_ids(prompt_ids, reply.reasoning, reply.content)
        else:
            raise PreconditionError(
                "the server gives no token ids, and there is no tokenizer to make them",
                expected="prompt_token_ids and token_ids in the reply (vLLM gives them), or a model folder",
                fix="name the verifier's folder with --model",
            )
        return sealed({
            "id": request.id,
            "key": request.key,
            "source": request.source,
            "model": self.model,
            "prompt": {"messages": request.messages, "tools": request.tools},
            "chat_template_kwargs": request.setting.chat_template_kwargs,
            "sampling": request.setting.recorded(max_tokens, self.section.seed),
            "reasoning": reply.reasoning,
            "content": reply.content,
            "tool_calls": reply.tool_calls,
            "finish_reason": reply.finish_reason,
            "prompt_token_ids": known,
            "completion_token_ids": completion,
            "token_source": source,
            "usage": reply.usage,
        })

    def _compare(self, ours: list[int] | None, servers: list[int]) -> None:
        """Warn once when the server renders prompts unlike the model folder's template."""
        if ours is not None and ours != servers and self.chat is not None:
            self._say_once("template", "the server renders prompts unlike the template of --model (its ids are used). "
                           f"Another model or template? Server: …{self.chat.decode(servers)[-80:]!r}, "
                           f"folder: …{self.chat.decode(ours)[-80:]!r}")

    # --- what becomes of a prompt ---

    async def _note_reasoning(self, reply: Reply) -> None:
        """Once a reply has reasoned, replies that did not are single cases: record those that were held back."""
        if reply.reasoning and not self._reasoning_seen:
            self._reasoning_seen = True
            held, self._without_reasoning = self._without_reasoning, []
            for record in held:
                await self._record("skipped", record)

    async def _skip(self, request: Request, reason: str, detail: str = "", **more: Any) -> str:
        record = {"id": request.id, "key": request.key, "source": request.source, "model": self.model,
                  "reason": reason, "detail": detail} | more
        if reason == "no reasoning" and not self._reasoning_seen:
            # Not written: with the server put right, these prompts are worth asking again.
            self._without_reasoning.append(record)
            if len(self._without_reasoning) >= _REPLIES_WITHOUT_REASONING:
                raise _no_reasoning(len(self._without_reasoning))
            return "failed"
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


async def _watch(look: Callable[[], None]) -> None:
    while True:
        look()
        await asyncio.sleep(_LOOK_EVERY_S)


def _first(error: BaseException) -> BaseException:
    """Return the first plain exception in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _no_reasoning(count: int) -> PreconditionError:
    return PreconditionError(
        f"the first {count} replies have no reasoning, though it is required; they are not recorded",
        where="--reasoning required",
        expected="reasoning or reasoning_content in the reply, or a think block in its content",
        fix="start the server with its reasoning parser (vLLM: --reasoning-parser NAME, with --serve in "
        "--serve-args), switch thinking on with --chat-template-kwargs, or use --reasoning optional",
    )
