"""Batches, the draft-round walk, training steps, checkpoints, resume, and stage 04 as a process."""

import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.pipeline import LAYERS, kill_at_random_moments, manifest, run_stage, tree
from support.project import ROOT

from eagle3.common import files
from eagle3.common.errors import PreconditionError
from eagle3.common.options import TrainSection
from eagle3.drafter import network, verifier, vocab
from eagle3.states.store import StateStore, load_dataset
from eagle3.training import acceptance, batches, checkpoints, ttt
from eagle3.training import trainer as training
from eagle3.training.batches import TrainingSample
from eagle3.training.schedule import Schedule, learning_rate, supervised

# --- batches ----------------------------------------------------------------------------------------------


def sample(i: int, length: int, prompt: int = 2) -> TrainingSample:
    return TrainingSample(i, "", np.arange(length) >= prompt)


def test_the_split_has_the_exact_sizes_and_no_overlap():
    train, held_out = batches.split([sample(i, 5) for i in range(12_501)], 0.2, seed=0)
    assert (len(train), len(held_out)) == (10_001, 2_500)
    assert not {s.i for s in train} & {s.i for s in held_out}
    with pytest.raises(PreconditionError, match="too few samples"):
        batches.split([sample(0, 5)], 0.2, seed=0)


def test_packing_keeps_every_sample_once_and_fills_the_batches():
    lengths = random.Random(0).choices(range(20, 300), k=500)
    samples = [sample(i, length) for i, length in enumerate(lengths)]
    packed = batches.pack(samples, 1024, seed=1, epoch=2)
    assert sorted(s.i for batch in packed for s in batch) == list(range(500))
    assert all(sum(s.length for s in batch) <= 1024 for batch in packed)
    assert batches.efficiency(packed, 1024) > 0.95
    assert [[s.i for s in b] for b in packed] == [[s.i for s in b] for b in batches.pack(samples, 1024, 1, 2)]
    assert [[s.i for s in b] for b in packed] != [[s.i for s in b] for b in batches.pack(samples, 1024, 1, 3)]


def test_supervised_positions_read_and_predict_generated_tokens():
    mask = np.array([0, 0, 1, 1, 1, 1], dtype=bool)  # tokens 2..5 are generated
    # position p reads token p+1 and predicts p+2: (2→3), (3→4), (4→5)
    assert TrainingSample(0, "", mask).supervised().tolist() == [False, True, True, True, False]


# --- the walk ---------------------------------------------------------------------------------------------


def engine(ids: list[int], drafts: dict[int, list[int]], first: int, k: int) -> tuple[int, int]:
    """Accept drafts as an engine does: drafts[t] are the tokens proposed after token t. Return (rounds, accepted)."""
    rounds = accepted = 0
    output = ids[: first + 1]
    while len(output) < len(ids):
        rounds += 1
        proposal = drafts[len(output) - 1][:k]
        matched = 0
        while matched < k and len(output) + matched < len(ids) and proposal[matched] == ids[len(output) + matched]:
            matched += 1
        accepted += matched
        output = ids[: min(len(ids), len(output) + matched + 1)]
    return rounds, accepted


@pytest.mark.parametrize("seed", range(20))
def test_the_walk_counts_as_an_engine_would(seed):
    rng = random.Random(seed)
    ids = [rng.randrange(3) for _ in range(40)]
    drafted = [[rng.randrange(3) for _ in range(39)] for _ in range(3)]
    result = acceptance.walk(ids, drafted, first_generated=5, draft_tokens=3)
    proposals = {t: [drafted[s][t - 1] for s in range(3)] for t in range(5, 40)}
    assert (result.rounds, sum(result.accepted)) == engine(ids, proposals, 5, 3)
    assert result.length == pytest.approx(1 + sum(result.accepted) / result.rounds)


def test_a_perfect_and_a_useless_drafter():
    ids = list(range(10, 30))
    perfect = [[ids[min(p + 2 + s, 19)] for p in range(19)] for s in range(3)]
    assert acceptance.walk(ids, perfect, 3, 3).length == 4.0  # 16 tokens after the first in 4 full rounds
    assert acceptance.walk(ids, [[-1] * 19] * 3, 3, 3).by_position == [0.0, 0.0, 0.0]


# --- a run directory with states and mapping --------------------------------------------------------------


@pytest.fixture(scope="module")
def parts(prepared, tiny_model):
    """(model factory, store, samples) of the prepared run."""
    facts = verifier.read(tiny_model)
    d2t, t2d = vocab.load_mapping(prepared / "03_vocab" / vocab.MAPPING)
    store = StateStore(prepared / "02_states")
    samples = batches.read_samples(store, load_dataset(prepared / "02_states"))

    def build(**more):
        return network.build(facts, [2, 4, 5, 7], d2t, t2d, network.layer_shape(facts), **more)

    return build, store, samples


def resolve(loss):
    from speculators.losses import resolve_loss_config

    return resolve_loss_config(loss, "eager")


def speculators_loss(model, batch, steps):
    """What speculators' own forward computes for the same batch (one document, all supervised)."""
    from speculators.models.attention import create_float_mask

    model._create_mask_fn = create_float_mask
    inputs = {"hidden_states": batch.aux[None], "input_ids": batch.ids[None], "position_ids": batch.positions[None],
              "document_ids": torch.zeros_like(batch.ids)[None], "loss_mask": batch.mask[None],
              "verifier_last_hidden_states": batch.teacher[None]}
    with torch.compiler.set_stance("force_eager"):
        return model(**inputs, ttt_steps=steps, loss_config=resolve("kl_div"))[1:]


def test_loss_and_gradients_are_those_of_speculators(parts):
    build, store, samples = parts
    ours, theirs = build(), build()
    states, _ = store.load(samples[0].i)
    # speculators' loss counts every position whose target is there: supervise all
    everything = replace(samples[0], loss_mask=np.ones_like(samples[0].loss_mask))
    batch = batches.collate(store, [everything], 1000, 3, verify=True)
    length = everything.length
    assert len(batch.rows) == length - 1  # nothing is known to follow the last position
    losses = ttt.loss(ours, batch, 3, resolve("kl_div"))
    counts = torch.tensor([len(rows) for rows, _ in batch.judged])
    (losses / counts).sum().backward()
    theirs_batch = replace(batch, teacher=states[1:, -1].to(batch.aux.dtype))
    loss, metrics = speculators_loss(theirs, theirs_batch, 3)
    loss.backward()
    by_step = [float(metrics[f"loss_{step}_sum"]) for step in range(3)]
    assert by_step == pytest.approx((losses / counts).tolist(), rel=1e-4)
    for name, parameter in checkpoints.trainable(ours).items():
        reference = dict(theirs.named_parameters())[name].grad
        assert torch.allclose(parameter.grad, reference, rtol=1e-3, atol=1e-6), name


def test_documents_do_not_see_each_other(parts):
    build, store, samples = parts
    model = build().eval()
    alone = batches.collate(store, [samples[3]], 1000, 3, verify=False)
    packed = batches.collate(store, [samples[1], samples[3], samples[2]], 1000, 3, verify=False)
    start = samples[1].length
    for one, many in zip(ttt.draft(model, alone, 3)[0], ttt.draft(model, packed, 3)[0], strict=True):
        assert torch.equal(one, many[start : start + samples[3].length])


def test_positions_without_loss_are_left_out_and_change_nothing(parts):
    """Rows of a second turn see the first turn; a gap in the mask is computed but not judged."""
    build, store, samples = parts
    sample = samples[0]
    mask = np.zeros(sample.length + 1, dtype=bool)
    mask[3:7] = mask[9:13] = True
    batch = batches.collate(store, [replace(sample, loss_mask=mask)], 1000, 3, verify=False)
    assert batch.mask.nonzero().flatten().tolist() == [2, 3, 4, 8, 9, 10]
    assert batch.spans == [(0, 2, 11)]
    judged = [batch.rows[rows].tolist() for rows, _ in batch.judged]
    assert judged == [[2, 3, 4, 8, 9, 10], [2, 3, 8, 9], [2, 8]]
    everything = batches.collate(store, [replace(sample, loss_mask=np.ones_like(mask))], 1000, 3, verify=False)
    model = build().eval()
    full = ttt.draft(model, everything, 3)[0]
    for few, reference, rows in zip(ttt.draft(model, batch, 3)[0], full, judged, strict=True):
        assert torch.equal(few[rows], reference[rows]) and (few >= 0).sum() == len(rows)
    losses = ttt.loss(model, batch, 3, resolve("kl_div"))
    by_hand = []
    targets = ttt.teacher_logits(model, everything)
    for step, logits in enumerate(ttt.logits_by_step(model, everything, 3)):
        rows, logits = torch.tensor(judged[step]), logits.detach()
        by_hand.append(float(resolve("kl_div")["kl_div"][0](logits[rows][None], targets[rows + step][None]).sum()))
    assert losses.tolist() == pytest.approx(by_hand, rel=1e-5)


def test_a_cut_sample_ends_its_loss_before_the_cut(parts):
    _, store, samples = parts
    sample = replace(samples[0], loss_mask=np.ones_like(samples[0].loss_mask))
    batch = batches.collate(store, [sample, samples[1]], 10, 3, verify=False)
    assert batch.lengths[0] == 10 and batch.mask[:10].tolist() == [True] * 9 + [False]
    assert supervised([sample], 10) == 9


def test_a_batch_with_nothing_to_learn_changes_nothing(parts, one_process):
    """Prompts longer than a batch leave no supervised position."""
    build, store, samples = parts
    trainer = training.Trainer(build(), store, TrainSection(batch_tokens=8), one_process)
    mask = np.zeros(samples[0].length + 1, dtype=bool)
    mask[10:] = True
    sample = replace(samples[0], loss_mask=mask)
    batch = trainer.load_batch([sample])
    assert batch.supervised == supervised([sample], 8) == 0
    before = {name: parameter.clone() for name, parameter in checkpoints.trainable(trainer.model).items()}
    result = trainer.validate([sample])
    assert result["loss"] == 0.0 and result["acceptance"]["rounds"] == 0
    assert trainer.step([batch, None], 0, 1e-3)["loss"] == 0.0
    for name, parameter in checkpoints.trainable(trainer.model).items():
        assert torch.isfinite(parameter).all() and torch.allclose(parameter, before[name], atol=1e-4), name


def test_only_the_drafter_is_trained(parts):
    build, _, _ = parts
    names = checkpoints.trainable(build())
    assert {"fc.weight", "lm_head.weight", "norm.weight", "layers.0.self_attn.q_proj.weight"} <= names.keys()
    assert not [name for name in names if name.startswith(("embed_tokens", "verifier_"))]


def test_a_fresh_drafter_starts_from_the_verifier(parts, tiny_model):
    model, facts = parts[0](), verifier.read(tiny_model)
    last = verifier.load_layer_weights(facts, facts.num_layers - 1)
    layer, hidden = model.layers[0], facts.hidden_size
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert torch.equal(getattr(layer.mlp, name).weight, last[f"mlp.{name}.weight"].float())
    for name in ("q_proj", "k_proj", "v_proj"):
        assert torch.equal(getattr(layer.self_attn, name).weight[:, hidden:], last[f"self_attn.{name}.weight"].float())
    assert torch.equal(layer.hidden_norm.weight, last["input_layernorm.weight"].float())
    assert torch.allclose(model.fc.weight[:, -hidden:].diagonal().mean(), torch.tensor(1.0), atol=0.1)


def test_a_layer_of_another_shape_is_left_alone(parts, tiny_model):
    _, store, _ = parts
    facts = verifier.read(tiny_model)
    d2t, t2d = (torch.from_numpy(a) for a in vocab.build_mapping(np.ones(facts.vocab_size, dtype=np.int64), 64))
    shape = network.layer_shape(facts, intermediate_size=96)
    layer = network.build(facts, [2, 4, 5, 7], d2t, t2d, shape).layers[0]
    last = verifier.load_layer_weights(facts, facts.num_layers - 1)
    assert torch.equal(layer.self_attn.o_proj.weight, last["self_attn.o_proj.weight"].float())
    assert torch.equal(layer.post_attention_layernorm.weight, torch.ones(facts.hidden_size))


def test_the_learning_rate_rises_then_falls_to_its_floor():
    options = TrainSection(lr=1.0, warmup_ratio=0.1, min_lr_ratio=0.1)
    rates = [learning_rate(step, 100, options) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (k + 1) for k in range(10)])
    assert max(rates) == 1.0 and rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))


def take_steps(trainer, schedule, first, last):
    steps = schedule.steps(0)[first:last]
    for number, members in enumerate(steps, start=first):
        loaded = [trainer.load_batch(batch) for batch in members]
        total = sum(supervised(batch, trainer.options.batch_tokens) for batch in members)
        figures = trainer.step(loaded, total, learning_rate(number, schedule.total_steps, trainer.options))
    return figures


@pytest.fixture
def one_process():
    return training.Processes(0, 1, torch.device("cpu"))


def test_accumulation_equals_one_large_batch(parts, one_process):
    build, store, samples = parts
    results = []
    for tokens, accumulation in ((10_000, 1), (200, 100)):
        options = TrainSection(batch_tokens=tokens, accumulation=accumulation, lr=1e-3)
        trainer = training.Trainer(build(), store, options, one_process)
        schedule = Schedule(samples, options, accumulation)
        assert schedule.total_steps == options.epochs
        results.append(take_steps(trainer, schedule, 0, 1))
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=2e-3)
    assert results[0]["grad_norm"] == pytest.approx(results[1]["grad_norm"], rel=2e-2)


def test_four_steps_equal_two_plus_resume_plus_two(parts, one_process, tiny_model, tmp_path):
    build, store, samples = parts
    options = TrainSection(batch_tokens=100, lr=1e-3)
    schedule = Schedule(samples, options, 1)
    straight = training.Trainer(build(), store, options, one_process)
    expected = take_steps(straight, schedule, 0, 4)
    first = training.Trainer(build(), store, options, one_process)
    take_steps(first, schedule, 0, 2)
    folder = checkpoints.save(tmp_path, 2, first.model, verifier.read(tiny_model), first.optimizer, {"step": 2})
    second = training.Trainer(build(seed=99), store, options, one_process)
    assert checkpoints.load(folder, second.model, second.optimizer)["step"] == 2
    assert take_steps(second, schedule, 2, 4) == expected
    for name, parameter in checkpoints.trainable(straight.model).items():
        assert torch.equal(parameter, checkpoints.trainable(second.model)[name]), name


def test_the_newest_sound_checkpoint_is_taken(parts, one_process, tiny_model, tmp_path):
    build, store, _ = parts
    trainer = training.Trainer(build(), store, TrainSection(), one_process)
    facts = verifier.read(tiny_model)
    for step in (1, 2):
        checkpoints.save(tmp_path, step, trainer.model, facts, trainer.optimizer, {"step": step, "epoch_end": True})
    (tmp_path / f"{files.TEMPORARY_PREFIX}step_3").mkdir()  # a save that was cut off
    assert checkpoints.newest(tmp_path).name == "step_2"
    state = tmp_path / "step_2" / checkpoints.STATE
    data = bytearray(state.read_bytes())
    data[-100] ^= 1
    state.write_bytes(data)
    assert checkpoints.newest(tmp_path).name == "step_1"
    (tmp_path / "step_1" / checkpoints.COUNTERS).write_text("{}")
    with pytest.raises(PreconditionError, match="every checkpoint is damaged"):
        checkpoints.newest(tmp_path)


def test_a_drafter_learns_and_the_prediction_follows(parts, one_process):
    build, store, samples = parts
    options = TrainSection(batch_tokens=400, lr=5e-3, epochs=12, warmup_ratio=0.05)
    trainer = training.Trainer(build(), store, options, one_process)
    before = trainer.validate(samples)
    for epoch in range(options.epochs):
        schedule = Schedule(samples, options, 1)
        for members in schedule.steps(epoch):
            loaded = [trainer.load_batch(batch) for batch in members]
            trainer.step(loaded, loaded[0].supervised, 5e-3)
    after = trainer.validate(samples)
    assert after["loss"] < before["loss"]
    assert after["acceptance"]["length"] > before["acceptance"]["length"] + 0.3
    assert after["accuracy_by_step"] == sorted(after["accuracy_by_step"], reverse=True)


# --- stage 04 as a process --------------------------------------------------------------------------------


def train_arguments(run_dir, model, *more):
    return ["--run-dir", run_dir, "--model", model, "--layers", *LAYERS.split(), "--epochs", 2, "--lr", "1e-3",
            "--batch-tokens", 100, "--validation-fraction", 0.2, "--save-every-steps", 1, *more]


@pytest.fixture(scope="module")
def undisturbed(prepared, tiny_model):
    """The result of an uninterrupted stage 04."""
    run_stage("04_train.py", *train_arguments(prepared, tiny_model))
    return prepared / "04_train"


def test_the_result_is_what_the_design_says(undisturbed):
    result = manifest(undisturbed)
    assert result["status"] == "complete" and result["best"]["acceptance"]["length"] >= 1
    best = undisturbed / "checkpoints" / "best"
    assert (best / "config.json").exists() and (best / "model.safetensors").exists()
    rows = [row for _, row in files.read_jsonl(undisturbed / "metrics.jsonl")]
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, result["counts"]["done"] + 1))
    assert len([row for row in rows if row["kind"] == "validation"]) == 2


def test_the_same_again_does_nothing_and_new_flags_go_beside(undisturbed, prepared, tiny_model, tmp_path):
    assert "complete already" in run_stage("04_train.py", *train_arguments(prepared, tiny_model)).stderr
    refused = run_stage("04_train.py", *train_arguments(prepared, tiny_model, "--lr", "5e-4"), check=3)
    assert "train.lr: 0.001 → 0.0005" in refused.stderr and "--out" in refused.stderr
    other = tmp_path / "04_train_lr5e-4"
    run_stage("04_train.py", *train_arguments(prepared, tiny_model, "--lr", "5e-4", "--out", other))
    assert manifest(other)["status"] == "complete"


def test_sigkill_costs_nothing(undisturbed, prepared, tiny_model, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(prepared, run_dir, ignore=shutil.ignore_patterns("04_train", "logs"))
    arguments = train_arguments(run_dir, tiny_model)
    kill_at_random_moments("04_train.py", *arguments, longest_s=9)
    run_stage("04_train.py", *arguments)
    assert tree(run_dir / "04_train") == tree(undisturbed)


def test_sigterm_saves_and_exits_with_its_code(prepared, tiny_model, tmp_path):
    out = tmp_path / "04_train"
    arguments = train_arguments(prepared, tiny_model, "--out", out, "--epochs", 200, "--save-every-steps", 1000)
    process = subprocess.Popen([sys.executable, ROOT / "04_train.py", *map(str, arguments)], stderr=subprocess.PIPE,
                               text=True)
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "step 10/" in line:
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stderr.read()
    assert process.wait(timeout=60) == 143, "".join(lines) + rest
    assert manifest(out)["status"] == "interrupted"
    assert checkpoints.newest(out / "checkpoints") is not None
