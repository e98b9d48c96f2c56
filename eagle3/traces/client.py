"""Replies: ask an OpenAI-compatible server for one assistant turn and read what it says.

Servers differ: the reasoning comes as `reasoning` or `reasoning_content` or inside the content, token ids come
or do not. A `Reply` is the same for equal content, whatever server gave it.
"""

import asyncio
import json
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from eagle3.common.errors import PreconditionError, UsageError
from eagle3.common.options import GenerateSection
from eagle3.engines import servers
from eagle3.traces.chat import split_reasoning
from eagle3.traces.sampling import Setting

FINISHED = ("stop", "length", "tool_calls", "function_call")
_REJECTED = (400, 413, 422)  # the request is at fault, not the server
_POOL_SIZE = 16  # requests in flight in one connection pool
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Reply:
    """One assistant turn.

    Attributes:
        reasoning, content: texts as generated, None where there is none.
        tool_calls: as the server parsed them.
        finish_reason: stop, length, tool_calls, …
        prompt_ids, completion_ids: the server's exact token ids ([P], [C]), or None when it gives none.
        usage: {"prompt_tokens", "completion_tokens"} as counted by the server.
        tagged: whether a think block was left in the content.
    """

    reasoning: str | None
    content: str | None
    tool_calls: list[dict[str, Any]]
    finish_reason: str
    prompt_ids: list[int] | None
    completion_ids: list[int] | None
    usage: dict[str, int]
    tagged: bool = False

    @property
    def exact(self) -> bool:
        """Whether the server gave the ids of both prompt and completion."""
        return bool(self.prompt_ids) and bool(self.completion_ids)

    @property
    def tokens(self) -> int:
        """Tokens generated, by the ids or as the server counted them."""
        return len(self.completion_ids or []) or self.usage.get("completion_tokens", 0)


@dataclass(frozen=True)
class ServedModel:
    """What a server calls the model and the longest sequence it takes (None when it does not say)."""

    name: str
    limit: int | None


class RequestFailed(Exception):
    """A request without a usable reply, after all retries; `rejected` when the request itself is at fault."""

    def __init__(self, reason: str, detail: str, *, rejected: bool = False) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.rejected = reason, detail, rejected


class KeyRefused(PreconditionError):
    """The server does not accept the API key: nothing that is asked of it will succeed."""

    def __init__(self, url: str, found: str) -> None:
        super().__init__("the server refuses the API key", where=url, found=_without_key(found),
                         fix="set OPENAI_API_KEY and run again")


def parse_reply(body: str, think_tags: tuple[str, str]) -> Reply:
    """Return the reply in a response body; ValueError when it is not one."""
    response = json.loads(body)
    try:
        choice = response["choices"][0]
        message = choice["message"]
        reasoning, content = split_reasoning(
            message.get("reasoning") or message.get("reasoning_content"), message.get("content"), think_tags
        )
        usage = response.get("usage") or {}
        counted = {name: int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")}
        return Reply(
            reasoning,
            content,
            message.get("tool_calls") or [],
            choice.get("finish_reason") or "none",
            response.get("prompt_token_ids") or None,
            choice.get("token_ids") or None,
            counted,
            tagged=content != message.get("content"),
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"not a chat completion: {type(error).__name__} {error}") from None


def reason_to_skip(reply: Reply, reasoning: str) -> str:
    """Return why a reply gives no trace, or "" when it gives one.

    A reply cut at max_tokens is good data (every token in it is the model's own) as long as its ids are
    exact; one cut inside its reasoning, or where reasoning is required, is not a finished example.
    """
    answered = bool((reply.content or "").strip()) or bool(reply.tool_calls)
    if reply.finish_reason == "length" and (not answered or reasoning == "required" or not reply.exact):
        return "truncated"
    if reply.finish_reason not in FINISHED:
        return f"finish_reason {reply.finish_reason}"
    if not answered:
        return "empty"
    if reasoning == "required" and not reply.reasoning:
        return "no reasoning"
    if reasoning == "off" and reply.reasoning:
        return "unwanted reasoning"
    if reply.tool_calls and not reply.exact:
        return "tool call without token ids"
    return ""


# --- the server -------------------------------------------------------------------------------------------


def base_url(endpoint: str) -> str:
    """Return the address that ends in /v1; UsageError for one that is no address or holds a password."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError("not an address", where="--endpoint", found=endpoint, fix="such as http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query:
        raise UsageError("the address holds a secret", where="--endpoint", fix="set OPENAI_API_KEY instead")
    return endpoint.rstrip("/").removesuffix("/v1") + "/v1"


def served_model(url: str, name: str | None) -> ServedModel:
    """Return the model to ask for: `name`, else the only one that the server lists.

    Raises PreconditionError when nothing answers, the key is refused, or the model cannot be told.
    """
    try:
        listed = {str(model["id"]): model for model in json.loads(servers.get(f"{url}/models"))["data"]}
    except servers.NO_ANSWER as error:
        if getattr(error, "code", 0) in (401, 403):
            raise KeyRefused(url, str(error)) from None
        raise PreconditionError(
            "no OpenAI-compatible server answers", where=url, found=_without_key(str(error)),
            fix="start it, correct --endpoint, or let this stage start one with --serve",
        ) from None
    if name is None and len(listed) == 1:
        name = next(iter(listed))
    if name not in listed:
        raise PreconditionError(
            "which model is to be asked?", where=url, expected=name or "one model", found=", ".join(listed) or "none",
            fix="name one of them with --served-model-name",
        )
    limit = listed[name].get("max_model_len")
    return ServedModel(name, limit if isinstance(limit, int) else None)


class Client:
    """Asks one server. Passing errors (408, 409, 429, 5xx, time-outs, resets) are retried with back-off."""

    def __init__(
        self, url: str, model: str, section: GenerateSection, think_tags: tuple[str, str], retries: int
    ) -> None:
        import openai

        self._openai, self.url, self._model, self._retries = openai, url, model, retries
        self._section, self._think_tags = section, think_tags
        # A connection pool looks at each of its connections for every request, so one pool of hundreds is slow:
        # pools of 16 keep the client at twice the requests/s that one of 256 has.
        self._clients = [
            openai.AsyncOpenAI(
                base_url=url,
                api_key=servers.api_key(),
                max_retries=retries,
                timeout=section.request_timeout_s,
                http_client=transport,
            )
            for transport in _transports(url, -(-section.concurrency // _POOL_SIZE))
        ]
        self._in_flight = [0] * len(self._clients)

    async def ask(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], setting: Setting, max_tokens: int
    ) -> Reply:
        """Return the reply; RequestFailed after the last retry; PreconditionError when the key is refused."""
        openai = self._openai
        for attempt in range(self._retries + 1):
            try:
                return parse_reply(await self._send(messages, tools, setting, max_tokens), self._think_tags)
            except ValueError as error:  # a body that is cut short or is not a completion may pass too
                problem = RequestFailed("bad reply", str(error)[:300])
                await asyncio.sleep(min(8.0, 0.2 * 2**attempt))
            except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
                raise KeyRefused(self.url, _words(error)) from None
            except openai.APIStatusError as error:
                code = error.status_code
                raise RequestFailed(f"HTTP {code}", _words(error), rejected=code in _REJECTED) from None
            except openai.APITimeoutError:
                raise RequestFailed("time-out", f"no reply in {self._section.request_timeout_s:g} s") from None
            except openai.APIConnectionError as error:
                raise RequestFailed("no connection", _without_key(str(error.__cause__ or error))) from None
        raise problem

    async def _send(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], setting: Setting, max_tokens: int
    ) -> str:
        extra: dict[str, Any] = {"return_token_ids": True}
        if setting.chat_template_kwargs:
            extra["chat_template_kwargs"] = setting.chat_template_kwargs
        pool = self._in_flight.index(min(self._in_flight))
        self._in_flight[pool] += 1
        try:
            response = await self._clients[pool].chat.completions.with_raw_response.create(
                model=self._model,
                messages=messages,  # type: ignore[arg-type]
                max_tokens=max_tokens,
                temperature=setting.temperature,
                top_p=setting.top_p,
                seed=self._section.seed,
                extra_body=extra | ({"tools": tools} if tools else {}),
            )
        finally:
            self._in_flight[pool] -= 1
        return response.http_response.text

    async def close(self) -> None:
        """Close the connections; requests in flight are dropped."""
        for client in self._clients:
            await client.close()


def _transports(url: str, count: int) -> list[Any]:
    """Return HTTP clients for a server, all with one TLS context: loading the certificates takes a while."""
    import openai

    parts = urlsplit(url)
    verify: Any = False  # nothing to verify in plain HTTP
    if parts.scheme == "https":
        import certifi

        verify = ssl.create_default_context(cafile=certifi.where())
    near = parts.hostname in _LOOPBACK  # then a proxy from the environment is in the way
    return [openai.DefaultAsyncHttpxClient(trust_env=not near, verify=verify) for _ in range(count)]


def _words(error: Any) -> str:
    """Return what the server said about an error, in one line and without the key."""
    body = error.body if isinstance(error.body, dict) else {}
    return _without_key(str(body.get("message") or error.message))[:500].replace("\n", " ")


def _without_key(text: str) -> str:
    key = servers.api_key()
    return text if key == "EMPTY" else text.replace(key, "***")
