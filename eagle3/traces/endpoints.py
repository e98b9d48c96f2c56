"""Several servers of one model: the least busy one is asked, one that fails rests and is tried again."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from eagle3.common.errors import PreconditionError
from eagle3.common.log import logger
from eagle3.common.options import GenerateSection
from eagle3.traces import client
from eagle3.traces.client import Client, KeyRefused, RequestFailed, ServedModel
from eagle3.traces.replies import Answer, Completion, Reply
from eagle3.traces.sampling import Setting

_FIRST_REST_S = 5.0
_LONGEST_REST_S = 60.0


class Endpoint:
    """One server; `client` is None until it has said which model it serves."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client: Client | None = None
        self.in_flight = self.failures = 0
        self.rests_until = 0.0

    def rest(self, reason: object, now: float) -> None:
        """Set it aside: 5 s after the first failure, twice as long after each further one, at most a minute."""
        if now < self.rests_until:
            return  # other requests that were in flight then
        seconds = min(_LONGEST_REST_S, _FIRST_REST_S * 2**self.failures)
        self.failures += 1
        self.rests_until = now + seconds
        logger.warning("%s is set aside for %.0f s: %s", self.url, seconds, reason)


class Pool:
    """The servers of a run; with one alone, nothing rests and its retries are all of them."""

    def __init__(self, urls: list[str], section: GenerateSection) -> None:
        self._section = section
        self._endpoints = [Endpoint(client.base_url(url)) for url in urls]
        self._think_tags = ("", "")
        self._connecting = asyncio.Lock()
        self.served = ServedModel("", None)

    def connect(self, think_tags: tuple[str, str]) -> ServedModel:
        """Ask every server for its model; return the name and the shortest limit.

        Args:
            think_tags: what encloses reasoning that a server leaves in the content.
            PreconditionError: none answers, one refuses the key, or they serve different models.
        """
        self._think_tags = think_tags
        found: list[ServedModel] = []
        problem: PreconditionError | None = None
        for endpoint in self._endpoints:
            try:
                found.append(client.served_model(endpoint.url, self._section.served_model_name))
            except PreconditionError as error:
                if len(self._endpoints) == 1 or isinstance(error, KeyRefused):
                    raise
                problem = error
                endpoint.rest(error.what, time.monotonic())
                continue
            if Path(found[-1].name).name != Path(found[0].name).name:
                raise PreconditionError("the servers serve different models", where=endpoint.url,
                                        expected=found[0].name, found=found[-1].name, fix="correct --endpoint")
            endpoint.client = self._client(endpoint, found[-1].name)
        if not found:
            raise problem or PreconditionError("no server is given", where="--endpoint")
        self.served = ServedModel(found[0].name, min((model.limit for model in found if model.limit), default=None))
        return self.served

    async def ask(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], setting: Setting, max_tokens: int
    ) -> Reply:
        """Return the reply of the first server that gives one.

        Raises RequestFailed when all have failed, or one has rejected the request itself.
        """
        return await self._of_any(lambda client: client.ask(messages, tools, setting, max_tokens))

    async def complete(self, prompt_ids: list[int], fields: dict[str, Any]) -> Completion:
        """Return what the model says after token ids [P]; errors as for `ask`."""
        return await self._of_any(lambda client: client.complete(prompt_ids, fields))

    async def _of_any(self, exchange: Callable[[Client], Awaitable[Answer]]) -> Answer:
        tried: set[str] = set()
        while True:
            endpoint = self._next(tried)
            tried.add(endpoint.url)
            endpoint.in_flight += 1
            try:
                client = endpoint.client or await self._reconnect(endpoint)
                answer = await exchange(client)
                endpoint.failures = 0
                return answer
            except RequestFailed as failure:
                alone = len(self._endpoints) == 1
                if not (failure.rejected or alone):
                    endpoint.rest(failure, time.monotonic())
                if failure.rejected or len(tried) == len(self._endpoints):
                    raise
            finally:
                endpoint.in_flight -= 1

    def _next(self, tried: set[str]) -> Endpoint:
        """Return the least busy server that does not rest; if all rest, the one that rests the shortest."""
        now = time.monotonic()
        left = [endpoint for endpoint in self._endpoints if endpoint.url not in tried]
        return min(left, key=lambda endpoint: (max(0.0, endpoint.rests_until - now), endpoint.in_flight))

    async def _reconnect(self, endpoint: Endpoint) -> Client:
        """Return the client of a server that did not answer when the run began."""
        async with self._connecting:
            if endpoint.client is None:
                try:
                    served = await asyncio.to_thread(
                        client.served_model, endpoint.url, self._section.served_model_name)
                except PreconditionError as error:
                    raise RequestFailed("no server", error.what) from None
                if Path(served.name).name != Path(self.served.name).name:
                    raise RequestFailed("another model", f"{endpoint.url} serves {served.name}")
                endpoint.client = self._client(endpoint, served.name)
            return endpoint.client

    def _client(self, endpoint: Endpoint, model: str) -> Client:
        retries = self._section.retries if len(self._endpoints) == 1 else min(1, self._section.retries)
        return Client(endpoint.url, model, self._section, self._think_tags, retries)

    async def close(self) -> None:
        """Close all connections; requests in flight are dropped."""
        for endpoint in self._endpoints:
            if endpoint.client is not None:
                await endpoint.client.close()
