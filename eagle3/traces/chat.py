"""Chat: think tags, the verifier's template, and the token ids of a prompt and of what was generated.

The server's own token ids are exact and are used wherever it gives them. This room is the other way: it
renders the prompt with the generation prompt and appends what the model generated. Rendering the *finished*
conversation instead would lose the reasoning of its last turn in templates that drop old reasoning.
Tokenizers that put a space before every text (the SentencePiece dummy prefix) are exact to that space only.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.common import files
from eagle3.common.errors import PreconditionError

# Spellings in use; a tokenizer or template that has one decides which.
_THINK_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
DEFAULT_THINK_TAGS = _THINK_TAGS[0]
_MARKER = "Zebra7"  # a reply by which the end of a rendered turn is found


class TemplateRefusal(Exception):
    """The chat template does not take this conversation; the message is the template's own."""


def split_reasoning(
    reasoning: str | None, content: str | None, tags: tuple[str, str] = DEFAULT_THINK_TAGS
) -> tuple[str | None, str | None]:
    """Return (reasoning, content) with a think block that was left in the content moved out of it.

    `a</think>b` and `<think>a</think>b` give ("a", "b"). A reply whose reasoning arrived in its own field
    loses only a repeated or empty block. White space is kept; a reasoning of only white space is none.
    """
    opening, closing = tags
    if content and closing in content:
        before, after = content.split(closing, 1)
        block = before.lstrip().removeprefix(opening)
        if not (reasoning or "").strip():
            reasoning, content = block, after
        elif block.strip() in ("", reasoning.strip() if reasoning else ""):
            content = after
    return (reasoning if reasoning and reasoning.strip() else None), content


class Chat:
    """A verifier's tokenizer and chat template.

    Attributes:
        think_tags: opening and closing tag of this model's reasoning.
        knows_think_tags: whether the tokenizer or the template has them; else they are only a guess.
        end_id: the token that ends an assistant turn.
        vocabulary_size: rows of the verifier's embedding, so that every id is below; None where it is not known.
    """

    def __init__(self, tokenizer: Any, end_ids: set[int], vocabulary_size: int | None = None) -> None:
        """Take a tokenizer, the ids that end generation (may be empty), and the config's vocabulary size."""
        self._tokenizer = tokenizer
        self._vocabulary: dict[str, int] = tokenizer.get_vocab()
        template = str(tokenizer.chat_template)
        known = [pair for pair in _THINK_TAGS if all(tag in self._vocabulary or tag in template for tag in pair)]
        self.think_tags, self.knows_think_tags = known[0] if known else DEFAULT_THINK_TAGS, bool(known)
        largest = max(self._vocabulary.values())
        self.vocabulary_size = max(vocabulary_size, largest + 1) if vocabulary_size else None
        self.end_id = self._find_end(end_ids | {tokenizer.eos_token_id} - {None})

    @property
    def closing_id(self) -> int | None:
        """The token that ends reasoning, where it is one token."""
        return self._vocabulary.get(self.think_tags[1])

    @property
    def control_ids(self) -> dict[str, int]:
        """{text: id} of the tokens that end a turn and begin and end reasoning; of tags only those of one token."""
        tags = {tag: self._vocabulary[tag] for tag in self.think_tags if tag in self._vocabulary}
        return {self.decode([self.end_id]): self.end_id, **tags}

    @property
    def special_ids(self) -> set[int]:
        """Every token that the tokenizer treats as special: roles, tools, media and the like."""
        return set(self._tokenizer.all_special_ids) | set(getattr(self._tokenizer, "added_tokens_decoder", {}))

    def prompt_ids(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        arguments: dict[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids [P] of a conversation followed by the generation prompt; `arguments` go to the template.

        The template's output is tokenized by the tokenizer itself, so there is one BOS, not two.
        Raises TemplateRefusal when the template does not take the conversation.
        """
        return self._render(messages, tools, {"add_generation_prompt": True} | (arguments or {}))

    def prompt_text(self, messages: list[dict[str, Any]], arguments: dict[str, Any] | None = None) -> str:
        """Return a conversation followed by the generation prompt as the template spells it; raises as `prompt_ids`."""
        return str(self._applied(messages, [], {"add_generation_prompt": True} | (arguments or {}), tokenize=False))

    def template_ids(self, text: str) -> list[int]:
        """Return the ids of a piece of `prompt_text`: what spells a control token becomes one."""
        return as_ids(self._tokenizer(text, add_special_tokens=False))

    def completion_ids(self, prompt_ids: list[int], reasoning: str | None, content: str | None) -> list[int]:
        """Return the ids [C] that the model generated after `prompt_ids`, with the end token.

        Text that spells a control token stays text: servers leave such tokens out of what they return.
        Raises TemplateRefusal for reasoning of a model whose tags are not known: its form would be invented.
        """
        if reasoning and not self.knows_think_tags:
            raise TemplateRefusal("the model has no think tags that are known: " + ", ".join(
                opening for opening, _ in _THINK_TAGS))
        opening, closing = (self._vocabulary.get(tag, tag) for tag in self.think_tags)
        if self._ends_in_open_think(prompt_ids):
            pieces: list[str | int] = [reasoning or "", closing, content or ""]
        elif reasoning:
            pieces = [opening, reasoning, closing, content or ""]
        else:
            pieces = [content or ""]
        return [*self._encode(pieces), self.end_id]

    def id_of(self, text: str) -> int | None:
        """Return the token that is this text, None where it is none or several."""
        ids = [self._vocabulary[text]] if text in self._vocabulary else self._text_ids(text)
        return ids[0] if len(ids) == 1 else None

    @property
    def known_ids(self) -> int:
        """How many ids, from 0, the tokenizer can have; a model may have rows beyond them, as padding."""
        return max(self._vocabulary.values()) + 1

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, control tokens spelled out."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def spells(self, ids: list[int], *texts: str | None) -> bool:
        """Say whether token ids decode to these texts, in turn; white space, special tokens and a cut end aside.

        Servers strip white space and leave out tags and calls; what they return as text must still be there.
        """
        return any(_in_turn(self._tokenizer.decode(ids, skip_special_tokens=skip), texts) for skip in (True, False))

    def _ends_in_open_think(self, prompt_ids: list[int]) -> bool:
        return self.decode(prompt_ids[-16:]).rstrip().endswith(self.think_tags[0])

    def _encode(self, pieces: list[str | int]) -> list[int]:
        """Return the ids of texts (merged where they meet) and of ready token ids."""
        ids: list[int] = []
        text = ""
        for piece in [*pieces, -1]:
            if isinstance(piece, str):
                text += piece
                continue
            ids += self._text_ids(text) if text else []
            ids += [piece] if piece >= 0 else []
            text = ""
        return ids

    def _text_ids(self, text: str) -> list[int]:
        literal = {"split_special_tokens": True} if getattr(self._tokenizer, "is_fast", False) else {}
        return as_ids(self._tokenizer(text, add_special_tokens=False, **literal))

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], how: dict[str, Any]) -> list[int]:
        return as_ids(self._applied(messages, tools, how, tokenize=True))

    def _applied(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], how: dict[str, Any], *,
                 tokenize: bool) -> Any:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                _as_rendered(messages), tools=tools or None, tokenize=tokenize, **how
            )
        except TemplateError as error:
            raise TemplateRefusal(str(error)) from None
        except ImportError as error:
            raise PreconditionError("templates cannot be rendered", found=error, fix="pip install jinja2") from None
        except Exception as error:  # a template is a program of somebody else: it joins a missing content, say
            raise TemplateRefusal(f"{type(error).__name__}: {error}") from None

    def _find_end(self, end_ids: set[int]) -> int:
        """Return the first token after a finished reply that ends generation, else the first token there."""
        try:
            turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARKER}]
            text = self.decode(self._render(turn, [], {}))
        except TemplateRefusal:
            text = ""
        after = self._tokenizer(text.rpartition(_MARKER)[2], add_special_tokens=False) if _MARKER in text else []
        candidates = as_ids(after)
        ending = [token for token in candidates if token in end_ids]
        special = [token for token in candidates[:1] if token in set(self._tokenizer.all_special_ids)]
        for token in (*ending, *special, self._tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise PreconditionError("the model names no token that ends a turn", fix="set eos_token in its tokenizer")


def _in_turn(text: str, parts: tuple[str | None, ...]) -> bool:
    """Say whether a text holds other texts one after the other, white space and broken characters aside."""
    text, at = _bare(text), 0
    for part in map(_bare, parts):
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return True


def _bare(text: str | None) -> str:
    return "".join((text or "").replace("\ufffd", "").split())


def load_chat(folder: Path, *, trust_remote_code: bool = False) -> Chat:
    """Return the chat of a model folder.

    Raises PreconditionError when there is no usable tokenizer or no chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise PreconditionError(
            "the tokenizer does not load",
            where=folder,
            found=str(error)[:500],
            fix="check the folder; a tokenizer that brings its own code needs --trust-remote-code",
        ) from None
    tokenizer.chat_template = tokenizer.chat_template or _processors_template(folder)
    if not tokenizer.chat_template:
        raise PreconditionError("the tokenizer has no chat template", where=folder,
                                expected="chat_template.jinja, or one in tokenizer_config.json or chat_template.json",
                                fix="add chat_template.jinja")
    return Chat(tokenizer, _end_ids(folder), vocabulary_size(folder))


def _processors_template(folder: Path) -> str | None:
    """Return the template of chat_template.json: processors of images keep theirs there, and servers use it."""
    path = folder / "chat_template.json"
    if not path.is_file():
        return None
    found = files.read_json(path, fix="restore it, or add chat_template.jinja")
    template = found.get("chat_template") if isinstance(found, dict) else None
    if not isinstance(template, str):
        raise PreconditionError("not a processor's chat template", where=path, expected='{"chat_template": "…"}')
    return template


def as_ids(value: Any) -> list[int]:
    """Return token ids as a plain list from what tokenizers return: a list, a mapping, a batch of one.

    Some versions return a mapping here, whose length is its number of fields, not of tokens.
    """
    if isinstance(value, Mapping):
        value = value["input_ids"]
    value = value.tolist() if hasattr(value, "tolist") else list(value)
    return list(value[0]) if value and isinstance(value[0], list) else value


def _end_ids(folder: Path) -> set[int]:
    """Return the ids that end generation according to the model folder's own files."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            config = files.read_json(folder / name)
            for part in (config, config.get("text_config") or {}):
                value = part.get("eos_token_id")
                found |= {int(token) for token in (value if isinstance(value, list) else [value]) if token is not None}
    return found


def vocabulary_size(folder: Path) -> int | None:
    """Return what config.json says; None when it leaves that to its class."""
    if not (folder / "config.json").is_file():
        return None
    config = files.read_json(folder / "config.json")
    value = (config.get("text_config") or config).get("vocab_size")
    return value if type(value) is int and value > 0 else None


def with_contents(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which a content that is missing (beside tool calls) is empty text.

    So a server sees it, and no template can print the word None for it.
    """
    return [message if message.get("content") is not None else message | {"content": ""} for message in messages]


def _as_rendered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as servers hand them to a template: contents are texts, the arguments of calls are objects.

    Arguments that are no JSON object are an empty one, as in vLLM; where a server rejects them, it says so itself.
    """
    copies = [dict(message) for message in with_contents(messages)]
    for message in copies:
        if message.get("tool_calls"):
            message["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
    return copies


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    return call | {"function": function | {"arguments": arguments if isinstance(arguments, dict) else {}}}
