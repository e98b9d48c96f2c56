"""Training steps, and checkpoints of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from eagle3.common import files
from eagle3.common.errors import PreconditionError
from eagle3.common.options import TrainSection
from eagle3.drafter import verifier
from eagle3.training import checkpoints
from eagle3.training import optimizer as optimizers
from eagle3.training import trainer as training
from eagle3.training.schedule import Schedule, learning_rate, supervised


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


def take_steps(trainer, schedule, first, last):
    steps = schedule.steps(0)[first:last]
    for number, members in enumerate(steps, start=first):
        loaded = [trainer.load_batch(batch) for batch in members]
        total = sum(supervised(batch, trainer.options.batch_tokens) for batch in members)
        figures = trainer.step(loaded, total, learning_rate(number, schedule.total_steps, trainer.options))
    return figures


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


@pytest.mark.parametrize("more", [{}, {"optimizer": "muon"}, {"moments": "bf16"}, {"recompute": "on"}])
def test_four_steps_equal_two_plus_resume_plus_two(parts, one_process, tiny_model, tmp_path, more):
    build, store, samples = parts
    options = TrainSection(batch_tokens=100, lr=1e-3, **more)
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


def test_moments_in_bf16_are_rounded_to_neighbours_and_to_themselves_on_average():
    x = torch.full((200_000,), 1.0 + 1 / 512 + 1 / 1024)  # 3/8 of the way from 1 to the next, 1 + 1/128
    x[1::2] *= -1
    noise = torch.randint(65536, x.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    rounded = optimizers.round_stochastically(x, noise).float().abs()
    assert {*rounded.unique().tolist()} == {1.0, 1.0 + 1 / 128}
    assert float((rounded > 1).float().mean()) == pytest.approx(0.375, abs=0.005)


def test_moments_in_bf16_are_kept_so_and_follow_those_in_float32(parts, one_process, tiny_model, tmp_path):
    build, store, samples = parts
    trainers = [training.Trainer(build(), store, TrainSection(batch_tokens=200, lr=1e-3, moments=moments), one_process)
                for moments in ("float32", "bf16")]
    schedule = Schedule(samples, trainers[0].options, 1)
    full, half = (take_steps(trainer, schedule, 0, 3)["loss"] for trainer in trainers)
    assert half == pytest.approx(full, rel=2e-3) and half != full
    sizes, facts = [], verifier.read(tiny_model)
    for number, trainer in enumerate(trainers):
        state = trainer.optimizer.state
        assert {each["exp_avg_sq"].dtype for each in state.values()} == {(torch.float32, torch.bfloat16)[number]}
        folder = checkpoints.save(tmp_path / str(number), 3, trainer.model, facts, trainer.optimizer, {"step": 3})
        sizes.append((folder / checkpoints.STATE).stat().st_size)
    assert sizes[1] < 0.7 * sizes[0]


def test_muon_turns_matrices_and_adamw_the_rest(parts, one_process):
    """A Muon update has singular values of at most one size, 0.2 √(larger side) of the rate; AdamW's entries have."""
    build, store, samples = parts
    options = TrainSection(batch_tokens=400, optimizer="muon", weight_decay=0.0)
    trainer = training.Trainer(build(), store, options, one_process)
    before = {name: weight.detach().clone() for name, weight in checkpoints.trainable(trainer.model).items()}
    batch = trainer.load_batch(samples[:8])
    trainer.step([batch], batch.supervised, 1e-3)
    for name, weight in checkpoints.trainable(trainer.model).items():
        update, state = (weight - before[name]).detach(), trainer.optimizer.state[weight]
        if weight.dim() == 2 and name != "lm_head.weight":
            largest = float(torch.linalg.matrix_norm(update, 2)) / (1e-3 * 0.2 * max(weight.shape) ** 0.5)
            assert set(state) == {"momentum_buffer"} and 0.6 < largest < 1.3, (name, largest)
        else:
            assert {"exp_avg", "exp_avg_sq"} < set(state)
            assert float(update.abs().max()) == pytest.approx(1e-3, rel=0.01), name


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


@pytest.mark.parametrize("more", [{}, {"optimizer": "muon", "loss": "lk_hybrid"}])
def test_a_drafter_learns_and_the_prediction_follows(parts, one_process, more):
    build, store, samples = parts
    options = TrainSection(batch_tokens=400, lr=5e-3, epochs=12, warmup_ratio=0.05, **more)
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
