"""Measurements on disk: compared with each other and with what was predicted for them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3.benchmark import measurements, prediction
from eagle3.common import files
from eagle3.common.options import BenchmarkOptions


def test_predictions_are_made_on_the_measured_replies_at_once_and_kept(tmp_path, monkeypatch):
    calls = []
    walked = {"length": 16 / 7, "by_position": [5 / 7, 4 / 7], "rounds": 7, "by_draft_tokens": {"1": {"length": 1.7}}}

    def predict_measurements(stage, model, engine, drafter, measured, sources):
        calls.append((drafter, measured))
        return {name: (walked, {"b": {"margin": 0.1, "within_noise": True}}) for name in measured}

    monkeypatch.setattr(prediction, "predict_measurements", predict_measurements)

    def write(name, *completions):
        replies = [{"id": key, "text": "", "prompt_token_ids": [1], "completion_token_ids": ids}
                   for key, ids in zip("abc", completions, strict=True)]
        files.write_bytes(tmp_path / f"replies_{name}.jsonl", b"".join(map(files.encode_line, replies)))

    write("baseline_c1", [2, 3], [2, 3, 4], [2])
    write("drafter-2_c1", [2, 3], [2, 9, 9], [2])
    write("drafter-4_c1", [2, 3], [2, 3, 4], [2])
    stage = SimpleNamespace(directory=tmp_path, check_stop=lambda: None)

    def predicted(**changes):
        runs = [{"name": f"drafter-{count}_c1", "draft_tokens": count, "fingerprint": "f", "replies": "r",
                 "concurrency": 1, "baseline": "baseline_c1",
                 "acceptance": {"length": 2.0}, "lossless": {"first_difference": parted}} | changes
                for count, parted in ((2, {"b": 1}), (4, {}))]
        options = BenchmarkOptions()
        prediction.predict_runs(stage, options.model, options.engine, Path("d"), runs)
        return runs

    runs = predicted()
    replies = [([1], [2, 3]), ([1], [2, 9, 9])]
    assert calls == [(Path("d"), {
        "drafter-2_c1": measurements.Measured(2, ["a", "b"], replies, {1: (1, 3)}),
        "drafter-4_c1": measurements.Measured(4, ["a", "b"], [replies[0], ([1], [2, 3, 4])], {})})]
    assert runs[0]["predicted"] == walked
    assert runs[0]["difference"] == pytest.approx(9 / 7 - 1)
    assert runs[0]["lossless"]["margins"]["b"]["within_noise"]
    assert predicted()[0] == runs[0] and len(calls) == 1
    assert "difference" not in predicted(acceptance=None)[0]
    predicted(replies="measured again")
    assert len(calls) == 2


def test_agreement_finds_the_first_difference():
    def reply(name, ids, text=""):
        return {"id": name, "completion_token_ids": ids, "text": text}

    expected = [reply("a", [1, 2, 3]), reply("b", [1, 2, 3]), reply("c", [1, 2]), reply("d", [], "same x")]
    found = [reply("a", [1, 2, 3]), reply("b", [1, 9, 3]), reply("c", [1, 2, 4]), reply("d", [], "same y")]
    assert measurements.agreement(expected, found) == {
        "replies": 4, "identical": 1, "first_difference": {"b": 1, "c": 2, "d": 5}
    }  # fmt: skip
