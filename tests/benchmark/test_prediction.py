"""The prediction itself: states of the tiny model's own replies, walked with a drafter that an export holds."""

from types import SimpleNamespace

import pytest
from support.pipeline import LAYERS, write_export, write_traces

from eagle3.benchmark import prediction
from eagle3.benchmark.measurements import Measured
from eagle3.common.errors import PreconditionError
from eagle3.common.interrupt import Interrupt
from eagle3.common.options import EngineOptions, ModelOptions
from eagle3.states import extraction
from eagle3.traces import trace_rows

DEPTH = 3


@pytest.fixture
def replies(tiny_model, tmp_path):
    """Greedy replies of the tiny model as (prompt ids, completion ids)."""
    folder = write_traces(tmp_path / "traces", tiny_model, count=3)
    return [(row["prompt_token_ids"], row["completion_token_ids"])
            for row in trace_rows.read_traces(folder / "traces.jsonl")]


@pytest.fixture
def predict(tiny_model, tmp_path, monkeypatch):
    """Predict the acceptance of measured replies, their states captured by transformers instead of vLLM."""
    real = extraction.settings_for
    monkeypatch.setattr(extraction, "settings_for",
                        lambda *given, **named: real(*given, **named | {"backend": "hf", "dtype": "float32"}))
    drafter = write_export(tmp_path / "05_export", tiny_model)
    stage = SimpleNamespace(directory=tmp_path / "06_bench", run_dir=tmp_path, check_stop=lambda: None,
                            interrupt=Interrupt(led=True))
    model = ModelOptions(path=str(tiny_model), layers=[int(layer) for layer in LAYERS.split()])
    return lambda measured: prediction.predict_measurements(stage, model, EngineOptions(), drafter, measured)


def measured(replies, **more):
    return {"drafter-3_c1": Measured(DEPTH, [f"p{k}" for k in range(len(replies))], replies, **more)}


def test_every_reply_is_walked_to_its_end(predict, replies):
    acceptance, margins = predict(measured(replies))["drafter-3_c1"]
    tokens = sum(len(reply) - 1 for _, reply in replies)  # the first comes from the prompt's own pass
    walked = acceptance.rounds + sum(acceptance.accepted)
    assert tokens <= walked <= tokens + len(replies)  # a last round may end with the reply
    assert len(acceptance.accepted) == DEPTH and acceptance.accepted == sorted(acceptance.accepted, reverse=True)
    assert not margins
    one = predict(measured(replies[:1]))["drafter-3_c1"][0]
    assert one.rounds < acceptance.rounds


def test_where_a_reply_parts_the_margin_is_that_of_the_two_tokens(predict, replies):
    prompt, reply = replies[0]
    other = (reply[4] + 1) % 400
    margins = predict(measured([(prompt, reply)], parted={0: (4, other)}))["drafter-3_c1"][1]
    assert margins["p0"]["tokens"] == [other, reply[4]] and margins["p0"]["margin"] > 0
    same = predict(measured([(prompt, reply)], parted={0: (4, reply[4])}))["drafter-3_c1"][1]
    assert same["p0"]["margin"] == 0 and same["p0"]["within_noise"]


def test_a_reply_whose_states_cannot_be_captured_is_left_out_and_said(predict, replies, monkeypatch, caplog):
    whole = predict(measured(replies))["drafter-3_c1"][0]
    real = extraction.Capture.run

    def run(child, batch, wanted=None):
        entries = real(child, batch, wanted)
        return [{"i": entry["i"], "error": "NaN in slot 1"} if entry["i"] == 1 else entry for entry in entries]

    monkeypatch.setattr(extraction.Capture, "run", run)
    monkeypatch.setattr(prediction.logger, "propagate", True)
    without = predict(measured(replies))["drafter-3_c1"][0]
    assert 0 < without.rounds < whole.rounds
    assert "1 of 3 replies are left out" in caplog.text and "NaN in slot 1" in caplog.text
    monkeypatch.setattr(extraction.Capture, "run",
                        lambda child, batch, wanted=None: [{"i": sample.i, "error": "gone"} for sample in batch])
    with pytest.raises(PreconditionError, match="no state of a measured reply"):
        predict(measured(replies))


def test_states_are_gone_afterwards(predict, replies, tmp_path):
    predict(measured(replies))
    assert not (tmp_path / "06_bench/.predict_states").exists()
