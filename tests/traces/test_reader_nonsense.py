"""What others send is read or refused, never a bug: generated replies and prompt rows, each from its seed."""

import copy
import json
import warnings

import pytest
from support.nonsense import Nonsense, outcomes

from eagle3.common import files
from eagle3.common.errors import StageError
from eagle3.common.options import GenerateSection
from eagle3.traces import client
from eagle3.traces.chat import TemplateRefusal, load_chat
from eagle3.traces.prompts import PromptSource
from eagle3.traces.replies import BadReply, parse_reply, reason_to_fail, words_of
from eagle3.traces.sampling import Setting
from eagle3.traces.trace_making import NoTrace, TraceMaker
from eagle3.traces.worklist import Request

COUNT = 10_000
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODY = {
    "id": "x", "object": "chat.completion", "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "token_ids": [72, 105], "prompt_token_ids": None, "meta_info": {},
                 "message": {"role": "assistant", "content": "Hi", "reasoning": None, "reasoning_content": "",
                             "tool_calls": []}}],
    "prompt_token_ids": [1, 2], "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
}


def told(error, well, outcome):
    """Return the outcome of an error that says what it has to."""
    assert well, error
    return outcome


def bodies():
    """Return sound bodies of several forms, of which the others are made."""
    parts, calls, error = copy.deepcopy(BODY), copy.deepcopy(BODY), {"error": {"message": "no", "code": 502}}
    parts["choices"][0]["message"]["content"] = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                                                 {"type": "text", "text": "Hi"}]
    calls["choices"][0]["message"] |= {"content": None, "tool_calls": [CALL]}
    return [*[BODY, parts, calls] * 3, error | {"choices": None}, {"object": "error", "message": "no"},
            {"detail": [{"loc": ["body", "x"], "msg": "no"}]}]


@pytest.fixture(scope="module")
def chat(tiny_model):
    return load_chat(tiny_model)


def test_any_body_is_a_reply_or_says_why_not(chat):
    sound, section = bodies(), GenerateSection(check_tokens=COUNT)
    setting = Setting(0.0, 1.0, 64, {}, "optional")
    request = Request("r", "k", [{"role": "user", "content": "Hi"}], [], "s", setting)

    def read(number):
        nonsense = Nonsense(number)
        text = json.dumps(nonsense.mutated(nonsense.chance.choice(sound), nonsense.chance.randrange(3)))
        text = nonsense.damaged(text)
        try:
            reply = parse_reply(text, ("<think>", "</think>"))
        except BadReply as bad:
            return told(bad, bad.detail and len(bad.detail) < 700, "refused")
        if reason_to_fail(reply):
            return "fails"
        maker = TraceMaker(section, chat, "m")  # a new one: with so many bad ones, the run would stop
        if maker.proof.beyond_vocabulary(reply):
            return "beyond the vocabulary"
        try:
            row, _ = maker.row(request, reply, [1, 2], 64)
        except NoTrace as none:
            return told(none, none.reason, "skipped")
        files.encode_line(row).decode("ascii")
        assert json.loads(json.dumps(row, allow_nan=False)) == row
        return "trace"

    found = outcomes(COUNT, read)
    assert set(found) == {"refused", "fails", "beyond the vocabulary", "skipped", "trace"}, found
    assert min(found.values()) > 5 and found["trace"] > 1000, found


def test_any_error_has_words():
    def read(number):
        value = Nonsense(number).value()
        assert isinstance(words_of(value), str) and "\n" not in words_of(value)[:-1] or isinstance(value, list)
        return "words"

    assert outcomes(2000, read) == {"words": 2000}


ROWS = [
    {"id": "a", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi"}],
     "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "source": "s"},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                  {"role": "tool", "tool_call_id": "1", "content": "42"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "user", "value": "c"}]},
    {"messages": [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Hm"}]},  # refused by templates
    {"prompt": "Hi", "system": "s"}, {"prompt": ["one", "two"], "prompt_id": 1},
    {"question_id": 81, "category": "c", "turns": ["one", "two"]},
    {"messages": json.dumps([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])},
]


def test_any_row_is_asked_dropped_or_refused_with_its_place(tmp_path, chat):
    path = tmp_path / "p.jsonl"

    def read(number):
        nonsense = Nonsense(number)
        row = nonsense.mutated(nonsense.chance.choice(ROWS), nonsense.chance.randrange(4))
        text = nonsense.damaged(json.dumps(row, ensure_ascii=nonsense.chance.random() < 0.5))
        path.write_bytes((text.replace("\n", " ") + "\n").encode(errors="surrogatepass"))
        try:
            source = PromptSource(GenerateSection(prompts=str(path), turns=nonsense.chance.choice(("last", "all"))))
            counts = source.scan()
            (conversation,) = source
        except StageError as error:
            dropped = error.what == "no prompts" and "dropped: 1" in str(error)
            return told(error, error.exit_code in (2, 3) and str(path) in str(error.parts["where"]),
                        "dropped" if dropped else "refused")
        assert counts.replies == len(conversation.asked)
        # what is asked can be sent, and the template takes it or says why not
        asked = conversation.messages[: conversation.asked[0]]
        json.dumps([asked, conversation.tools], allow_nan=False, ensure_ascii=False).encode()
        try:
            chat.prompt_ids(asked, conversation.tools)
        except TemplateRefusal:
            return "refused by the template"
        return "asked"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = outcomes(COUNT, read)
    assert set(found) == {"asked", "dropped", "refused", "refused by the template"}, found
    assert min(found.values()) > 20 and found["asked"] > 1000, found


def test_any_address_is_one_or_is_refused():
    def read(number):
        nonsense = Nonsense(number)
        parts = ("http", "https", "://", ":", "/", "[", "]", "127.0.0.1", "v1", "8000", "@", "?", "#", " ", "é", "\x00",
                 "-1", "99999")
        text = "".join(nonsense.chance.choice(parts) for _ in range(6))
        try:
            assert client.base_url(text).endswith("/v1")
        except StageError as error:
            return told(error, error.exit_code == 2, "refused")
        return "address"

    assert set(outcomes(2000, read)) == {"address", "refused"}
