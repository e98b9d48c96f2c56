"""Replies: what a chat completion says, read from its body. Both stages that ask servers, 01 and 06, read it here.

Servers differ: the reasoning comes as `reasoning` or `reasoning_content`, as a part of the content, or inside its
text; token ids come or do not; an error may come with HTTP 200. A `Reply` is the same for equal content, whatever
server gave it. Nothing that a server sends is trusted to be of its type: what does not fit is a `BadReply`.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from eagle3.traces.chat import DEFAULT_THINK_TAGS, split_reasoning

FINISHED = ("stop", "length", "tool_calls", "function_call")
FINAL = (*FINISHED, "content_filter")  # any other ending ("abort", "error", none, …) may be otherwise the next time
_TEXT_PARTS = {"text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING_PARTS = {"thinking": "thinking", "reasoning": "reasoning", "reasoning_content": "reasoning_content"}
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LARGEST_ID = 2**31 - 1
_MOST_WORDS = 500  # characters kept of what a server says about an error

Answer = TypeVar("Answer")


class BadReply(ValueError):
    """A body that is no usable chat completion; `reason` is what it is counted under, `detail` the server's words."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Reply:
    """One assistant turn.

    Attributes:
        reasoning, content: texts as generated, None where there is none.
        tool_calls: as the server parsed them.
        finish_reason: stop, length, tool_calls, …; "none" where the server gives none.
        prompt_ids, completion_ids: the server's exact token ids ([P], [C]), or None when it gives none.
        usage: {"prompt_tokens", "completion_tokens"} as counted by the server, 0 where it does not say.
        tagged: whether a think block was left in the content.
        model: the name that the server gives itself, "" where it gives none.
        meta_info: what SGLang adds to a choice.
    """

    reasoning: str | None
    content: str | None
    tool_calls: list[dict[str, Any]]
    finish_reason: str
    prompt_ids: list[int] | None
    completion_ids: list[int] | None
    usage: dict[str, int]
    tagged: bool = False
    model: str = ""
    meta_info: dict[str, Any] | None = field(default=None, compare=False)

    @property
    def exact(self) -> bool:
        """Whether the server gave the ids of both prompt and completion."""
        return bool(self.prompt_ids) and bool(self.completion_ids)

    @property
    def tokens(self) -> int:
        """Tokens generated, by the ids or as the server counted them."""
        return len(self.completion_ids or []) or self.usage["completion_tokens"]


@dataclass(frozen=True)
class Completion:
    """A text that goes on from given token ids.

    Attributes:
        text: as the server spells it. ids: the exact ones [C], the token that ended it included; None where it gives
            none. tokens: how many it generated. finish_reason: as in Reply.
        stopped_at: the token id or the text that ended it, None where the server does not say (vLLM: at the model's
            own end token).
    """

    text: str
    ids: list[int] | None
    tokens: int
    finish_reason: str
    stopped_at: int | str | None


def parse_reply(body: str, think_tags: tuple[str, str] = DEFAULT_THINK_TAGS) -> Reply:
    """Return the reply in a response body; BadReply when it is not one, whatever it is."""
    return _read(body, lambda response: _parse(response, think_tags))


def parse_completion(body: str) -> Completion:
    """Return the completion in the body of an answer of /v1/completions; BadReply when it is not one."""
    return _read(body, _parse_completion)


def _read(body: str, parse: Callable[[Any], Answer]) -> Answer:
    try:
        response = json.loads(body, parse_constant=lambda _: None)  # NaN is no JSON
        if _SURROGATE.search(body):
            json.dumps(response, ensure_ascii=False).encode()
        return parse(response)
    except BadReply:
        raise
    except UnicodeEncodeError:
        raise BadReply("bad reply", "a text holds half of a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        raise BadReply("bad reply", f"not JSON: {str(error)[:200]}") from None


def _parse(response: Any, think_tags: tuple[str, str]) -> Reply:
    choice = _choice(response)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise _not("choices[0].message", "an object", message)
    answer, parts_reasoning = _texts(message.get("content"), "content")
    told = "reasoning" if message.get("reasoning") else "reasoning_content"
    reasoning, content = split_reasoning("".join(filter(None, _texts(message.get(told), told))) or parts_reasoning,
                                         answer, think_tags)
    finish = choice.get("finish_reason")
    if not isinstance(finish, str | None):
        raise _not("finish_reason", "text", finish)
    meta, name = choice.get("meta_info"), response.get("model")
    return Reply(
        reasoning,
        content,
        _tool_calls(message.get("tool_calls")),
        finish or "none",
        _ids(response.get("prompt_token_ids") or choice.get("prompt_token_ids"), "prompt_token_ids"),
        _ids(choice.get("token_ids"), "token_ids"),
        _usage(response.get("usage")),
        tagged=content != answer,
        model=name if isinstance(name, str) else "",
        meta_info=meta if isinstance(meta, dict) else None,
    )


def _parse_completion(response: Any) -> Completion:
    choice = _choice(response)
    text, finish, stopped = choice.get("text"), choice.get("finish_reason"), choice.get("stop_reason")
    stopped = choice.get("matched_stop") if stopped is None else stopped  # vLLM's name, else SGLang's
    if not isinstance(text, str):
        raise _not("choices[0].text", "text", text)
    if not isinstance(finish, str | None):
        raise _not("finish_reason", "text", finish)
    ids = _ids(choice.get("token_ids"), "token_ids")
    return Completion(text, ids, len(ids or []) or _usage(response.get("usage"))["completion_tokens"], finish or "none",
                      stopped if type(stopped) in (int, str) else None)


def reason_to_fail(reply: Reply) -> str:
    """Return why a reply may be another one when it is asked for again, or ""."""
    return "" if reply.finish_reason in FINAL else f"finish_reason {reply.finish_reason}"


def reason_to_skip(reply: Reply, reasoning: str) -> str:
    """Return why a reply gives no trace, however often it is asked for, or "" when it gives one.

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


def words_of(value: Any) -> str:
    """Return in one line what a server says about an error, in whatever form it comes; "" when it says nothing."""
    if isinstance(value, list):
        return "; ".join(filter(None, map(words_of, value[:5])))[:_MOST_WORDS]
    if not isinstance(value, dict):
        return "" if value is None else str(value)[:_MOST_WORDS].replace("\n", " ")
    if "msg" in value:  # an item of FastAPI's list
        place = value.get("loc")
        return f"{'.'.join(map(str, place))}: {words_of(value['msg'])}" if isinstance(place, list) else words_of(
            value["msg"])
    for name in ("error", "message", "detail", "errors"):
        if value.get(name):
            return words_of(value[name])
    return json.dumps(value, default=str)[:_MOST_WORDS] if value else ""


# --- parts of a body --------------------------------------------------------------------------------------


def _choice(response: Any) -> dict[str, Any]:
    """Return the first choice; BadReply with the server's words where it reports an error instead."""
    if not isinstance(response, dict):
        raise _not("the body", "an object", response)
    choices = response.get("choices")
    failed = response.get("error") or response.get("object") == "error"
    if failed or not choices:
        said = words_of(response.get("error") or {name: value for name, value in response.items() if name in (
            "message", "detail", "errors")})
        raise BadReply("error in the reply" if failed or said else "bad reply", said or (
            f"choices is {choices!r}" if "choices" in response else f"no choices, but {sorted(response)[:8]}"))
    if not isinstance(choices, list) or not isinstance(choices[0], dict):
        raise _not("choices", "a list of objects", choices)
    problem = choices[0].get("error")
    if problem:
        raise BadReply("error in the reply", words_of(problem))
    return choices[0]


def _texts(value: Any, name: str) -> tuple[str | None, str | None]:
    """Return (text, reasoning) of a content: text, or a list of parts of either kind."""
    if value is None or isinstance(value, str):
        return value, None
    if not isinstance(value, list):
        raise _not(name, "text or a list of parts", value)
    text: list[str] = []
    reasoning: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else "text" if isinstance(part, str) else None
        if isinstance(part, str):
            text.append(part)
        elif isinstance(kind, str) and kind in _TEXT_PARTS and isinstance(part.get(_TEXT_PARTS[kind]), str):
            text.append(part[_TEXT_PARTS[kind]])
        elif isinstance(kind, str) and kind in _REASONING_PARTS:
            inner = part.get(_REASONING_PARTS[kind], part.get("text"))
            reasoning += filter(None, _texts(inner, f"{name}: {kind}"))
        else:
            raise _not(f"{name}: a part", "of text or of reasoning", part)
    return "".join(text) if text else None, "".join(reasoning) or None


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(call, dict) for call in value):
        raise _not("tool_calls", "a list of objects", value)
    for call in value:
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _not("tool_calls: function", "an object with a name", function)
        if not isinstance(function.get("arguments"), str | dict | None):
            raise _not("tool_calls: arguments", "JSON text", function["arguments"])
    json.dumps(value)  # it is stored: RecursionError here rather than there
    return value


def _ids(value: Any, name: str) -> list[int] | None:
    """Return token ids, None where there are none."""
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise _not(name, "a list of token ids", value)
    for token in value:
        if type(token) is not int or not 0 <= token <= _LARGEST_ID:  # a bool is an int as well
            raise _not(name, "whole numbers from 0", token)
    return value


def _usage(value: Any) -> dict[str, int]:
    if not isinstance(value, dict | None):
        raise _not("usage", "an object", value)
    counted = {}
    for name in ("prompt_tokens", "completion_tokens"):
        count = (value or {}).get(name)
        if isinstance(count, float) and count.is_integer():
            count = int(count)
        if count is not None and (type(count) is not int or not 0 <= count <= _LARGEST_ID):
            raise _not(f"usage.{name}", "a number of tokens", count)
        counted[name] = count or 0
    return counted


def _not(place: str, expected: str, found: Any) -> BadReply:
    return BadReply("bad reply", f"{place} is not {expected}: {type(found).__name__} {repr(found)[:80]}")
