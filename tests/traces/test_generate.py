"""Stage 01 against a stub server: replies, resume, faults, kills."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.project import ROOT
from support.stage_01 import SCRIPT, by_id, command, lines, log, manifest, write_prompts
from support.stub_server import Stub, answer_to

from eagle3.common import files
from eagle3.common.errors import PreconditionError
from eagle3.common.options import GenerateOptions
from eagle3.common.script import run_script
from eagle3.traces import token_counts, trace_rows
from eagle3.traces.chat import load_chat

FAST_RETRY = {"retry-after-ms": "10"}


# --- replies ----------------------------------------------------------------------------------------------


def test_a_row_holds_what_was_asked_and_the_servers_ids(stage_01, tmp_path):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    messages = [{"role": "user", "content": "Hi"}]
    write_prompts(tmp_path, {"id": "x", "messages": messages, "tools": tools})
    with Stub() as stub:
        assert stage_01(stub, "--temperature", "0.5", "--chat-template-kwargs", '{"thinking": false}') == 0
        body = stub.bodies[0]
    row = next(trace_rows.read_traces(tmp_path / "run/01_traces/traces.jsonl"))
    assert body["tools"] == tools
    assert body["chat_template_kwargs"] == {"thinking": False}
    assert (body["temperature"], body["seed"], body["top_p"], body["max_tokens"]) == (0.5, 0, 1.0, 64)
    assert row["id"] == "x#0"
    assert row["prompt"] == {"messages": messages, "tools": tools}
    assert row["sampling"] == {"max_tokens": 64, "temperature": 0.5, "top_p": 1.0, "seed": 0}
    assert row["content"] == answer_to("Hi")
    assert (row["model"], row["token_source"], row["finish_reason"]) == ("stub-model", "server", "stop")
    ids, mask = trace_rows.sequence(row)
    assert ids == row["prompt_token_ids"] + row["completion_token_ids"]
    assert [i for i, on in zip(ids, mask, strict=True) if on] == [*answer_to("Hi").encode(), 256]
    counts = manifest(tmp_path)["counts"]
    assert (counts["expected"], counts["done"], counts["failed"], counts["completion_tokens"]) == (1, 1, 0, sum(mask))


def test_a_reply_cut_inside_its_reasoning_is_skipped_and_counted(stage_01, tmp_path):
    write_prompts(tmp_path, "cut", "fine")
    cut = {"reasoning": "abc", "content": None, "finish_reason": "length"}
    with Stub({"replies": {"cut": [cut], "fine": [{"reasoning": "r"}]}}) as stub:
        assert stage_01(stub, "--reasoning", "required") == 0
        assert stage_01(stub, "--reasoning", "required") == 0
        assert sorted(stub.calls) == ["cut", "fine"]  # a skip is not asked again
    assert [row["id"] for row in lines(tmp_path)] == ["id-fine#0"]
    skipped = lines(tmp_path, "skipped")
    assert [(row["id"], row["reason"]) for row in skipped] == [("id-cut#0", "truncated")]
    assert manifest(tmp_path)["counts"]["skipped"] == {"truncated": 1}
    assert "WARNING cut at max_tokens: 1 of 2 replies lost (50.0%)" in log(tmp_path)


def test_few_cut_replies_are_no_warning(stage_01, tmp_path):
    write_prompts(tmp_path, "cut", *(f"p{i}" for i in range(24)))
    with Stub({"replies": {"cut": [{"content": None, "finish_reason": "length"}]}}) as stub:
        assert stage_01(stub) == 0
    assert "INFO    cut at max_tokens: 1 of 25 replies lost (4.0%)" in log(tmp_path)


def test_a_cut_answer_with_exact_ids_is_kept_unless_reasoning_is_required(stage_01, tmp_path):
    write_prompts(tmp_path, "exact", "vague")
    cut = {"content": "so far", "finish_reason": "length"}
    with Stub({"replies": {"exact": [cut], "vague": [cut | {"token_ids": False}]}}) as stub:
        assert stage_01(stub) == 0
    (row,) = lines(tmp_path)
    assert (row["id"], row["finish_reason"], bytes(row["completion_token_ids"])) == ("id-exact#0", "length", b"so far")
    assert manifest(tmp_path)["counts"]["truncated"] == 1
    assert manifest(tmp_path)["counts"]["skipped"] == {"truncated": 1}


def test_both_reasoning_fields_and_think_tags_give_equal_rows(stage_01, tmp_path):
    replies = {
        "new": {"reasoning": "a", "content": "b"},
        "old": {"reasoning": "a", "content": "b", "reasoning_field": "reasoning_content"},
        "end": {"content": "a</think>b"},
        "both": {"content": "<think>a</think>b"},
        "none": {"content": "b"},
    }
    write_prompts(tmp_path, *replies)
    with Stub({"replies": {name: [step] for name, step in replies.items()}}) as stub:
        assert stage_01(stub, "--reasoning", "required") == 0
    rows = by_id(tmp_path)
    assert {(row["reasoning"], row["content"]) for row in rows.values()} == {("a", "b")}
    assert len(rows) == 4
    ours = [{k: v for k, v in rows[f"id-{n}#0"].items() if k not in ("id", "key", "digest", "prompt",
                                                                      "prompt_token_ids")} for n in ("new", "old")]
    assert ours[0] == ours[1]
    assert [(row["id"], row["reason"]) for row in lines(tmp_path, "skipped")] == [("id-none#0", "no reasoning")]
    assert manifest(tmp_path)["tagged"] == 2 and "2 replies had their reasoning inside the content" in log(tmp_path)


def test_missing_reasoning_stops_after_20_replies_and_is_not_recorded(stage_01, tmp_path):
    write_prompts(tmp_path, *(f"p{i}" for i in range(100)))
    with Stub() as stub:
        assert stage_01(stub, "--reasoning", "required", "--concurrency", "4") == 3
        assert 20 <= len(stub.calls) <= 24
    assert "--reasoning-parser" in log(tmp_path)
    assert lines(tmp_path) == lines(tmp_path, "skipped") == []
    with Stub({"reasoning_field": "reasoning_content", "default": {"reasoning": "r"}}) as mended:
        assert stage_01(mended, "--reasoning", "required") == 0
        assert len(mended.calls) == 100


def test_unwanted_reasoning_and_empty_replies_are_skipped(stage_01, tmp_path):
    write_prompts(tmp_path, "thinks", "empty", "filtered", "good")
    steps = {"thinks": {"reasoning": "a", "content": "b"}, "empty": {"content": " "},
             "filtered": {"finish_reason": "content_filter"}}
    with Stub({"replies": {name: [step] for name, step in steps.items()}}) as stub:
        assert stage_01(stub, "--reasoning", "off") == 0
    reasons = {row["id"]: row["reason"] for row in lines(tmp_path, "skipped")}
    assert reasons == {"id-thinks#0": "unwanted reasoning", "id-empty#0": "empty",
                       "id-filtered#0": "finish_reason content_filter"}


def test_nothing_but_skips_is_a_failure_and_none_is_written_off(stage_01, tmp_path):
    write_prompts(tmp_path, "a", "b")
    with Stub({"default": {"content": ""}}) as stub:
        assert stage_01(stub) == 3
        assert stage_01(stub) == 3
        assert len(stub.calls) == 4
    assert manifest(tmp_path)["status"] == "failed" and lines(tmp_path, "skipped") == []
    assert "2 × empty" in log(tmp_path)
    with Stub() as mended:
        assert stage_01(mended) == 0
    assert len(lines(tmp_path)) == 2


# --- the template -----------------------------------------------------------------------------------------


def test_without_the_servers_ids_the_template_makes_them(stage_01, tmp_path, tiny_model):
    write_prompts(tmp_path, "plain", "thought")
    chat = load_chat(tiny_model)
    with Stub({"token_ids": False, "chat": chat, "replies": {"thought": [{"reasoning": "a", "content": "b"}]}}) as stub:
        assert stage_01(stub) == 3  # no ids and no tokenizer
        assert "--model" in log(tmp_path)
        assert stage_01(stub, "--model", str(tiny_model), "--out", str(tmp_path / "run/01_traces_2")) == 0
    rows = {row["id"]: row for row in trace_rows.read_traces(tmp_path / "run/01_traces_2/traces.jsonl")}
    texts = {name: chat.decode(row["completion_token_ids"]) for name, row in rows.items()}
    assert texts == {"id-plain#0": answer_to("plain") + "<|im_end|>", "id-thought#0": "<think>a</think>b<|im_end|>"}
    assert {row["token_source"] for row in rows.values()} == {"template"}
    assert chat.decode(rows["id-plain#0"]["prompt_token_ids"]).endswith("<|im_start|>assistant\n")


def test_prompts_are_measured_before_they_are_sent(stage_01, tmp_path, tiny_model):
    chat = load_chat(tiny_model)
    frame = len(chat.prompt_ids([{"role": "user", "content": ""}], []))
    word = "ÿ"  # two tokens of one byte each
    texts = {length: word * ((length - frame) // 2) + "!" * ((length - frame) % 2) for length in (500, 512, 600)}
    lengths = {n: len(chat.prompt_ids([{"role": "user", "content": text}], [])) for n, text in texts.items()}
    assert lengths == {500: 500, 512: 512, 600: 600}
    write_prompts(tmp_path, *({"id": str(n), "prompt": text} for n, text in texts.items()))
    with Stub({"max_model_len": 512, "chat": chat, "spelled": True}) as stub:
        assert stage_01(stub, "--model", str(tiny_model), "--max-tokens", "256") == 0
        assert [body["max_tokens"] for body in stub.bodies] == [12]
    (row,) = lines(tmp_path)
    assert (row["id"], row["sampling"]["max_tokens"]) == ("500#0", 12)
    details = {row["id"]: row["detail"] for row in lines(tmp_path, "skipped")}
    assert details == {"600#0": "600 > 512", "512#0": "512 = 512"}
    assert "clamped: prompt of 500 + 256 asked > 512, so 12" in log(tmp_path)
    assert "renders prompts unlike the template" in log(tmp_path)  # the stub's ids are bytes


def test_a_row_that_the_template_refuses_is_skipped_with_its_message(stage_01, tmp_path, tiny_model):
    refused = {"id": "r", "messages": [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Hm"}]}
    write_prompts(tmp_path, refused, "good")
    with Stub({"chat": load_chat(tiny_model)}) as stub:
        assert stage_01(stub, "--model", str(tiny_model)) == 0
        assert stub.calls == ["good"]
        (row,) = lines(tmp_path, "skipped")
        assert (row["id"], row["reason"]) == ("r#1", "template")
        assert "the first turn must be the user" in row["detail"]
        write_prompts(tmp_path, refused)
        assert stage_01(stub, "--model", str(tiny_model), "--out", str(tmp_path / "run/01_traces_all")) == 4


# --- resume -----------------------------------------------------------------------------------------------


def test_resume_is_by_identity_not_by_line(stage_01, tmp_path):
    path = write_prompts(tmp_path, "a", "b", "c", "d")
    with Stub() as stub:
        assert stage_01(stub, "--limit", "2") == 0
        assert sorted(stub.calls) == ["a", "b"]
        path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
        assert stage_01(stub) == 0
        assert sorted(stub.calls) == ["a", "b", "c", "d"]
    assert set(by_id(tmp_path)) == {f"id-{name}#0" for name in "abcd"}


def test_a_second_run_does_nothing_and_appended_prompts_extend(stage_01, tmp_path):
    path = write_prompts(tmp_path, "a", "b")
    with Stub() as stub:
        assert stage_01(stub) == 0
        before = (tmp_path / "run/01_traces/traces.jsonl").read_bytes()
        first = manifest(tmp_path)
        stub.stop()  # a run with nothing to do needs no server
        assert stage_01(stub) == 0
    assert "complete already" in log(tmp_path)
    assert manifest(tmp_path) == first
    rows = trace_rows.read_traces(tmp_path / "run/01_traces/traces.jsonl")
    assert first["content"] == trace_rows.content_identity(rows)
    with open(path, "a") as file:
        file.write('{"prompt": "c"}\n')
    with Stub() as stub:
        assert stage_01(stub) == 0
        assert stub.calls == ["c"]
    assert (tmp_path / "run/01_traces/traces.jsonl").read_bytes().startswith(before)
    assert manifest(tmp_path)["content"] != first["content"]
    counts, count = token_counts.read(tmp_path / "run/01_traces" / token_counts.FILE_NAME)  # of both runs
    assert count == 3 and manifest(tmp_path)["outputs"]["token_counts"]["sha256"]
    for half in (0, 1):
        ids = [token for row in lines(tmp_path)[half::2] for token in row["completion_token_ids"]]
        assert counts[half].tolist() == [ids.count(token) for token in range(counts.shape[1])]


def test_a_changed_option_is_refused_by_name(stage_01, tmp_path):
    write_prompts(tmp_path, "a")
    with Stub() as stub, Stub({"model": "another"}) as other:
        assert stage_01(stub) == 0
        for change, name in ((["--max-tokens", "65"], "generate.max_tokens: 64 → 65"),
                             (["--temperature", "1"], "generate.temperature: 0.0 → 1.0"),
                             (["--top-p", "0.5"], "generate.top_p: 1.0 → 0.5"),
                             (["--seed", "1"], "generate.seed: 0 → 1"),
                             (["--chat-template-kwargs", '{"x": 1}'], "generate.chat_template_kwargs"),
                             (["--turns", "all"], "generate.turns: \"last\" → \"all\""),
                             (["--max-model-len", "99"], "generate.max_model_len: null → 99"),
                             (["--served-model-name", "another"], "another model is to be asked"),
                             (["--reasoning", "off"], "generate.reasoning: \"optional\" → \"off\"")):
            seen = len(log(tmp_path))
            assert stage_01(stub, *change) == 3, change
            assert name in log(tmp_path)[seen:]
        write_prompts(tmp_path, "a", "b")
        assert stage_01(stub, "--concurrency", "3", "--retries", "1") == 0
        write_prompts(tmp_path, "a", "b", "c")
        seen = len(log(tmp_path))
        assert stage_01(other) == 3
        assert "another" in log(tmp_path)[seen:]
        assert sorted(stub.calls) == ["a", "b"]
        assert other.calls == []


def test_another_model_folder_is_refused(stage_01, tmp_path, tiny_model):
    write_prompts(tmp_path, "a")
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    with open(other / "generation_config.json", "a") as file:
        file.write("\n")
    with Stub({"chat": load_chat(tiny_model)}) as stub:
        assert stage_01(stub, "--model", str(tiny_model)) == 0
        assert stage_01(stub, "--model", str(other)) == 3
        assert len(stub.calls) == 1
    assert "input model: " in log(tmp_path)


def test_a_run_that_failed_before_its_first_row_does_not_fix_its_options(stage_01, tmp_path):
    write_prompts(tmp_path, *(f"p{i}" for i in range(25)))
    with Stub() as stub:
        assert stage_01(stub, "--served-model-name", "wrong") == 3
        assert stage_01(stub, "--reasoning", "required") == 3
        assert stage_01(stub, "--max-tokens", "32") == 0
        assert stage_01(stub) == 3


def test_a_changed_prompt_under_an_old_id_is_refused_by_name(stage_01, tmp_path):
    write_prompts(tmp_path, "a", {"id": "x", "prompt": "first"})
    with Stub() as stub:
        assert stage_01(stub) == 0
        write_prompts(tmp_path, "a", {"id": "x", "prompt": "second"})
        assert stage_01(stub) == 3
        assert len(stub.calls) == 2
    assert "ids x#0" in log(tmp_path)


@pytest.mark.parametrize("tail", [b'{"id":"id-b#0","key":"' , '{"id":"id-b#0","content":"é'.encode()[:-1]])
def test_a_torn_tail_is_removed_and_that_row_asked_again(stage_01, tmp_path, tail):
    write_prompts(tmp_path, "a", "b")
    path = tmp_path / "run/01_traces/traces.jsonl"
    with Stub() as stub:
        assert stage_01(stub, "--limit", "1") == 0
        whole = path.read_bytes()
        path.write_bytes(whole + tail)
        assert stage_01(stub) == 0
        assert stub.calls == ["a", "b"]
    assert path.read_bytes().startswith(whole)
    assert set(by_id(tmp_path)) == {"id-a#0", "id-b#0"}
    assert "removed a torn last line" in log(tmp_path)


def test_an_empty_traces_file_is_no_rows(stage_01, tmp_path):
    write_prompts(tmp_path, "a")
    (tmp_path / "run/01_traces").mkdir(parents=True)
    (tmp_path / "run/01_traces/traces.jsonl").touch()
    with Stub() as stub:
        assert stage_01(stub) == 0
    assert len(lines(tmp_path)) == 1


def test_damage_in_the_middle_is_an_error_with_its_line(stage_01, tmp_path, capsys):
    write_prompts(tmp_path, "a", "b", "c")
    path = tmp_path / "run/01_traces/traces.jsonl"
    with Stub() as stub:
        assert stage_01(stub, "--concurrency", "1") == 0
        rows = path.read_bytes().splitlines(keepends=True)
        broken = {
            "cut": rows[1][:-20] + b"\n",
            "token": rows[1].replace(b"[91,", b"[92,"),
            "text": rows[1].replace(b"You said", b"You sayd"),
            "zeros": bytes(len(rows[1]) - 1) + b"\n",
            "twice": rows[0],
        }
        for name, damaged in broken.items():
            assert damaged != rows[1], name
            path.write_bytes(rows[0] + damaged + rows[2])
            assert stage_01(stub) == 3, name
            assert "traces.jsonl line 2" in capsys.readouterr().err, name
            with pytest.raises(PreconditionError, match=r"traces.jsonl line 2"):
                list(trace_rows.read_traces(path))
        assert len(stub.calls) == 3
        path.write_bytes(rows[0] + rows[2])  # the advice: remove the line, run again
        assert stage_01(stub) == 0
        assert stub.calls[3:] == ["b"]
    assert sorted(path.read_bytes().splitlines(keepends=True)) == sorted(rows)


# --- faults -----------------------------------------------------------------------------------------------


def test_passing_errors_are_retried_and_rejections_are_not(stage_01, tmp_path):
    write_prompts(tmp_path, "passes", "rejected", "garbled", "reset", "good")
    replies = {
        "passes": [{"status": 429, "headers": {"Retry-After": "1"}}, {"status": 500, "headers": FAST_RETRY},
                   {"delay_s": 1.5}, {}],
        "rejected": [{"status": 400, "message": "this model's limit is 8"}],
        "garbled": [{"raw": '{"choices": [{"mess'}, {"raw": "{}"}, {}],
        "reset": [{"reset": True}, {}],
    }
    with Stub({"replies": replies}) as stub:
        assert stage_01(stub, "--request-timeout-s", "1") == 4
        calls = {name: stub.calls.count(name) for name in ("passes", "rejected", "garbled", "reset", "good")}
        assert calls == {"passes": 4, "rejected": 1, "garbled": 3, "reset": 2, "good": 1}
        assert set(by_id(tmp_path)) == {f"id-{name}#0" for name in ("passes", "garbled", "reset", "good")}
        (failure,) = lines(tmp_path, "failures")
        assert (failure["id"], failure["reason"], failure["detail"]) == ("id-rejected#0", "HTTP 400",
                                                                        "this model's limit is 8")
        assert manifest(tmp_path)["status"] == "partial"
        assert "this model's limit is 8" in log(tmp_path)
        replies["rejected"].append({})  # failures are asked again, and only they
        assert stage_01(stub) == 0
        assert len(stub.calls) == 12
    assert lines(tmp_path, "failures") == []
    assert manifest(tmp_path)["status"] == "complete"


def test_failures_within_the_limit_are_a_success(stage_01, tmp_path):
    write_prompts(tmp_path, "bad", "good")
    with Stub({"replies": {"bad": [{"status": 400}]}}) as stub:
        assert stage_01(stub, "--max-failures", "1") == 0
    assert manifest(tmp_path)["counts"]["failed"] == 1
    assert manifest(tmp_path)["status"] == "complete"


def test_a_server_that_dies_stops_the_run_with_its_rows_kept(stage_01, tmp_path):
    write_prompts(tmp_path, *(f"p{i}" for i in range(10)))
    arguments = ("--concurrency", "1", "--retries", "0", "--max-consecutive-failures", "3")
    with Stub({"die_after": 2}) as stub:
        assert stage_01(stub, *arguments) == 4
    assert len(lines(tmp_path)) == 2
    assert len(lines(tmp_path, "failures")) == 3
    assert "3 prompts failed in a row" in log(tmp_path)
    assert manifest(tmp_path)["status"] == "partial"
    assert manifest(tmp_path)["counts"]["done"] == 2
    with Stub() as stub:
        assert stage_01(stub) == 0
        assert len(stub.calls) == 8


def test_errors_in_a_row_stop_with_the_servers_words(stage_01, tmp_path):
    write_prompts(tmp_path, *(f"p{i}" for i in range(50)))
    with Stub({"default": {"status": 503, "message": "out of memory", "headers": FAST_RETRY}}) as stub:
        assert stage_01(stub, "--retries", "1", "--max-consecutive-failures", "5", "--concurrency", "2") == 4
        assert 10 <= len(stub.calls) <= 14
    assert "HTTP 503: out of memory" in log(tmp_path)


def test_rejections_among_answers_do_not_stop_the_run(stage_01, tmp_path):
    write_prompts(tmp_path, "good", *(f"p{i}" for i in range(10)), "also good")
    with Stub({"default": {"status": 400}, "replies": {"good": [{}], "also good": [{}]}}) as stub:
        assert stage_01(stub, "--max-consecutive-failures", "3", "--concurrency", "1") == 4
        assert len(stub.calls) == 12
    assert len(lines(tmp_path)) == 2


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_stops_at_once(stage_01, tmp_path, status):
    write_prompts(tmp_path, *(f"p{i}" for i in range(50)))
    with Stub({"default": {"status": status, "message": "bad key"}}) as stub:
        assert stage_01(stub, "--concurrency", "2") == 3
        assert len(stub.calls) <= 4
    assert "bad key" in log(tmp_path)
    assert "OPENAI_API_KEY" in log(tmp_path)


def test_the_server_must_be_chosen_and_answer(script, stage_01, tmp_path):
    write_prompts(tmp_path, "a")
    base, seen = [str(SCRIPT), "--run-dir", str(tmp_path / "run"), "--prompts", str(tmp_path / "prompts.jsonl")], 0
    with Stub() as stub:
        for more, code, words in (
            ([], 2, "--serve starts the engine on --model"),
            (["--serve", "--endpoint", stub.url], 2, "two servers are chosen"),
            (["--serve"], 3, "--model"),
            (["--endpoint", "127.0.0.1:8000"], 2, "not an address"),
            (["--endpoint", "http://me:secret@127.0.0.1:1/v1"], 2, "OPENAI_API_KEY"),
            (["--endpoint", "http://127.0.0.1:1/v1"], 3, "no OpenAI-compatible server answers"),
            (["--endpoint", stub.url, "--served-model-name", "x"], 3, "stub-model"),
        ):
            assert run_script(script.__doc__, GenerateOptions, script.run, base + more) == code, more
            told = log(tmp_path)
            assert words in told[seen:], more
            seen = len(told)
        assert stub.calls == []


def test_a_dry_run_changes_nothing_and_fails_where_the_run_would(stage_01, tmp_path, capsys):
    path = write_prompts(tmp_path, "a", "b")
    with Stub() as stub:
        assert stage_01(stub, "--dry-run") == 0
        assert stub.calls == []
        assert not (tmp_path / "run").exists()
        said = capsys.readouterr().err
        assert "2 prompts, 2 of them to ask" in said
        assert "estimate: 0 prompt tokens" in said
        assert "at most 128 generated tokens" in said
        assert stage_01(stub, "--dry-run", "--max-tokens", str(10**15)) == 3
        assert "the disk is too small for the traces" in capsys.readouterr().err
        path.write_text("nonsense\n")
        assert stage_01(stub, "--dry-run") == 3
        assert "line 1" in capsys.readouterr().err
    write_prompts(tmp_path, "a")
    assert stage_01(stub, "--dry-run") == 3
    assert "no OpenAI-compatible server answers" in capsys.readouterr().err


def test_no_more_requests_in_flight_than_asked(stage_01, tmp_path):
    write_prompts(tmp_path, *(f"p{i}" for i in range(12)))
    with Stub({"delay_s": 0.4}) as stub:
        assert stage_01(stub, "--concurrency", "5") == 0
        assert stub.most_in_flight == 5


def test_a_full_disk_stops_with_the_path_and_keeps_what_was_written(stage_01, tmp_path, monkeypatch):
    write_prompts(tmp_path, *(f"p{i}" for i in range(20)))
    real, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("traces.jsonl") and len(calls) > 8:
            raise OSError(28, "No space left on device")
        real(descriptor)

    with Stub() as stub:
        monkeypatch.setattr(os, "fsync", full)
        assert stage_01(stub, "--concurrency", "2") == 3
        monkeypatch.setattr(os, "fsync", real)
        assert "the disk is full" in log(tmp_path)
        kept = by_id(tmp_path)
        assert 0 < len(kept) < 20
        assert stage_01(stub) == 0
    assert len(by_id(tmp_path)) == 20
    assert {name: by_id(tmp_path)[name] for name in kept} == kept


# --- as a real process ------------------------------------------------------------------------------------


def start(tmp_path: Path, stub: Stub, *arguments: str, **env: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, str(SCRIPT), *command(tmp_path, stub), *arguments], env=os.environ | env,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)


def wait_for(condition, process: subprocess.Popen, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.002)


def test_a_slow_prompt_is_the_only_one_asked_again_after_a_kill(tmp_path):
    write_prompts(tmp_path, "slow", "b", "c", "d")
    with Stub({"replies": {"slow": [{"delay_s": 30}, {}]}}) as stub:
        process = start(tmp_path, stub)
        wait_for(lambda: len(lines(tmp_path)) == 3, process)
        process.kill()
        process.wait()
        again = start(tmp_path, stub)
        assert again.wait(60) == 0
        assert sorted(stub.calls) == ["b", "c", "d", "slow", "slow"]
    assert len(by_id(tmp_path)) == 4


def test_killed_at_random_moments_it_ends_with_the_undisturbed_rows(stage_01, tmp_path):
    kills, count, concurrency = 5, 60, 8
    names = [f"prompt number {i}" for i in range(count)]
    default = {"delay_s": 0.01}
    script = {"default": default, "replies": {names[7]: [{"content": None, "finish_reason": "length"}]}}
    (tmp_path / "calm").mkdir()
    write_prompts(tmp_path, *names)
    with Stub(script) as stub:
        assert stage_01(stub, "--out", str(tmp_path / "calm/01_traces")) == 0
    chance = random.Random(1)
    with Stub(script) as stub:
        for number in range(1, kills + 1):
            process = start(tmp_path, stub, "--concurrency", str(concurrency))
            target = number * count // (kills + 2) + chance.randrange(6)
            wait_for(lambda target=target: len(stub.calls) >= target + concurrency, process)
            time.sleep(chance.random() * 0.01)
            process.kill()
            process.wait()
        assert len(lines(tmp_path)) < count
        last = start(tmp_path, stub, "--concurrency", str(concurrency))
        assert last.wait(60) == 0, last.communicate()[0]
        repeated = len(stub.calls) - count
    assert 0 < repeated <= kills * concurrency
    calm = [row for _, row in files.read_jsonl(tmp_path / "calm/01_traces/traces.jsonl")]
    assert len(calm) == count - 1
    assert by_id(tmp_path) == {row["id"]: row for row in calm}
    assert [row["id"] for row in lines(tmp_path, "skipped")] == [f"id-{names[7]}#0"]
    assert manifest(tmp_path)["content"] == trace_rows.content_identity(calm)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_drops_what_is_in_flight_and_exits_with_its_code(tmp_path, number, code):
    write_prompts(tmp_path, "slow", "b", "c")
    with Stub({"replies": {"slow": [{"delay_s": 30}, {}]}}) as stub:
        process = start(tmp_path, stub)
        wait_for(lambda: len(lines(tmp_path)) == 2, process)
        process.send_signal(number)
        began = time.monotonic()
        assert process.wait(30) == code
        assert time.monotonic() - began < 5
        assert manifest(tmp_path)["status"] == "interrupted"
        assert manifest(tmp_path)["counts"]["done"] == 2
        assert len(by_id(tmp_path)) == 2


def test_the_api_key_is_sent_and_stands_in_no_file_or_output(tmp_path):
    canary = "sk-canary-7f3a"
    write_prompts(tmp_path, *(f"p{i}" for i in range(3)))
    leaky = {"status": 401, "message": f"Incorrect API key provided: {canary}"}
    outputs = []
    for script in ({}, {"default": leaky}, {"default": {"status": 400, "message": canary}}):
        with Stub(script) as stub:
            process = start(tmp_path, stub, "--restart", "--log-level", "debug", OPENAI_API_KEY=canary)
            outputs.append(process.communicate(timeout=60)[0])
            assert stub.authorization[0] == f"Bearer {canary}"
    assert "3 traces" in outputs[0]
    assert "refuses the API key" in outputs[1]
    assert "HTTP 400" in outputs[2]
    everything = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(everything) > 8
    assert all(canary.encode() not in data for data in everything)
    assert all(canary not in output for output in outputs)


def test_help_is_quick_and_loads_nothing_heavy():
    program = """
import runpy, sys, time
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as ending:
    assert ending.code == 0
heavy = {"torch", "transformers", "openai", "numpy"} & set(sys.modules)
assert not heavy, heavy
assert time.process_time() < 1, time.process_time()
"""
    subprocess.run([sys.executable, "-c", program, str(SCRIPT)], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
