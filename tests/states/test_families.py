"""Families of verifiers, each as a tiny random model: states, teacher, a training step and an export are right.

Everything is compared with transformers' own model in float32. docs/verifiers.md has the table.
"""

import hashlib
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import family_engine
from support.captures import in_process, samples_of
from support.families import FAMILIES, LAYERS
from support.pipeline import manifest, run_stage

from eagle3.common import tensor_files
from eagle3.common.errors import PreconditionError
from eagle3.common.findings import FAIL
from eagle3.common.options import ModelOptions, TrainSection
from eagle3.drafter import export_checks, network, teacher, verifier, vocab
from eagle3.drafter.checkpoint import Export
from eagle3.states.agreement import AgreementCheck
from eagle3.states.store import StateStore
from eagle3.training import batches, checkpoints, ttt
from eagle3.training.trainer import Processes, Trainer

CAPTURED = [2, 4, 5, LAYERS - 1]


def capture(folder, directory):
    """Capture three sequences with the transformers backend; return it with what the model said of them."""
    facts, store = verifier.read(folder), StateStore(directory)
    rng = np.random.default_rng(0)
    sequences = {i: rng.integers(2, min(500, facts.vocab_size), 20 + i).tolist() for i in range(3)}
    with in_process(folder, store, CAPTURED) as running:
        collected, said = running.run(sequences), running.prove(sequences)
    assert not [entry for entry in collected.entries if "error" in entry], collected.entries
    return SimpleNamespace(facts=facts, model=running.backend.model, store=store, sequences=sequences, said=said,
                           entries=collected.entries, rows=collected.rows)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A captured family, with a drafter of 128 tokens for it."""
    folder = tmp_path_factory.mktemp("families") / request.param
    FAMILIES[request.param].build(folder)
    captured = capture(folder, folder.with_name("states"))
    counts = np.random.default_rng(1).integers(1, 100, captured.facts.vocab_size)
    captured.d2t, captured.t2d = (torch.from_numpy(array) for array in vocab.build_mapping(counts, 128))
    captured.drafter = network.build(captured.facts, CAPTURED, captured.d2t, captured.t2d,
                                     network.layer_shape(captured.facts))
    return captured


def test_states_and_teacher_are_the_models_own(family):
    """Streams against transformers' hidden states, probabilities of head and training teacher against its logits."""
    head = teacher.TeacherHead(family.facts, torch.float32)
    for i, ids in family.sequences.items():
        states, _ = family.store.load(i)
        with torch.inference_mode():
            output = family.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        for slot, layer in enumerate(CAPTURED[:-1]):
            torch.testing.assert_close(states[:, slot], output.hidden_states[layer][0], atol=1e-5, rtol=1e-5)
        theirs = output.logits[0].float().log_softmax(-1)
        torch.testing.assert_close(head.logits(states[:, -1]).log_softmax(-1), theirs, atol=2e-4, rtol=1e-4)
        with torch.no_grad():
            ours = ttt.teacher_logits(family.drafter, SimpleNamespace(teacher=states[:, -1].float()))
        wanted = output.logits[0].float()[:, family.t2d].log_softmax(-1)
        torch.testing.assert_close(ours.log_softmax(-1), wanted, atol=2e-4, rtol=1e-4)
    assert theirs.exp().max() < 0.999  # a distribution that scales and caps show in


def test_the_self_check_finds_the_probabilities_equal(family):
    check = AgreementCheck(family.facts, family.store, 1.0, "float32", "float32")
    check.add(family.entries)
    check.add_prompts(family.said)
    check.judge()
    assert check.agreed == 3 and check.difference < 1e-3
    assert check.compared == 3 + sum(len(ids) - 1 for ids in family.sequences.values())
    check.add_rows(family.entries, family.rows, {sample.i: sample for sample in samples_of(family.sequences)})
    assert check.agreed == 6 and check.difference < 1e-3  # of so short ones, the last row each


def test_the_drafter_reads_the_embedding_as_it_is_stored(family):
    """Engines hand a drafter the table without the verifier's own factor (Gemma's root of H, Granite's multiplier)."""
    name = verifier.shared_names(verifier.weight_map(family.facts.folder), family.facts)["embed_tokens"]
    own = tensor_files.read(family.facts.folder)[name]
    weight = family.drafter.embed_tokens.weight.detach()
    stored = torch.frombuffer(bytearray(b"".join(tensor_files.blocks(own))),
                              dtype=torch.float32).view(own.shape)
    assert torch.equal(weight, stored)


def test_a_training_step_and_an_export(family, tmp_path):
    options = TrainSection(batch_tokens=64, ttt_steps=3, lr=1e-3)
    trainer = Trainer(family.drafter, family.store, options, Processes(0, 1, torch.device("cpu")))
    samples = [batches.TrainingSample(entry["i"], entry["sha256"], np.arange(entry["tokens"]) >= 5)
               for entry in family.entries]
    batch = batches.collate(family.store, samples[:2], 64, 3, verify=True)
    before = {name: weight.clone() for name, weight in family.drafter.named_parameters()}
    losses = [trainer.step([batch], batch.supervised, 1e-3)["loss"] for _ in range(3)]
    assert losses[-1] < losses[0]
    changed = {name for name, weight in family.drafter.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == set(checkpoints.trainable(family.drafter))

    folder = checkpoints.save(tmp_path, 3, family.drafter, family.facts, trainer.optimizer,
                              {"step": 3, "epoch": 1, "layers": CAPTURED})
    raw = network.served_config(family.drafter, family.facts)
    for engine, version in (("vllm", "0.32.0"), ("sglang", "0.5.17")):
        export = Export(folder=folder, raw=raw, tensors=tensor_files.read(folder), verifier=family.facts, engine=engine,
                        version=version, serving_length=family.facts.max_positions, trained_ids=CAPTURED[:-1],
                        trained_here=True)
        failed = [finding.line() for finding in export_checks.run(export) if finding.status == FAIL]
        assert not failed, failed
    again = network.load(folder, family.facts)
    torch.testing.assert_close(ttt.teacher_logits(again, batch), ttt.teacher_logits(family.drafter, batch))


def test_the_doctor_names_norm_and_head(family):
    from eagle3.checks import model_checks
    from eagle3.checks.subject import Subject, look

    lines = look(Subject(model=ModelOptions(path=str(family.facts.folder))), [model_checks.check_model])
    assert [line.status for line in lines] == ["ok"] * 3, lines
    assert "norm.weight; " in lines[2].found and (str(family.facts.output) or "norm") in lines[2].found


@pytest.mark.parametrize("name", ["granite", "gemma2", "cohere", "minicpm3"])
def test_a_scale_or_cap_left_out_stops_the_capture_although_every_token_agrees(name, tmp_path):
    """Case 52: the most likely token does not change, the probabilities do."""
    captured = capture(FAMILIES[name].build(tmp_path / name), tmp_path / "states")
    plain = replace(captured.facts, output=replace(captured.facts.output, scale=1.0, softcap=None))
    check = AgreementCheck(plain, captured.store, 0.9, "float32", "float32")
    check.add(captured.entries)
    assert check.agreed == 3
    with pytest.raises(PreconditionError, match="own probabilities"):
        check.add_prompts(captured.said)


def test_what_the_engine_says_stands_in_the_manifest_and_the_index(prepared):
    states = prepared / "02_states"
    said = manifest(states)
    assert said["agreement"] == 1.0 and said["logprob_difference"] < 1e-3
    assert said["logprobs_compared"] > 24 + 8 * 20  # each sample's next token, and the beginnings of eight
    assert all(entry["next_logprob"] < 0 for entry in StateStore(states).index().values())


def test_states_with_a_slot_too_many_are_named(prepared, tiny_model, tmp_path):
    """Case 53: not a matmul error inside training."""
    states = shutil.copytree(prepared / "02_states", tmp_path / "02_states")
    store = StateStore(states)
    hidden, ids = store.load(3)
    save_file({"hidden_states": torch.cat([hidden, hidden[:, :1]], 1), "token_ids": ids}, store.path(3))
    data = store.path(3).read_bytes()
    store.append([store.index()[3] | {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}])
    with pytest.raises(PreconditionError, match=r"\[tokens, 4, hidden\]"):
        StateStore(states, 4).load(3)
    StateStore(states, 5).load(3)


def test_a_verifier_unlike_its_config_is_refused_before_anything_is_loaded(prepared, tiny_model, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"lm_head.bias": torch.zeros(1)}, model / "model.safetensors", metadata={"format": "pt"})
    stopped = run_stage("02_extract_hidden_states.py", "--run-dir", tmp_path / "run", "--model", model, "--backend",
                        "hf", "--traces", prepared / "01_traces", "--layers", *CAPTURED, check=3)
    assert "lm_head.bias" in stopped.stderr and "loading the verifier" not in stopped.stderr


def test_a_shallow_verifier_is_refused_before_anything_is_loaded(prepared, tiny_model, tmp_path):
    """Case 53: default layers that do not ascend."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    stopped = run_stage("02_extract_hidden_states.py", "--run-dir", tmp_path / "run", "--model", model, "--backend",
                        "hf", "--traces", prepared / "01_traces", check=3)
    assert "--layers A B C 3" in stopped.stderr and "loading the verifier" not in stopped.stderr


@pytest.mark.engine
@pytest.mark.parametrize("name", ["granite", "gpt-oss", "qwen3-moe"])
def test_vllm_gives_the_same_states_and_probabilities_and_starts_with_a_drafter(name, tmp_path):
    model = family_engine.build(name, tmp_path / "model")
    found = family_engine.states(model, tmp_path, "vllm", "float32")
    reference = family_engine.states(model, tmp_path, "hf", "float32")
    assert found["agreement"] == 1.0 and found["logprob_difference"] < 1e-3
    assert family_engine.error_of(found["store"], reference["store"]) < 1e-4
    served = family_engine.serve(model, tmp_path, "float32")
    assert served["tokens"] == 8 * 24 and served["drafts"] > 0
    assert found["capture"] == "outputs"
    for given, captured in family_engine.handed(tmp_path, found["store"]):
        assert torch.equal(given, captured)  # what was captured is what the engine hands its drafter, bit by bit
