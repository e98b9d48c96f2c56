"""The data report of stage 01: its numbers, its page, and that texts of unknown origin do no harm."""

import json
import random
import subprocess
import sys

import pytest
from support.pages import SHOWN, hides, hostile, is_harmless, tables_scroll
from support.project import ROOT
from support.traces import put, row

from eagle3 import datareport
from eagle3.common import files
from eagle3.common.errors import PreconditionError
from eagle3.traces import data_report, trace_statistics

CLOSING, END = 7, 2


def test_counts_and_token_statistics_by_source(tmp_path):
    put(tmp_path, [
        row("a", 10), row("b", 20, finish_reason="length"), row("c", 40, source="code", prompt_token_ids=[1] * 9),
        row("d", 30, reasoning="r" * 30, content="c" * 10),
    ], skipped=[
        {"id": "s", "reason": "empty", "source": "code"},
        {"id": "t", "reason": "template", "source": "chat"},
        {"id": "t", "reason": "truncated", "source": "chat", "tokens": 64},  # the latest of an id counts
        {"id": "a", "reason": "empty", "source": "chat"},  # was asked again and has a trace now
    ], failures=[{"id": "f", "reason": "HTTP 400"}])
    report = data_report.write(tmp_path)
    total, chat, code = report["total"], report["sources"]["chat"], report["sources"]["code"]
    assert (total["traces"], chat["traces"], code["traces"]) == (4, 3, 1)
    assert total["skipped"] == {"empty": 1, "truncated": 1}
    assert (chat["skipped"], code["skipped"]) == ({"truncated": 1}, {"empty": 1})
    assert total["tokens_of_skipped"] == 64
    assert total["failed"] == report["sources"]["(not recorded)"]["failed"] == {"HTTP 400": 1}
    assert (total["truncated"], total["with_reasoning"]) == (1, 1)
    assert total["finish_reasons"] == {"stop": 3, "length": 1}
    assert total["tokens"]["completion"] == {"count": 4, "sum": 100, "mean": 25.0, "median": 25.0, "p90": 37.0,
                                             "p99": 39.7, "max": 40}
    assert total["tokens"]["prompt"]["sum"] == 18
    assert code["tokens"]["prompt"]["max"] == 9
    assert code["tokens"]["reasoning"] == {"count": 0}
    assert [entry["id"] for entry in report["longest"]] == ["c", "d", "b", "a"]
    assert [entry["id"] for entry in report["shortest"]] == ["a", "b", "d", "c"]
    assert sum(sum(counts) for counts in report["histograms"]["content"]["counts"].values()) == 4
    assert set(data_report.outputs(tmp_path)) == {"data_report.json", "data_report.html"}


def test_reasoning_is_split_at_the_closing_tag_or_estimated(tmp_path):
    reasoned = row("a", [50, 51, 52, CLOSING, 60, 61, CLOSING, 62, 63, END], reasoning="xxx", content="y")
    without_tag = row("b", [50] * 8, reasoning="xxx", content="y")
    assert trace_statistics.reasoning_tokens(reasoned, CLOSING) == (4, False)
    assert trace_statistics.reasoning_tokens(without_tag, CLOSING) == (6, True)
    assert trace_statistics.reasoning_tokens(row("c", 10), None) == (0, False)
    assert trace_statistics.reasoning_tokens(row("d", [50] * 8, reasoning="xxx", content=None), None) == (8, True)
    put(tmp_path, [reasoned, without_tag])
    exact, guessed = data_report.write(tmp_path, CLOSING), data_report.write(tmp_path)
    assert (exact["estimated_reasoning"], guessed["estimated_reasoning"]) == (1, 2)
    assert exact["total"]["tokens"]["reasoning"]["sum"] == 10
    assert exact["total"]["tokens"]["content"]["sum"] == 8
    assert "an estimate" in (tmp_path / "data_report.html").read_text()


def test_repeated_tokens_are_those_whose_last_16_stood_there_before():
    def by_hand(ids: list[int]) -> int:
        seen, count = set(), 0
        for end in range(16, len(ids) + 1):
            window = tuple(ids[end - 16 : end])
            count += window in seen
            seen.add(window)
        return count

    chance = random.Random(0)
    for length in (1, 16, 17, 40, 300):
        for variety in (1, 2, 1000):
            ids = [chance.randrange(variety) for _ in range(length)]
            assert trace_statistics.repeated_tokens(ids) == by_hand(ids)
    loop = list(range(100)) + [5, 6, 7] * 100
    assert trace_statistics.repeated_tokens(loop) == by_hand(loop) == 300 - 15 - 3
    assert trace_statistics.repeated_tokens(list(range(150_000, 152_000))) == 0


def test_loops_equal_replies_and_settings_are_found(tmp_path):
    named = {"sampling": {"name": "hot", "temperature": 1.0}}
    put(tmp_path, [
        row("loop", [5, 6] * 200), row("b", 50, content="Sorry."), row("c", 60, content="Sorry.", **named),
        row("d", 70, content=" ", token_source="template"), row("e", 80, content=" ", **named),
        row("f", 10, sampling={"temperature": 0.0, "max_tokens": 12, "seed": 9}),
    ])
    report = data_report.write(tmp_path)
    assert report["total"]["loops"] == 1
    assert report["most_repeated"][0]["id"] == "loop"
    assert report["total"]["repeated_share"] == pytest.approx((400 - 17) / (400 + 50 + 60 + 70 + 80 + 10))
    assert report["duplicates"]["replies"] == 1
    (equal,) = report["duplicates"]["largest"]
    assert (equal["count"], equal["content"]) == (2, "Sorry.")
    assert equal["id"] in "bc"
    assert {entry["setting"]: entry["traces"] for entry in report["settings"]} == {'{"temperature": 0.0}': 4, "hot": 2}
    assert report["token_sources"] == {"server": {"traces": 5, "tokens": 600}, "template": {"traces": 1, "tokens": 70}}
    assert ">Sampling<" in (tmp_path / "data_report.html").read_text()


def test_a_text_in_any_field_stays_text_on_the_page_and_in_the_terminal(tmp_path, capsys):
    asked = {"messages": [{"role": "user", "content": hostile("asked")}]}
    put(tmp_path, [
        row(hostile("first"), 30, source=hostile("source"), model=hostile("model"), prompt=asked,
            content=hostile("reply"), reasoning=hostile("reasoning") * 20, finish_reason=hostile("ended"),
            token_source=hostile("origin"), sampling={"name": hostile("setting")}),
        row(hostile("second"), 40, content=hostile("reply")), row("c", 3000, source="_hidden", prompt={}),
    ], skipped=[{"id": "s", "reason": hostile("skipped"), "source": hostile("lost")}],
        failures=[{"id": "f", "reason": hostile("failed")}])
    assert datareport.main([str(tmp_path)]) == 0
    page = is_harmless(tmp_path / "data_report.html")
    for name in ("model", "source", "lost", "ended", "skipped", "failed", "setting", "origin", "first", "second",
                 "asked", "reasoning", "reply"):
        assert name + SHOWN in page.text, name
    output = capsys.readouterr().out
    assert "source" + SHOWN in output and not any(map(hides, output))


def test_the_page_comes_from_the_json_alone(tmp_path):
    put(tmp_path, [row("a", 30, content="日本 reply " * 100), row("b", 3000, source="_hidden")])
    data_report.write(tmp_path)
    page = (tmp_path / "data_report.html").read_text(encoding="utf-8")
    assert "日本" in page and "characters…" in page and page.count("<figure>") == 3
    assert tables_scroll(is_harmless(tmp_path / "data_report.html"))
    assert json.loads((tmp_path / "data_report.json").read_text())["histograms"]["content"]["log"]
    for path in tmp_path.iterdir():
        if path.name != "data_report.json":
            path.unlink()
    assert datareport.main([str(tmp_path), "--render"]) == 0
    assert (tmp_path / "data_report.html").read_text(encoding="utf-8") == page


def test_the_order_of_the_rows_changes_nothing(tmp_path):
    rows = [row(f"id-{n}", 10 + n % 5, source="ab"[n % 2], content=f"{n % 3}") for n in range(40)]
    one, other = (data_report.write(put(tmp_path / name, order)) for name, order in
                  (("a", rows), ("b", rows[::-1])))
    assert one | {"sources": 0, "histograms": 0} == other | {"sources": 0, "histograms": 0}
    assert one["sources"] == other["sources"]
    assert one["histograms"] == other["histograms"]


def test_many_sources_are_summed_up(tmp_path):
    report = data_report.write(put(tmp_path, [row(f"{n}", 5, source=f"s{n}") for n in range(30)]))
    assert len(report["sources"]) == 13
    assert sum(group["traces"] for group in report["sources"].values()) == 30


def test_nothing_to_report_is_a_report_and_what_is_broken_an_error(tmp_path):
    report = data_report.write(tmp_path)
    assert report["total"]["traces"] == 0
    assert "<h1>Traces</h1>" in (tmp_path / "data_report.html").read_text()
    with pytest.raises(PreconditionError, match="no such folder"):
        data_report.write(tmp_path / "nowhere")
    put(tmp_path, [row("a", 5)])
    path = tmp_path / "traces.jsonl"
    path.write_bytes(path.read_bytes().replace(b"reply to a", b"reply to b"))
    assert datareport.main([str(tmp_path)]) == 3
    files.write_json(tmp_path / "data_report.json", {"schema_version": 99})
    with pytest.raises(PreconditionError, match="another schema version"):
        data_report.render(tmp_path)


def test_help_loads_nothing_heavy():
    result = subprocess.run([sys.executable, "-X", "importtime", "-m", "eagle3.datareport", "--help"], cwd=ROOT,
                            capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "eagle3.traces" in imported
    assert not imported & {"numpy", "torch", "transformers"}
    assert "--closing-id" in result.stdout
