"""Comparing the server's token ids with those that the template and tokenizer of the model folder make.

The server's ids are what the model saw and generated, and they are used. Where they differ from the folder's,
either the folder is of another model (prompts differ), or the model spelled a text in other tokens than its
tokenizer would (completions differ now and then: harmless with the server's ids, wrong training data without).
"""

from typing import Any

from eagle3.common.log import logger
from eagle3.traces.chat import Chat
from eagle3.traces.replies import Reply

_AROUND = 6  # tokens shown on each side of a difference


class TokenCheck:
    """Compares the first `wanted` replies that come with exact ids."""

    def __init__(self, chat: Chat | None, wanted: int) -> None:
        self._chat, self._wanted = chat, wanted if chat is not None else 0
        self.figures: dict[str, Any] = {"checked": 0, "prompts_differ": 0, "completions_differ": 0, "examples": []}

    def compare(self, reply: Reply, prompt_ids: list[int] | None) -> None:
        """Compare one reply both ways; `prompt_ids` are the template's."""
        if self._chat is None or prompt_ids is None or self.figures["checked"] >= self._wanted:
            return
        if reply.reasoning and not self._chat.knows_think_tags:
            return  # how the model encloses it is not known
        self.figures["checked"] += 1
        if reply.prompt_ids != prompt_ids:
            self._note("prompts_differ", reply.prompt_ids or [], prompt_ids)
        theirs = reply.completion_ids or []
        ours = self._chat.completion_ids(prompt_ids, reply.reasoning, reply.content)
        if reply.finish_reason == "length":
            ours = ours[:-1]  # no end token was generated
        if not reply.tool_calls and theirs != ours:
            self._note("completions_differ", theirs, ours)

    def report(self) -> None:
        """Say what was found."""
        found = self.figures
        if not found["checked"]:
            return
        differ = found["prompts_differ"] or found["completions_differ"]
        say = logger.warning if differ else logger.info
        say("token ids of %d replies compared with the template's: %d prompts and %d completions differ",
            found["checked"], found["prompts_differ"], found["completions_differ"])
        for example in found["examples"]:
            logger.warning("  %s at token %d: server %r, template %r", example["kind"], example["token"],
                           example["server"], example["template"])

    def _note(self, kind: str, theirs: list[int], ours: list[int]) -> None:
        self.figures[kind] += 1
        if self._chat is None or len(self.figures["examples"]) >= 3:
            return
        shared = min(len(theirs), len(ours))
        at = next((i for i in range(shared) if theirs[i] != ours[i]), shared)
        near = slice(max(0, at - _AROUND), at + _AROUND)
        self.figures["examples"].append({"kind": kind.removesuffix("s_differ"), "token": at,
                                         "server": self._chat.decode(theirs[near]),
                                         "template": self._chat.decode(ours[near])})
