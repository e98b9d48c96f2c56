"""From a reply to the row of a trace: whose token ids it holds, and whether they are to be believed."""

from collections import Counter
from pathlib import Path
from typing import Any

from eagle3.common.errors import PreconditionError
from eagle3.common.log import logger
from eagle3.common.options import GenerateSection
from eagle3.traces.chat import Chat, TemplateRefusal
from eagle3.traces.replies import Reply, reason_to_skip
from eagle3.traces.token_check import TokenCheck
from eagle3.traces.token_proof import TEXT_DIFFERS, TokenProof
from eagle3.traces.trace_rows import sealed
from eagle3.traces.worklist import Request

_MOST_NAMES = 20  # of models in replies, kept with their counts


class NoTrace(Exception):
    """A reply that gives no trace, however often it is asked for."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


class TraceMaker:
    """Makes rows of replies.

    Attributes:
        token_check: what comparing the server's ids with the template's has shown.
        proof: what the ids of every reply were held against.
        other_names: {name: replies} that call themselves by another model's name than the one that was asked.
    """

    def __init__(self, section: GenerateSection, chat: Chat | None, model: str) -> None:
        self._section, self._chat, self._model = section, chat, model
        self.token_check, self.proof = TokenCheck(chat, section.check_tokens), TokenProof(chat)
        self.other_names: Counter[str] = Counter()
        self._replies, self._rendering_compared = 0, False

    def row(
        self, request: Request, reply: Reply, prompt_ids: list[int] | None, max_tokens: int
    ) -> tuple[dict[str, Any], bool]:
        """Return the trace of a reply, and whether its text contradicts its ids.

        Args:
            prompt_ids: the template's, None without one.

        Raises:
            NoTrace: the reply is no example, or its token ids are not to be believed.
            PreconditionError: there is no way to its token ids, or too many are not to be believed.
        """
        self._note_name(reply)
        if reason := reason_to_skip(reply, request.setting.reasoning):
            raise NoTrace(reason)
        known, completion = self._token_ids(reply, prompt_ids)
        reason, detail = self.proof.doubt(reply, known, completion)
        if reason and reason != TEXT_DIFFERS:
            raise NoTrace(reason, detail)
        row = sealed({
            "id": request.id,
            "key": request.key,
            "source": request.source,
            "model": self._model,
            "prompt": {"messages": request.messages, "tools": request.tools},
            "chat_template_kwargs": request.setting.chat_template_kwargs,
            "sampling": request.setting.recorded(max_tokens, self._section.seed),
            "reasoning": reply.reasoning,
            "content": reply.content,
            "tool_calls": reply.tool_calls,
            "finish_reason": reply.finish_reason,
            "prompt_token_ids": known,
            "completion_token_ids": completion,
            "token_source": "server" if reply.exact else "template",
            "usage": reply.usage,
        })
        return row, reason == TEXT_DIFFERS

    def report(self) -> None:
        """Say what did not agree."""
        self.token_check.report()
        self.proof.report()
        if self.other_names:
            logger.warning("%d of %d replies name another model than %s, which was asked: %s",
                           self.other_names.total(), self._replies, self._model, dict(self.other_names))

    def figures(self) -> dict[str, Any]:
        """Return what the manifest says of this run's token ids and names."""
        return {"token_check": self.token_check.figures, "token_proof": self.proof.figures,
                "other_models": dict(self.other_names)}

    def _token_ids(self, reply: Reply, prompt_ids: list[int] | None) -> tuple[list[int], list[int]]:
        """Return the ids of prompt and completion: the server's where it gives them, else ours."""
        if reply.prompt_ids and reply.completion_ids:
            self._compare_rendering(prompt_ids, reply.prompt_ids)
            self.token_check.compare(reply, prompt_ids)
            return reply.prompt_ids, reply.completion_ids
        if self._chat is None or prompt_ids is None:
            raise PreconditionError(
                "the server gives no token ids, and there is no tokenizer to make them",
                expected="prompt_token_ids and token_ids in the reply (vLLM gives them), or a model folder",
                fix="name the verifier's folder with --model",
            )
        if reply.completion_ids:
            return prompt_ids, reply.completion_ids
        try:
            return prompt_ids, self._chat.completion_ids(prompt_ids, reply.reasoning, reply.content)
        except TemplateRefusal as refusal:
            raise NoTrace("reasoning without token ids", str(refusal)) from None

    def _compare_rendering(self, ours: list[int] | None, servers: list[int]) -> None:
        """Warn once when the server renders prompts unlike the model folder's template."""
        if self._chat is None or ours is None or ours == servers or self._rendering_compared:
            return
        self._rendering_compared = True
        logger.warning("the server renders prompts unlike the template of --model (its ids are used). Another model or "
                       "template? Server: …%r, folder: …%r", self._chat.decode(servers)[-80:],
                       self._chat.decode(ours)[-80:])

    def _note_name(self, reply: Reply) -> None:
        self._replies += 1
        name = reply.model
        if not name or Path(name).name.lower() == Path(self._model).name.lower():
            return
        if not self.other_names:
            logger.warning("a reply names the model %r, asked was %r; how many do is said at the end", name[:100],
                           self._model)
        self.other_names[name[:100] if len(self.other_names) < _MOST_NAMES else "…"] += 1
