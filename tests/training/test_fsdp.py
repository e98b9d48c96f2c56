"""Two processes that share the weights compute what one does; a checkpoint knows no number of processes."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.project import ROOT
from support.trainers import OPTIONS, trainer_of

from eagle3.training import checkpoints
from eagle3.training import trainer as training

STEPS = 3


def train(trainer, steps, first=0, after=None):
    """Train the steps from `first` on and return their figures; `after(step)` is called after each."""
    figures = []
    world, rank = trainer.processes.world, trainer.processes.rank
    for number, members in enumerate(steps[first:], start=first):
        loaded = [trainer.load_batch(batch) for batch in members]
        mine = [loaded[k] if k < len(loaded) else None for k in range(rank, 2, world)]
        total = sum(batch.supervised for batch in loaded)
        figures.append(trainer.step(mine, total, 1e-3))
        if after:
            after(number + 1)
    return figures


def work(run_dir, model, folder, processes):
    """Train straight, save after each step, go on from step 1 of this run; return what was computed."""
    trainer, steps, facts = trainer_of(run_dir, model, processes)
    first = processes.rank == 0

    def save(step):
        checkpoints.save(folder, step, trainer.model, facts, trainer.optimizer, {"step": step}, writes=first)

    figures = train(trainer, steps, after=save)
    validation = trainer.validate(steps[0][0] + steps[2][0])
    again, _, _ = trainer_of(run_dir, model, processes, seed=9)
    processes.from_first(None)  # the checkpoint is there for all
    checkpoints.load(folder / "step_1", again.model, again.optimizer)
    figures += train(again, steps, first=1)
    checkpoints.save(folder / "resumed", STEPS, again.model, facts, again.optimizer, {"step": STEPS}, writes=first)
    return figures, validation


def in_bf16(run_dir, model, processes):
    """Return the loss of the first step in bf16, norms having grown by less than bf16 can tell near 1."""
    trainer, steps, _ = trainer_of(run_dir, model, processes, options=replace(OPTIONS, dtype="bfloat16"))
    with torch.no_grad():
        for parameter in checkpoints.trainable(trainer.model).values():
            if parameter.dim() == 1:
                parameter.fill_(1.0035)
    return train(trainer, steps)[0]["loss"]


def to_save_memory(run_dir, model, processes):
    """Return the losses of steps that recompute the layer, with moments in bf16."""
    options = replace(OPTIONS, recompute="on", moments="bf16")
    trainer, steps, _ = trainer_of(run_dir, model, processes, options=options)
    return [figures["loss"] for figures in train(trainer, steps)]


def resume(run_dir, model, folder, target, processes):
    """Go on from step 1 of another run and save the end."""
    trainer, steps, facts = trainer_of(run_dir, model, processes, seed=9)
    checkpoints.load(folder / "step_1", trainer.model, trainer.optimizer)
    train(trainer, steps, first=1)
    checkpoints.save(target, STEPS, trainer.model, facts, trainer.optimizer, {"step": STEPS},
                    writes=processes.rank == 0)


def main(run_dir, model, one, two):
    """What each of the two processes does."""
    processes = training.Processes.start()
    figures, validation = work(run_dir, model, two, processes)
    resume(run_dir, model, one, two / "from_one", processes)
    low = in_bf16(run_dir, model, processes), to_save_memory(run_dir, model, processes)
    if processes.rank == 0:
        torch.save((figures, validation, low), two / "figures.pt")
    processes.stop()


@pytest.fixture(scope="module")
def runs(prepared, tiny_model, tmp_path_factory):
    """(folder of one process, its figures and validation, folder of two, theirs)."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    alone = training.Processes(0, 1, torch.device("cpu"))
    low = in_bf16(prepared, tiny_model, alone), to_save_memory(prepared, tiny_model, alone)
    expected = *work(prepared, tiny_model, one, alone), low
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    environment = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([*command, *map(str, (prepared, tiny_model, one, two))], capture_output=True, text=True,
                            timeout=200, env=os.environ | environment)
    assert result.returncode == 0, result.stderr[-4000:]
    resume(prepared, tiny_model, two, one / "from_two", alone)
    return one, expected, two, torch.load(two / "figures.pt")


def state(folder):
    return load_file(folder / f"step_{STEPS}" / checkpoints.STATE)


def assert_close(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].shape == right[name].shape, name
        assert torch.allclose(left[name], right[name], rtol=1e-3, atol=2e-5), name


def test_loss_gradient_norm_and_weights_are_those_of_one_process(runs):
    one, (expected, validation, _), two, (found, theirs, _) = runs
    for left, right in zip(expected, found, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-4)
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-3)
    assert all(figures["grad_norm"] > OPTIONS.max_grad_norm for figures in expected)
    assert_close(state(one), state(two))
    assert theirs["loss"] == pytest.approx(validation["loss"], rel=1e-4)
    assert theirs["acceptance"]["rounds"] == validation["acceptance"]["rounds"] > 0


def test_norms_are_not_rounded_when_weights_are_gathered_in_bf16(runs):
    assert runs[1][2][0] == pytest.approx(runs[3][2][0], rel=3e-5)


def test_steps_that_save_memory_have_the_losses_of_those_that_do_not(runs):
    expected = [figures["loss"] for figures in runs[1][0][:STEPS]]
    for found in (runs[1][2][1], runs[3][2][1]):
        assert found[0] == pytest.approx(expected[0], rel=1e-5) and found == pytest.approx(expected, rel=2e-3)


def test_a_resume_on_as_many_processes_changes_no_bit(runs):
    for folder in (runs[0], runs[2]):
        straight, resumed = state(folder), state(folder / "resumed")
        assert all(torch.equal(straight[name], resumed[name]) for name in straight)
        served = (folder / f"step_{STEPS}" / "model.safetensors").read_bytes()
        assert served == (folder / "resumed" / f"step_{STEPS}" / "model.safetensors").read_bytes()


def test_a_resume_on_another_number_of_processes_goes_on(runs):
    one, _, two, _ = runs
    for straight, resumed in ((two, one / "from_two"), (one, two / "from_one")):
        assert_close(state(straight), state(resumed))


def test_a_checkpoint_is_written_as_the_library_writes_it(runs, tmp_path):
    for name, metadata in (("model.safetensors", {"format": "pt"}), (checkpoints.STATE, None)):
        written = runs[2] / f"step_{STEPS}" / name
        save_file(load_file(written), tmp_path / name, metadata=metadata)
        assert written.read_bytes() == (tmp_path / name).read_bytes()


def test_every_process_holds_a_part_of_weights_and_moments(prepared, tiny_model, tmp_path):
    """Rows are counted in a group of one process that believes to be one of two."""
    from torch.distributed.fsdp import FSDPModule
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        trainer, _, _ = trainer_of(prepared, tiny_model, training.Processes(0, 2, torch.device("cpu")))
        assert isinstance(trainer._objective, FSDPModule)
        for name, parameter in checkpoints.trainable(trainer.model).items():
            if parameter.dim() > 1:
                assert parameter.to_local().shape[0] == parameter.shape[0] // 2, name
            else:
                assert type(parameter) is torch.nn.Parameter, name  # norms stay whole
            assert parameter.dtype == torch.float32
        assert type(trainer.model.embed_tokens.weight) is torch.nn.Parameter  # whole: it is not trained
    finally:
        torch.distributed.destroy_process_group()
        shutil.rmtree(tmp_path)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
