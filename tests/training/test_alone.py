"""What a run does that nobody watches: it skips, leaves out, divides, says, and stops where it has to."""

import importlib.util
import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.pipeline import kill_midway, manifest, run_stage, tree
from support.trainers import loop_of

from eagle3.common import files
from eagle3.common.errors import FailureLimitError, PreconditionError, StageError, UsageError
from eagle3.common.options import TrainSection
from eagle3.states.store import StateStore
from eagle3.training import batches, checkpoints, curves, speed, spikes, tracking
from eagle3.training import trainer as training
from eagle3.training.long_samples import fit
from eagle3.training.schedule import Schedule
from eagle3.training.ttt import loss as ttt_loss

OPTIONS = TrainSection(batch_tokens=100, lr=1e-3, epochs=2, save_every_steps=1)


@pytest.fixture
def make_loop(prepared, tiny_model, tmp_path):
    """Return a function that makes a new Loop of one process on one directory, as a new start does."""
    def make(states=prepared / "02_states", **more):
        return loop_of(prepared, states, tiny_model, tmp_path / "04_train", replace(OPTIONS, **more))

    return make


def state_of(loop):
    """Return weights and moments."""
    found = dict(checkpoints.trainable(loop.trainer.model))
    for name, parameter in [*found.items()]:
        for key, value in loop.trainer.optimizer.state.get(parameter, {}).items():
            found[f"{key}/{name}"] = value
    return {name: value.detach().clone() for name, value in found.items()}


def spoil(loop, steps):
    """Let the batches of some steps (from 0) have a state that is not finite, behind all checks."""
    load, numbers = loop.trainer.load_batch, {sample.i for step in steps for batch in loop.schedule.steps(0)[step]
                                              for sample in batch}

    def loaded(members, *more):
        batch = load(members, *more)
        if {sample.i for sample in members} <= numbers:
            batch.aux[0, 0] = torch.inf
        return batch

    loop.trainer.load_batch = loaded


# --- steps that are skipped ---


def test_a_step_that_is_not_finite_is_skipped_counted_and_named(make_loop):
    made = make_loop()
    spoil(made, [2])
    made.epoch(0, None)
    rows = [row for _, row in files.read_jsonl(made.metrics) if row["kind"] == "train"]
    assert [bool(row.get("skipped")) for row in rows[:4]] == [False, False, True, False]
    assert rows[2]["loss"] is None and rows[2]["samples"] == [sample.i for sample in made.schedule.steps(0)[2][0]]
    assert made.counters["skipped_steps"] == 1 and made.counters["skipped_in_a_row"] == 0
    json.loads((made.root / "last" / "trainer.json").read_text(), parse_constant=pytest.fail)  # no NaN in it
    resumed = make_loop()
    assert resumed.counters == made.counters and len(resumed.counters["gradient_norms"]) == len(rows) - 1
    for name, value in state_of(made).items():
        assert torch.equal(value, state_of(resumed)[name]), name  # AdamW's own count of steps too


@pytest.mark.parametrize("limit", [1e-6, math.inf])
def test_a_gradient_above_the_limit_changes_neither_weights_nor_moments(make_loop, limit):
    made = make_loop()
    step = made.schedule.steps(0)[0]
    made.trainer.step([made.trainer.load_batch(step[0])], 100, 1e-3)
    before = state_of(made)
    figures = made.trainer.step([made.trainer.load_batch(step[0])], 100, 1e-3, limit)
    assert bool(spikes.reason(figures["loss"], figures["grad_norm"], limit)) == (limit < 1)
    after = state_of(made)
    assert all(torch.equal(before[name], after[name]) for name in before) == (limit < 1)


def test_a_spike_is_what_is_far_above_the_median():
    assert spikes.limit([1.0] * 19, 10) == spikes.limit([1.0] * 50, 0) == math.inf
    assert spikes.limit([0.5] * 30 + [40.0] * 5, 10) == 5.0
    counters = {}
    for norm in range(1, 150):
        spikes.remember(counters, float(norm), "")
    assert counters["gradient_norms"] == [float(norm) for norm in range(50, 150)]
    spikes.remember(counters, 0.0, "")  # a step with nothing to learn says nothing of what is usual
    spikes.remember(counters, 1e9, "a spike")
    assert counters["gradient_norms"][-1] == 149.0
    assert (counters["skipped_steps"], counters["skipped_in_a_row"]) == (1, 1)


def test_a_few_in_a_row_end_the_run_with_what_it_was_before_them(make_loop):
    made = make_loop(save_every_steps=None, max_skipped_in_a_row=3)
    spoil(made, [2, 3, 4])
    with pytest.raises(StageError, match="3 steps in a row were skipped") as caught:
        made.epoch(0, None)
    assert "step 5" in str(caught.value) and "last" in str(caught.value)
    resumed = make_loop(save_every_steps=None, max_skipped_in_a_row=3)
    assert resumed.counters["step"] == 2 and not resumed.counters.get("skipped_steps")
    assert len([*files.read_jsonl(resumed.metrics)]) == 2
    spoil(resumed, [2, 3, 4])
    with pytest.raises(StageError, match="3 steps in a row"):
        resumed.epoch(0, None)
    assert make_loop(max_skipped_in_a_row=3).counters["step"] == 2


# --- samples that are left out ---


@pytest.fixture
def damaged_states(prepared, tmp_path):
    """Return a function that copies the states with some files damaged: by a flipped byte, or gone."""
    def damage(flipped=(), gone=()):
        states = shutil.copytree(prepared / "02_states", tmp_path / "02_states")
        for number in flipped:
            path = StateStore(states).path(number)
            data = bytearray(path.read_bytes())
            data[-70] ^= 1
            path.write_bytes(data)
        for number in gone:
            StateStore(states).path(number).unlink()
        return states

    return damage


def test_damaged_samples_are_left_out_and_named(make_loop, damaged_states, caplog):
    made = make_loop(damaged_states(flipped=[6], gone=[9]), max_failures=2)
    made.run()
    assert made.counters["left_out"] == [6, 9]
    assert "hs_6.safetensors" in caplog.text and "hs_9.safetensors" in caplog.text
    used = {sample.i for step in made.schedule.steps(0) for batch in step for sample in batch}
    assert {6, 9} <= used  # the schedule is that of all samples: nobody else trains in another batch
    again = make_loop(made.trainer.store.directory, max_failures=2)
    assert again.trainer.left_out == {6, 9}


def test_more_damage_than_allowed_stops_with_the_way_to_mend_it(make_loop, damaged_states):
    made = make_loop(damaged_states(flipped=[6, 9]), max_failures=1)
    with pytest.raises(FailureLimitError, match="2 samples have damaged states") as caught:
        made.run()
    assert "hs_6.safetensors" in caught.value.parts["fix"] and "hs_9.safetensors" in caught.value.parts["fix"]
    assert "02_extract_hidden_states.py" in caught.value.parts["fix"]


def test_without_leave_the_first_one_stops(make_loop, damaged_states):
    with pytest.raises(PreconditionError, match="hs_6.safetensors"):
        make_loop(damaged_states(flipped=[6])).run()


def test_both_in_two_processes_and_a_killed_run_ends_with_the_same_bytes(prepared, tiny_model, tmp_path,
                                                                         damaged_states):
    states = damaged_states(flipped=[6])
    store = StateStore(states)
    tensors = load_file(store.path(11))
    tensors["hidden_states"][3:5] = 3e38  # finite, so nobody refuses it, and too much for any loss
    save_file(tensors, store.path(11))
    index = store.index()
    index[11] |= {"bytes": store.path(11).stat().st_size, "sha256": files.sha256_file(store.path(11))}
    store.index_path.write_bytes(b"".join(files.encode_line(index[number]) for number in sorted(index)))
    written = manifest(states) | {"seal": None}
    written["outputs"]["index.jsonl"] |= {"bytes": store.index_path.stat().st_size,
                                          "sha256": files.sha256_file(store.index_path)}
    files.write_json(states / "manifest.json", written)

    def arguments(out):
        return ["--run-dir", prepared, "--model", tiny_model, "--layers", 2, 4, 5, 7, "--epochs", 2, "--lr", "1e-3",
                "--batch-tokens", 100, "--validation-fraction", 0.1, "--save-every-steps", 1, "--log-every-steps", 2,
                "--states", states, "--max-failures", 1, "--gpus", 2, "--out", tmp_path / out]

    log = run_stage("04_train.py", *arguments("straight")).stderr
    done = manifest(tmp_path / "straight")
    assert done["counts"]["skipped_steps"] == 2 and done["left_out"] == [6]
    assert log.count("is left out") == 1 and log.count("is skipped") == 2 and "rm -f" in log.splitlines()[-2]
    rows = [row for _, row in files.read_jsonl(tmp_path / "straight/metrics.jsonl") if row["kind"] == "train"]
    assert all(11 in row["samples"] for row in rows if row.get("skipped"))
    metrics = tmp_path / "killed/metrics.jsonl"
    kill_midway("04_train.py", *arguments("killed"),
                done=lambda: metrics.read_bytes().count(b"\n") if metrics.exists() else 0)
    run_stage("04_train.py", *arguments("killed"))
    assert tree(tmp_path / "killed") == tree(tmp_path / "straight")


# --- texts longer than a batch ---


def everything_of(store, samples, batch_tokens, steps):
    """Return {(step, position in the text): (token read, teacher state)} of what carries loss, by sample, and the RoPE
    positions."""
    found, places = {}, {}
    for sample in samples:
        batch = batches.collate(store, [sample], batch_tokens, steps, verify=True)
        later = batches.collate(store, [sample], batch_tokens, steps, verify=False)  # reads no more than it needs
        assert all(torch.equal(getattr(batch, name), getattr(later, name)) for name in ("ids", "aux", "teacher"))
        for p, (place, aux) in enumerate(zip(batch.positions.tolist(), batch.aux, strict=True)):
            assert place == sample.start + p + 1
            places.setdefault((sample.i, place), aux)
            assert torch.equal(places[sample.i, place], aux)
        for step, (rows, teachers) in enumerate(batch.judged):
            for row, teacher in zip(batch.rows[rows].tolist(), teachers.tolist(), strict=True):
                key = sample.i, step, sample.start + row
                assert key not in found, "judged twice"
                found[key] = int(batch.ids[row + step]), batch.teacher[teacher]
    return found


@pytest.mark.parametrize("batch_tokens", [8, 11, 26, 27, 30])
def test_chunks_lose_nothing_but_the_context_before_them(parts, batch_tokens):
    _, store, samples = parts
    steps = 3
    fitted = fit(samples, batch_tokens, "chunk", steps)
    assert all(sample.length <= batch_tokens for sample in fitted.samples)
    assert fitted.long_samples and fitted.long_chunks > fitted.long_samples and fitted.long_lost_positions == 0
    whole, chunked = (everything_of(store, part, 1000, steps) for part in (samples, fitted.samples))
    assert whole.keys() == chunked.keys()
    for key, (token, teacher) in whole.items():
        assert chunked[key][0] == token and torch.equal(chunked[key][1], teacher)
    assert sum(int(s.learned().sum()) for s in fitted.samples) == sum(int(s.learned().sum()) for s in samples)


def test_a_chunk_whose_context_is_nothing_has_the_loss_of_the_text(parts):
    """The first chunk has all that the text has before it, so its share of the loss is the text's."""
    build, store, samples = parts
    model = build()
    config = training.Trainer(model, store, OPTIONS, training.Processes(0, 1, torch.device("cpu")))._loss
    sample = replace(samples[0], loss_mask=np.ones_like(samples[0].loss_mask))
    first, *others = fit([sample], 16, "chunk", 3).samples
    assert others and others[0].start == first.own == 13
    short = batches.collate(store, [first], 16, 3, verify=True)
    cut = batches.collate(store, [sample], 1000, 3, verify=True)
    keep = [torch.isin(cut.rows[rows], torch.arange(13)) for rows, _ in cut.judged]
    cut.judged = [(rows[kept], teachers[kept]) for (rows, teachers), kept in zip(cut.judged, keep, strict=True)]
    one, other = ttt_loss(model, short, 3, *config), ttt_loss(model, cut, 3, *config)
    assert one.tolist() == pytest.approx(other.tolist(), rel=1e-5)


def test_long_texts_are_cut_or_left_out_when_asked_and_counted(parts):
    _, _, samples = parts
    cut, dropped = fit(samples, 26, "truncate", 3), fit(samples, 26, "drop", 3)
    assert cut.long_samples == dropped.long_samples == sum(sample.length > 26 for sample in samples) > 0
    assert [s.learned().tolist() for s in cut.samples] == [s.supervised(26).tolist() for s in samples]
    assert dropped.long_lost_positions > cut.long_lost_positions > 0
    assert f"{dropped.long_samples} texts are longer than a batch: left out" in dropped.say("drop")
    with pytest.raises(PreconditionError, match="no sample is left"):
        fit(samples, 9, "drop", 3)


# --- when it ends, and what is kept ---


def test_max_steps_ends_the_schedule_and_its_learning_rate(parts):
    _, _, samples = parts
    whole = Schedule(samples, OPTIONS, 1)
    short = Schedule(samples, replace(OPTIONS, max_steps=whole.steps_per_epoch[0] + 2), 1)
    assert short.steps_per_epoch == [whole.steps_per_epoch[0], 2] and short.total_steps == sum(short.steps_per_epoch)
    assert Schedule(samples, replace(OPTIONS, max_steps=1), 1).steps_per_epoch == [1]
    assert short.steps(1) == whole.steps(1)[:2]


def test_every_nth_checkpoint_is_kept_and_a_short_run_ends_validated(make_loop):
    made = make_loop(save_every_steps=None, keep_every=2, keep_checkpoints=1, max_steps=5)
    made.run()
    names = {path.name for path in made.root.glob("step_*")}
    assert names == {"step_2", "step_4", "step_5"} and made.counters["validation"]
    assert made.counters["step"] == 5 and made.counters["epoch_end"]


# --- figures ---


def test_validation_tells_every_count_source_and_place_in_the_context(parts, one_process):
    build, store, samples = parts
    named = [replace(sample, source="ab"[sample.i % 2]) for sample in samples]
    trainer = training.Trainer(build(), store, replace(OPTIONS, ttt_steps=4), one_process, served=[2, 3])
    figures = trainer.validate(named)
    assert [*figures["lengths"]] == ["1", "2", "3", "4"] and figures["acceptance"]["length"] == figures["lengths"]["3"]
    assert figures["length"] == pytest.approx((figures["lengths"]["2"] + figures["lengths"]["3"]) / 2)
    for shares in (figures["by_source"], figures["by_context"]):
        rounds = sum(each["rounds"] for each in shares.values())
        assert rounds == figures["acceptance"]["rounds"]
        mean = sum(each["length"] * each["rounds"] for each in shares.values()) / rounds
        assert mean == pytest.approx(figures["acceptance"]["length"])
    assert set(figures["by_source"]) == {"a", "b"} and set(figures["by_context"]) == {"0-1k"}
    only = trainer.validate([sample for sample in named if sample.source == "a"])
    assert only["acceptance"]["length"] == pytest.approx(figures["by_source"]["a"]["length"])
    far = trainer.validate([replace(sample, start=0, own=None) for sample in named])
    assert far["accuracy_by_step"] == figures["accuracy_by_step"]


def test_a_step_counts_accuracies_as_validation_does(parts, one_process):
    build, store, samples = parts
    trainer = training.Trainer(build(), store, replace(OPTIONS, batch_tokens=2000), one_process)
    held_out = trainer.validate(samples)
    batch = trainer.load_batch(samples)
    figures = trainer.step([batch], batch.supervised, 0.0, counted=True)
    for name in ("accuracy_by_step", "conditional_accuracy"):
        assert figures[name] == pytest.approx(held_out[name])
    first, second = figures["accuracy_by_step"][:2]
    assert figures["conditional_accuracy"][0] == first and figures["conditional_accuracy"][1] > second


def test_operations_are_those_that_torch_counts(parts):
    from torch.utils.flop_counter import FlopCounterMode

    build, store, samples = parts
    model = build()
    batch = batches.collate(store, samples[:6], 1000, 3, verify=False)
    config = training.Trainer(model, store, OPTIONS, training.Processes(0, 1, torch.device("cpu")))._loss
    with FlopCounterMode(display=False) as counter:
        ttt_loss(model, batch, 3, *config).sum().backward()
    # the plain form computes whole squares of attention scores where a triangle is needed
    assert counter.get_total_flops() == pytest.approx(speed.operations(model, batch, 3), rel=0.03)


@pytest.mark.parametrize(("name", "flops"), [
    ("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA GB200", 2.5e15), ("NVIDIA L40S", 362e12),
    ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA Imaginary 100", None)])
def test_the_peak_of_a_card_is_known_by_its_name(name, flops):
    assert speed.peak(name) == flops


def test_rates_are_those_of_the_last_steps(monkeypatch):
    now = iter([0.0, 1.0, 2.0, 5.0])
    monkeypatch.setattr(speed.time, "monotonic", lambda: next(now))
    measured = speed.Speed(torch.device("cpu"), 2, bf16=False)
    assert measured.next_of(iter("abc"), 2) == ["a", "b"]
    measured.add(1000, 0)
    figures = measured.figures(steps_left=3)
    assert (figures["tokens_per_s"], figures["waiting"], figures["left_s"]) == (200.0, 0.2, 15.0)
    assert figures["peak_share"] is None and "20.0% waiting for data, 15s left" in speed.say(figures)


def test_the_page_shows_a_run_and_escapes_what_it_is_told():
    rows = [{"kind": "train", "step": step, "loss": None if step == 3 else 1 / step, "grad_norm": 1.0, "lr": 1e-3,
             "accuracy_by_step": [0.5, 0.2]} for step in range(1, 1000)]
    rows[2] |= {"skipped": "not finite: <loss>", "samples": [4, 5]}
    rows.append({"kind": "validation", "step": 999, "epoch": 1, "loss": 0.2, "accuracy_by_step": [0.6],
                 "lengths": {"1": 1.5}, "conditional_accuracy": [0.6], "by_context": {},
                 "by_source": {"<b>": {"length": 1.5, "rounds": 7}}})
    page = curves.page(rows)
    assert page.count("<figure>") == 7 and "&lt;loss&gt;" in page and "<b>" not in page and "1 skipped steps" in page
    assert len(page) < 200_000
    assert curves.page([]).count("<svg") == 0


# --- trackers ---


def test_a_tracker_that_is_not_installed_or_not_known_is_refused_before_training():
    with pytest.raises(UsageError, match="no such tracker"):
        tracking.check(["tensorbored"])
    missing = [name for name in ("tensorboard", "wandb", "trackio") if not importlib.util.find_spec(name)]
    assert missing
    for name in missing:
        with pytest.raises(PreconditionError, match=f"{name} is not installed"):
            tracking.check([name])


def test_a_tracker_gets_every_number_and_its_failure_costs_no_training(monkeypatch, tmp_path, caplog):
    told = []

    def opened(folder, step):
        def log(step, figures):
            if step == 3:
                raise OSError("no more")
            told.append((step, figures))
        return log, lambda: told.append("closed")

    monkeypatch.setitem(tracking._OPENERS, "wandb", opened)
    tracker = tracking.Tracker(["wandb"], tmp_path)
    row = {"kind": "train", "step": 1, "loss": 0.5, "accuracy_by_step": [0.4, 0.1], "speed": {"waiting": 0.0,
           "peak_share": None}, "samples": [1, 2], "skipped": "x"}
    for step in range(1, 5):
        tracker.log(row | {"step": step})
    tracker.close()
    assert told == [(step, {"train/loss": 0.5, "train/accuracy_by_step/1": 0.4, "train/accuracy_by_step/2": 0.1,
                            "train/speed/waiting": 0.0}) for step in (1, 2)]
    assert "wandb gets no more figures: OSError: no more" in caplog.text
