"""The benchmark's report: tables, plots and page, from results.json alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import HOSTILE, SHOWN, block_matplotlib, hides, hostile, is_harmless, tables_scroll
from support.project import ROOT

from eagle3 import report as report_command
from eagle3.benchmark import report
from eagle3.common import files, pages


def hand_made_results():
    times = {"mean": 1.25, "median": 1.0, "p95": 2.0}
    shared = {"requests": 4, "seconds": 5.0, "output_tokens": 400, "latency_s": times, "s_per_token": times}
    return {
        "schema_version": 1,
        "model": {"path": "/models/<verifier>", "identity": "a" * 64},
        "drafter": {"path": "/drafters/d", "identity": "b" * 64},
        "engine": {"kind": "vllm", "version": "0.32.0", "attached": False},
        "settings": {"prompts": 4, "max_tokens": 100, "temperature": 0.0, "warmup_prompts": 2, "gpus": []},
        "runs": [
            {"name": "baseline_c1", "draft_tokens": 0, "concurrency": 1, "tokens_per_s": 80.0, "acceptance": None}
            | shared,
            {"name": "drafter-2_c1", "draft_tokens": 2, "concurrency": 1, "tokens_per_s": 120.0, "speedup": 1.5,
             "acceptance": {"length": 1.987, "by_position": [0.654, 0.333]}, "difference": -0.025,
             "predicted": {"length": 1.962, "by_position": [0.641, 0.321], "rounds": 9},
             "lossless": {"replies": 4, "identical": 3, "first_difference": {"x": 7}}} | shared,
            {"name": "drafter-2_c8", "draft_tokens": 2, "concurrency": 8, "tokens_per_s": 500.0, "speedup": 1.1,
             "acceptance": None} | shared,
        ],
    }  # fmt: skip


def render_again(directory, **env):
    command = [sys.executable, "-m", "eagle3.report", str(directory)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | env)


def test_report_renders_from_results_alone(tmp_path):
    files.write_json(tmp_path / "results.json", hand_made_results())
    result = render_again(tmp_path)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "report.html").read_text()
    for text in ("1.987", "0.654", "1.962", "0.321", "-0.025", "1.50×", "3 of 4", "80.0", "unavailable"):
        assert text in page and text in result.stdout, text
    assert "/models/&lt;verifier&gt;" in page and "<verifier>" not in page
    assert "://" not in page and "<script" not in page and page.count("data:image/png;base64,") == 2
    for name in ("acceptance.png", "throughput.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def wide_results():
    """What a whole matrix gives at its widest: 16 draft tokens, long names, large figures, spreads."""
    four = {"mean": 12.0, "median": 12.345, "p95": 23.456, "p99": 123.456}
    each = {"latency_s": four, "s_per_token": four, "first_token_s": four, "tokens_per_chunk": 3.21, "prompts": "p",
            "between_tokens_s": {name: value / 100 for name, value in four.items()},
            "between_chunks_s": {name: value / 10 for name, value in four.items()},
            "tokens_per_s": 12345.6, "tokens_per_s_per_user": 123.4, "joules_per_token": 12.34, "requests": 500,
            "measurements": ["a", "b"], "temperature": 0.65, "concurrency": 256,
            "spread": {"tokens_per_s": [12000.1, 13000.2], "tokens_per_s_per_user": [111.1, 133.3],
                       "joules_per_token": [11.11, 13.33], "speedup": [1.111, 2.222]}}
    shares = [0.9 ** k for k in range(1, 17)]
    acceptance = {"length": 5.432, "error": 0.012, "by_position": shares, "conditional": [0.9] * 15 + [None],
                  "drafts": 1234567.0, "used": 0.34}
    runs = [{"server": "baseline", "draft_tokens": 0} | each, {"server": "baseline-again", "draft_tokens": 0} | each]
    runs += [{"server": server, "draft_tokens": 16, "acceptance": acceptance, "speedup": 1.5, "difference": -0.012,
              "predicted": {"length": 5.42, "by_position": shares, "rounds": 1}, "lossless": {
                  "replies": 500, "identical": 499, "margins": {"a": {"within_noise": True}}}}
             | each | {"prompts": "a-very-long-name-of-a-prompt-set", "temperature": temperature}
             for server in ("drafter", "control") for temperature in (0.0, 0.65)]
    return hand_made_results() | {
        "schema_version": 2, "runs": runs, "settings": {"max_tokens": 100, "gpus": []},
        "sets": [{"name": "gsm8k", "about": "word problems", "prompts": 1319, "path": "/data/" + 30 * "deep/"}],
        "drift": [{"prompts": "gsm8k", "temperature": 0.0, "concurrency": 8, "start": 100.0, "end": 93.4,
                   "change": -0.066}],
        "control": {"answer": "training", "text": "only ours is low"}}


def test_tables_of_a_whole_matrix_fit_a_terminal(tmp_path):
    files.write_json(tmp_path / "results.json", wide_results())
    result = render_again(tmp_path, PYTHONPATH=block_matplotlib(tmp_path))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 120
    cut = [line for line in lines if line.endswith("…")]
    assert len(cut) == 1 and "deep/" in cut[0]  # the path of a file, which the page has whole
    for text in ("5.432 ±0.012", "1234567", "34%", "499 of 500, 1/1 noise", "12346 [12000–13000]", "1.50× [1.11–2.22]",
                 "12.3 [11.1–13.3]", "90 81 73", "12.3/23.5/123", "123/235/1235", "/2346/12346", "a-very-long-n…",
                 "-6.6%", "Control: only ours is low", "alone, end", "control 16"):
        assert text in result.stdout, text
        assert text in is_harmless(tmp_path / "report.html").text, text


def test_report_without_matplotlib_keeps_the_tables(tmp_path):
    files.write_json(tmp_path / "results.json", hand_made_results())
    result = render_again(tmp_path, PYTHONPATH=block_matplotlib(tmp_path))
    assert result.returncode == 0 and result.stderr.count("matplotlib is not installed") == 1
    page = (tmp_path / "report.html").read_text()
    assert "1.987" in page and "data:image" not in page and not list(tmp_path.glob("*.png"))


def test_report_refuses_what_it_does_not_know(tmp_path):
    assert render_again(tmp_path).returncode == 3
    files.write_json(tmp_path / "results.json", hand_made_results() | {"schema_version": 99})
    result = render_again(tmp_path)
    assert result.returncode == 3 and "schema version" in result.stderr and not (tmp_path / "report.html").exists()
    with pytest.raises(SystemExit) as wrong:
        report_command.main([])
    assert wrong.value.code == 2


def test_a_text_in_any_field_stays_text_on_the_page_and_in_the_terminal(tmp_path):
    results = hand_made_results()
    results["model"]["path"] = hostile("model")
    results["drafter"] = {"path": hostile("drafter"), "identity": f"id{HOSTILE}"}
    results["engine"] |= {"kind": hostile("kind"), "version": hostile("version")}
    results["settings"] |= {"gpus": [hostile("gpu 0"), hostile("gpu 1")], "prompts": hostile("prompts"),
                            "max_tokens": hostile("most")}
    results["runs"][1]["lossless"] = {"identical": hostile("same"), "replies": hostile("of")}
    files.write_json(tmp_path / "results.json", results)
    rendered = render_again(tmp_path)
    assert rendered.returncode == 0, rendered.stderr
    page = is_harmless(tmp_path / "report.html")
    for name in ("model", "drafter", "kind", "version", "gpu 0", "gpu 1", "prompts", "most", "same", "of"):
        assert name + SHOWN in page.text, name
    assert f"(identity id{SHOWN[:10]})" in page.text
    cut = f"same{SHOWN} of of{SHOWN}"[:40]  # a row of a terminal ends at its width
    assert cut in rendered.stdout and not any(map(hides, rendered.stdout))
    assert max(map(len, rendered.stdout.splitlines())) <= 120


def test_a_row_of_a_terminal_table_is_one_line():
    assert pages.text_table(["a", "b"], [["x\ny\tz", "1"], ["\x1b", ""]]) == "a      b\nx y z  1\n·"


def test_a_table_wider_than_the_page_scrolls(tmp_path):
    files.write_json(tmp_path / "results.json", hand_made_results())
    report.render(tmp_path)
    assert tables_scroll(is_harmless(tmp_path / "report.html"))


def test_plots_leave_matplotlib_as_it_was(tmp_path):
    program = ("import sys; from pathlib import Path; from eagle3.benchmark import report\n"
               f"print(*report.render(Path({str(tmp_path)!r}))); assert 'matplotlib.pyplot' not in sys.modules")
    files.write_json(tmp_path / "results.json", hand_made_results())
    made = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [Path(name).name for name in made.split()] == ["report.html", "acceptance.png", "throughput.png"]
