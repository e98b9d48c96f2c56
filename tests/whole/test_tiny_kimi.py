"""The tiny Kimi-K2.5: its tasks, its tokenizer and template, and the weights in the repository."""

import itertools
import json
import lzma
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.project import ROOT

from tiny_kimi import model, tokenizer
from tiny_kimi.tasks import KINDS, is_held_out, tasks


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The model folder, made as a user makes it."""
    out = tmp_path_factory.mktemp("tiny") / "tiny-kimi"
    subprocess.run([sys.executable, "-m", "tiny_kimi.model", "--out", out], cwd=ROOT, check=True)
    return out


@pytest.fixture(scope="module")
def codec(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_tasks_are_as_many_as_wanted_and_come_again():
    some = list(itertools.islice(tasks(5), 22))
    assert some == list(itertools.islice(tasks(5), 22)) != list(itertools.islice(tasks(6), 22))
    assert [task.kind for task in some] == 2 * [kind.__name__ for kind in KINDS]
    assert len({task.question for task in itertools.islice(tasks(5), 2000)}) > 1900


def test_training_never_sees_held_out_questions():
    assert not any(is_held_out(task.question) for task in itertools.islice(tasks(0), 2000))
    assert all(is_held_out(task.question) for task in itertools.islice(tasks(0, held_out=True), 200))
    rows = {name: [json.loads(line)["messages"][0]["content"] for line in (ROOT / "prompts" / name).open()]
            for name in ("tiny-kimi-train.jsonl", "tiny-kimi-benchmark.jsonl")}
    assert not any(map(is_held_out, rows["tiny-kimi-train.jsonl"]))
    assert all(map(is_held_out, rows["tiny-kimi-benchmark.jsonl"]))


def test_answers_are_right():
    """Worked out again, in another way, from the question alone."""
    for task in itertools.islice(tasks(1), 550):
        numbers = [int(number) for number in re.findall(r"\d+", task.question)]
        words = re.findall(r'"(.+?)"', task.question)
        if task.kind in ("addition", "subtraction", "multiplication"):
            a, b = reversed(numbers) if task.question.startswith("Take") else numbers
            results = {"addition": f"+ {b} = {a + b}", "subtraction": f"- {b} = {a - b}",
                       "multiplication": f"* {b} = {a * b}"}
            assert task.answer == f"{a} {results[task.kind]}"
        elif task.kind == "sorting":
            assert [int(number) for number in task.answer.split(", ")] == sorted(numbers)
        elif task.kind == "largest":
            assert task.answer.endswith(f" {max(numbers)}")
        elif task.kind == "progression":
            assert int(task.answer) == 2 * numbers[-1] - numbers[-2]
        elif task.kind == "reversal":
            assert task.answer.replace("-", "") == words[0][::-1]
        elif task.kind == "boxes":
            count, each, used = numbers
            assert task.answer.startswith(f"{count * each - used} ")
        elif task.kind == "story":
            gains = sum(int(n) for n in re.findall(r"(?:buys|gets) (\d+)", task.question))
            losses = sum(int(n) for n in re.findall(r"(?:gives|loses) (\d+)", task.question))
            assert f" has {numbers[0] + gains - losses} " in task.answer
        elif task.kind == "replacement":
            old, new = re.search(r"(?:every|each) (.) .*(?:with|to) (.)\.", task.question).groups()
            assert task.answer.split("-") == list(words[0].replace(old, new))
        elif task.kind == "counting":
            letter = re.search(r"(?:times does|the letter) (.) ", task.question).group(1)
            assert task.answer == f"{letter} occurs {words[0].count(letter)} times"
        else:
            pytest.fail(f"nobody checks {task.kind}")


def test_special_tokens_are_kimis_by_name(codec):
    ids = tokenizer.ids()
    assert len(codec) == tokenizer.VOCAB_SIZE == 1 + max(ids.values())
    for name, number in ids.items():
        assert codec.convert_tokens_to_ids(name) == number
    assert codec.decode([ids["<think>"], ids["</think>"]], skip_special_tokens=True) == "<think></think>"
    assert codec.decode([ids["<|im_end|>"], ids["<|media_pad|>"]], skip_special_tokens=True) == ""
    assert codec.tokenize("4821") == ["4", "8", "2", "1"]


def test_the_template_opens_a_think_block_and_drops_old_reasoning(codec):
    turn = {"role": "user", "content": "1?"}
    said = {"role": "assistant", "reasoning": "old", "content": "one"}
    function = {"name": "f", "arguments": {"a": 1}}
    call = {"role": "assistant", "reasoning": "kept", "content": None,
            "tool_calls": [{"id": "functions.f:0", "type": "function", "function": function}]}

    def render(messages, **how):
        return codec.apply_chat_template(messages, tokenize=False, **how)

    assert render([turn], add_generation_prompt=True) == tokenizer.prompt_text("1?")
    assert render([turn], add_generation_prompt=True, thinking=False).endswith("<|im_middle|><think></think>")
    assert "old" not in render([turn, said]) and "<think></think>one<|im_end|>" in render([turn, said])
    with_call = render([turn, said, turn, call, {"role": "tool", "tool_call_id": "functions.f:0", "content": "2"}],
                       add_generation_prompt=True)
    assert "old" not in with_call
    assert ('<think>kept</think><|tool_calls_section_begin|><|tool_call_begin|>functions.f:0'
            '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>') in with_call
    assert with_call.endswith("<|im_assistant|>assistant<|im_middle|><think>")


def test_the_folder_is_kimi_k25_in_everything_but_size(folder):
    from eagle3.drafter import verifier

    facts = verifier.read(folder)
    text = facts.config
    assert facts.architecture == "KimiK25ForConditionalGeneration" and facts.mla
    ranks = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    assert [text[name] for name in ranks] == [512, 64, 128, 128]
    assert (text["topk_method"], text["scoring_func"], text["n_shared_experts"]) == ("noaux_tc", "sigmoid", 1)
    assert facts.num_layers >= 8 and text["first_k_dense_replace"] == 1
    assert facts.layers([]) == [2, 4, 5, 7]
    shapes = [entry.shape for entry in _entries(folder / "model.safetensors")]
    parameters = sum(_product(shape) for shape in shapes)
    assert 5e6 < parameters < 30e6
    assert model.WEIGHTS.stat().st_size < 5e6


def _entries(path):
    from eagle3.common import tensor_files

    return tensor_files.read_header(path).values()


def _product(shape) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def test_packing_keeps_six_bits_of_matrices_and_all_of_vectors(tmp_path):
    import torch

    matrix = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    tensors = {"a": matrix, "norm": torch.tensor([1.0, 0.5, 2.0])}
    model.pack(tensors, tmp_path / "w.xz")
    read = model.unpack(tmp_path / "w.xz")
    step = matrix.abs().amax(-1, keepdim=True) / 31
    assert torch.equal(read["norm"], tensors["norm"])
    assert ((read["a"] - matrix).abs() <= 0.52 * step).all() and not torch.equal(read["a"], matrix)
    assert lzma.decompress((tmp_path / "w.xz").read_bytes())


def test_it_reasons_and_answers(folder, codec, tmp_path):
    """A few held-out tasks in transformers; the end-to-end run on the engine asks many more."""
    import torch
    from transformers import AutoModelForCausalLM

    text = tmp_path / "text"
    model.write(text, text_only=True)
    network = AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32).eval()
    asked = random.Random(0).sample(list(itertools.islice(tasks(3, held_out=True), 110)), 4)
    right = 0
    for task in asked:
        given = codec(tokenizer.prompt_text(task.question), return_tensors="pt", add_special_tokens=False)
        ids = network.generate(**given, max_new_tokens=200, do_sample=False)[0, given["input_ids"].shape[1] :]
        reasoning, tag, answer = codec.decode(ids).partition("</think>")
        assert tag and len(reasoning) > 10
        right += answer == task.answer + "<|im_end|>"
    assert right >= 3
