"""A streamed completion becomes the body that an unstreamed request gives, with the time of each chunk."""

import json

import pytest

from eagle3.benchmark.stream_reply import assembled
from eagle3.traces.replies import BadReply, parse_reply


def chunk(delta=None, **more):
    top = {name: more.pop(name) for name in ("usage", "prompt_token_ids", "model") if name in more}
    return {"id": "x", "choices": [{"index": 0, "delta": delta or {}} | more]} | top


def stream(*events, end=b"\n\n"):
    return b"".join(b"data: " + json.dumps(event).encode() + end for event in events) + b"data: [DONE]" + end


VLLM = stream(
    chunk({"role": "assistant", "content": ""}, prompt_token_ids=[7, 8], model="m"),
    chunk({"reasoning": "hm"}, token_ids=[1]),
    chunk({"reasoning": "m"}, token_ids=[2, 3]),
    chunk({}, token_ids=[4]),  # the tag itself: a token without a text
    chunk({"content": "yes"}, token_ids=[5, 6], finish_reason="stop"),
    {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 6}},
)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream_cut_anywhere_gives_the_reply(size):
    arrivals = [(float(k), VLLM[k : k + size]) for k in range(0, len(VLLM), size)]
    body, times, tokens = assembled(arrivals)
    reply = parse_reply(body)
    assert (reply.reasoning, reply.content, reply.finish_reason, reply.model) == ("hmm", "yes", "stop", "m")
    assert reply.prompt_ids == [7, 8] and reply.completion_ids == [1, 2, 3, 4, 5, 6]
    assert reply.usage == {"prompt_tokens": 2, "completion_tokens": 6}
    assert tokens == [1, 2, 1, 2] and times == sorted(times) and times[-1] <= arrivals[-1][0]


def test_a_chunk_has_the_time_of_the_read_that_completed_it():
    first = VLLM.index(b"\n", VLLM.index(b'"token_ids"')) + 1
    _, times, _ = assembled([(1.0, VLLM[: first - 3]), (2.0, VLLM[first - 3 : first]), (3.0, VLLM[first:])])
    assert times == [2.0, 3.0, 3.0, 3.0]


def test_without_ids_the_counts_of_the_chunks_are_taken():
    def told(count):
        return {"usage": {"prompt_tokens": 2, "completion_tokens": count}}

    data = stream(chunk({"role": "assistant", "content": ""}, **told(0)), chunk({"content": "a"}, **told(1)),
                  chunk({"content": "bc"}, **told(4)), chunk(finish_reason="stop", **told(4)), end=b"\r\n\r\n")
    body, _, tokens = assembled([(1.0, data)])
    assert tokens == [1, 3] and parse_reply(body).content == "abc"
    _, times, tokens = assembled([(1.0, stream(chunk({"content": "a"}), chunk({"content": "b"})))])
    assert tokens == [-1, -1] and times == [1.0, 1.0]  # nobody counts


def test_tool_calls_come_in_pieces():
    body, _, _ = assembled([(1.0, stream(
        chunk({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]}, finish_reason="tool_calls")))])
    (call,) = parse_reply(body).tool_calls
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}


@pytest.mark.parametrize(("data", "words"), [
    (stream({"error": {"message": "overloaded"}}), "overloaded"),
    (stream(chunk({"content": "a"}, token_ids=[1]), {"object": "error", "message": "gone"}), "gone"),
    (b"data: {half\n\n", "not JSON"),
    (stream(chunk({"content": "a"}, token_ids=["1"])), "token_ids"),
    (stream(chunk({"content": {"a": 1}})), "content"),
    (stream([1]), "not an object"),
    (b"", "not an object"),
])
def test_what_is_no_reply_is_refused(data, words):
    body, _, _ = assembled([(1.0, data)])
    if not data:
        assert parse_reply(body).finish_reason == "none"  # which no one takes for a reply
        return
    with pytest.raises(BadReply, match=words):
        parse_reply(body)
