"""The doctor as a command: what it says, and its exit codes."""

import json
import os
import subprocess
import sys

from support.examined import options
from support.project import ROOT

from eagle3 import doctor


def test_a_missing_engine_is_a_failure_with_its_interpreter():
    lines = [line for line in doctor.examine(options(engine__kind="sglang")) if line.name == "engine"]
    assert [line.status for line in lines] == ["fail"] and sys.executable in lines[0].found


def test_a_sound_drafter_is_ok(drafter, tiny_model):
    given = options(model__path=str(tiny_model), doctor__drafter=str(drafter))
    found = [line for line in doctor.examine(given) if line.name.startswith("drafter")]
    assert len(found) > 20 and {line.status for line in found} == {"ok"}


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "eagle3.doctor", *map(str, arguments)], capture_output=True, text=True,
                          cwd=ROOT, env=os.environ)


def test_the_command_says_it_line_by_line_and_as_json(tiny_model):
    as_text, as_json = run("--model", tiny_model), run("--model", tiny_model, "--json")
    lines = json.loads(as_json.stdout)["lines"]
    assert {"model", "weights", "tokenizer", "engine", "disk", "clock"} <= {line["check"] for line in lines}
    said = [line for line in as_text.stdout.splitlines() if not line.startswith(" ")]  # what to do is indented
    heads = [f"{line['level']:<5} {line['check']}: " for line in lines]
    assert all(line.startswith(head) for line, head in zip(said, heads, strict=True)), as_text.stdout
    worst = {line["level"] for line in lines}
    assert as_text.returncode == as_json.returncode == (3 if "fail" in worst else 0)


def test_wrong_options_are_exit_2():
    result = run("--modle", "x")
    assert result.returncode == 2 and "--model" in result.stderr


def test_a_failure_is_exit_3(tmp_path):
    result = run("--model", tmp_path / "nowhere")
    assert result.returncode == 3 and "→" in result.stdout
