"""Requests: ask an OpenAI-compatible server which model it serves, and for one assistant turn."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from eagle3.common.errors import PreconditionError, UsageError
from eagle3.common.log import logger
from eagle3.common.options import GenerateSection
from eagle3.engines import servers
from eagle3.traces.chat import DEFAULT_THINK_TAGS, with_contents
from eagle3.traces.replies import Answer, BadReply, Completion, Reply, parse_completion, parse_reply, words_of
from eagle3.traces.sampling import Setting

_REJECTED = (400, 413, 422)  # the request is at fault, not the server
_POOL_SIZE = 16  # requests in flight in one connection pool
_OPTIONAL = {"return_token_ids": True}

Send = Callable[[Any, dict[str, Any]], Awaitable[Any]]  # posts fields through an openai client


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
        super().__init__("the server refuses the API key", where=url, found=without_key(found),
                         fix="set OPENAI_API_KEY and run again")


# --- the server -------------------------------------------------------------------------------------------


def base_url(endpoint: str) -> str:
    """Return the address that ends in /v1; UsageError for one that is no address or holds a password."""
    try:
        parts = urlsplit(endpoint)
        named = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, half of an IPv6 address
        named = False
    if not named:
        raise UsageError("not an address", where="--endpoint", found=endpoint, fix="such as http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query:
        raise UsageError("the address holds a secret", where="--endpoint", fix="set OPENAI_API_KEY instead")
    return endpoint.rstrip("/").removesuffix("/v1") + "/v1"


def served_model(url: str, name: str | None) -> ServedModel:
    """Return the model to ask for: `name`, else the only one that the server lists.

    Raises PreconditionError when nothing answers, the key is refused, or the model cannot be told.
    """
    try:
        listed = {str(model["id"]): model for model in servers.listed(url)}
    except servers.NO_ANSWER as error:
        if getattr(error, "code", 0) in (401, 403):
            raise KeyRefused(url, str(error)) from None
        raise PreconditionError(
            "no OpenAI-compatible server answers", where=url, found=without_key(str(error)),
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
    return ServedModel(name, limit if type(limit) is int and limit > 0 else None)


class Wire:
    """Sends requests to one server, without a second try; stages 01 and 06 both ask through it.

    Attributes:
        refused: optional fields that the server does not take; they are left out, which is said once.
    """

    def __init__(self, url: str, model: str, *, timeout_s: float, connections: int, retries: int = 0) -> None:
        """Take the server and how to ask it.

        Args:
            connections: requests in flight. retries: tries after the first for passing errors (408, 409, 429, 5xx,
                time-outs, resets), with back-off.
        """
        import openai

        self._openai, self.url, self._model, self._timeout_s = openai, url, model, timeout_s
        # A connection pool looks at each of its connections for every request, so one pool of hundreds is slow:
        # pools of 16 keep the client at twice the requests/s that one of 256 has.
        self._clients = [
            openai.AsyncOpenAI(base_url=url, api_key=servers.api_key(), max_retries=retries, timeout=timeout_s,
                               http_client=transport)
            for transport in servers.transports(url, -(-connections // _POOL_SIZE))
        ]
        self._in_flight = [0] * len(self._clients)
        self.refused: set[str] = set()

    async def ask(
        self,
        messages: list[dict[str, Any]],
        fields: dict[str, Any],
        optional: dict[str, Any],
        think_tags: tuple[str, str] = DEFAULT_THINK_TAGS,
    ) -> Reply:
        """Return the reply to a conversation.

        Args:
            fields: what the request has to say. optional: what is left out where the server refuses it.
        Raises:
            RequestFailed: it failed, with the server's words. BadReply: what came is not a reply.
            KeyRefused: the server does not take the API key.
        """
        sent = with_contents(messages)
        return await self._exchange(
            lambda client, more: client.chat.completions.with_raw_response.create(
                model=self._model, messages=sent, extra_body=more),
            fields, optional, lambda body: parse_reply(body, think_tags))

    async def complete(self, prompt_ids: list[int], fields: dict[str, Any], optional: dict[str, Any]) -> Completion:
        """Return what the model says after these token ids [P]; fields, optional and errors as for `ask`."""
        return await self._exchange(
            lambda client, more: client.completions.with_raw_response.create(
                model=self._model, prompt=prompt_ids, extra_body=more),
            fields, optional, parse_completion)

    async def _exchange(self, send: Send, fields: dict[str, Any], optional: dict[str, Any],
                        parse: Callable[[str], Answer]) -> Answer:
        openai = self._openai
        try:
            return parse(await self._send(send, fields, optional))
        except BadReply as error:
            raise BadReply(error.reason, without_key(error.detail)) from None
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise KeyRefused(self.url, _words(error)) from None
        except openai.APIStatusError as error:
            code = error.status_code
            raise RequestFailed(f"HTTP {code}", _words(error), rejected=code in _REJECTED) from None
        except openai.APITimeoutError:
            raise RequestFailed("time-out", f"no reply in {self._timeout_s:g} s") from None
        except openai.APIConnectionError as error:
            raise RequestFailed("no connection", without_key(str(error.__cause__ or error))) from None
        except (openai.OpenAIError, ValueError, RecursionError) as error:  # a body that is no text, a request no JSON
            raise RequestFailed("no exchange", without_key(f"{type(error).__name__}: {error}"[:300])) from None

    async def _send(self, send: Send, fields: dict[str, Any], optional: dict[str, Any]) -> str:
        """Return the body of the answer; a refusal that names optional fields is met by leaving them out.

        Only if that helps are they taken for refused: some servers quote the whole request in any error.
        """
        first: Exception | None = None
        left = {name: value for name, value in optional.items() if name not in self.refused}
        while True:
            try:
                text = await self._post(send, fields | left)
            except (self._openai.BadRequestError, self._openai.UnprocessableEntityError) as error:
                first = first or error
                named = {name for name in left if name in error.response.text}
                if not named:
                    raise first from None
                left = {name: value for name, value in left.items() if name not in named}
            else:
                if first is not None:
                    self._note_refused(set(optional) - set(left), first)
                return text

    async def _post(self, send: Send, fields: dict[str, Any]) -> str:
        pool = self._in_flight.index(min(self._in_flight))
        self._in_flight[pool] += 1
        try:
            response = await send(self._clients[pool], fields)
        finally:
            self._in_flight[pool] -= 1
        return str(response.http_response.text)

    def _note_refused(self, names: set[str], error: Exception) -> None:
        if not names <= self.refused:
            self.refused |= names
            logger.warning("%s does not take %s (%s); it is asked without", self.url, ", ".join(sorted(names)),
                           _words(error))

    async def close(self) -> None:
        """Close the connections; requests in flight are dropped."""
        for client in self._clients:
            await client.close()


class Client:
    """Asks one server for traces. Passing errors and bodies that are no reply are tried again, with back-off."""

    def __init__(
        self, url: str, model: str, section: GenerateSection, think_tags: tuple[str, str], retries: int
    ) -> None:
        self._section, self._think_tags, self._retries, self._model = section, think_tags, retries, model
        self._wire = Wire(url, model, timeout_s=section.request_timeout_s, connections=section.concurrency,
                          retries=retries)

    async def ask(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], setting: Setting, max_tokens: int
    ) -> Reply:
        """Return the reply; RequestFailed after the last retry; PreconditionError when the key is refused."""
        fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": setting.temperature, "top_p": setting.top_p,
                                  "seed": self._section.seed}
        if setting.chat_template_kwargs:
            fields["chat_template_kwargs"] = setting.chat_template_kwargs
        if tools:
            fields["tools"] = tools
        return await self._again(lambda: self._wire.ask(messages, fields, _OPTIONAL, self._think_tags))

    async def complete(self, prompt_ids: list[int], fields: dict[str, Any]) -> Completion:
        """Return what the model says after token ids [P]; errors as for `ask`."""
        return await self._again(lambda: self._wire.complete(prompt_ids, fields, _OPTIONAL))

    async def _again(self, exchange: Callable[[], Awaitable[Answer]]) -> Answer:
        for attempt in range(self._retries + 1):
            try:
                return await exchange()
            except BadReply as error:  # a body that is cut short, or an error in it, may pass too
                problem = RequestFailed(error.reason, error.detail)
            if attempt < self._retries:
                await asyncio.sleep(min(8.0, 0.2 * 2**attempt))
        raise problem

    async def close(self) -> None:
        """Close the connections; requests in flight are dropped."""
        await self._wire.close()


def _words(error: Any) -> str:
    """Return what the server said about an error, in one line and without the key."""
    try:
        said = words_of(json.loads(error.response.text))
    except (ValueError, RecursionError, AttributeError):
        said = ""
    return without_key(said or str(error.message)[:500].replace("\n", " "))


def without_key(text: str) -> str:
    """Return a text without the key that was sent: servers repeat it in errors."""
    key = servers.api_key()
    return text if key == "EMPTY" else text.replace(key, "***")
