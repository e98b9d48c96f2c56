"""The prediction itself: states of the tiny model's own replies, walked with a drafter that an export holds."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import engine_walk
from support.pipeline import LAYERS, write_traces

from eagle3.benchmark import prediction
from eagle3.benchmark.measurements import Measured
from eagle3.common import files
from eagle3.common.errors import PreconditionError
from eagle3.common.interrupt import Interrupt
from eagle3.common.options import EngineOptions, ModelOptions
from eagle3.drafter import network, teacher, verifier
from eagle3.states import extraction
from eagle3.states.collecting import Collected
from eagle3.states.encoding import Stored
from eagle3.traces import trace_rows
from eagle3.training import drafting
from eagle3.training.batches import TrainingSample, collate
from eagle3.training.drafting import Sampling

DEPTH = 3
SENT = {"seed": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
WARM = SENT | {"temperature": 0.05, "top_k": 40, "top_p": 0.95}


@pytest.fixture
def replies(tiny_model, tmp_path):
    """Greedy replies of the tiny model as (prompt ids, completion ids)."""
    folder = write_traces(tmp_path / "traces", tiny_model, count=3)
    return [(row["prompt_token_ids"], row["completion_token_ids"])
            for row in trace_rows.read_traces(folder / "traces.jsonl")]


@pytest.fixture
def at_once(monkeypatch, by_hand):
    """Captures happen in this process: `predict` then takes no engine, which saves seconds a test."""

    def capture(stage, facts, model, engine, store, samples):
        last = {}
        hook = by_hand.target.model.layers[-1].register_forward_hook(lambda module, args, out: last.update(out=out))
        store.files.mkdir(parents=True)
        for k, sample in samples.items():
            with torch.inference_mode():
                hidden = by_hand.target(torch.tensor([sample.input_ids]), output_hidden_states=True).hidden_states
            layers = [*(hidden[int(layer)] for layer in LAYERS.split()[:-1]), last["out"].view_as(hidden[0])]
            states, ids = torch.cat(layers).transpose(0, 1).contiguous(), torch.tensor(sample.input_ids)
            save_file({"hidden_states": states, "token_ids": ids}, store.path(k))
        hook.remove()
        return {k: files.sha256_file(store.path(k)) for k in samples}

    monkeypatch.setattr(prediction, "capture_replies", capture)


@pytest.fixture
def predict(tiny_model, drafter, tmp_path, monkeypatch):
    """Predict the acceptance of measured replies, their states captured by transformers instead of vLLM."""
    real = extraction.settings_for
    monkeypatch.setattr(extraction, "settings_for",
                        lambda *given, **named: real(*given, **named | {"backend": "hf", "dtype": "float32"}))
    stage = SimpleNamespace(directory=tmp_path / "06_bench", run_dir=tmp_path, check_stop=lambda: None,
                            interrupt=Interrupt(led=True))
    model = ModelOptions(path=str(tiny_model), layers=[int(layer) for layer in LAYERS.split()])
    return lambda measured, sources=None: prediction.predict_measurements(
        stage, model, EngineOptions(), drafter, measured, sources or {})


def measured(replies, **more):
    return {"drafter-3_c1": Measured(DEPTH, [f"p{k}" for k in range(len(replies))], replies, **more)}


@pytest.fixture
def by_hand(tiny_model, drafter):
    """Target, drafter, and a function (ids) → function (known, depth) → drafts: by token, everything computed anew."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    model = network.load(drafter, verifier.read(tiny_model)).eval()

    def proposals(ids):
        with torch.inference_mode():
            hidden = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
            states = torch.cat([hidden[int(layer)][0] for layer in LAYERS.split()[:-1]], -1)

        def propose(known, depth):
            with torch.inference_mode():
                return engine_walk.drafts(model, ids, states, known, depth)

        return propose

    return SimpleNamespace(target=target, proposals=proposals)


def counted(by_hand, replies, depth):
    """Return (rounds, accepted) of replies for one draft-token count."""
    total, counts = 0, np.zeros(depth, dtype=int)
    for prompt, reply in replies:
        propose = by_hand.proposals(prompt + reply)
        count, accepted = engine_walk.rounds(prompt + reply, len(prompt), depth,
                                             lambda known, propose=propose: propose(known, depth))
        total, counts = total + count, counts + accepted
    return total, counts.tolist()


def told(figures):
    """Return (rounds, accepted) of a prediction."""
    return figures["rounds"], [round(share * figures["rounds"]) for share in figures["by_position"]]


def test_the_prediction_is_that_of_an_engine_walked_by_hand(predict, replies, by_hand):
    figures, margins = predict(measured(replies))["drafter-3_c1"]
    assert told(figures) == counted(by_hand, replies, DEPTH)
    assert told(figures)[1][1] > 0 and not margins  # more than misses were compared
    for depth in (1, 2, 5, 16):
        assert told(figures["by_draft_tokens"][str(depth)]) == counted(by_hand, replies, depth)
    one = predict(measured(replies[:1]))["drafter-3_c1"][0]
    assert told(one) == counted(by_hand, replies[:1], DEPTH)


def test_batches_and_pieces_change_nothing(predict, replies, at_once, monkeypatch):
    whole = predict(measured(replies))["drafter-3_c1"][0]
    monkeypatch.setattr(prediction, "_BATCH_TOKENS", {"cpu": 8})
    monkeypatch.setattr(drafting, "_SCORES", {"cpu": 100})
    monkeypatch.setattr(drafting, "_LOGITS", {"cpu": 3000})
    small = predict(measured(replies))["drafter-3_c1"][0]
    assert told(small) == told(whole) and small["by_draft_tokens"].keys() == whole["by_draft_tokens"].keys()


@pytest.fixture
def strong(facts, parts, request):
    """A drafter whose attention decides: random weights, none of the verifier's in its layer; with norms, if asked."""
    model = parts[0](norms=getattr(request, "param", ()))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and not name.startswith(("embed", "verifier")):
                weight.copy_(torch.randn(weight.shape, generator=generator) * (2.0 / weight.shape[1]) ** 0.5)
            elif name.startswith(("fc_norm", "input_norm", "layers.0.hidden_norm", "norm.")):
                weight.uniform_(0.2, 3.0, generator=generator)
        model.layers[0].self_attn.o_proj.weight.mul_(6)
    return model


@pytest.mark.parametrize("strong", [(), ("fc_norm", "norm_output"), ("norm_before_fc", "norm_output"),
                                    ("norm_before_residual",)], indirect=True, ids=lambda norms: "+".join(norms))
def test_every_draft_is_that_of_a_drafter_that_goes_token_by_token(strong, monkeypatch):
    """Texts of random states whose tokens are the drafter's own proposals, four in a row and then another."""
    rng, members, texts, states, depth = np.random.default_rng(0), [], [], [], 4
    for number, (prompt, length) in enumerate(((5, 30), (9, 21), (3, 40))):
        random = torch.from_numpy(rng.standard_normal((length, 4, 64)).astype(np.float32))
        ids = rng.integers(5, 400, prompt + 1).tolist()
        with torch.inference_mode():
            while len(ids) < length:
                ids += engine_walk.drafts(strong, ids, random[:, :3].flatten(1), len(ids) - 1, depth)
                ids.append(int(rng.integers(5, 400)))
        mask = np.arange(length) >= prompt
        members.append(TrainingSample(number, "", mask))
        texts.append(ids[:length])
        states.append(Stored(random, None, torch.tensor(ids[:length])))
    store = SimpleNamespace(read=lambda number, sha256=None, pin=False: states[number])
    for pieces in (1 << 24, 60):
        monkeypatch.setattr(drafting, "_SCORES", {"cpu": pieces})
        batch = collate(store, members, 64, 1, verify=False)
        tokens, right = drafting.draft(strong, batch, depth)
        start, long = 0, 0
        for ids, own, member in zip(texts, states, members, strict=True):
            for place in np.flatnonzero(member.supervised()):
                with torch.inference_mode():
                    drafts = engine_walk.drafts(strong, ids, own.hidden[:, :3].flatten(1), int(place) + 1, depth)
                true = ids[place + 2 : place + 2 + depth]
                same = [a == b for a, b in zip(drafts, true, strict=False)]
                count = same.index(False) if False in same else len(same)
                assert right[start + place] == count
                assert tokens[start + place, : count + 1].tolist()[: len(true)] == drafts[: min(count + 1, len(true))]
                assert (tokens[start + place, count + 1 :] == -1).all()
                long += count == depth
            start += len(ids) - 1
        assert long > 8


def sampled_by_an_engine(by_hand, prompt, sampling, depth, tokens, rng):
    """Generate with drafts and rejection sampling of one-hot drafts; return (reply, rounds, accepted, probabilities).

    A draft is accepted with the target's probability p of it; after a rejection the token comes from the rest of p.
    """
    p = distribution(by_hand, prompt, sampling)
    ids, count, accepted, chances = [*prompt, int(rng.choice(len(p), p=p))], 0, [0] * depth, [[] for _ in range(depth)]
    while len(ids) - len(prompt) < tokens:
        count += 1
        drafts = by_hand.proposals(ids)(len(ids) - 1, depth)
        for k, token in enumerate(drafts):
            p = distribution(by_hand, ids, sampling)
            chances[k].append(p[token])
            if rng.random() >= p[token]:
                p[token] = 0
                ids.append(int(rng.choice(len(p), p=p / p.sum())))
                break
            accepted[k] += 1
            ids.append(token)
        else:
            p = distribution(by_hand, ids, sampling)
            ids.append(int(rng.choice(len(p), p=p / p.sum())))
    return ids[len(prompt):], count, accepted, chances


def distribution(by_hand, ids, sampling):
    """The target's next token under a sampling, spelled out."""
    with torch.inference_mode():
        logits = by_hand.target(torch.tensor([ids])).logits[0, -1].double().numpy() / sampling["temperature"]
    order = np.argsort(-logits)
    kept = order[: sampling["top_k"]] if sampling["top_k"] > 0 else order
    p = np.exp(logits[kept] - logits[kept].max())
    p /= p.sum()
    kept = kept[: 1 + int((np.cumsum(p) < sampling["top_p"]).sum())]  # up to the one that completes top_p
    result = np.zeros(len(logits))
    result[kept] = np.exp(logits[kept] - logits[kept].max())
    return result / result.sum()


@pytest.mark.parametrize("sampling", [WARM, WARM | {"top_k": -1, "top_p": 1.0}], ids=["cut", "whole"])
def test_sampled_replies_are_walked_as_their_engine_went(predict, replies, at_once, by_hand, sampling):
    rng, depth, made, rounds, accepted = np.random.default_rng(0), DEPTH, [], 0, np.zeros(DEPTH, dtype=int)
    chances = [[] for _ in range(depth)]
    for prompt, _ in replies:
        reply, count, hits, seen = sampled_by_an_engine(by_hand, prompt, sampling, depth, 20, rng)
        made.append((prompt, reply))
        rounds, accepted = rounds + count, accepted + hits
        chances = [a + b for a, b in zip(chances, seen, strict=True)]
    figures = predict(measured(made, sampling=sampling))["drafter-3_c1"][0]
    assert told(figures) == (rounds, accepted.tolist()) and 0 < accepted[0] < rounds
    expected = figures["expected"]
    assert expected["conditional"] == pytest.approx([np.mean(each) for each in chances], abs=1e-3)
    length = 1 + sum(np.cumprod([np.mean(each) for each in chances]))
    assert expected["length"] == pytest.approx(length, abs=1e-3)
    assert 0 < expected["standard_error"] < figures["standard_error"]


def test_probabilities_are_told_where_the_sampling_is(predict, replies, at_once):
    assert "expected" not in predict(measured(replies))["drafter-3_c1"][0]
    greedy = predict(measured(replies, sampling=SENT | {"temperature": 0.0, "top_k": -1, "top_p": 1.0}))
    figures = greedy["drafter-3_c1"][0]  # all of the probability is on the token that was taken
    assert figures["expected"]["length"] == pytest.approx(figures["length"], abs=0.2)
    assert prediction.sampling_of(WARM) == Sampling(0.05, 40, 0.95)
    assert prediction.sampling_of(WARM | {"temperature": 1e-4}).temperature == 0.01
    for strange in ({"frequency_penalty": 0.5}, {"min_p": 0.1}):
        assert prediction.sampling_of(WARM | strange) is None
    assert prediction.sampling_of({name: WARM[name] for name in WARM if name != "top_p"}) is None


def test_lengths_by_prompt_set_and_context_make_up_the_whole(predict, replies, at_once):
    sources = {"p0": "one", "p1": "two", "p2": "two"}
    figures = predict(measured(replies), sources)["drafter-3_c1"][0]
    for groups in (figures["by_source"], figures["by_context"]):
        for count, whole in figures["by_draft_tokens"].items():
            assert sum(group[count]["rounds"] for group in groups.values()) == whole["rounds"]
            tokens = sum(group[count]["rounds"] * group[count]["length"] for group in groups.values())
            assert tokens == pytest.approx(whole["rounds"] * whole["length"])
    assert figures["by_source"].keys() == {"one", "two"} and "0-127" in figures["by_context"]


@pytest.mark.parametrize("speculation", [{"rejection_sample_method": "block"},
                                         {"draft_sample_method": "probabilistic"}])
def test_what_cannot_be_walked_is_refused_with_the_reason(speculation, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(prediction.logger, "propagate", True)
    run = {"name": "drafter-3_c1", "draft_tokens": 3, "sampling": {"sent": WARM}, "fingerprint": "f", "replies": "r",
           "engine": {"kind": "vllm", "version": "0.32.0", "attached": False, "speculation": speculation}}
    stage = SimpleNamespace(directory=tmp_path, check_stop=lambda: None)
    prediction.predict_runs(stage, None, None, None, [run])
    assert next(iter(speculation.values())) in run["not_predicted"] and run["not_predicted"] in caplog.text
    assert "predicted" not in run


def test_where_a_reply_parts_the_margin_is_that_of_the_two_tokens(predict, replies, at_once, tiny_model):
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
    whole = predict(measured(replies))["drafter-3_c1"][0]["rounds"]
    real = extraction.Capture.run

    def run(child, batch, wanted=None):
        collected = real(child, batch, wanted)
        collected.entries = [{"i": entry["i"], "error": "NaN in slot 1"} if entry["i"] == 1 else entry
                             for entry in collected.entries]
        return collected

    monkeypatch.setattr(extraction.Capture, "run", run)
    monkeypatch.setattr(prediction.logger, "propagate", True)
    without = predict(measured(replies))["drafter-3_c1"][0]["rounds"]
    assert 0 < without < whole
    assert "1 of 3 replies are left out" in caplog.text and "NaN in slot 1" in caplog.text
    monkeypatch.setattr(extraction.Capture, "run",
                        lambda child, batch, wanted=None: Collected(
                            [{"i": sample.i, "error": "gone"} for sample in batch], {}))
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
