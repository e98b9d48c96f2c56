"""Warm start: a published drafter's vocabulary into stage 03, its weights into stage 04; full vocabularies."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.pipeline import LAYERS, manifest, run_stage

from eagle3.common import files, tensor_files
from eagle3.common.errors import PreconditionError
from eagle3.common.options import TrainSection
from eagle3.drafter import checkpoint, flat_config, network, verifier, vocab
from eagle3.states.store import StateStore, load_dataset
from eagle3.training import batches, checkpoints
from eagle3.training import trainer as training
from eagle3.training.schedule import Schedule

AUX = [2, 4, 5, 7]
# A layer that is not the verifier's: heads, sizes, eps, positions, and RoPE with scaling.
SHAPE = {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "rms_norm_eps": 1e-4, "max_position_embeddings": 4096,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0,
                             "original_max_position_embeddings": 512, "beta_fast": 16.0}}  # fmt: skip


def trained(prepared, facts, d2t, t2d, epochs):
    """Return a drafter of SHAPE after a few epochs on every sample."""
    store = StateStore(prepared / "02_states")
    samples = batches.read_samples(store, load_dataset(prepared / "02_states"))
    model = network.build(facts, AUX, d2t, t2d, network.layer_shape(facts) | SHAPE)
    options = TrainSection(batch_tokens=400, epochs=epochs)
    trainer = training.Trainer(model, store, options, training.Processes(0, 1, torch.device("cpu")))
    schedule = Schedule(samples, options, 1)
    for epoch in range(epochs):
        for members in schedule.steps(epoch):
            loaded = [trainer.load_batch(batch) for batch in members]
            trainer.step(loaded, loaded[0].supervised, 5e-3)
    return model


def publish(model, facts, folder):
    folder.mkdir()
    save_file(checkpoints.served_tensors(model), folder / tensor_files.SINGLE)
    files.write_json(folder / "config.json", network.served_config(model, facts))
    return folder


@pytest.fixture(scope="module")
def drafters(prepared, facts, tmp_path_factory):
    """Folder with `reduced` (a vocabulary of its own, 160 tokens; trained) and `full` (all of them; noise)."""
    folder = tmp_path_factory.mktemp("drafters")
    counts = load_file(prepared / "03_vocab" / vocab.COUNTS)["counts"].numpy()
    reduced = (torch.from_numpy(part) for part in vocab.build_mapping(counts, 160))
    publish(trained(prepared, facts, *reduced, epochs=12), facts, folder / "reduced")
    every = torch.zeros(facts.vocab_size, dtype=torch.int64), torch.ones(facts.vocab_size, dtype=torch.bool)
    noise = network.build(facts, AUX, *every, network.layer_shape(facts))
    torch.nn.init.normal_(noise.fc.weight)
    publish(noise, facts, folder / "full")
    return folder


@pytest.fixture
def published(drafters, tmp_path):
    """A copy of the reduced drafter, to be changed."""
    return shutil.copytree(drafters / "reduced", tmp_path / "published")


def change(folder, *, tensors=None, config=None, drop=()):
    """Rewrite tensors with a function of all of them, config.json with a dictionary."""
    if tensors:
        save_file(tensors(load_file(folder / tensor_files.SINGLE)), folder / tensor_files.SINGLE)
    written = files.read_json(folder / "config.json") | (config or {})
    files.write_json(folder / "config.json", {name: value for name, value in written.items() if name not in drop})


def with_prefix(prefix, dtype=torch.bfloat16):
    def rename(name):
        layer = checkpoint.engine_key(name) if prefix.endswith("midlayer.") else name
        return layer if name in ("d2t", "t2d", "lm_head.weight") else prefix.removesuffix("midlayer.") + layer

    return lambda tensors: {rename(name): tensor.to(dtype) if tensor.is_floating_point() else tensor
                            for name, tensor in tensors.items()}


def split_into_shards(folder):
    """Make two shards and an index of the single file."""
    tensors = load_file(folder / tensor_files.SINGLE)
    names = {name: f"model-{number % 2 + 1:05}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for shard in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == shard}, folder / shard)
    files.write_json(folder / tensor_files.INDEX, {"metadata": {}, "weight_map": names})
    (folder / tensor_files.SINGLE).unlink()


def as_speculators(folder, facts):
    """Give the folder the config that speculators saves."""
    flat = files.read_json(folder / "config.json")
    raw = flat_config.engine_config(flat, engine="speculators", version="0.9.0", verifier=facts, serving_length=1)
    files.write_json(folder / "config.json", raw)


LAYOUTS = {
    "flat": lambda folder, facts: None,
    "midlayer in shards": lambda folder, facts: (change(folder, tensors=with_prefix("midlayer.")),
                                                 split_into_shards(folder)),
    "model. in float32": lambda folder, facts: change(folder, tensors=with_prefix("model.", torch.float32)),
    "as speculators saves it": as_speculators,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_drafter_and_mapping(layout, drafters, published, facts):
    expected = load_file(drafters / "reduced" / tensor_files.SINGLE)
    LAYOUTS[layout](published, facts)
    d2t, t2d = vocab.published_mapping(published, facts.vocab_size)
    assert torch.equal(d2t, expected["d2t"]) and torch.equal(t2d, expected["t2d"])
    assert network.check_start(published, facts, AUX, t2d) == []
    model = network.continue_from(published, facts, AUX)
    found = checkpoints.served_tensors(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    served = network.served_config(model, facts)
    assert served == files.read_json(drafters / "reduced" / "config.json")
    assert served["rope_scaling"]["factor"] == 8.0 and served["rope_theta"] == 5000.0


def test_what_is_frozen_is_the_verifiers(published, facts):
    shared = verifier.load_shared_weights(facts, ("embed_tokens", "lm_head", "norm"))
    own = torch.ones_like(shared["embed_tokens"])
    change(published, tensors=lambda tensors: tensors | {"embed_tokens.weight": own})
    t2d = vocab.published_mapping(published, facts.vocab_size)[1]
    assert "its own embedding is not the verifier's" in network.check_start(published, facts, AUX, t2d)[0]
    model = network.continue_from(published, facts, AUX)
    assert torch.equal(model.embed_tokens.weight, shared["embed_tokens"].float())
    assert torch.equal(model.verifier_lm_head.weight, shared["lm_head"][t2d].float())
    assert torch.equal(model.verifier_norm.weight, shared["norm"].float())
    assert model.verifier_norm.variance_epsilon == facts.rms_norm_eps != model.norm.variance_epsilon
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    assert torch.equal(network.load(published, facts).embed_tokens.weight, own.float())  # served as it is


# --- refusals ---------------------------------------------------------------------------------------------


def replaced(name, function):
    return lambda tensors: tensors | {name: function(tensors[name]).contiguous()}


@pytest.mark.parametrize(("damage", "message"), [
    (lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "t2d"}, "t2d BOOL"),
    (lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}, "no mapping"),
    (replaced("d2t", lambda d2t: d2t.int()), "I32"),
    (replaced("d2t", lambda d2t: d2t[:-1]), r"d2t I64 \[159\]"),
    (replaced("t2d", lambda t2d: t2d[:-2]), r"t2d BOOL \[400\]"),
    (replaced("d2t", lambda d2t: d2t + 1), "do not belong together"),
])  # fmt: skip
def test_a_mapping_that_is_not_whole_is_refused(published, facts, damage, message):
    change(published, tensors=damage)
    with pytest.raises(PreconditionError, match=message):
        vocab.published_mapping(published, facts.vocab_size)


def test_a_mapping_of_another_verifier_is_refused(published, facts):
    with pytest.raises(PreconditionError, match="vocab_size 402") as refused:
        vocab.published_mapping(published, 500)
    assert "vocab_size 500" in str(refused.value)


def drop_key(name):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(("changes", "message"), [
    ({"config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]}}, r"\[1, 4, 5\].*\n.*\[2, 4, 5\] in the states"),
    ({"config": {"fc_norm": True}}, "missing: fc_norm.0.weight"),
    ({"config": {"hidden_size": 128}, "tensors": replaced("norm.weight", lambda norm: norm.repeat(2))},
     r"norm.weight: \[128\] instead of \[64\]"),
    ({"config": {"hidden_size": 128}}, r"norm.weight: \(64,\) instead of \(128,\)"),
    ({"tensors": replaced("lm_head.weight", lambda head: head[:-1])},
     r"lm_head.weight: \[159, 64\] instead of \[160, 64\]"),
    ({"config": {"num_attention_heads": 2}}, r"q_proj.weight: \[64, 128\] instead of \[32, 128\]"),
    ({"tensors": drop_key("fc.weight")}, "missing: fc.weight"),
    ({"tensors": lambda tensors: tensors | {"fc.bias": torch.zeros(64)}}, "unknown: fc.bias"),
    ({"tensors": replaced("fc.weight", lambda weight: weight * torch.nan)}, "NaN or Inf in fc.weight"),
    ({"config": {"model_type": "qwen3"}}, "architecture-known"),
])  # fmt: skip
def test_a_drafter_that_does_not_fit_is_refused_with_both_sides(published, facts, changes, message):
    change(published, **changes)
    t2d = torch.ones(facts.vocab_size, dtype=torch.bool)
    with pytest.raises(PreconditionError, match=message):
        network.check_start(published, facts, AUX, t2d)


def test_a_drafter_of_another_hidden_size_names_a_tensor_and_both_shapes(published, facts):
    with pytest.raises(PreconditionError, match=r"norm.weight: \[64\] instead of \[128\]"):
        network.check_start(published, replace(facts, hidden_size=128), AUX, torch.ones(1))


def test_ids_that_the_config_does_not_say_are_assumed_aloud(published, facts):
    t2d = vocab.published_mapping(published, facts.vocab_size)[1]
    change(published, drop=[flat_config.IDS])
    assert network.check_start(published, facts, AUX, t2d) == [
        "its config names no layer ids: taken as the engines' default [2, 4, 5]"]
    with pytest.raises(PreconditionError, match=r"\[2, 4, 5\].*\n.*\[1, 3, 5\]"):
        network.check_start(published, facts, [1, 3, 5, 7], t2d)
    change(published, config={"eagle_config": {flat_config.IDS: [2, 4, 5]}})  # ambiguous, but it may be these
    assert "step 0" in network.check_start(published, facts, AUX, t2d)[0]


def test_a_vocabulary_of_equal_size_but_other_tokens_is_refused(prepared, published, facts):
    other = np.arange(facts.vocab_size, 0, -1)
    t2d = torch.from_numpy(vocab.build_mapping(other, 160)[1])
    with pytest.raises(PreconditionError, match="draft vocabulary of stage 03 is not the drafter's"):
        network.check_start(published, facts, AUX, t2d)


# --- stage 03 ---------------------------------------------------------------------------------------------


def test_stage_03_reports_what_a_taken_vocabulary_covers(prepared, published, tiny_model, facts, tmp_path):
    counts = load_file(prepared / "03_vocab" / vocab.COUNTS)["counts"].numpy()
    rare = vocab.build_mapping(counts.max() - counts, 160)  # the tokens that were generated least
    mapping = {name: torch.from_numpy(part) for name, part in zip(("d2t", "t2d"), rare, strict=True)}
    change(published, tensors=lambda tensors: tensors | mapping)
    out = tmp_path / "03_vocab"
    stage = run_stage("03_build_vocab_mapping.py", "--run-dir", prepared, "--model", tiny_model, "--out", out,
                      "--from-checkpoint", published)
    result = manifest(out)
    assert result["draft_vocab_size"] == 160
    assert torch.equal(vocab.load_mapping(out / vocab.MAPPING)[1], mapping["t2d"])
    assert result["coverage"] == pytest.approx(counts[rare[1]].sum() / counts.sum())
    assert result["fresh_coverage"] > result["held_out_coverage"] > result["coverage"] + 0.01
    assert "percentage points less than a fresh choice" in stage.stderr
    most = int(counts.argmax())
    assert result["missing_tokens"][0]["id"] == most and result["missing_tokens"][0]["count"] == counts[most]
    controls = {text: each["in"] for text, each in result["control_tokens"].items()}
    assert controls.keys() == {"<|im_end|>", "<think>", "</think>"}
    assert all(inside == rare[1][result["control_tokens"][text]["id"]] for text, inside in controls.items())
    refused = run_stage("03_build_vocab_mapping.py", "--run-dir", prepared, "--model", tiny_model, "--out", out,
                        "--draft-vocab-size", 160, check=3)
    assert "input mapping" in refused.stderr


def test_a_fresh_vocabulary_has_the_control_tokens_whatever_was_generated(prepared):
    result = manifest(prepared / "03_vocab")
    assert {text: each["in"] for text, each in result["control_tokens"].items()} == {
        "<|im_end|>": True, "<think>": True, "</think>": True}


def test_without_a_tokenizer_the_control_tokens_are_unknown(prepared, tiny_model, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(tiny_model / "config.json", model)
    stage = run_stage("03_build_vocab_mapping.py", "--run-dir", prepared, "--model", model, "--draft-vocab-size", 64,
                      "--out", tmp_path / "03_vocab")
    assert "it is unknown whether the tokens that end a turn" in stage.stderr
    assert manifest(tmp_path / "03_vocab")["control_tokens"] == {}


# --- stage 04 ---------------------------------------------------------------------------------------------


def train(run_dir, model, *more, check=0):
    return run_stage("04_train.py", "--run-dir", run_dir, "--model", model, "--layers", *LAYERS.split(), "--epochs", 1,
                     "--lr", "1e-4", "--batch-tokens", 100, "--validation-fraction", 0.2, *more, check=check)


def test_a_reduced_drafter_is_trained_further(prepared, drafters, tiny_model, facts, tmp_path):
    start = drafters / "reduced"
    out, taken = tmp_path / "04_train", tmp_path / "03_vocab_taken"
    refused = train(prepared, tiny_model, "--init-from", start, "--out", out, check=3)
    assert "160 tokens" in refused.stderr and "128 tokens" in refused.stderr
    command = f"python 03_build_vocab_mapping.py --run-dir {prepared} --model {tiny_model} --from-checkpoint {start}"
    assert command in refused.stderr and not (out / "manifest.json").exists()
    run_stage("03_build_vocab_mapping.py", "--run-dir", prepared, "--model", tiny_model, "--from-checkpoint", start,
              "--out", taken)
    train(prepared, tiny_model, "--init-from", start, "--vocab", taken, "--out", out)

    result = manifest(out)
    rows = [row for _, row in files.read_jsonl(out / "metrics.jsonl") if row["kind"] == "validation"]
    assert [row["step"] for row in rows] == [0, result["counts"]["done"]]
    assert result["start"]["acceptance"] == rows[0]["acceptance"]
    # what the drafter predicts by itself on the held-out samples is what step 0 says
    store = StateStore(prepared / "02_states")
    samples = batches.read_samples(store, load_dataset(prepared / "02_states"))
    held_out = batches.split(samples, 0.2, 0)[1]
    options = TrainSection(batch_tokens=100, validation_fraction=0.2)
    trainer = training.Trainer(network.continue_from(start, facts, AUX), store, options,
                               training.Processes(0, 1, torch.device("cpu")))
    measured = trainer.validate(held_out)
    assert rows[0]["acceptance"] == measured["acceptance"] and measured["accuracy_by_step"][0] > 0.3
    # training began there: the weights have moved, but not far
    before, best = (load_file(folder / tensor_files.SINGLE)["fc.weight"].float()
                    for folder in (start, out / "checkpoints" / "best"))
    assert 0 < (best - before).abs().max() < 0.05
    assert files.read_json(out / "checkpoints" / "best" / "config.json") == files.read_json(start / "config.json")

    # its RoPE is the published drafter's, not the verifier's: right as training wrote it, a fault when it is changed
    export = ("05_fix_weight_keys.py", "--model", tiny_model, "--to", "vllm", "--run-dir", prepared)
    run_stage(*export, "--checkpoint", out / "checkpoints" / "best", "--out", tmp_path / "05_export")
    served = tmp_path / "05_export" / "vllm"
    assert files.read_json(served / "config.json")["rope_theta"] == 5000.0
    run_stage(*export, "--checkpoint", served, "--check")
    rope = files.read_json(served / "config.json")["rope_parameters"] | {"rope_theta": 100.0}
    change(served, config={"rope_theta": 100.0, "rope_parameters": rope})
    refused = run_stage(*export, "--checkpoint", served, "--check", check=3)
    assert "rope-as-trained" in refused.stderr

    stale = train(prepared, tiny_model, "--vocab", taken, "--out", out, check=3)
    assert 'train.init_from: "reduced" → null' in stale.stderr and "input init_from" in stale.stderr


def test_a_full_vocabulary_goes_from_03_to_05(prepared, drafters, tiny_model, facts, tmp_path):
    start = drafters / "full"
    assert not {"d2t", "t2d"} & tensor_files.read(start).keys()
    for name in ("01_traces", "02_states"):
        (tmp_path / name).symlink_to(prepared / name)
    run_stage("03_build_vocab_mapping.py", "--run-dir", tmp_path, "--model", tiny_model, "--from-checkpoint", start)
    result = manifest(tmp_path / "03_vocab")
    assert result["draft_vocab_size"] == result["vocab_size"] == facts.vocab_size and result["coverage"] == 1.0
    stage = train(tmp_path, tiny_model, "--init-from", start)
    assert "before training" in stage.stderr and "a good one 60 to 80%" in stage.stderr
    best = tmp_path / "04_train" / "checkpoints" / "best"
    assert not {"d2t", "t2d"} & tensor_files.read(best).keys()
    assert network.load(best, facts).d2t is None
    run_stage("05_fix_weight_keys.py", "--run-dir", tmp_path, "--model", tiny_model, "--check")
