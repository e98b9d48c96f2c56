"""The prediction itself: states of the tiny model's own replies, walked with a drafter that an export holds."""

from types import SimpleNamespace

import pytest
import torch
from support import engine_walk
from support.pipeline import LAYERS, write_traces

from eagle3.benchmark import prediction
from eagle3.benchmark.measurements import Measured
from eagle3.common.errors import PreconditionError
from eagle3.common.interrupt import Interrupt
from eagle3.common.options import EngineOptions, ModelOptions
from eagle3.drafter import network, teacher, verifier
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
def predict(tiny_model, drafter, tmp_path, monkeypatch):
    """Predict the acceptance of measured replies, their states captured by transformers instead of vLLM."""
    real = extraction.settings_for
    monkeypatch.setattr(extraction, "settings_for",
                        lambda *given, **named: real(*given, **named | {"backend": "hf", "dtype": "float32"}))
    stage = SimpleNamespace(directory=tmp_path / "06_bench", run_dir=tmp_path, check_stop=lambda: None,
                            interrupt=Interrupt(led=True))
    model = ModelOptions(path=str(tiny_model), layers=[int(layer) for layer in LAYERS.split()])
    return lambda measured: prediction.predict_measurements(stage, model, EngineOptions(), drafter, measured)


def measured(replies, **more):
    return {"drafter-3_c1": Measured(DEPTH, [f"p{k}" for k in range(len(replies))], replies, **more)}


def by_hand(tiny_model, drafter, replies):
    """Return (rounds, accepted) of replies: states of transformers, drafted token by token in plain torch."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    model, total, counts = network.load(drafter, verifier.read(tiny_model)).eval(), 0, torch.zeros(DEPTH, dtype=int)
    with torch.inference_mode():
        for prompt, reply in replies:
            ids = prompt + reply
            hidden = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
            states = torch.cat([hidden[int(layer)][0] for layer in LAYERS.split()[:-1]], -1)
            count, accepted = engine_walk.rounds(
                ids, len(prompt), DEPTH, lambda known, ids=ids, states=states: engine_walk.drafts(
                    model, ids, states, known, DEPTH))
            total, counts = total + count, counts + torch.tensor(accepted)
    return total, counts.tolist()


def test_the_prediction_is_that_of_an_engine_walked_by_hand(predict, replies, drafter, tiny_model):
    acceptance, margins = predict(measured(replies))["drafter-3_c1"]
    assert (acceptance.rounds, acceptance.accepted) == by_hand(tiny_model, drafter, replies)
    assert acceptance.accepted[1] > 0 and not margins  # more than misses were compared
    one = predict(measured(replies[:1]))["drafter-3_c1"][0]
    assert (one.rounds, one.accepted) == by_hand(tiny_model, drafter, replies[:1])


def test_where_a_reply_parts_the_margin_is_that_of_the_two_tokens(predict, replies, tiny_model):
    from transformers import AutoModelForCausalLM

    prompt, reply = replies[0]
    other = (reply[4] + 1) % 400
    margins = predict(measured([(prompt, reply)], parted={0: (4, other)}))["drafter-3_c1"][1]
    assert margins["p0"]["tokens"] == [other, reply[4]]
    target = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = target(torch.tensor([prompt + reply[:4]])).logits[0, -1]  # from which reply[4] was chosen
    assert margins["p0"]["margin"] == pytest.approx(float(logits[reply[4]] - logits[other]), rel=1e-3)
    same = predict(measured([(prompt, reply)], parted={0: (4, reply[4])}))["drafter-3_c1"][1]
    assert same["p0"]["margin"] == 0 and same["p0"]["within_noise"]


def test_a_reply_whose_states_cannot_be_captured_is_left_out_and_said(predict, replies, monkeypatch, caplog):
    whole = predict(measured(replies))["drafter-3_c1"][0]
    real = extraction.Capture.run

    def run(child, batch, wanted=None):
        collected = real(child, batch, wanted)
        collected.entries = [{"i": entry["i"], "error": "NaN in slot 1"} if entry["i"] == 1 else entry
                             for entry in collected.entries]
        return collected

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


def test_a_margin_is_noise_when_rounding_could_have_turned_it(facts):
    head = teacher.TeacherHead(facts)
    state = torch.randn(facts.hidden_size, generator=torch.Generator().manual_seed(0))
    normed = head.normed(state[None])[0]
    logits = normed @ head.rows(list(range(facts.vocab_size))).T
    first, last = int(logits.argmax()), int(logits.argmin())
    far = prediction.margin(head, state, first, last)
    assert far["margin"] == pytest.approx(float(logits[first] - logits[last]), rel=1e-5) and not far["within_noise"]
    assert prediction.margin(head, state, first, first)["within_noise"]
    # the noise is what relative errors of 1% in the state really do to the difference
    shaken = normed + 0.01 * normed.norm() / len(normed) ** 0.5 * torch.randn(4000, len(normed))
    apart = head.rows([first])[0] - head.rows([last])[0]
    assert far["noise"] == pytest.approx(float((shaken @ apart).std()), rel=0.1)
