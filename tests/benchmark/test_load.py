"""The load of stage 06 against stub servers: what is sent, how replies are read, whether two sides are comparable."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.stub_server import Stub, answer_to

from eagle3.benchmark import comparison, load
from eagle3.common.errors import FailureLimitError, PreconditionError
from eagle3.common.options import BenchmarkSection
from eagle3.engines import servers
from eagle3.traces.prompts import Prompt

NEUTRAL = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
           "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 0}
PROMPTS = [Prompt(f"p{i}", [{"role": "user", "content": f"p{i}"}], [], "s") for i in range(4)]


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Measure a stub as stage 06 does; the figures and the replies."""
    monkeypatch.setattr(load, "_SETTLE_S", 0)

    def run(stub, prompts=PROMPTS, model="", url="", kind="vllm", section=None):
        base = (url or stub.url).removesuffix("/v1")
        server = servers.Server(f"{base}/v1", base, "stub-model", kind, "1")
        stage = SimpleNamespace(
            check_stop=lambda: None, options=SimpleNamespace(model=SimpleNamespace(path=model)),
            progress=lambda *_: SimpleNamespace(update=lambda: None, close=lambda: None), run_dir=tmp_path,
            directory=tmp_path / "06_bench")
        return load.measure(server, prompts, section or BenchmarkSection(max_tokens=9), 2, stage, "x")

    return run


def test_every_sampling_setting_is_sent_and_recorded(measure):
    with Stub({"paths": {"/server_info": '{"sampling_defaults": "model", "api_key": "secret"}'}}) as stub:
        figures, replies = measure(stub)
        body = stub.bodies[0]
    assert {name: body[name] for name in NEUTRAL} == NEUTRAL
    assert figures["sampling"] == {"sent": NEUTRAL, "server_defaults": {"sampling_defaults": "model"}}
    assert [reply["text"] for reply in replies] == [answer_to(prompt.id) for prompt in PROMPTS]
    assert "meta_info" not in replies[0]


def test_a_setting_that_a_server_refuses_is_left_out_and_not_recorded_as_sent(measure, caplog):
    with Stub({"refuses": ["top_k", "min_p"], "refuses_status": 422, "refuses_detail": True}) as stub:
        figures, replies = measure(stub)
    assert figures["sampling"]["sent"] == {name: value for name, value in NEUTRAL.items()
                                           if name not in ("top_k", "min_p")}
    assert len(replies) == 4 and all(reply["completion_token_ids"] for reply in replies)


@pytest.mark.parametrize(("other", "told"), [
    ({"sent": NEUTRAL, "server_defaults": {}}, True),
    ({"sent": NEUTRAL | {"top_k": 20}, "server_defaults": {}}, False),
    ({"sent": NEUTRAL, "server_defaults": {"sampling_defaults": "openai"}}, False),
    (None, False),  # measured before this was recorded
])
def test_no_speed_up_is_told_of_servers_that_sample_differently(other, told):
    def run(server, draft_tokens, sampling):
        return {"name": server, "server": server, "draft_tokens": draft_tokens, "concurrency": 1, "temperature": 0.0,
                "prompts": "p", "repeat": 1, "tokens_per_s": 2.0 + draft_tokens} | (
            {"sampling": sampling} if sampling else {})

    cells = comparison.cells([run("baseline", 0, {"sent": NEUTRAL, "server_defaults": {}}), run("drafter", 3, other)])
    assert ("speedup" in cells[1]) == told


@pytest.mark.parametrize("step", [
    {"choice": {"token_ids": ["1"]}}, {"choice": {"token_ids": [-1]}}, {"raw": {"error": {"message": "overloaded"}}},
    {"raw": {"choices": None}}, {"finish_reason": "abort"}, {"finish_reason": None},
    {"usage": {"completion_tokens": "x"}}, {"status": 400, "message": "too long"},
])
def test_a_reply_that_is_none_is_no_measurement(measure, step):
    with Stub({"default": step}) as stub, pytest.raises(FailureLimitError) as caught:
        measure(stub)
    assert "prompt p" in str(caught.value) and caught.value.parts["fix"]
    if "overloaded" in json.dumps(step):
        assert "overloaded" in str(caught.value)


def test_streams_are_timed_and_read_as_whole_replies_are(measure):
    with Stub() as stub:
        figures, replies = measure(stub)
        assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for body in stub.bodies)
    with Stub({"unstreamed": True}) as stub:
        whole, same = measure(stub)
    assert replies == same and figures["output_tokens"] == whole["output_tokens"]
    assert 0 < figures["first_token_s"]["median"] <= figures["latency_s"]["median"]
    assert figures["tokens_per_chunk"] > 1 and figures["between_tokens_s"] and figures["client"]["cpu_share"] > 0
    assert whole["first_token_s"] is None and whole["tokens_per_chunk"] is None and whole["latency_s"]


def test_several_processes_ask_each_prompt_once_with_as_many_in_flight(measure):
    with Stub({"delay_s": 0.05}) as stub:
        figures, replies = measure(stub, section=BenchmarkSection(max_tokens=9, load_processes=2))
        assert sorted(stub.calls) == [prompt.id for prompt in PROMPTS] and stub.most_in_flight == 2
    assert [reply["id"] for reply in replies] == [prompt.id for prompt in PROMPTS]
    assert [reply["text"] for reply in replies] == [answer_to(prompt.id) for prompt in PROMPTS]
    assert figures["seconds"] > 0.1


@pytest.mark.parametrize("processes", [1, 2])
def test_a_failure_in_any_process_is_no_measurement(measure, processes):
    section = BenchmarkSection(max_tokens=9, load_processes=processes, request_timeout_s=0.3)
    with Stub({"replies": {"p2": [{"delay_s": 2}]}}) as stub, pytest.raises(FailureLimitError) as caught:
        measure(stub, section=section)
    assert "prompt p2" in str(caught.value) and "0.3 s" in str(caught.value)
    with Stub({"replies": {"p1": [{"reset": True}]}}) as stub, pytest.raises(FailureLimitError, match="prompt p1"):
        measure(stub, section=section)


def test_a_content_in_parts_is_measured(measure):
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "so"}]
    with Stub({"default": {"shown": {"content": parts}}}) as stub:
        assert measure(stub)[1][0]["text"] == "hmso"


def test_ids_of_another_vocabulary_are_refused(measure, tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 90}')
    with Stub() as stub, pytest.raises(PreconditionError, match="not the verifier's") as caught:
        measure(stub, model=str(tmp_path))
    assert "ids below 90" in str(caught.value)


def test_other_names_are_told_with_figures(measure, monkeypatch):
    said = []
    monkeypatch.setattr(load.logger, "warning", lambda text, *values: said.append(text % values))
    with Stub({"replies": {"p1": [{"more": {"model": "another"}}]}}) as stub:
        measure(stub)
    assert said == ["1 of 4 replies name another model than stub-model, which was asked: {'another': 1}"]


def test_sglang_is_asked_once_more_where_its_streams_lack_the_counters(measure):
    meta = {"completion_tokens": 30, "spec_verify_ct": 10, "spec_draft_token_num": 30, "spec_accept_token_num": 19}
    with Stub({"default": {"choice": {"meta_info": meta}}, "streams_lack": ["meta_info", "token_ids"]}) as stub:
        figures, replies = measure(stub, kind="sglang")
        assert [bool(body.get("stream")) for body in stub.bodies] == [True] * 4 + [False] * 4
    assert figures["acceptance"]["length"] == pytest.approx(2.9) and figures["acceptance"]["error_from"] == "replies"
    assert figures["first_token_s"] and figures["requests"] == 4
    assert all(reply["completion_token_ids"] for reply in replies)


def test_sglang_counters_come_with_the_replies(measure):
    meta = {"completion_tokens": 30, "spec_verify_ct": 10, "spec_draft_token_num": 30, "spec_accept_token_num": 19}
    with Stub({"default": {"choice": {"meta_info": meta}}}) as stub:
        figures, _ = measure(stub, kind="sglang")
        assert stub.bodies[0]["return_meta_info"] is True
    assert figures["acceptance"]["length"] == pytest.approx(2.9)
    assert (figures["acceptance"]["accepted"], figures["acceptance"]["draft_tokens"]) == (76, 120)


def test_the_load_goes_through_the_proxy_that_is_set(measure, monkeypatch):
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Stub({"paths": {"/metrics": ""}}) as stub:
        monkeypatch.setenv("http_proxy", stub.url.removesuffix("/v1"))
        measure(stub, url="http://far.example")
        assert {line.partition("://")[2].partition("/")[0] for line in stub.lines} == {"far.example"}
        assert {Path(line).name for line in stub.lines} == {"completions", "metrics", "server_info"}
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        measure(stub)  # what is on this machine is asked directly
