"""Stage 01 against servers that answer, but not as one expects: nothing unproved becomes a trace, nothing is lost."""

import json
import shutil

import pytest
from support.stage_01 import by_id, lines, log, manifest, write_prompts
from support.stub_server import Stub, answer_to

from eagle3.common.errors import PreconditionError
from eagle3.engines import servers
from eagle3.traces.chat import TemplateRefusal, load_chat
from eagle3.traces.replies import BadReply, parse_reply, words_of

ONCE = ("--retries", "0")


def many(count, start=0):
    return [f"p{i}" for i in range(start, start + count)]


# --- final or passing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["abort", "error", None, "cancelled"])
def test_what_the_server_aborted_is_asked_again(stage_01, tmp_path, reason):
    write_prompts(tmp_path, "a", "aborted", "b")
    half = {"content": "You", "finish_reason": reason}
    with Stub({"replies": {"aborted": [half, {}]}}) as stub:
        assert stage_01(stub) == 4
        assert lines(tmp_path, "skipped") == [] and sorted(by_id(tmp_path)) == ["id-a#0", "id-b#0"]
        (failure,) = lines(tmp_path, "failures")
        assert failure["reason"] == f"finish_reason {reason or 'none'}"
        assert manifest(tmp_path)["counts"]["failed"] == 1 and manifest(tmp_path)["status"] == "partial"
        assert stage_01(stub) == 0
        assert stub.calls.count("aborted") == 2 and len(stub.calls) == 4
    assert len(by_id(tmp_path)) == 3


def test_aborted_replies_within_the_limit_are_a_success(stage_01, tmp_path):
    write_prompts(tmp_path, "a", "aborted")
    with Stub({"replies": {"aborted": [{"finish_reason": "abort"}]}}) as stub:
        assert stage_01(stub, "--max-failures", "1") == 0
    assert manifest(tmp_path)["counts"]["failed"] == 1


@pytest.mark.parametrize(("step", "more", "words"), [
    ({"content": None, "reasoning": "hm", "finish_reason": "length"}, [], "--max-tokens"),
    ({"content": ""}, [], "parser"),
    ({"reasoning": "hm"}, ["--reasoning", "off"], "--chat-template-kwargs"),
    ({"content": None, "token_ids": False, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}, [], "token ids"),
])
def test_one_fault_in_all_replies_stops_early_and_writes_none_off(stage_01, tmp_path, step, more, words):
    write_prompts(tmp_path, *many(100))
    with Stub({"default": step}) as stub:
        assert stage_01(stub, "--concurrency", "4", *more) == 3
        assert 20 <= len(stub.calls) <= 24
    assert lines(tmp_path) == lines(tmp_path, "skipped") == []
    assert "the first 20 replies gave no trace" in log(tmp_path) and words in log(tmp_path)
    with Stub() as mended:
        assert stage_01(mended, *more) == 0
        assert len(mended.calls) == 100


def test_single_faults_are_recorded_once_another_reply_gives_a_trace(stage_01, tmp_path):
    write_prompts(tmp_path, *many(6), "good")
    with Stub({"default": {"content": ""}, "replies": {"good": [{}]}}) as stub:
        assert stage_01(stub, "--concurrency", "1") == 0
        assert stage_01(stub) == 0 and len(stub.calls) == 7
    assert len(lines(tmp_path, "skipped")) == 6 and len(lines(tmp_path)) == 1


def test_one_setting_of_a_mix_with_a_fault_does_not_write_off_its_prompts(stage_01, tmp_path):
    mix = tmp_path / "mix.json"
    mix.write_text(json.dumps([{"name": "good"}, {"name": "bad", "reasoning": "off"}]))
    write_prompts(tmp_path, *many(100))
    with Stub({"default": {"reasoning": "hm"}}) as stub:
        assert stage_01(stub, "--sampling", str(mix), "--concurrency", "2") == 3
    assert lines(tmp_path) and lines(tmp_path, "skipped") == []
    assert "unwanted reasoning" in log(tmp_path)


def test_a_skip_that_holds_for_one_server_only_can_be_asked_again(stage_01, tmp_path, tiny_model):
    write_prompts(tmp_path, "long " * 60, "a")
    chat = load_chat(tiny_model)
    with Stub({"chat": chat, "max_model_len": 60}) as stub:
        assert stage_01(stub, "--model", str(tiny_model)) == 0
        assert [row["reason"] for row in lines(tmp_path, "skipped")] == ["prompt too long"]
    with Stub({"chat": chat}) as larger:
        assert stage_01(larger, "--model", str(tiny_model)) == 0 and larger.calls == []
        assert stage_01(larger, "--model", str(tiny_model), "--ask-again", "'prompt too long'") == 0
        assert len(larger.calls) == 1
    assert len(lines(tmp_path)) == 2


# --- types from outside -----------------------------------------------------------------------------------


def test_a_content_in_parts_is_text_and_reasoning(stage_01, tmp_path):
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "so "},
             {"type": "text", "text": "it is"}]
    write_prompts(tmp_path, "q")
    with Stub({"default": {"shown": {"content": parts}}}) as stub:
        assert stage_01(stub, "--reasoning", "required") == 0
    (row,) = lines(tmp_path)
    assert (row["reasoning"], row["content"]) == ("hm", "so it is")
    for form in ({"type": "reasoning", "reasoning": "hm"}, {"type": "reasoning", "text": "hm"}):
        body = {"choices": [{"message": {"content": [form, "x"]}, "finish_reason": "stop"}]}
        assert (parse_reply(json.dumps(body)).reasoning, parse_reply(json.dumps(body)).content) == ("hm", "x")


@pytest.mark.parametrize(("step", "words"), [
    ({"choice": {"token_ids": ["1", "2"]}}, "token_ids is not whole numbers"),
    ({"choice": {"token_ids": [1, -5]}}, "token_ids"),
    ({"choice": {"token_ids": [1.5]}}, "token_ids"),
    ({"choice": {"token_ids": [True]}}, "token_ids"),
    ({"choice": {"token_ids": [2**70]}}, "token_ids"),
    ({"choice": {"token_ids": {"a": 1}}}, "token_ids"),
    ({"more": {"prompt_token_ids": "1 2"}}, "prompt_token_ids"),
    ({"usage": {"completion_tokens": "many"}}, "usage.completion_tokens"),
    ({"usage": [1]}, "usage"),
    ({"shown": {"content": 5}}, "content"),
    ({"shown": {"content": [{"type": "image_url"}]}}, "content: a part"),
    ({"shown": {"reasoning": {"a": 1}}}, "reasoning"),
    ({"shown": {"tool_calls": "f()"}}, "tool_calls"),
    ({"shown": {"tool_calls": [{"function": "f"}]}}, "tool_calls: function"),
    ({"finish_reason": 7}, "finish_reason"),
    ({"raw": '{"choices": [{"message": {"content": "\\ud800"}, "finish_reason": "stop"}]}'}, "surrogate"),
    ({"raw": "[" * 100_000}, "not JSON"),
    ({"raw": {"choices": [7]}}, "choices"),
    ({"raw": {}}, "no choices"),
])
def test_a_reply_of_odd_types_fails_and_the_run_goes_on(stage_01, tmp_path, step, words):
    write_prompts(tmp_path, "odd", "good")
    with Stub({"replies": {"odd": [step, {}]}}) as stub:
        assert stage_01(stub, *ONCE) == 4
        (failure,) = lines(tmp_path, "failures")
        assert failure["reason"] == "bad reply" and words in failure["detail"], failure
        assert stage_01(stub, *ONCE) == 0
    assert len(by_id(tmp_path)) == 2


def test_ids_beyond_the_vocabulary_fail(stage_01, tmp_path, tiny_model):
    write_prompts(tmp_path, "odd", "good")
    with Stub({"chat": load_chat(tiny_model), "replies": {"odd": [{"choice": {"token_ids": [3, 999_999]}}]}}) as stub:
        assert stage_01(stub, "--model", str(tiny_model)) == 4
    (failure,) = lines(tmp_path, "failures")
    assert failure["reason"] == "token ids beyond the vocabulary" and "999999" in failure["detail"]
    assert list(by_id(tmp_path)) == ["id-good#0"]


def test_a_few_ids_that_contradict_their_text_are_told(stage_01, tmp_path, tiny_model):
    chat = load_chat(tiny_model)
    write_prompts(tmp_path, *many(25), "odd")
    other = {"choice": {"token_ids": chat._text_ids("quite another text")}}
    with Stub({"chat": chat, "replies": {"odd": [other]}}) as stub:
        assert stage_01(stub, "--model", str(tiny_model), "--concurrency", "1") == 0
    assert by_id(tmp_path)["id-odd#0"]["completion_token_ids"] == other["choice"]["token_ids"]  # the engine's word
    assert "token ids contradict the text in 1 of 26 replies" in log(tmp_path)
    assert manifest(tmp_path)["token_proof"]["texts_differ"] == 1


def test_ids_that_contradict_the_text_stop_the_run_above_a_share(stage_01, tmp_path, tiny_model):
    write_prompts(tmp_path, *many(60))
    with Stub({"replies": {"p0": [{"raw": "x"}]}}) as stub:  # its ids are bytes, of no tokenizer
        assert stage_01(stub, "--model", str(tiny_model), "--concurrency", "2", *ONCE) == 3
        assert len(stub.calls) <= 24
    assert lines(tmp_path) == lines(tmp_path, "skipped") == []
    assert "contradict the text in 20 of the first 20 replies" in log(tmp_path) and "--model" in log(tmp_path)


def test_a_reply_that_names_another_model_is_told_with_figures(stage_01, tmp_path):
    write_prompts(tmp_path, *many(5))
    other = {"more": {"model": "another"}}
    with Stub({"replies": {"p1": [other], "p3": [other], "p4": [{"more": {"model": "org/Stub-Model"}}]}}) as stub:
        assert stage_01(stub) == 0
    assert "2 of 5 replies name another model than stub-model" in log(tmp_path)
    assert manifest(tmp_path)["other_models"] == {"another": 2}


# --- tool calls in the history ----------------------------------------------------------------------------


def called(identity, arguments, content=None):
    return {"id": identity, "messages": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": content, "tool_calls": [
            {"id": "k1", "type": "function", "function": {"name": "weather", "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": "k1", "content": "rain"}, {"role": "user", "content": f"go on {identity}"}]}


CALLS = ("{% for c in message.tool_calls or [] %}[{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}"
         "{% endfor %}]{% endfor %}<|im_end|>")


@pytest.fixture
def calling_model(tiny_model, tmp_path):
    """The tiny model with a template that prints calls."""
    folder = tmp_path / "calling"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text(load_chat(tiny_model)._tokenizer.chat_template.replace(
        "<|im_end|>", CALLS, 1))
    return folder


def test_cut_arguments_are_rendered_as_the_server_does(stage_01, tmp_path, calling_model):
    write_prompts(tmp_path, called("whole", '{"city": "Oslo"}'), called("cut", '{"city": '), called("none", ""),
                  called("list", "[1]"))
    chat = load_chat(calling_model)
    with Stub({"chat": chat}) as stub:
        assert stage_01(stub, "--model", str(calling_model)) == 0
    prompts = {name: chat.decode(row["prompt_token_ids"]) for name, row in by_id(tmp_path).items()}
    assert "[city=Oslo]" in prompts["whole#1"]
    assert all("[]" in prompts[f"{name}#1"] for name in ("cut", "none", "list"))


def test_no_prompt_holds_the_word_none(stage_01, tmp_path, calling_model):
    write_prompts(tmp_path, called("a", "{}"))
    chat = load_chat(calling_model)
    with Stub({"chat": chat}) as stub:
        assert stage_01(stub, "--model", str(calling_model)) == 0
        assert [message["content"] for message in stub.bodies[0]["messages"]] == ["weather?", "", "rain", "go on a"]
    (row,) = by_id(tmp_path).values()
    assert "None" not in chat.decode(row["prompt_token_ids"])
    assert row["prompt"]["messages"][1]["content"] is None  # as it was given


@pytest.mark.parametrize("template", ["{{ 1 // 0 }}", "{{ messages[9].role }}", "{{ messages[0].content + 1 }}",
                                      "{{ 'x'.join(5) }}", "{{ ''.encode('no') }}"])
def test_whatever_a_template_raises_it_refuses_that_row(tiny_model, template):
    chat = load_chat(tiny_model)
    chat._tokenizer.chat_template = template
    with pytest.raises(TemplateRefusal):
        chat.prompt_ids([{"role": "user", "content": "x"}], [])
    with pytest.raises(TemplateRefusal):
        chat.prompt_ids([{"role": "user", "content": "x"}], [], {"conversation": 5, "tokenize": True})


# --- errors under HTTP 200, and fields that a server refuses -----------------------------------------------


@pytest.mark.parametrize("body", [
    {"error": {"message": "upstream is overloaded", "code": 502}},
    {"choices": None, "error": {"message": "upstream is overloaded"}},
    {"object": "error", "message": "upstream is overloaded", "code": 500},
    {"error": "upstream is overloaded"},
    {"detail": [{"loc": ["body"], "msg": "upstream is overloaded"}]},
    {"choices": [{"error": {"message": "upstream is overloaded"}, "message": {}}]},
])
def test_the_servers_words_are_kept_when_an_error_comes_with_http_200(stage_01, tmp_path, body):
    write_prompts(tmp_path, "broken", "good")
    with Stub({"replies": {"broken": [{"raw": body}, {"raw": body}, {}]}}) as stub:
        assert stage_01(stub, "--retries", "1") == 4
        (failure,) = lines(tmp_path, "failures")
        assert failure["reason"] == "error in the reply" and "upstream is overloaded" in failure["detail"]
        assert stage_01(stub) == 0


def test_a_servers_words_in_every_form():
    item = {"type": "missing", "loc": ["body", "x"], "msg": "Field required", "input": {"messages": "…"}}
    assert words_of({"detail": [item, item]}) == "body.x: Field required; body.x: Field required"
    assert words_of({"error": {"message": {"detail": [item]}}}) == "body.x: Field required"
    assert words_of({"object": "error", "message": "no\nway"}) == "no way"
    assert words_of({"errors": ["a", None, 5]}) == "a; 5"
    with pytest.raises(BadReply, match="choices is None"):
        parse_reply('{"choices": null}')


@pytest.mark.parametrize("form", [{}, {"refuses_status": 422, "refuses_detail": True}])
def test_a_server_that_refuses_token_ids_is_asked_without(stage_01, tmp_path, tiny_model, form):
    write_prompts(tmp_path, *many(8))
    refusing = {"refuses": ["return_token_ids"], "chat": load_chat(tiny_model)} | form
    with Stub(refusing) as stub:
        assert stage_01(stub, "--concurrency", "2") == 3
        assert "--model" in log(tmp_path)
    with Stub(refusing) as stub:
        assert stage_01(stub, "--model", str(tiny_model), "--concurrency", "2", "--out", str(tmp_path / "run/b")) == 0
        assert len(stub.calls) <= 8 + 2  # each that was in flight, once
    said = (tmp_path / "run/logs/b.log").read_text()
    assert said.count("does not take return_token_ids") == 1 and "Extra inputs are not permitted" in said


def test_an_error_that_quotes_the_request_refuses_nothing(stage_01, tmp_path):
    write_prompts(tmp_path, "bad", "good")
    quoting = {"status": 422, "message": "messages is odd; the body was {'return_token_ids': true}"}
    with Stub({"replies": {"bad": [quoting]}}) as stub:
        assert stage_01(stub, "--concurrency", "1") == 4
    assert by_id(tmp_path)["id-good#0"]["token_source"] == "server"
    assert "does not take" not in log(tmp_path)


def test_a_refusal_of_anything_else_is_kept_in_the_servers_words(stage_01, tmp_path):
    write_prompts(tmp_path, *many(30))
    with Stub({"refuses": ["seed"], "refuses_status": 422, "refuses_detail": True}) as stub:
        assert stage_01(stub, "--max-consecutive-failures", "5", "--concurrency", "1") == 4
    assert lines(tmp_path, "failures")[0]["detail"] == "body.seed: Extra inputs are not permitted"


# --- rebuilt ids are proved -------------------------------------------------------------------------------


def stripped(reasoning="hm\n", content="\n\nso"):
    """Return what a server generated, and shows without white space."""
    return {"reasoning": reasoning, "content": content, "token_ids": False,
            "shown": {"reasoning": reasoning.strip(), "content": content.strip()}}


def test_a_parser_that_strips_white_space_stops_the_run(stage_01, tmp_path, tiny_model):
    write_prompts(tmp_path, *many(60))
    with Stub({"chat": load_chat(tiny_model), "default": stripped()}) as stub:
        assert stage_01(stub, "--model", str(tiny_model), "--concurrency", "2") == 3
        assert 20 <= len(stub.calls) <= 23
    assert lines(tmp_path) == lines(tmp_path, "skipped") == []
    assert "token count differs in 20 of the first 20 replies" in log(tmp_path)
    assert "return_token_ids" in log(tmp_path)


def test_a_few_counts_that_differ_are_skipped_and_told(stage_01, tmp_path, tiny_model):
    write_prompts(tmp_path, *many(40), "odd")
    with Stub({"chat": load_chat(tiny_model), "token_ids": False, "replies": {"odd": [stripped()]}}) as stub:
        assert stage_01(stub, "--model", str(tiny_model), "--concurrency", "1") == 0
    ((skip,), rows) = lines(tmp_path, "skipped"), lines(tmp_path)
    assert (skip["id"], skip["reason"]) == ("id-odd#0", "token count differs") and "in usage" in skip["detail"]
    assert len(rows) == 40
    for row in rows:
        assert len(row["completion_token_ids"]) == row["usage"]["completion_tokens"]
        assert len(row["prompt_token_ids"]) == row["usage"]["prompt_tokens"]
    assert "token count differs in 1 of 41 replies" in log(tmp_path)
    assert manifest(tmp_path)["token_proof"]["counts"] == 41


@pytest.mark.parametrize(("usage", "reason"), [
    ({"prompt_tokens": 1, "completion_tokens": 25}, "token count differs"), (None, "token count not told"),
    ({"completion_tokens": 25}, "token count not told")])
def test_prompts_are_counted_too_and_without_counts_nothing_is_believed(
        stage_01, tmp_path, tiny_model, usage, reason):
    write_prompts(tmp_path, *many(3))
    with Stub({"chat": load_chat(tiny_model), "token_ids": False, "default": {"usage": usage}}) as stub:
        assert stage_01(stub, "--model", str(tiny_model)) == 3
    assert lines(tmp_path) == lines(tmp_path, "skipped") == []
    assert reason in log(tmp_path)


def test_no_think_tag_is_invented(stage_01, tmp_path, tiny_model):
    from transformers import AutoTokenizer

    folder = tmp_path / "channels"
    shutil.copytree(tiny_model, folder)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("<think>", "<|channel|>").replace("</think>", "<|message|>"))
    config = (folder / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(config.replace("<think>", "<|channel|>").replace(
        "</think>", "<|message|>"))
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<think>", "<|channel|>"))
    assert "<think>" not in AutoTokenizer.from_pretrained(folder).get_vocab()
    chat = load_chat(folder)
    assert not chat.knows_think_tags
    write_prompts(tmp_path, "thinks", "plain")
    step = {"reasoning": "hm", "content": "so", "usage": {"prompt_tokens": 30, "completion_tokens": 9},
            "token_ids": False, "finish_reason": "length"}
    with Stub({"token_ids": False, "replies": {"thinks": [step | {"finish_reason": "stop"}]}}) as stub:
        stub.script["chat"] = None
        assert stage_01(stub, "--model", str(folder)) == 3
    assert lines(tmp_path) == [] and "reasoning without token ids" in log(tmp_path)
    exact = {"reasoning": "hm", "content": "so", "choice": {"token_ids": [*chat._text_ids("hm so"), chat.end_id]}}
    with Stub({"replies": {"thinks": [exact], "plain": [exact]}}) as stub:
        assert stage_01(stub, "--model", str(folder)) == 0
    assert {row["token_source"] for row in lines(tmp_path)} == {"server"}


# --- conversations of user turns --------------------------------------------------------------------------


def test_user_turns_are_answered_one_after_the_other(stage_01, tmp_path):
    write_prompts(tmp_path, {"question_id": 81, "turns": ["write", "again", "more"]})
    with Stub() as stub:
        assert stage_01(stub) == 0
        said = [[message["content"] for message in body["messages"]] for body in stub.bodies]
    assert said[2] == ["write", answer_to("write"), "again", answer_to("again"), "more"]
    assert list(by_id(tmp_path)) == ["81#0", "81#1", "81#2"]


def test_separators_in_texts_survive_the_stage(stage_01, tmp_path):
    texts = ["a\u2028b", "a\u2029b", "a\x85b", "a\x0cb\x0bc\x1ed"]
    (tmp_path / "prompts.jsonl").write_text("".join(
        json.dumps({"id": str(i), "prompt": text}, ensure_ascii=False) + "\n" for i, text in enumerate(texts)))
    with Stub() as stub:
        assert stage_01(stub) == 0 and stage_01(stub) == 0
        assert sorted(stub.calls) == sorted(texts)
    rows = by_id(tmp_path)
    assert [rows[f"{i}#0"]["content"] for i in range(4)] == [answer_to(text) for text in texts]


# --- one way to a server ----------------------------------------------------------------------------------


@pytest.fixture
def proxied(monkeypatch):
    """Set the variables of a proxy, and only those."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)

    def set_to(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_to


def test_a_proxy_is_for_other_hosts_only(proxied):
    proxied(http_proxy="http://proxy:1", https_proxy="proxy:2", no_proxy="near.example,10.0.0.5:80")
    assert servers.proxy_for("http://far.example/v1") == "http://proxy:1"
    assert servers.proxy_for("https://far.example:8000/v1/models") == "http://proxy:2"
    for near in ("near.example", "a.near.example:8000", "10.0.0.5:80", "127.0.0.1:1", "127.9.9.9", "localhost:8000",
                 "[::1]:8000", "0.0.0.0:8000"):
        assert servers.proxy_for(f"http://{near}/v1") is None, near
    assert servers.proxy_for("http://notnear.example/v1") == "http://proxy:1"
    proxied(http_proxy="socks5://proxy:1")
    with pytest.raises(PreconditionError, match="no_proxy=far.example"):
        servers.proxy_for("http://far.example/v1")


def test_every_request_to_another_host_goes_through_the_proxy(stage_01, tmp_path, proxied):
    write_prompts(tmp_path, *many(3))

    class Far:
        url = "http://far.example/v1"  # the stub stands in for the proxy: it is asked for the whole address

    with Stub() as stub:
        proxied(http_proxy=stub.url.removesuffix("/v1"))
        assert stage_01(Far) == 0
        assert {line.partition(" ")[2].partition("://")[2].partition("/")[0] for line in stub.lines} == {"far.example"}
        assert [line for line in stub.lines if line.endswith("/v1/models")] and len(stub.calls) == 3
        proxied(no_proxy="far.example")
        seen = len(stub.lines)
        assert stage_01(Far, "--out", str(tmp_path / "run/b")) == 3  # there is no such host
        assert len(stub.lines) == seen


def test_no_proxy_stands_before_what_is_on_this_machine(stage_01, tmp_path, proxied):
    write_prompts(tmp_path, "a")
    proxied(http_proxy="http://127.0.0.1:9", all_proxy="http://127.0.0.1:9")
    with Stub() as stub:
        assert stage_01(stub) == 0
