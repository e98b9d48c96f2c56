"""A load on a server: ask every prompt with a fixed number of requests in flight and measure."""

import asyncio
import statistics
import time
from typing import Any

from eagle3.common.errors import FailureLimitError, PreconditionError
from eagle3.common.log import Progress, logger
from eagle3.common.options import BenchmarkSection
from eagle3.common.stage import Stage
from eagle3.engines import counters
from eagle3.engines.servers import Server, api_key
from eagle3.traces.prompts import Prompt

_WARM_UP_TOKENS = 32
_SETTLE_S = 0.3  # an engine may answer just before it counts the last round


def warm_up(server: Server, prompts: list[Prompt], section: BenchmarkSection, stage: Stage) -> None:
    """Send a few short requests, at once, so that what an engine does on first use is not measured."""
    if prompts:
        progress = stage.progress("warm-up", len(prompts), "requests")
        tokens = min(_WARM_UP_TOKENS, section.max_tokens)
        asyncio.run(_ask_all(server, prompts, section, tokens, len(prompts), stage, progress))


def measure(
    server: Server, prompts: list[Prompt], section: BenchmarkSection, concurrency: int, stage: Stage, name: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Ask every prompt once and return (figures, replies in the order of the prompts).

    Figures: seconds, output_tokens, tokens_per_s, latency_s and s_per_token (mean, median, p95 over
    requests; the time per token is a request's whole time over its tokens, prompt included), acceptance
    (None where the engine does not count it). A reply has id, text and token ids (empty if not returned).

    Raises FailureLimitError when a request fails, since what is left would measure another load.
    """
    progress = stage.progress(name, len(prompts), "requests")
    before, cached_before = counters.read(server), _prefix_cache_hits(server)
    started = time.monotonic()
    replies = asyncio.run(_ask_all(server, prompts, section, section.max_tokens, concurrency, stage, progress))
    seconds = time.monotonic() - started
    progress.close()
    time.sleep(_SETTLE_S)
    server.require_alive()
    if server.kind == "sglang":
        counted = counters.from_meta_info(reply["meta_info"] for reply in replies)
    else:
        counted = counters.difference(before, counters.read(server))
    if (hits := _prefix_cache_hits(server) - cached_before) > 0:
        logger.warning("the server took %d prompt tokens from its prefix cache: times are not comparable", hits)
    tokens = sum(reply["tokens"] for reply in replies)
    if not tokens:
        raise PreconditionError(
            "the server generated nothing, or does not count it", where=server.base_url, expected="usage in its replies"
        )
    figures = {
        "requests": len(replies),
        "seconds": seconds,
        "output_tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "latency_s": _summary([reply["seconds"] for reply in replies]),
        "s_per_token": _summary([reply["seconds"] / max(1, reply["tokens"]) for reply in replies]),
        "acceptance": _acceptance(counted),
    }
    kept = ("id", "text", "prompt_token_ids", "completion_token_ids", "finish_reason")
    return figures, [{field: reply[field] for field in kept} for reply in replies]


def _acceptance(counted: counters.Counters | None) -> dict[str, Any] | None:
    if counted is None or counted.drafts == 0:
        return None
    return {
        "length": counted.acceptance_length(),
        "by_position": counted.acceptance_by_position(),
        "drafts": counted.drafts,
        "draft_tokens": counted.draft_tokens,
        "accepted": counted.accepted,
    }


def _summary(values: list[float]) -> dict[str, float]:
    p95 = statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
    return {"mean": statistics.fmean(values), "median": statistics.median(values), "p95": p95}


def _prefix_cache_hits(server: Server) -> float:
    """Return vLLM's count of prompt tokens that it did not compute (0 where it is not told)."""
    return counters.read_total(server, "vllm:prefix_cache_hits_total") or 0.0


async def _ask_all(
    server: Server,
    prompts: list[Prompt],
    section: BenchmarkSection,
    max_tokens: int,
    concurrency: int,
    stage: Stage,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Ask with `concurrency` workers, giving up within a second when the stage or the server stops."""
    import openai

    replies: list[Any] = [None] * len(prompts)
    waiting = iter(enumerate(prompts))
    async with openai.AsyncOpenAI(
        base_url=server.base_url,
        api_key=api_key(),
        max_retries=0,  # a silent second try would count as latency
        timeout=section.request_timeout_s,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),  # no proxy: servers are near
    ) as client:

        async def work() -> None:
            for i, prompt in waiting:
                replies[i] = await _ask(client, server, prompt, max_tokens, section.temperature)
                progress.update()

        workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(prompts)))]
        try:
            await _watch(workers, server, stage)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    return replies


async def _watch(workers: list["asyncio.Task[None]"], server: Server, stage: Stage) -> None:
    """Return when all workers are done; raise as soon as one fails, the server dies or a signal comes."""
    pending = set(workers)
    while pending:
        done, pending = await asyncio.wait(pending, timeout=0.5, return_when=asyncio.FIRST_EXCEPTION)
        stage.check_stop()
        server.require_alive()
        for worker in done:
            if worker.exception() is not None:
                await asyncio.sleep(1.0)  # a dying server drops its connections first
                server.require_alive()
                worker.result()


async def _ask(client: Any, server: Server, prompt: Prompt, max_tokens: int, temperature: float) -> dict[str, Any]:
    import openai

    extra: dict[str, Any] = {"return_token_ids": True}
    if server.kind == "sglang":
        extra["return_meta_info"] = True
    if prompt.tools:
        extra["tools"] = prompt.tools
    started = time.monotonic()
    try:
        response = await client.chat.completions.create(
            model=server.model_name,
            messages=prompt.messages,
            max_tokens=max_tokens,
            temperature=temperature,
            extra_body=extra,
        )
    except openai.OpenAIError as error:
        raise FailureLimitError(
            "a request failed, so this is no measurement",
            where=f"prompt {prompt.id} at {server.base_url}",
            found=f"{type(error).__name__}: {str(error)[:500]}",
            fix="remove that prompt or lower --max-tokens if it is too long; "
            "raise --request-timeout-s if it took too long; finished measurements are kept",
        ) from None
    return _reply(prompt.id, response.model_dump(), time.monotonic() - started)


def _reply(prompt_id: str, answer: dict[str, Any], seconds: float) -> dict[str, Any]:
    choice = answer["choices"][0]
    message = choice["message"]
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    ids = choice.get("token_ids") or []
    usage = answer.get("usage") or {}
    return {
        "id": prompt_id,
        "seconds": seconds,
        "tokens": usage.get("completion_tokens") or len(ids),
        "text": reasoning + (message.get("content") or ""),
        "prompt_token_ids": answer.get("prompt_token_ids") or choice.get("prompt_token_ids") or [],
        "completion_token_ids": ids,
        "finish_reason": choice.get("finish_reason"),
        "meta_info": choice.get("meta_info"),
    }
