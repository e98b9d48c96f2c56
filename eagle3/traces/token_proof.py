"""Proof of token ids: none enters a trace without the engine's word for it, or a check of it.

The server's own ids are held against the text that it returns beside them, and against the verifier's vocabulary. Ids
that the template and the tokenizer make of a text are held against the server's counts: a parser that strips white
space, another template, or another spelling of the same text shows there, and gives no trace. A text that does not
agree with the server's ids gives one, since the ids are the engine's word; it is told. Where more than a few do not
agree, the run stops, since then a setting is wrong.
"""

from typing import Any

from eagle3.common.errors import PreconditionError
from eagle3.common.log import logger
from eagle3.traces.chat import Chat
from eagle3.traces.replies import Reply

COUNT_DIFFERS, TEXT_DIFFERS, NO_COUNT = "token count differs", "token ids contradict the text", "token count not told"
LARGEST_SHARE = 0.05  # of replies that do not agree
ENOUGH = 20  # replies before a share is judged
_FIXES = {
    COUNT_DIFFERS: "let the server return token ids (vLLM does, and so it does behind a gateway that passes "
    "return_token_ids on), name the folder of the model that is served with --model, or leave out the server's "
    "reasoning parser if it strips white space; --restart asks anew what was traced before",
    TEXT_DIFFERS: "name the folder of the model that is served with --model, and see that nothing between here and the "
    "server changes its replies; --restart asks anew what was traced before",
}


class TokenProof:
    """Compares every reply of a run.

    Attributes:
        figures: replies whose "texts" and "counts" were compared, how many of them differed, and an example of each.
    """

    def __init__(self, chat: Chat | None) -> None:
        self._chat = chat
        self.figures: dict[str, Any] = {"texts": 0, "texts_differ": 0, "counts": 0, "counts_differ": 0, "examples": {}}

    def beyond_vocabulary(self, reply: Reply) -> str:
        """Return the first of the server's ids that the verifier does not have, in words, or ""."""
        size = self._chat.vocabulary_size if self._chat else None
        for token in (*(reply.prompt_ids or ()), *(reply.completion_ids or ())) if size else ():
            if token >= size:
                return f"id {token}, of {size} in the verifier's vocabulary"
        return ""

    @property
    def texts_judged(self) -> bool:
        """Whether so many texts were compared that ids of another model would have shown."""
        return self.figures["texts"] >= ENOUGH

    def doubt(self, reply: Reply, prompt_ids: list[int], completion_ids: list[int]) -> tuple[str, str]:
        """Return what does not agree, as (reason, detail), or ("", "").

        Raises PreconditionError when too many replies do not.
        """
        if reply.exact:
            return self._against_text(reply)
        told = (reply.usage["prompt_tokens"], reply.usage["completion_tokens"])
        if not all(told):
            return NO_COUNT, "no token ids, and usage has no prompt_tokens and completion_tokens to hold ours against"
        ours = (len(prompt_ids), len(completion_ids) if reply.completion_ids is None else told[1])
        detail = ", ".join(f"{what}: {made} made, {count} in usage" for what, made, count in zip(
            ("prompt", "completion"), ours, told, strict=True) if made != count)
        return self._note("counts", COUNT_DIFFERS, detail)

    def report(self) -> None:
        """Say what did not agree."""
        for kind, reason, then in (("counts", COUNT_DIFFERS, "which give no trace"), ("texts", TEXT_DIFFERS,
                                   "of which the ids are used, since they are the server's")):
            if differ := self.figures[f"{kind}_differ"]:
                logger.warning("%s in %d of %d replies, %s; the first: %s", reason, differ, self.figures[kind], then,
                               self.figures["examples"][kind])

    def _against_text(self, reply: Reply) -> tuple[str, str]:
        if self._chat is None or not reply.completion_ids:
            return "", ""
        agrees = self._chat.spells(reply.completion_ids, reply.reasoning, reply.content)
        text = f"{reply.reasoning or ''}{reply.content or ''}"
        return self._note("texts", TEXT_DIFFERS, "" if agrees else f"they say "
                          f"{self._chat.decode(reply.completion_ids[:40])!r}, the text {text[:80]!r}")

    def _note(self, kind: str, reason: str, detail: str) -> tuple[str, str]:
        self.figures[kind] += 1
        if not detail:
            return "", ""
        self.figures[f"{kind}_differ"] += 1
        first = self.figures["examples"].setdefault(kind, detail)
        differ, compared = self.figures[f"{kind}_differ"], self.figures[kind]
        if compared >= ENOUGH and differ > LARGEST_SHARE * compared:
            raise PreconditionError(
                f"{reason} in {differ} of the first {compared} replies; they are not recorded",
                where="--endpoint", expected=f"at most {LARGEST_SHARE:.0%} of the replies", found=first,
                fix=_FIXES[reason],
            )
        return reason, detail
