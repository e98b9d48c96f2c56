"""A load on a server: ask every prompt with a fixed number of requests in flight and measure."""

import contextlib
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from eagle3.benchmark import asking, figures
from eagle3.benchmark.energy import Meter
from eagle3.benchmark.streaming import Job, Load, Row
from eagle3.common.errors import FailureLimitError, PreconditionError
from eagle3.common.log import logger
from eagle3.common.options import BenchmarkSection
from eagle3.common.stage import Stage
from eagle3.engines import counters
from eagle3.engines.servers import Server, sampling_defaults
from eagle3.traces.chat import vocabulary_size, with_contents
from eagle3.traces.client import KeyRefused, without_key
from eagle3.traces.prompts import Prompt
from eagle3.traces.replies import BadReply, Reply, parse_reply, reason_to_fail, words_of

_WARM_UP_TOKENS = 32
_NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0}  # each switched off
_TOKEN_FIELDS = ("prompt_token_ids", "completion_token_ids")
_SETTLE_S = 0.3  # an engine may answer just before it counts the last round
_BUSY = 0.8  # of a core: a client that spends more may be what is measured
_WORDS = 500  # characters kept of an answer that is no reply


def warm_up(server: Server, prompts: list[Prompt], section: BenchmarkSection, stage: Stage) -> None:
    """Send a few short requests, at once, so that what an engine does on first use is not measured."""
    if prompts:
        tokens = min(_WARM_UP_TOKENS, section.max_tokens)
        job = _job(server, prompts, section, len(prompts), tokens, _sampling(section.temperature[0], 0))
        _checked(asking.run(job, 1, server, stage, "warm-up"), prompts, server)


def measure(
    server: Server, prompts: list[Prompt], section: BenchmarkSection, concurrency: int, stage: Stage, name: str, *,
    temperature: float = 0.0, seed: int = 0, gpus: list[str] | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Ask every prompt once and return (figures, replies in the order of the prompts).

    Args:
        gpus: uuids of the GPUs that the server uses, whose energy is counted; None where that is not known.
    Returns:
        Figures: requests, seconds, output_tokens, tokens_per_s, the times of `figures.times`, acceptance (None where
        the engine does not count it), energy (None where nvidia-smi does not tell), sampling (what was sent, and what
        the server falls back on where it says), client (how the load generator did). A reply has id, text and token
        ids (empty if not returned).
    Raises:
        FailureLimitError: a request failed; what is left would measure another load.
        PreconditionError: the server's token ids or counts cannot be the verifier's.
    """
    sampling = _sampling(temperature, seed)
    job = _job(server, prompts, section, concurrency, section.max_tokens, sampling)
    before, cached_before = counters.read(server), _prefix_cache_hits(server)
    with Meter(gpus or []) as meter:
        load = asking.run(job, asking.processes(section.load_processes, concurrency), server, stage, name)
    replies = _checked(load, prompts, server)
    time.sleep(_SETTLE_S)
    server.require_alive()
    rows = load.rows
    seconds = max(row.ended for row in rows) - min(row.started for row in rows)
    counts = [_tokens(reply) for reply in replies]
    if not sum(counts):
        raise PreconditionError(
            "the server generated nothing, or does not count it", where=server.base_url, expected="usage in its replies"
        )
    counted, rounds = counters.difference(before, counters.read(server)), figures.rounds_of(rows)
    if server.kind == "sglang":
        replies, counted = _asked_plainly(job, replies, prompts, server, stage, name)
        rounds = [] if counted is None else _rounds_told(replies)
    hits = _prefix_cache_hits(server) - cached_before
    if hits > 0 and server.kind == "vllm":
        logger.warning("the server took %d prompt tokens from its prefix cache: times are not comparable", hits)
    _say_other_models(replies, server)
    joules = meter.joules(min(row.started for row in rows), max(row.ended for row in rows))
    told = {
        "requests": len(rows),
        "seconds": seconds,
        "output_tokens": sum(counts),
        "tokens_per_s": sum(counts) / seconds,
        **figures.times(rows, counts),
        "acceptance": figures.acceptance(counted, rounds),
        "joules": joules,
        "joules_per_token": joules / sum(counts) if joules is not None else None,
        "sampling": {"sent": {key: value for key, value in sampling.items() if key not in load.refused},
                     "server_defaults": sampling_defaults(server)},
        "client": _client(load, seconds, name),
    }
    kept = [_kept(prompt.id, reply) for prompt, reply in zip(prompts, replies, strict=True)]
    _refuse_strange_ids(kept, server, stage.options.model.path)
    return told, kept


def _asked_plainly(job: Job, replies: list[Reply], prompts: list[Prompt], server: Server, stage: Stage, name: str
                   ) -> tuple[list[Reply], counters.Counters | None]:
    """Return SGLang's replies with the counters that they carry, asked once more without a stream where it lacks them.

    Its streams of chat completions carry neither meta_info nor token ids; times are those of the stream all the same.
    """
    if all(reply.exact and reply.meta_info for reply in replies):
        return replies, counters.from_meta_info(reply.meta_info for reply in replies)
    bodies = [{key: value for key, value in body.items() if key != "stream"} for body in job.bodies]
    optional = {key: value for key, value in job.optional.items() if key != "stream_options"}
    plain = Job(job.url, bodies, optional | {"return_meta_info": True}, job.concurrency, job.timeout_s)
    replies = _checked(asking.run(plain, 1, server, stage, f"{name}, its counters"), prompts, server)
    return replies, counters.from_meta_info(reply.meta_info for reply in replies)


def _rounds_told(replies: list[Reply]) -> list[tuple[int, int]]:
    """Return (rounds, tokens of them) of each reply as SGLang tells them; the first token comes from the prefill."""
    told = [(reply.meta_info or {}, _tokens(reply) - 1) for reply in replies]
    return [(int(meta["spec_verify_ct"]), tokens) for meta, tokens in told if meta.get("spec_verify_ct")]


# --- asking -----------------------------------------------------------------------------------------------


def _job(server: Server, prompts: list[Prompt], section: BenchmarkSection, concurrency: int, max_tokens: int,
         sampling: dict[str, Any]) -> Job:
    bodies = [{"model": server.model_name, "messages": with_contents(prompt.messages), "max_tokens": max_tokens,
               "stream": True} | ({"tools": prompt.tools} if prompt.tools else {}) for prompt in prompts]
    usage = {"include_usage": True} | ({"continuous_usage_stats": True} if server.kind == "sglang" else {})
    optional = {"return_token_ids": True, "stream_options": usage} | sampling
    if server.kind == "sglang":
        optional["return_meta_info"] = True
    return Job(server.base_url, bodies, optional, min(concurrency, len(prompts)), section.request_timeout_s)


def _sampling(temperature: float, seed: int) -> dict[str, Any]:
    """Return every sampling setting, neutral where none is chosen: a server's own defaults decide nothing."""
    return {"temperature": temperature, "seed": seed} | _NEUTRAL


# --- what came back ---------------------------------------------------------------------------------------


def _checked(load: Load, prompts: list[Prompt], server: Server) -> list[Reply]:
    """Return the replies of a load, after waiting for a dying server; FailureLimitError when one is none."""
    replies = []
    if load.refused:
        logger.warning("%s does not take %s; it is asked without", server.base_url, ", ".join(load.refused))
    for row in load.rows:
        try:
            replies.append(_reply(row, server))
        except BadReply as error:
            if server.child:
                time.sleep(1.0)  # a dying server drops its connections first
            server.require_alive()
            raise FailureLimitError(
                "a request failed, so this is no measurement",
                where=f"prompt {prompts[row.number].id} at {server.base_url}",
                found=error,
                fix="remove that prompt or lower --max-tokens if it is too long; "
                "raise --request-timeout-s if it took too long; finished measurements are kept",
            ) from None
    return replies


def _reply(row: Row, server: Server) -> Reply:
    """Return the reply of a row; BadReply in its place, KeyRefused when the server does not take the key."""
    if row.status in (401, 403):
        raise KeyRefused(server.base_url, _words(row.text))
    if row.status != 200:
        raise BadReply(f"HTTP {row.status}" if row.status else "no answer", _words(row.text))
    try:
        reply = parse_reply(row.text)
    except BadReply as error:
        raise BadReply(error.reason, without_key(error.detail)) from None
    if problem := reason_to_fail(reply):
        raise BadReply(problem, f"after {reply.tokens} tokens")
    return reply


def _words(text: str) -> str:
    """Return what a server said about an error, in one line and without the key."""
    with contextlib.suppress(ValueError, RecursionError):
        text = words_of(json.loads(text)) or text
    return without_key(text[:_WORDS].replace("\n", " "))


def _tokens(reply: Reply) -> int:
    return reply.usage["completion_tokens"] or len(reply.completion_ids or [])


def _kept(prompt_id: str, reply: Reply) -> dict[str, Any]:
    return {
        "id": prompt_id,
        "text": (reply.reasoning or "") + (reply.content or ""),
        "prompt_token_ids": reply.prompt_ids or [],
        "completion_token_ids": reply.completion_ids or [],
        "finish_reason": reply.finish_reason,
    }


def _client(load: Load, seconds: float, name: str) -> dict[str, float]:
    """Return how the load generator did, and warn when it may be what was measured."""
    share = load.cpu_s / seconds
    if share > _BUSY:
        logger.warning("%s: the load generator was busy for %.0f%% of the time, so it may be what was measured: give "
                       "it more --load-processes, or a machine of its own", name, 100 * share)
    late = sorted(load.late_s)
    return {"cpu_share": share, "late_ms_median": 1000 * statistics.median(late) if late else 0.0,
            "late_ms_p99": 1000 * late[int(0.99 * (len(late) - 1))] if late else 0.0}


def _prefix_cache_hits(server: Server) -> float:
    """Return vLLM's count of prompt tokens that it did not compute (0 where it is not told)."""
    return counters.read_total(server, "vllm:prefix_cache_hits_total") or 0.0


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


def _say_other_models(replies: list[Reply], server: Server) -> None:
    own = Path(server.model_name).name.lower()
    others = Counter(reply.model for reply in replies if reply.model and Path(reply.model).name.lower() != own)
    if others:
        logger.warning("%d of %d replies name another model than %s, which was asked: %s", others.total(), len(replies),
                       server.model_name, dict(others.most_common(5)))
