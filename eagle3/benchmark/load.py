"""A load on a server: ask every prompt with a fixed number of requests in flight and measure."""

import asyncio
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from eagle3.common.errors import FailureLimitError, PreconditionError
from eagle3.common.log import Progress, logger
from eagle3.common.options import BenchmarkSection
from eagle3.common.stage import Stage
from eagle3.engines import counters
from eagle3.engines.servers import Server, sampling_defaults
from eagle3.traces.chat import vocabulary_size
from eagle3.traces.client import RequestFailed, Wire
from eagle3.traces.prompts import Prompt
from eagle3.traces.replies import BadReply, Reply, reason_to_fail

_WARM_UP_TOKENS = 32
_NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0}  # each switched off
_TOKEN_FIELDS = ("prompt_token_ids", "completion_token_ids")
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
    (None where the engine does not count it), sampling (what was sent, and what the server falls back on where
    it says). A reply has id, text and token ids (empty if not returned).

    Raises FailureLimitError when a request fails, since what is left would measure another load.
    PreconditionError: the server's token ids or counts cannot be the verifier's.
    """
    progress = stage.progress(name, len(prompts), "requests")
    before, cached_before = counters.read(server), _prefix_cache_hits(server)
    started = time.monotonic()
    replies, sent = asyncio.run(_ask_all(server, prompts, section, section.max_tokens, concurrency, stage, progress))
    seconds = time.monotonic() - started
    progress.close()
    time.sleep(_SETTLE_S)
    server.require_alive()
    _say_other_models(replies, server)
    _refuse_strange_ids(replies, server, stage.options.model.path)
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
        "sampling": {"sent": sent, "server_defaults": sampling_defaults(server)},
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
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Ask with `concurrency` workers, giving up within a second when the stage or the server stops.

    Returns (replies in the order of the prompts, the sampling settings that were sent).
    """
    replies: list[Any] = [None] * len(prompts)
    waiting = iter(enumerate(prompts))
    # No retries: a silent second try would count as latency.
    wire = Wire(server.base_url, server.model_name, timeout_s=section.request_timeout_s, connections=concurrency)
    sampling = _sampling(section)

    async def work() -> None:
        for i, prompt in waiting:
            replies[i] = await _ask(wire, server, prompt, max_tokens, sampling)
            progress.update()

    workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(prompts)))]
    try:
        await _watch(workers, server, stage)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        await wire.close()
    return replies, {name: value for name, value in sampling.items() if name not in wire.refused}


def _sampling(section: BenchmarkSection) -> dict[str, Any]:
    """Return every sampling setting, neutral where none is chosen: a server's own defaults decide nothing."""
    return {"temperature": section.temperature, "seed": 0} | _NEUTRAL


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


async def _ask(
    wire: Wire, server: Server, prompt: Prompt, max_tokens: int, sampling: dict[str, Any]
) -> dict[str, Any]:
    fields = {"max_tokens": max_tokens} | ({"tools": prompt.tools} if prompt.tools else {})
    optional = {"return_token_ids": True} | sampling
    if server.kind == "sglang":
        optional["return_meta_info"] = True
    started = time.monotonic()
    try:
        reply = await wire.ask(prompt.messages, fields, optional)
        if problem := reason_to_fail(reply):
            raise BadReply(problem, f"after {reply.tokens} tokens")
    except (RequestFailed, BadReply) as error:
        raise FailureLimitError(
            "a request failed, so this is no measurement",
            where=f"prompt {prompt.id} at {server.base_url}",
            found=error,
            fix="remove that prompt or lower --max-tokens if it is too long; "
            "raise --request-timeout-s if it took too long; finished measurements are kept",
        ) from None
    return _reply(prompt.id, reply, time.monotonic() - started)


def _reply(prompt_id: str, reply: Reply, seconds: float) -> dict[str, Any]:
    return {
        "id": prompt_id,
        "seconds": seconds,
        "tokens": reply.usage["completion_tokens"] or len(reply.completion_ids or []),
        "text": (reply.reasoning or "") + (reply.content or ""),
        "prompt_token_ids": reply.prompt_ids or [],
        "completion_token_ids": reply.completion_ids or [],
        "finish_reason": reply.finish_reason,
        "meta_info": reply.meta_info,
        "model": reply.model,
    }


def _refuse_strange_ids(replies: list[dict[str, Any]], server: Server, model: str) -> None:
    """Raise PreconditionError for token ids that the verifier does not have: they are of another model."""
    size = vocabulary_size(Path(model)) if model else None
    for reply in replies if size else ():
        strange = [token for name in _TOKEN_FIELDS for token in reply[name] if token >= size]
        if strange:
            raise PreconditionError(
                "the server's token ids are not the verifier's", where=f"prompt {reply['id']} at {server.base_url}",
                expected=f"ids below {size}", found=strange[0], fix="give the address of a server of this model",
            )


def _say_other_models(replies: list[dict[str, Any]], server: Server) -> None:
    own = Path(server.model_name).name.lower()
    others = Counter(reply["model"] for reply in replies if reply["model"] and Path(reply["model"]).name.lower() != own)
    if others:
        logger.warning("%d of %d replies name another model than %s, which was asked: %s", others.total(), len(replies),
                       server.model_name, dict(others.most_common(5)))
