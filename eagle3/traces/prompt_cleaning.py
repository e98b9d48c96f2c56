"""Which of the prompts that a model invented are worth asking."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from eagle3.traces.chat import Chat
from eagle3.traces.near_repeats import NearRepeats, triples
from eagle3.traces.replies import Completion
from eagle3.traces.user_turn import UserTurn

_VARIED = 0.5  # share of a prompt's word triples that must differ from each other
_MOST_TAKEN = 40  # characters of an example

TURN, OTHER, LENGTH = "turn", "other", "length"  # how a text ended


@dataclass(frozen=True)
class Attempt:
    """One text that the model said as the user.

    Attributes:
        number: of the request, from 0. text: with its opening. tokens: generated, the one that ended it included.
        ended: by the end of the "turn", by an "other" token, or by "length". control: whether it holds control tokens.
    """

    number: int
    text: str
    tokens: int
    ended: str
    control: bool


class Hearing:
    """Makes attempts of completions."""

    def __init__(self, chat: Chat) -> None:
        self._chat, self._special = chat, chat.special_ids
        self._spelled = [chat.decode([token]) for token in self._special]

    def __call__(self, number: int, turn: UserTurn, said: Completion) -> Attempt:
        """Return what a completion is as an attempt; by its exact ids where the server gives them."""
        ids = said.ids
        if ids:
            body = ids[:-1] if ids[-1] in self._special else ids
            text, control = self._chat.decode(body), any(token in self._special for token in body)
        else:
            text, control = said.text, any(name in said.text for name in self._spelled)
        if turn.end_text:
            text = text.partition(turn.end_text)[0]
        return Attempt(number, turn.opening + text, said.tokens, _ending(turn, said), control)


def _ending(turn: UserTurn, said: Completion) -> str:
    if said.finish_reason == "length":
        return LENGTH
    ends = (*turn.end_ids, turn.end_text) if turn.end_text else turn.end_ids
    if said.stopped_at in ends or (said.ids and said.ids[-1] in ends):
        return TURN
    # A server that says neither was asked to stop at nothing else.
    return TURN if said.ids is None and said.stopped_at is None else OTHER


class Cleaner:
    """Judges attempts in the order of their numbers.

    Attributes:
        reasons: {why not: attempts}, and in `examples` the beginning of the first text of each.
    """

    def __init__(self, held_out: list[str], tokens: tuple[int, int]) -> None:
        """Take the texts that must not be repeated, and the shortest and longest prompt in tokens."""
        self._near, self._tokens = NearRepeats(held_out), tokens
        self.reasons: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def usable(self, said: Attempt) -> bool:
        """Say whether an attempt is a prompt; count why not."""
        if reason := self._reason(said):
            self.reasons[reason] += 1
            self.examples.setdefault(reason, said.text.strip()[:_MOST_TAKEN])
        return not reason

    def figures(self) -> dict[str, Any]:
        """Return {reason: {"attempts", "example"}}, the most frequent first."""
        return {reason: {"attempts": count, "example": self.examples[reason]}
                for reason, count in self.reasons.most_common()}

    def _reason(self, said: Attempt) -> str:
        shortest, longest = self._tokens
        text, length = said.text.strip(), said.tokens - (said.ended == TURN)
        if said.ended == LENGTH or length > longest:
            return "not ended in time"
        if said.ended != TURN:
            return "ended by another token"
        if not text:
            return "empty"
        if said.control:
            return "control tokens in it"
        if "\ufffd" in text or not any(character.isalpha() for character in text):
            return "no words"
        if length < shortest:
            return "too short"
        said_in_turn = triples(text)
        if len(set(said_in_turn)) < _VARIED * len(said_in_turn):
            return "repeats itself"
        if self._near.repeats_held_out(text):
            return "near a held-out prompt"
        return "" if self._near.take(text) else "near an earlier prompt"
