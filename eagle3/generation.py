"""Generation: ask for many prompts at once and write each finished reply durably.

Workers take a prompt, ask, hand the result to one writer and take the next prompt only when the result is on
disk. So a process killed at any moment has at most `concurrency` prompts to ask again. The writer takes
whatever waits, so many results share one fsync without any of them waiting for company.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

from eagle3.chat import Chat, TemplateRefusal
from eagle3.errors import FailureLimitError, PreconditionError
from eagle3.log import Progress, logger
from eagle3.options import GenerateSection
from eagle3.prompts import Prompt
from eagle3.replies import Client, Reply, RequestFailed, reason_to_skip
from eagle3.traces import Ledger, sampling_of, sealed

_REPLIES_WITHOUT_REASONING = 20  # then reasoning that is required will not come
_LOOK_EVERY_S = 0.1


class Generator:
    """Turns prompts into traces, skips and failures of a ledger.

    Attributes:
        failed: prompts that failed in this run.
    """

    def __init__(
        self,
        section: GenerateSection,
        ledger: Ledger,
        keys: dict[str, str],
        *,
        client: Client,
        model: str,
        chat: Chat | None,
        limit: int | None,
        progress: Progress,
    ) -> None:
        """Take what is to be asked how.

        Args:
            keys: {prompt id: request key}.
            chat: the verifier's template; None leaves token ids and prompt lengths to the server.
            limit: longest prompt plus reply in tokens, or None.
        """
        self.section, self.ledger, self.keys = section, ledger, keys
        self.client, self.model, self.chat, self.limit, self.progress = client, model, chat, limit, progress
        self.failed = 0
        self._failed_in_row, self._answered = 0, False
        self._reasoning_seen = ledger.counts["with_reasoning"] > 0
        self._without_reasoning: list[dict[str, Any]] = []
        self._tokens, self._started = 0, time.monotonic()
        self._said: set[str] = set()
        self._queue: asyncio.Queue[tuple[str, dict[str, Any], asyncio.Future[None]] | None] = asyncio.Queue()

    async def run(self, prompts: list[Prompt], look: Callable[[], None]) -> None:
        """Ask for all prompts; `look` is called ten times a second and stops the run by raising.

        Raises what stopped it: Interrupted, FailureLimitError (failures in a row), PreconditionError (key
        refused, no reasoning, disk full, …). What was finished is on disk in any case.
        """
        todo = iter(prompts)
        writer = asyncio.create_task(self._write())
        workers = asyncio.create_task(self._work_together(todo, min(self.section.concurrency, len(prompts))))
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
            await self.client.close()
        for task in (writer, watcher, workers):
            if not task.cancelled() and (error := task.exception()):
                raise _first(error)
        if self._without_reasoning:
            raise _no_reasoning(len(self._without_reasoning))

    # --- workers ---

    async def _work_together(self, todo: Iterator[Prompt], count: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._work(todo))

    async def _work(self, todo: Iterator[Prompt]) -> None:
        for prompt in todo:
            await self._settle(prompt)

    async def _settle(self, prompt: Prompt) -> None:
        """Ask for one prompt and record what came of it."""
        prompt_ids: list[int] | None = None
        if self.chat is not None:
            try:
                prompt_ids = self.chat.prompt_ids(prompt.messages, prompt.tools)
            except TemplateRefusal as refusal:
                await self._skip(prompt, "template", str(refusal))
                return
        max_tokens = self._room(prompt_ids)
        if max_tokens < 1:
            length = len(prompt_ids or [])
            await self._skip(prompt, "prompt too long", f"{length} {'>' if max_tokens else '='} {self.limit}")
            return
        try:
            reply = await self.client.ask(prompt.messages, prompt.tools, max_tokens)
        except RequestFailed as failure:
            await self._fail(prompt, failure)
            return
        self._failed_in_row, self._answered = 0, True
        self._tokens += reply.tokens
        await self._note_reasoning(reply)
        reason = reason_to_skip(reply, self.section.reasoning)
        if reason:
            await self._skip(prompt, reason, finish_reason=reply.finish_reason, tokens=reply.tokens)
            return
        await self._record("traces", self._trace(prompt, reply, prompt_ids, max_tokens))

    def _room(self, prompt_ids: list[int] | None) -> int:
        """Return the longest reply to ask for; 0 or less when the prompt leaves no room."""
        wanted = self.section.max_tokens
        if self.limit is None or prompt_ids is None or len(prompt_ids) + wanted <= self.limit:
            return wanted
        room = self.limit - len(prompt_ids)
        if room > 0:
            logger.debug("reply clamped from %d to %d tokens: prompt of %d, limit %d",
                         wanted, room, len(prompt_ids), self.limit)
            self._say(f"replies to long prompts are clamped: prompt of {len(prompt_ids)} + {wanted} asked > "
                      f"{self.limit}, so {room} (once shown; the others are in each trace's sampling)")
        return room

    def _trace(self, prompt: Prompt, reply: Reply, prompt_ids: list[int] | None, max_tokens: int) -> dict[str, Any]:
        section = self.section
        if reply.exact:
            source, known, completion = "server", reply.prompt_ids, reply.completion_ids
            self._compare(prompt_ids, known or [])
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
            "id": prompt.id,
            "key": self.keys[prompt.id],
            "source": prompt.source,
            "model": self.model,
            "prompt": {"messages": prompt.messages, "tools": prompt.tools},
            "chat_template_kwargs": section.chat_template_kwargs,
            "sampling": sampling_of(section, max_tokens),
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
            self._say("the server renders prompts unlike the template of --model (its ids are used). Another model "
                      f"or template? Server: …{self.chat.decode(servers)[-80:]!r}, "
                      f"folder: …{self.chat.decode(ours)[-80:]!r}")

    # --- what becomes of a prompt ---

    async def _note_reasoning(self, reply: Reply) -> None:
        """Once a reply has reasoned, replies that did not are single cases: record those that were held back."""
        if reply.reasoning and not self._reasoning_seen:
            self._reasoning_seen = True
            held, self._without_reasoning = self._without_reasoning, []
            for record in held:
                await self._record("skipped", record)

    async def _skip(self, prompt: Prompt, reason: str, detail: str = "", **more: Any) -> None:
        record = {"id": prompt.id, "key": self.keys[prompt.id], "model": self.model, "reason": reason,
                  "detail": detail} | more
        if reason == "no reasoning" and not self._reasoning_seen:
            # Not written: with the server put right, these prompts are worth asking again.
            self._without_reasoning.append(record)
            if len(self._without_reasoning) >= _REPLIES_WITHOUT_REASONING:
                raise _no_reasoning(len(self._without_reasoning))
            return
        await self._record("skipped", record)

    async def _fail(self, prompt: Prompt, failure: RequestFailed) -> None:
        record = {"id": prompt.id, "key": self.keys[prompt.id], "reason": failure.reason, "detail": failure.detail}
        await self._record("failures", record)
        self.failed += 1
        if not (failure.rejected and self._answered):  # a server that answers others is not gone
            self._failed_in_row += 1
        logger.debug("%s failed: %s", prompt.id, failure)
        if self._failed_in_row >= self.section.max_consecutive_failures:
            raise FailureLimitError(
                f"{self._failed_in_row} prompts failed in a row; the finished traces are kept",
                found=failure,
                fix="see that the server is well and run the same command again, or raise --max-consecutive-failures",
            )

    async def _record(self, target: str, record: dict[str, Any]) -> None:
        """Hand a record to the writer and wait until it is on disk."""
        written = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((target, record, written))
        await written
        rate = self._tokens / max(1e-9, time.monotonic() - self._started)
        cut = self.ledger.counts["truncated"]
        note = f"{rate:.0f} tok/s, {cut} truncated, {len(self.ledger.skipped)} skipped"
        failed = target == "failures"
        self.progress.update(0 if failed else 1, failed=int(failed), note=note)

    async def _write(self) -> None:
        while True:
            batch = [await self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            entries = [entry for entry in batch if entry is not None]
            await asyncio.to_thread(self.ledger.write, [(target, record) for target, record, _ in entries])
            for _, _, written in entries:
                if not written.done():  # its worker may have been cancelled
                    written.set_result(None)
            if None in batch:
                return

    def _say(self, message: str) -> None:
        """Warn once about each kind of thing."""
        if message[:30] not in self._said:
            self._said.add(message[:30])
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
