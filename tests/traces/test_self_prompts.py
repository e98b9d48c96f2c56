"""Prompts that the verifier invents: where its user speaks, what is cleaned, and the stage that makes them."""

import json
import random
import time

import pytest
from support.project import ROOT
from support.stage_01 import by_id, lines, log, manifest
from support.stub_server import Stub

from eagle3.common import files
from eagle3.common.errors import PreconditionError, UsageError
from eagle3.traces import self_prompts
from eagle3.traces.chat import Chat, load_chat
from eagle3.traces.near_repeats import NearRepeats
from eagle3.traces.prompt_cleaning import Attempt, Cleaner
from eagle3.traces.replies import parse_completion
from eagle3.traces.user_turn import user_turn

THINGS = ["planets", "ships", "cats", "drafters", "guesses", "tokens", "keepers", "stories", "nights", "seas"]
WAYS = ["short", "long", "sad", "happy", "wild", "quiet"]


@pytest.fixture(scope="module")
def chat(tiny_model) -> Chat:
    return load_chat(tiny_model)


# --- the user's turn --------------------------------------------------------------------------------------


def test_the_turn_is_the_template_up_to_where_the_user_speaks(chat):
    turn = user_turn(chat)
    assert chat.decode(turn.ids) == "<|im_start|>user\n"
    assert (turn.end_ids, turn.end_text) == ((chat.end_id,), "")
    whole = chat.prompt_ids([{"role": "user", "content": "List the planets."}], [])
    assert whole[:len(turn.ids)] == turn.ids and whole[len(turn.ids):].index(chat.end_id) > 0

    steered = user_turn(chat, system="Be brief.", opening="Write a ")
    assert chat.decode(steered.ids) == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWrite a"


def test_the_turn_of_kimi(tmp_path):
    from tiny_kimi import tokenizer

    tokenizer.write(tmp_path)
    chat = load_chat(tmp_path)
    turn = user_turn(chat, system="Be brief.", arguments={"thinking": False})
    assert chat.decode(turn.ids) == (
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>")
    assert turn.end_ids == (tokenizer.ids()["<|im_end|>"],)


def test_a_template_may_end_the_turn_with_text_or_begin_the_next(tiny_model):
    chat = load_chat(tiny_model)
    chat._tokenizer.chat_template = "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
    turn = user_turn(chat)
    assert (chat.decode(turn.ids), turn.end_text, turn.end_ids) == ("[INST]", "[/INST]", (chat.end_id,))
    chat._tokenizer.chat_template = ("{% for m in messages %}<think>{{ m.content }}{% endfor %}"
                                     "{% if add_generation_prompt %}<|im_start|>{% endif %}")
    turn = user_turn(chat)
    start = chat._tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert set(turn.end_ids) == {start, chat.end_id}


@pytest.mark.parametrize("template", ["nothing", "{{ messages[0].content }} {{ messages[0].content }}",
                                      "{{ raise_exception('no') }}"])
def test_a_template_that_does_not_show_the_user_is_an_error(tiny_model, template):
    chat = load_chat(tiny_model)
    chat._tokenizer.chat_template = template
    with pytest.raises(PreconditionError, match="chat template"):
        user_turn(chat)


# --- cleaning ---------------------------------------------------------------------------------------------


def test_near_repeats_are_found_whatever_their_case_and_length():
    near = NearRepeats(["Why do cats purr, and is it always a sign of happiness?"])
    assert near.repeats_held_out("Tell me: WHY do cats purr and is it always a sign of joy? Be brief, I have a dog.")
    assert not near.repeats_held_out("Why do cats sleep, and is it always at night?")
    text = ("Write a short story about an old lighthouse keeper who counts the ships at night and never ever sleeps "
            "before the day begins")
    assert near.take(text)
    assert not near.take(text.lower() + "!")
    assert not near.take(text.replace("short", "long"))
    assert near.take(text.replace("ships", "stars").replace("old lighthouse", "young"))
    assert near.take("写一个关于老灯塔看守人的短故事") and not near.take("写一个关于老灯塔看守人的短故事。")
    assert near.take("写一首关于大海和雨的诗")


def test_minhash_finds_what_comparing_all_finds():
    rng, near, taken = random.Random(0), NearRepeats([]), []
    vocabulary = [f"w{k}" for k in range(30)]
    base = [rng.choices(vocabulary, k=20) for _ in range(20)]
    for _ in range(300):
        said = [word if rng.random() < 0.95 else rng.choice(vocabulary) for word in rng.choice(base)]
        own = {tuple(said[k:k + 3]) for k in range(18)}
        expected = all(len(own & other) < 0.7 * len(own | other) for other in taken)
        assert near.take(" ".join(said)) == expected
        taken += [own] if expected else []
    assert 20 < len(taken) < 280


@pytest.mark.parametrize(("change", "reason"), [
    ({}, ""),
    ({"ended": "length"}, "not ended in time"),
    ({"ended": "other"}, "ended by another token"),
    ({"tokens": 100}, "not ended in time"),
    ({"tokens": 3}, "too short"),
    ({"text": " \n"}, "empty"),
    ({"text": "1 + 1 = ?"}, "no words"),
    ({"text": "a broken \ufffd letter is here"}, "no words"),
    ({"control": True}, "control tokens in it"),
    ({"text": "go on and on and on and on and on and on and on and on"}, "repeats itself"),
    ({"text": "Please tell me: how many planets are there?"}, "near a held-out prompt"),
])
def test_why_an_attempt_is_left_out(change, reason):
    cleaner = Cleaner(["How many planets are there?"], (3, 50))
    attempt = Attempt(**{"number": 0, "text": "Write a poem about the sea.", "tokens": 9, "ended": "turn",
                         "control": False} | change)
    assert cleaner.usable(attempt) == (not reason)
    assert [*cleaner.reasons] == [reason] * bool(reason)
    if not reason:
        assert not cleaner.usable(attempt) and [*cleaner.reasons] == ["near an earlier prompt"]


@pytest.mark.parametrize(("choice", "stopped"), [
    ({"stop_reason": 7, "token_ids": [1, 7]}, 7), ({"matched_stop": 7}, 7), ({"matched_stop": "[/INST]"}, "[/INST]"),
    ({"stop_reason": None}, None), ({"stop_reason": [7]}, None),
])
def test_completions_of_both_engines_are_read(choice, stopped):
    body = json.dumps({"choices": [{"text": "x", "finish_reason": "stop"} | choice], "usage": {"completion_tokens": 2}})
    said = parse_completion(body)
    assert (said.stopped_at, said.ids, said.tokens, said.text) == (stopped, choice.get("token_ids"), 2, "x")


def test_only_a_number_of_prompts_is_taken():
    assert [self_prompts.count_of(text) for text in ("self:20000", "self:20_000", "self.jsonl")] == [20000, 20000, None]
    for wrong in ("self:", "self:0", "self:-3", "self:many"):
        with pytest.raises(UsageError, match="self:20000"):
            self_prompts.count_of(wrong)


# --- the stage --------------------------------------------------------------------------------------------


def says(chat, *, ids=True):
    """Return what a server says as the user: a function of the seed, one in five not usable, at odd speeds."""
    def answer(body):
        rng = random.Random(body["seed"])
        time.sleep(rng.random() * 0.01)
        text = " ".join([f"Tell {rng.randrange(10**6)} me about", rng.choice(WAYS), rng.choice(THINGS),
                         f"and {rng.randrange(10**6)}"])
        finish = "length" if rng.random() < 0.2 else "stop"
        tokens = chat.template_ids(text) + [chat.end_id] * (finish == "stop")
        return {"text": text, "finish_reason": finish, "matched_stop": chat.end_id if finish == "stop" else None,
                } | ({"token_ids": tokens} if ids else {})
    return answer


@pytest.fixture
def own(stage_01, tiny_model):
    """Run the stage with prompts of the tiny model's own."""
    return lambda stub, count, *more: stage_01(stub, "--prompts", f"self:{count}", "--model", tiny_model,
                                               "--concurrency", 8, *more)


@pytest.fixture
def stage_01(stage_01):
    return lambda stub, *arguments: stage_01(stub, *map(str, arguments))


def written(tmp_path):
    folder = tmp_path / "run/01_traces"
    return {name: (folder / name).read_bytes() for name in ("self_prompts.jsonl", "self_attempts.jsonl",
                                                            "self_prompts.json")}


def test_the_stage_invents_prompts_and_asks_them(own, chat, tmp_path):
    with Stub({"chat": chat, "says": says(chat)}) as stub:
        assert own(stub, 30) == 0
        sent = [body for body in stub.bodies if "prompt" in body]
        asked = sorted(stub.calls)
    turn = user_turn(chat)
    assert all(body["prompt"] == turn.ids and body["stop_token_ids"] == [*turn.end_ids] for body in sent)
    assert all(body["temperature"] == 1.0 and body["skip_special_tokens"] is False for body in sent)
    assert len({body["seed"] for body in sent}) == len(sent)  # none is asked for twice
    rows = lines(tmp_path, "self_prompts")
    assert len(rows) == 30 and all(row["source"] == "self" for row in rows)
    assert sorted([""] * len(sent) + [row["messages"][0]["content"] for row in rows]) == asked
    assert set(by_id(tmp_path)) == {f"{row['id']}#0" for row in rows}
    invented = manifest(tmp_path)["invented"]
    assert invented["usable"] == 30 and invented["settings"]["self_seed"] == 0
    assert invented["attempts"] == 30 + sum(each["attempts"] for each in invented["left_out"].values())
    assert list(invented["left_out"]) == ["not ended in time"]
    page = (tmp_path / "run/01_traces/data_report.html").read_text()
    assert "not ended in time" in page and "How prompts begin (" in page
    assert sum(row["messages"][0]["content"] in page for row in rows) >= 20  # the sample

    with Stub({"chat": chat, "says": says(chat)}) as stub:
        assert own(stub, 30) == 0  # complete already
        assert not stub.calls


def test_a_run_that_was_cut_short_ends_with_the_same_bytes(own, chat, tmp_path):
    with Stub({"chat": chat, "says": says(chat)}) as stub:
        assert own(stub, 40) == 0
    expected = written(tmp_path)
    (tmp_path / "run").rename(tmp_path / "whole")
    with Stub({"chat": chat, "says": says(chat), "die_after": 25}) as stub:
        assert own(stub, 40, "--retries", 0) == 4
    assert "failed in a row" in log(tmp_path)
    attempts = tmp_path / "run/01_traces/self_attempts.jsonl"
    there = {row["number"] for _, row in files.read_jsonl(attempts)}
    assert 10 <= len(there) <= 25
    with open(attempts, "ab") as file:
        file.write(b'{"number": 39, "te')
    with Stub({"chat": chat, "says": says(chat)}) as stub:
        assert own(stub, 40) == 0
        seeds = [body["seed"] for body in stub.bodies if "prompt" in body]
    assert written(tmp_path) == expected
    assert len(seeds) < 70 - len(there)  # what was there was not asked for again


def test_more_prompts_go_on_and_other_settings_are_refused(own, chat, tmp_path):
    with Stub({"chat": chat, "says": says(chat)}) as stub:
        assert own(stub, 10) == 0
        few = lines(tmp_path, "self_prompts")
        assert own(stub, 20) == 0
        assert lines(tmp_path, "self_prompts")[:10] == few and len(by_id(tmp_path)) == 20
        assert own(stub, 10) == 0 and len(lines(tmp_path, "self_prompts")) == 20
        before = written(tmp_path)
        assert own(stub, 20, "--self-temperature", "0.5") == 3
        assert "self_temperature: 1.0 → 0.5" in log(tmp_path) and written(tmp_path) == before


def test_a_damaged_attempt_is_named(own, chat, tmp_path):
    with Stub({"chat": chat, "says": says(chat), "die_after": 9}) as stub:
        assert own(stub, 20, "--retries", 0) == 4
    path = tmp_path / "run/01_traces/self_attempts.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"control":false', b'"control":0', 1))
    with Stub({"chat": chat, "says": says(chat)}) as stub:
        assert own(stub, 20) == 3
    assert "an attempt is damaged" in log(tmp_path) and "line 1" in log(tmp_path)


def test_kinds_take_turns_and_name_their_prompts(own, chat, tmp_path):
    with Stub({"chat": chat, "says": says(chat)}) as stub:
        assert own(stub, 12, "--self-openings", "'Write a poem' ''", "--self-systems", "'Be brief.'",
                   "--self-keep-system") == 0
    rows = lines(tmp_path, "self_prompts")
    assert {row["source"] for row in rows} == {"self: Be brief. | Write a poem", "self: Be brief."}
    for row in rows:
        assert row["messages"][0] == {"role": "system", "content": "Be brief."}
        assert row["messages"][1]["content"].startswith("Write a poem") == row["source"].endswith("poem")


@pytest.mark.parametrize(("answers", "told"), [
    ({"says": lambda body: {"text": "Why do cats purr, and is it always a sign of happiness?",
                            "finish_reason": "stop"}}, "near a held-out prompt"),
    ({"default": {"status": 404}}, "/v1/completions"),
])
def test_a_server_that_gives_no_prompt_stops_the_run(own, tmp_path, answers, told):
    with Stub(answers) as stub:
        assert own(stub, 10, "--retries", 0) == 4
    assert told in log(tmp_path)
    assert lines(tmp_path) == []


def test_the_dry_run_prices_it(own, chat, tmp_path, capfd):
    with Stub({"chat": chat, "says": says(chat)}) as stub:
        assert own(stub, 840, "--dry-run", "--max-tokens", 100) == 0
    told = capfd.readouterr().err
    assert "840 prompts after 5 tokens of the template: '<|im_start|>user\\n'" in told
    assert "1,000 attempts" in told and "93,000 tokens" in told and "at most 84,000 generated tokens" in told
    assert not (tmp_path / "run").exists()


def test_the_projects_own_measure_is_held_out(own, chat, tmp_path):
    first = json.loads((ROOT / "prompts/benchmark.jsonl").read_text().splitlines()[0])["messages"][0]["content"]

    def answer(body):
        said = says(chat, ids=False)(body)
        return said | ({"text": first, "finish_reason": "stop"} if body["seed"] % 3 == 0 else {})
    with Stub({"chat": chat, "says": answer}) as stub:
        assert own(stub, 10) == 0
    assert "near a held-out prompt" in manifest(tmp_path)["invented"]["left_out"]
    assert first not in (tmp_path / "run/01_traces/self_prompts.jsonl").read_text()


def test_a_prompt_set_of_the_configuration_is_held_out(own, chat, tmp_path):
    """In the form in which it is published, which no other source of prompts has."""
    question = "Janet has 16 eggs, eats three of them and sells the rest at two dollars each. What does she earn?"
    questions, configuration = tmp_path / "gsm8k.jsonl", tmp_path / "own.yaml"
    questions.write_text(json.dumps({"question": question, "answer": "26"}) + "\n")
    configuration.write_text(f"benchmark: {{prompt_sets: [gsm8k={questions}]}}")

    def answer(body):
        said = says(chat, ids=False)(body)
        return said | ({"text": question, "finish_reason": "stop"} if body["seed"] % 3 == 0 else {})
    with Stub({"chat": chat, "says": answer}) as stub:
        assert own(stub, 10, "--config", configuration) == 0
    assert "near a held-out prompt" in manifest(tmp_path)["invented"]["left_out"]
    assert "Janet" not in (tmp_path / "run/01_traces/self_prompts.jsonl").read_text()
