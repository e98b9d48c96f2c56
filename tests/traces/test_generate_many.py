"""Stage 01 beyond one question to one server: several endpoints, sampling mixes, conversations, token checks."""

import json
from collections import Counter

import pytest
import yaml
from support.stage_01 import by_id, lines, log, manifest, write_prompts
from support.stub_server import Stub, answer_to

from eagle3.common.errors import PreconditionError
from eagle3.common.options import GenerateSection
from eagle3.traces.chat import load_chat
from eagle3.traces.sampling import Mix

QUICK = ["--retries", "1"]


# --- several servers --------------------------------------------------------------------------------------


def test_two_servers_share_the_work(stage_01, tmp_path):
    write_prompts(tmp_path, *[f"q{i}" for i in range(40)])
    with Stub({"delay_s": 0.02}) as one, Stub({"delay_s": 0.02, "model": "org/stub-model"}) as two:
        assert stage_01(one, "--endpoint", two.url, "--concurrency", "8") == 0
        assert len(one.calls) + len(two.calls) == 40
        assert min(len(one.calls), len(two.calls)) >= 10
        assert two.bodies[0]["model"] == "org/stub-model"
    assert len(by_id(tmp_path)) == 40


def test_a_server_that_dies_is_set_aside_and_nothing_is_lost(stage_01, tmp_path):
    write_prompts(tmp_path, *[f"q{i}" for i in range(30)])
    with Stub({"die_after": 5, "delay_s": 0.01}) as dying, Stub({"delay_s": 0.01}) as well:
        assert stage_01(dying, "--endpoint", well.url, "--concurrency", "4", *QUICK) == 0
    assert len(by_id(tmp_path)) == 30 and not lines(tmp_path, "failures")
    assert "is set aside for 5 s" in log(tmp_path)


def test_a_server_that_is_down_at_first_is_asked_once_it_answers(stage_01, tmp_path, monkeypatch):
    monkeypatch.setattr("eagle3.traces.endpoints._FIRST_REST_S", 0.3)
    write_prompts(tmp_path, *[f"q{i}" for i in range(60)])
    with Stub({"delay_s": 0.05}) as well:
        late = Stub({"delay_s": 0.01})
        late.server.server_close()  # its port answers nothing yet
        port = late.server.server_address[1]
        import threading

        started = {}

        def start() -> None:
            started["stub"] = Stub({"delay_s": 0.01}, port=port).__enter__()

        timer = threading.Timer(0.5, start)
        timer.start()
        try:
            assert stage_01(well, "--endpoint", f"http://127.0.0.1:{port}/v1", "--concurrency", "2", *QUICK) == 0
        finally:
            timer.join()
            started["stub"].stop()
        assert started["stub"].calls and well.calls
    assert len(by_id(tmp_path)) == 60


def test_a_rejected_request_is_not_tried_elsewhere(stage_01, tmp_path):
    write_prompts(tmp_path, "bad", "good")
    faults = {"replies": {"bad": [{"status": 400, "message": "no"}]}}
    with Stub(faults) as one, Stub(faults) as two:
        assert stage_01(one, "--endpoint", two.url, "--max-failures", "1") == 0
        assert Counter(one.calls + two.calls)["bad"] == 1


def test_servers_of_different_models_are_refused(stage_01, tmp_path, capsys):
    write_prompts(tmp_path, "q")
    with Stub() as one, Stub({"model": "other"}) as two:
        assert stage_01(one, "--endpoint", two.url) == 3
    assert "serve different models" in log(tmp_path)


# --- sampling mixes ---------------------------------------------------------------------------------------


def mix_file(tmp_path, *entries):
    path = tmp_path / "mix.yaml"
    path.write_text(yaml.safe_dump(list(entries)))
    return path


THINKING = {"name": "thinking", "weight": 3, "temperature": 1.0, "top_p": 0.95}
INSTANT = {"name": "instant", "weight": 1, "temperature": 0.6, "max_tokens": 32,
           "chat_template_kwargs": {"thinking": False}}


def test_a_mix_keeps_its_shares_whatever_else_is_asked(tmp_path):
    mix = Mix(GenerateSection(sampling=str(mix_file(tmp_path, THINKING, INSTANT))))
    chosen = {f"row-{i}": mix.choose(f"row-{i}").name for i in range(4000)}
    share = Counter(chosen.values())["thinking"] / 4000
    assert 0.72 < share < 0.78
    assert [mix.choose(name).name for name in list(chosen)[::-1]] == list(chosen.values())[::-1]
    other = Mix(GenerateSection(sampling=str(mix_file(tmp_path, THINKING, INSTANT)), seed=1))
    assert sum(other.choose(name).name != setting for name, setting in chosen.items()) > 500


def test_each_row_records_the_setting_that_it_was_asked_with(stage_01, tmp_path):
    write_prompts(tmp_path, *[f"q{i}" for i in range(24)])
    path = mix_file(tmp_path, THINKING, INSTANT)
    with Stub() as stub:
        assert stage_01(stub, "--sampling", str(path)) == 0
        asked = {body["messages"][-1]["content"]: body for body in stub.bodies}
    names = Counter()
    for row in by_id(tmp_path).values():
        body, sampling = asked[row["prompt"]["messages"][-1]["content"]], row["sampling"]
        names[sampling["name"]] += 1
        assert body["temperature"] == sampling["temperature"] and body["top_p"] == sampling["top_p"]
        instant = sampling["name"] == "instant"
        assert body["max_tokens"] == sampling["max_tokens"] == (32 if instant else 64)
        assert body.get("chat_template_kwargs", {}) == row["chat_template_kwargs"] == (
            {"thinking": False} if instant else {})
    assert set(names) == {"thinking", "instant"}


def test_another_mix_under_the_same_traces_is_refused(stage_01, tmp_path):
    write_prompts(tmp_path, "q0")
    with Stub() as stub:
        assert stage_01(stub, "--sampling", str(mix_file(tmp_path, THINKING, INSTANT))) == 0
        assert stage_01(stub, "--sampling", str(mix_file(tmp_path, THINKING, INSTANT))) == 0
        assert stage_01(stub, "--sampling", str(mix_file(tmp_path, THINKING, INSTANT | {"top_p": 0.5}))) == 3
        assert len(stub.calls) == 1
    assert "generate.sampling" in log(tmp_path)


@pytest.mark.parametrize(("entries", "words"), [
    ([], "a list of settings"),
    ([{"temprature": 1}], "some of temperature"),
    ([{"temperature": -1}], "temperature"),
    ([{"top_p": 1.5}], "from 0.0 to 1.0"),
    ([{"weight": 0}], "weight"),
    ([{"reasoning": False}], '"off"'),
    ([{"name": "a"}, {"name": "a"}], "a different name"),
    ([{"chat_template_kwargs": 3}], "an object"),
])
def test_a_mix_that_says_nonsense_is_refused(tmp_path, entries, words):
    with pytest.raises(PreconditionError, match="sampling file") as error:
        Mix(GenerateSection(sampling=str(mix_file(tmp_path, *entries))))
    assert words in str(error.value)


# --- conversations ----------------------------------------------------------------------------------------


def conversation(identity="c", turns=3):
    messages = [{"role": "system", "content": "Be brief."}]
    for k in range(turns):
        messages += [{"role": "user", "content": f"{identity} question {k}"},
                     {"role": "assistant", "content": f"old answer {k}"}]
    return {"id": identity, "messages": messages}


def test_each_turn_is_asked_on_what_was_generated_before(stage_01, tmp_path):
    write_prompts(tmp_path, conversation())
    with Stub() as stub:
        assert stage_01(stub, "--turns", "all") == 0
        assert [body["messages"][-1]["content"] for body in stub.bodies] == [f"c question {k}" for k in range(3)]
        last = stub.bodies[2]["messages"]
    replies = [message["content"] for message in last if message["role"] == "assistant"]
    assert replies == [answer_to("c question 0"), answer_to("c question 1")]
    assert list(by_id(tmp_path)) == ["c#0", "c#1", "c#2"]


def test_a_conversation_goes_on_from_its_finished_turns(stage_01, tmp_path):
    write_prompts(tmp_path, conversation())
    with Stub({"replies": {"c question 1": [{"status": 400}]}}) as stub:
        assert stage_01(stub, "--turns", "all") == 4
        assert stub.calls == ["c question 0", "c question 1"]
    assert {row["id"]: row["reason"] for row in lines(tmp_path, "failures")} == {
        "c#1": "HTTP 400", "c#2": "an earlier turn failed"}
    with Stub() as stub:
        assert stage_01(stub, "--turns", "all") == 0
        assert stub.calls == ["c question 1", "c question 2"]
        history = [m["content"] for m in stub.bodies[0]["messages"] if m["role"] == "assistant"]
    assert history == [answer_to("c question 0")]
    assert len(by_id(tmp_path)) == 3 and manifest(tmp_path)["counts"]["done"] == 3


def test_what_follows_a_skipped_turn_is_skipped(stage_01, tmp_path):
    write_prompts(tmp_path, conversation(), conversation("d"))
    with Stub({"replies": {"c question 1": [{"content": ""}]}}) as stub:
        assert stage_01(stub, "--turns", "all") == 0
        calls = len(stub.calls)
        assert stage_01(stub, "--turns", "all") == 0 and len(stub.calls) == calls
    assert {row["id"]: row["reason"] for row in lines(tmp_path, "skipped")} == {
        "c#1": "empty", "c#2": "an earlier turn was skipped"}
    assert len(by_id(tmp_path)) == 4


def test_generated_tool_calls_with_results_stay_as_they_are(stage_01, tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    write_prompts(tmp_path, {"id": "t", "messages": [
        {"role": "user", "content": "use f"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"}, {"role": "assistant", "content": "old"}]})
    with Stub() as stub:
        assert stage_01(stub, "--turns", "all") == 0
        assert len(stub.bodies) == 1
        assert stub.bodies[0]["messages"][1]["tool_calls"] == [call]


# --- token ids --------------------------------------------------------------------------------------------


def test_ids_are_compared_with_the_templates(stage_01, tmp_path, tiny_model):
    write_prompts(tmp_path, *[f"q{i}" for i in range(5)])
    with Stub({"chat": load_chat(tiny_model), "spelled": True}) as stub:  # the same texts in other tokens
        assert stage_01(stub, "--model", str(tiny_model), "--check-tokens", "3") == 0
    found = manifest(tmp_path)["token_check"]
    assert (found["checked"], found["prompts_differ"], found["completions_differ"]) == (3, 3, 3)
    assert "3 prompts and 3 completions differ" in log(tmp_path)


def test_equal_ids_are_reported_as_such(stage_01, tmp_path, tiny_model):
    write_prompts(tmp_path, "q0")
    chat = load_chat(tiny_model)
    prompt = chat.prompt_ids([{"role": "user", "content": "q0"}], [])
    raw = {"choices": [{"message": {"content": "hello"}, "finish_reason": "stop",
                        "token_ids": chat.completion_ids(prompt, None, "hello")}], "prompt_token_ids": prompt}
    with Stub({"default": {"raw": json.dumps(raw)}}) as stub:
        assert stage_01(stub, "--model", str(tiny_model), "--check-tokens", "3") == 0
    assert manifest(tmp_path)["token_check"]["checked"] == 1
    assert "0 prompts and 0 completions differ" in log(tmp_path)
