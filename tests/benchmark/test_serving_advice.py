"""What a report says of predictions that are off and of what to serve, from a benchmark's runs."""

import json
import shlex

import pytest

from eagle3.benchmark import cost_model, prediction_tables, report, serving_advice
from eagle3.common import files
from eagle3.engines import speculation

LENGTHS = {1: 1.7, 3: 2.3, 5: 2.5}
MACHINE = cost_model.CostModel(0.01, 1e-5, 4e-4, 0.0, 5e-4, 1e-5, 0.0, knee=32)
BY_COUNT = {str(k): {"length": 1 + sum(0.7**j for j in range(1, k + 1)), "rounds": 50, "standard_error": 0.05}
            for k in range(1, 17)}


def runs(kind="vllm", version="0.32.0", difference=0.01, loads=(1, 4, 16, 64), temperature=0.0):
    found = []
    for load in loads:
        for count, length in {0: 1.0, **LENGTHS}.items():
            rate = MACHINE.rate(count, load, length)
            run = {"name": f"drafter-{count}_c{load}" if count else f"baseline_c{load}", "draft_tokens": count,
                   "concurrency": load, "tokens_per_s": rate, "acceptance": None, "temperature": temperature,
                   "server": "drafter" if count else "baseline", "prompts": "prompts",
                   "engine": {"kind": kind, "version": version, "attached": False},
                   "latency_s": dict.fromkeys(("mean", "median", "p95"), 1.0),
                   "s_per_token": dict.fromkeys(("mean", "median", "p95"), 1.0)}
            if count:
                run["acceptance"] = {"length": length, "by_position": [0.5] * count}
                run["predicted"] = {"length": length + difference, "by_position": [0.5] * count, "rounds": 50,
                                    "standard_error": 0.05, "by_draft_tokens": BY_COUNT,
                                    "by_context": {"0-127": BY_COUNT}, "by_source": {"chat": BY_COUNT}}
                run["difference"] = difference
            found.append(run)
    return found


def results(**how):
    made = runs(**how)
    return {"schema_version": 1, "model": {"path": "/m", "identity": "a"}, "engine": made[0]["engine"],
            "drafter": {"path": "/d", "identity": "b"}, "runs": made,
            "settings": {"prompts": 4, "max_tokens": 9, "temperature": 0.0, "warmup_prompts": 2, "gpus": []},
            "serving": serving_advice.advise(made, model="/m", drafter="/d")}


def test_the_line_serves_what_the_model_found_with_a_schedule_where_it_pays():
    answer = results()["serving"][0]
    best = {row["concurrency"]: row["draft_tokens"] for row in answer["by_concurrency"]}
    assert best[1] > best[64] and answer["schedule_pays"] and answer["scheduled"]
    words = shlex.split(answer["line"])
    assert words[:3] == ["vllm", "serve", "/m"]
    given = json.loads(words[words.index("--speculative-config") + 1])
    schedule = given["num_speculative_tokens_per_batch_size"]
    assert (given["method"], given["model"]) == ("eagle3", "/d") and schedule[0][0] == 1 and schedule[-1][1] == 64
    assert given["num_speculative_tokens"] == max(count for _, _, count in schedule)
    old = results(version="0.22.0")["serving"][0]
    assert not old["scheduled"] and "per_batch_size" not in old["line"]
    given = json.loads(shlex.split(old["line"])[-1])
    assert given["num_speculative_tokens"] == old["draft_tokens"]


def test_sglang_gets_its_own_words_and_no_schedule():
    answer = results(kind="sglang", version="0.5.17")["serving"][0]
    words = shlex.split(answer["line"])
    steps = int(words[words.index("--speculative-num-steps") + 1])
    assert words[words.index("--speculative-eagle-topk") + 1] == "1" and steps == answer["draft_tokens"]
    assert words[words.index("--speculative-num-draft-tokens") + 1] == str(steps + 1)
    assert speculation.serve_line("sglang", "/m", "/d", 0) == "python -m sglang.launch_server --model-path /m"
    assert speculation.serve_line("vllm", "/m", "/d", 0, [[1, 8, 0]]) == "vllm serve /m"


def test_conditions_are_answered_one_by_one_and_only_with_a_baseline():
    made = runs() + [run for run in runs(temperature=1.0) if run["draft_tokens"]]
    answers = serving_advice.advise(made, model="/m", drafter="/d")
    assert [answer["condition"] for answer in answers] == [{"temperature": 0.0}]
    assert [answer["condition"] for answer in serving_advice.advise(runs(), model="/m", drafter="/d")] == [{}]
    assert serving_advice.advise([run for run in runs() if not run["draft_tokens"]], model="/m", drafter="/d") == []


@pytest.mark.parametrize(("difference", "far"), [(0.031, True), (-0.031, True), (0.03, False), (None, False)])
def test_a_prediction_that_is_off_is_marked_and_the_doctor_named(tmp_path, difference, far):
    made = results()
    made["runs"][1]["difference"] = difference
    files.write_json(tmp_path / "results.json", made)
    report.render(tmp_path)
    for text in ((tmp_path / "report.html").read_text(), report.text_table(report.load(tmp_path))):
        assert (" ←" in text) == (f"python -m eagle3.doctor --explain {tmp_path}" in text) == far
        assert ("drafter-1_c1 (" in " ".join(text.split())) == far


@pytest.mark.parametrize(("expected", "strange"), [(2.3, False), (2.5, True), (1.9, True)])
def test_replies_that_the_verifier_would_not_have_given_are_said(expected, strange):
    made = results()
    made["runs"][2]["predicted"] |= {"length": 2.3, "expected": {"length": expected, "standard_error": 0.01}}
    said = [line for line in prediction_tables.remarks(made) if "does not draw from the verifier" in line]
    assert bool(said) == strange and (not said or "drafter-3_c1 (2.300 by its tokens" in said[0])


def test_predictions_for_other_settings_and_what_to_serve_are_on_the_page(tmp_path):
    made = results()
    made["runs"][2]["not_predicted"] = "it accepts by lot"
    files.write_json(tmp_path / "results.json", made)
    report.render(tmp_path)
    page, text = (tmp_path / "report.html").read_text(), report.text_table(report.load(tmp_path))
    for words in ("1.700 ± 0.050", "Which setting to serve", "context of tokens 0-127", "chat", "Serve with"):
        assert words in page
    for shown in (page, text):
        assert "it accepts by lot" in " ".join(shown.split()) and "the cost model is" in " ".join(shown.split())
    head, rows = prediction_tables.lengths(made)
    assert len(rows) == 16 and len(head) == len(rows[0])
