"""Where the user speaks: the token ids of a template up to there, and what ends the turn.

Found by rendering a user's message and looking for it in the result, so it fits whatever template a verifier has.
"""

from dataclasses import dataclass
from typing import Any

from eagle3.common.errors import PreconditionError
from eagle3.traces.chat import Chat, TemplateRefusal

_MARKER = "Quokka5"  # what the user says while the template is looked at


@dataclass(frozen=True)
class UserTurn:
    """A conversation up to where the user speaks.

    Attributes:
        ids: [P], with the first words of what the user says where there are any. opening: these words.
        end_ids: tokens that end the turn: the template's, and the one that ends the assistant's.
        end_text: what ends it in templates that have no token for that, else "".
    """

    ids: list[int]
    opening: str
    end_ids: tuple[int, ...]
    end_text: str


def user_turn(chat: Chat, *, system: str = "", opening: str = "", arguments: dict[str, Any] | None = None) -> UserTurn:
    """Return the user's turn in a verifier's template.

    Args:
        system: a system prompt, "" for none (the template may have one of its own). opening: what the user begins with.
        arguments: of the template.
    Raises:
        PreconditionError: the template takes no such conversation, or does not say once what the user says.
    """
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": _MARKER}]
    try:
        text = chat.prompt_text(messages, arguments)
    except TemplateRefusal as refusal:
        raise PreconditionError("the chat template takes no user's message" + " after a system prompt" * bool(system),
                                found=refusal, fix="leave --self-systems out" if system else "") from None
    before, found, after = text.partition(_MARKER)
    if not found or _MARKER in after:
        raise PreconditionError(
            "the chat template does not show where the user speaks", expected="what the user says, once",
            found=text[:300], fix="give a prompts file with --prompts: this verifier cannot invent its own")
    # The space before a word is part of the word's token: the model is to choose both.
    before = before.rstrip(" ") if not opening else before
    end_id = _ending_token(chat, after)
    end_ids = tuple(sorted({chat.end_id} | ({end_id} if end_id is not None else set())))
    end_text = "" if end_id is not None else after.strip().partition("\n")[0]
    return UserTurn(chat.template_ids(before + opening.rstrip(" ")), opening, end_ids, end_text)


def _ending_token(chat: Chat, after: str) -> int | None:
    """Return the control token that follows what the user says, None where text does."""
    ids = chat.template_ids(after.lstrip())
    return ids[0] if ids and ids[0] in chat.special_ids else None
