"""Two benchmarks side by side: only the drafter may differ."""

import copy

import pytest
from support.bench_results import hand_made_results, wide_results
from support.pages import is_harmless

from eagle3 import report as command
from eagle3.common import files

MADE = {"command": "python 06_benchmark.py", "options": {}, "versions": {"python": "3.12"}, "gpus": [],
        "git_commit": None, "processor": "cpu x", "deciding": {"benchmark.serve_args": [], "engine.args": []}}


def put(folder, results):
    folder.mkdir()
    files.write_json(folder / "results.json", results)
    return str(folder)


@pytest.fixture
def pair(tmp_path):
    """(folder of A, results of B, a function that compares A with B as they are)."""
    one = hand_made_results() | {"made_with": MADE}
    other = copy.deepcopy(one)
    other["drafter"] = {"path": "/drafters/<other>", "identity": "c" * 64}
    first = put(tmp_path / "a", one)

    def compare():
        return command.main(["--compare", first, put(tmp_path / "b", other)])

    return tmp_path, other, compare


def test_two_drafters_are_put_side_by_side(pair, capsys):
    here, other, compare = pair
    other["runs"][1] |= {"speedup": 1.8, "tokens_per_s": 144.0}
    assert compare() == 0
    told = capsys.readouterr().out
    assert "B is ahead of A in 1 of 2 common measurements; its speed-up differs by +0.0% to +20.0%." in told
    page = is_harmless(here / "b/comparison.html")
    for text in ("1.50×", "1.80×", "+20.0%", "144.0", "/drafters/<other>"):
        assert text in told and text in page.text, text
    assert max(map(len, told.splitlines())) <= 120


def test_the_widest_fits_a_terminal(tmp_path, capsys):
    first, second = (put(tmp_path / name, wide_results()) for name in "ab")
    assert command.main(["--compare", first, second]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120 and not [line for line in lines if line.endswith("…")]


@pytest.mark.parametrize(("change", "name", "expected", "found"), [
    (lambda r: r["model"].update(identity="f" * 64), "verifier", "a" * 12, "f" * 12),
    (lambda r: r["engine"].update(version="0.33.0"), "engine", "vllm 0.32.0", "vllm 0.33.0"),
    (lambda r: r["engine"].update(kind="sglang"), "engine", "vllm 0.32.0", "sglang 0.32.0"),
    (lambda r: r["engine"].update(attached=True), "server", "started by the stage", "attached"),
    (lambda r: r["settings"].update(max_tokens=7), "max tokens", "100", "7"),
    (lambda r: r["settings"].update(gpus=["H200"]), "hardware", "CPU", "H200"),
    (lambda r: r["settings"].update(prompts=9), "prompts prompts", "4 prompts", "9 prompts"),
    (lambda r: r["settings"].update(temperature=0.7), "temperatures", "0", "0.7"),
    (lambda r: r["settings"].update(warmup_prompts=0), "warm-up prompts", "2", "0"),
    (lambda r: r.update(made_with=MADE | {"processor": "cpu y"}), "processor", "cpu x", "cpu y"),
    (lambda r: r.update(made_with=MADE | {"deciding": MADE["deciding"] | {"engine.args": ["--x"]}}), "engine.args",
     "[]", "['--x']"),
])
def test_unequal_conditions_are_refused_by_name(pair, capsys, change, name, expected, found):
    here, other, compare = pair
    change(other)
    assert compare() == 3 and not (here / "b/comparison.html").exists()
    error = capsys.readouterr().err
    assert "not measured under equal conditions" in error
    assert f"{name}: {expected}" in error.partition("found:")[0] and f"{name}: {found}" in error.partition("found:")[2]


def test_all_unequal_conditions_are_named_at_once(pair, capsys):
    _, other, compare = pair
    other["settings"] |= {"max_tokens": 7, "gpus": ["H200"]}
    assert compare() == 3
    error = capsys.readouterr().err
    assert "conditions: hardware, max tokens" in error


def test_what_an_earlier_version_did_not_record_is_not_compared_and_said(pair, capsys):
    _, other, compare = pair
    del other["made_with"]
    assert compare() == 0
    assert "not compared: benchmark.serve_args, engine.args, processor" in capsys.readouterr().out


def test_another_machine_shows_in_the_verifier_alone(pair, capsys):
    _, other, compare = pair
    other["runs"][0]["tokens_per_s"] = 60.0
    assert compare() == 0
    assert "The verifier alone gave -25.0% tokens/s in B" in capsys.readouterr().out


def test_without_a_common_load_nothing_is_compared(pair, capsys):
    _, other, compare = pair
    for run in other["runs"]:
        run["concurrency"] += 100
    assert compare() == 3
    assert "no load in common" in capsys.readouterr().err
