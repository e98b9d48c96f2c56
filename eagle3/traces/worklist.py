"""What stage 01 has to ask: the prompts of a source against what lies in its ledger, as a stream.

Nothing here holds the prompts: a source is read once to survey it and once more while asking.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from eagle3.common.errors import StaleError
from eagle3.traces.prompts import Conversation, PromptSource
from eagle3.traces.sampling import Mix, Setting
from eagle3.traces.trace_rows import FILE_NAME, SKIPPED, Ledger

CHARACTERS_PER_TOKEN = 4
_BYTES_PER_TOKEN = 11  # of traces.jsonl: about 6 for the id and 5 for the text


@dataclass(frozen=True)
class Request:
    """One reply to ask for; `key` is a hash of all that decides it."""

    id: str
    key: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    source: str
    setting: Setting


@dataclass
class Survey:
    """Counts of replies.

    Attributes:
        characters, tokens: of the missing replies, the characters of their prompts and the most they can generate.
        history: ids of traces from which conversations with missing replies go on.
    """

    expected: int = 0
    done: int = 0
    missing: int = 0
    characters: int = 0
    tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    history: set[str] = field(default_factory=set)

    @property
    def prompt_tokens(self) -> int:
        """Upper estimate of the missing prompts' tokens."""
        return self.characters // CHARACTERS_PER_TOKEN

    @property
    def bytes(self) -> int:
        """Upper estimate of what the missing traces take on disk."""
        return (self.prompt_tokens + self.tokens) * _BYTES_PER_TOKEN

    def figures(self, ledger: Ledger, came_of_it: Counter[str] | None = None) -> dict[str, Any]:
        """Return the counts of the manifest: of these prompts, and of all that lies in the directory.

        Args:
            came_of_it: what became of the missing ones since the survey, as the generator counts it.
        """
        new = came_of_it or Counter()
        skipped = self.skipped + Counter({name.removeprefix(SKIPPED): count for name, count in new.items()
                                          if name.startswith(SKIPPED)})
        return {"expected": self.expected, "done": self.done + new["traces"], "skipped": dict(skipped),
                "failed": new["failures"], **ledger.counts}


class ConversationWork:
    """A conversation with replies to ask for.

    Attributes:
        broken: "" or what became of an earlier reply, "skipped" or "failed", without which it cannot go on.
    """

    def __init__(self, conversation: Conversation, setting: Setting, replies: list[tuple[str, str, str]],
                 history: dict[str, dict[str, Any]]) -> None:
        """Take (id, key, state) of each reply, and the finished ones by id as far as they are needed."""
        self.broken = ""
        self._conversation, self._setting, self._replies, self._history = conversation, setting, replies, history
        self._generated: dict[int, dict[str, Any]] = {}

    def requests(self) -> Iterator[Request]:
        """Yield the missing replies in turn; call `went_on` or set `broken` before taking the next."""
        conversation = self._conversation
        for (identity, key, state), place in zip(self._replies, conversation.asked, strict=True):
            if state == "missing":
                messages = [self._generated.get(i, message) for i, message in enumerate(conversation.messages[:place])]
                yield Request(identity, key, messages, conversation.tools, conversation.source, self._setting)
            elif state == "done":
                if identity in self._history:
                    self._generated[place] = self._history[identity]
            else:
                self.broken = "skipped"

    def went_on(self, request: Request, reply: dict[str, Any]) -> None:
        """Take a generated reply into the history of the next one."""
        turn = [identity for identity, _, _ in self._replies].index(request.id)
        self._generated[self._conversation.asked[turn]] = reply


class Worklist:
    """A source, the sampling of each of its conversations, and the ledger that says what is done."""

    def __init__(self, source: PromptSource, mix: Mix, ledger: Ledger) -> None:
        self._source, self._mix, self._ledger = source, mix, ledger

    def look_over(self, named: str | None, check_stop: Callable[[], None]) -> Survey:
        """Return the survey under the model's name that is given, else the one asked before.

        If none was, all is missing. Raises StaleError as `survey` does, and when the traces are of a model with
        another name.
        """
        model = named or self._ledger.model
        self._ledger.refuse_other_model(model)
        return self.survey(model, check_stop)

    def survey(self, model: str, check_stop: Callable[[], None]) -> Survey:
        """Count what is done and what is missing when `model` is asked.

        Raises StaleError when a trace lies there for the same id but another request.
        """
        result, changed = Survey(), 0
        first: list[str] = []
        for conversation in self._source:
            check_stop()
            setting = self._mix.choose(conversation.id)
            done: list[str] = []
            for identity, _, state in self._replies(conversation, setting, model):
                result.expected += 1
                if state == "done":
                    result.done += 1
                    done.append(identity)
                elif state == "changed":
                    changed, first = changed + 1, [*first, identity][:5]
                elif state == "missing":
                    result.missing += 1
                    result.tokens += setting.max_tokens
                    result.characters += _characters(conversation)
                    result.history.update(done)
                else:
                    result.skipped[state.removeprefix(SKIPPED)] += 1
        if changed:
            raise StaleError(
                f"{changed} traces were made from another prompt or with other sampling under the same id",
                where=self._ledger.directory / FILE_NAME,
                found="ids " + ", ".join(first) + (" …" if changed > len(first) else ""),
                fix="give changed prompts new ids, write elsewhere with --out, or use --restart (moves the old aside)",
            )
        return result

    def work(self, model: str, survey: Survey) -> Iterator[ConversationWork]:
        """Yield the conversations of which a reply is missing, in the order of the source."""
        history = self._ledger.replies(survey.history)
        for conversation in self._source:
            setting = self._mix.choose(conversation.id)
            replies = self._replies(conversation, setting, model)
            if any(state == "missing" for _, _, state in replies):
                yield ConversationWork(conversation, setting, replies, history)

    def _replies(self, conversation: Conversation, setting: Setting, model: str) -> list[tuple[str, str, str]]:
        """Return (id, key, state) of each reply. What an earlier reply says is no part of a key: it is generated."""
        result = []
        for turn, place in enumerate(conversation.asked):
            generated = set(conversation.asked[:turn])
            messages = [None if i in generated else message for i, message in enumerate(conversation.messages[:place])]
            identity = conversation.prompt_id(turn)
            key = self._mix.key(setting, messages, conversation.tools, model)
            result.append((identity, key, self._ledger.state(identity, key)))
        return result


def _characters(conversation: Conversation) -> int:
    return sum(len(message.get("content") or "") for message in conversation.messages)
