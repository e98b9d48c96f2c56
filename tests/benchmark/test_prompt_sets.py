"""Prompt sets: files as they are published, and what is no such file."""

import gzip
import json

import pytest

from eagle3.benchmark import prompt_sets
from eagle3.common.errors import PreconditionError, UsageError

MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write a letter.", "Shorten it."]}
GSM8K = {"question": "Ann has 3 pens and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": "def f(x):\n    \"\"\"Double x.\"\"\"\n", "entry_point": "f",
             "canonical_solution": "    return 2 * x\n", "test": "def check(c): ..."}
MATH = {"problem": "What is $1+1$?", "solution": "It is $2$.", "answer": "2", "subject": "Algebra", "level": 1,
        "unique_id": "test/algebra/1.json"}
SPEED = {"question_id": "a1", "category": "coding", "sub_category": "x", "source": "y", "src_id": "z", "difficulty": "",
         "multiturn": True}
TURNS = {"turns": ["First.", "Second."]}
MESSAGES = {"messages": [{"role": "user", "content": turn} for turn in TURNS["turns"]]}


@pytest.mark.parametrize(("name", "row", "identity", "asked"), [
    ("mt-bench", MT_BENCH, "81#0", "Write a letter."),
    ("gsm8k", GSM8K, None, GSM8K["question"]),
    ("humaneval", HUMANEVAL, "HumanEval/0#0", HUMANEVAL["prompt"]),
    ("math-500", MATH, "test/algebra/1.json#0", "What is $1+1$?"),
    ("speed-bench", SPEED | TURNS, "a1#0", "First."),
    ("speed-bench", SPEED | MESSAGES, "a1#0", "First."),
    ("mine", {"id": "q", "prompt": "Hi"}, "q#0", "Hi"),
])
def test_a_published_file_is_read_as_it_is(tmp_path, name, row, identity, asked):
    path = tmp_path / "file.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(row) + "\n")
    found = prompt_sets.read(name, path)
    (prompt,) = found.prompts
    assert prompt.messages == [{"role": "user", "content": asked}] and identity in (prompt.id, None)
    assert found.to_dict()["prompts"] == 1 and found.to_dict()["about"]


def test_a_limit_takes_the_first_and_is_another_identity(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(GSM8K | {"question": f"What is {k}?"}) + "\n" for k in range(5)))
    whole, some = prompt_sets.read("gsm8k", path), prompt_sets.read("gsm8k", path, 2)
    assert [p.messages[0]["content"] for p in some.prompts] == ["What is 0?", "What is 1?"]
    assert len(whole.prompts) == 5 and whole.identity != some.identity


@pytest.mark.parametrize(("name", "row", "words"), [
    ("gsm8k", {"problem": "x"}, "no question, answer"),
    ("humaneval", GSM8K, "no task_id"),
    ("speed-bench", SPEED | {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]},
     "not prepared"),
    ("mt-bench", MT_BENCH | {"turns": [3]}, "turns"),
])
def test_a_file_of_something_else_is_refused_with_its_place(tmp_path, name, row, words):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(PreconditionError, match=words) as error:
        prompt_sets.read(name, path)
    assert "line 1" in str(error.value) and error.value.parts["fix"]


def test_sets_are_named():
    found = prompt_sets.named("data/held_out.jsonl.gz", ["gsm8k=a=b.jsonl", "my-2=c"])
    assert [(name, str(path)) for name, path in found.items()] == [
        ("held_out", "data/held_out.jsonl.gz"), ("gsm8k", "a=b.jsonl"), ("my-2", "c")]
    for sets in (["gsm8k"], ["=x"], ["a/b=x"], ["x="], ["a=1", "a=2"], ["é=x"]):
        with pytest.raises(UsageError) as error:
            prompt_sets.named("", sets)
        assert error.value.parts["fix"]
    with pytest.raises(UsageError, match="no prompts"):
        prompt_sets.named("", [])
