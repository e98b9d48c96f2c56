"""The benchmark's report: tables, plots and page, from results.json alone."""

import subprocess
import sys

import pytest
from support.bench_results import hand_made_results, wide_results
from support.pages import HOSTILE, SHOWN, hides, hostile, is_harmless, tables_scroll
from support.project import ROOT

from eagle3 import report as report_command
from eagle3.benchmark import report
from eagle3.common import files, pages


def render_again(*arguments):
    command = [sys.executable, "-m", "eagle3.report", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_report_renders_from_results_alone(tmp_path):
    files.write_json(tmp_path / "results.json", hand_made_results())
    result = render_again(tmp_path)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "report.html").read_text()
    for text in ("1.987", "0.654", "1.962", "0.321", "-0.025", "1.50×", "3 of 4", "80.0", "unavailable"):
        assert text in page and text in result.stdout, text
    assert "/models/&lt;verifier&gt;" in page and "<verifier>" not in page
    assert "://" not in page and "<script" not in page and page.count("<figure>") == page.count('role="img"') == 6
    assert render_again(tmp_path).returncode == 0 and (tmp_path / "report.html").read_text() == page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "results.json"]


def test_tables_of_a_whole_matrix_fit_a_terminal(tmp_path):
    files.write_json(tmp_path / "results.json", wide_results())
    result = render_again(tmp_path)
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
