"""Epochs, saves and resumes of one process, cut off between any two moments."""

import errno
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eagle3.common import files
from eagle3.common.errors import Interrupted
from eagle3.common.options import TrainSection
from eagle3.drafter import network, verifier, vocab
from eagle3.states.store import StateStore, load_dataset
from eagle3.training import batches, checkpoints
from eagle3.training.loop import Loop
from eagle3.training.schedule import Schedule
from eagle3.training.trainer import Processes, Trainer


@pytest.fixture
def loop(prepared, tiny_model, tmp_path):
    """Return a function that makes a new Loop of one process on one directory, as a new start does."""
    facts = verifier.read(tiny_model)
    mapping = vocab.load_mapping(prepared / "03_vocab" / vocab.MAPPING)
    store = StateStore(prepared / "02_states")
    samples = batches.read_samples(store, load_dataset(prepared / "02_states"))
    options = TrainSection(batch_tokens=300, lr=1e-3, epochs=2)

    def make(check_stop=lambda: None):
        stage = SimpleNamespace(directory=tmp_path, signal=None, check_stop=check_stop)
        model = network.build(facts, [2, 4, 5, 7], *mapping, network.layer_shape(facts))
        trainer = Trainer(model, store, options, Processes(0, 1, torch.device("cpu")))
        made = Loop(stage, facts, trainer, Schedule(samples, options, 1), samples[:4], [2, 4, 5, 7])
        made.saved_at = time.monotonic()
        made.resume()
        return made

    return make


def test_links_that_a_kill_left_behind_are_set_right(loop):
    loop().epoch(0, None)
    first = loop()
    assert (first.root / "best").resolve().name == (first.root / "last").resolve().name
    newest = (first.root / "last").resolve()
    (first.root / "best").unlink()
    (first.root / "last").unlink()
    assert loop().counters["epoch"] == 1
    assert (first.root / "best").resolve() == (first.root / "last").resolve() == newest


def test_a_checkpoint_that_only_lacks_its_name_gets_it(loop):
    """The same step is saved twice at the end of an epoch: the first must not go before the second has its name."""
    made = loop()
    made.epoch(0, None)
    newest = (made.root / "last").resolve()
    newest.rename(made.root / f"{files.TEMPORARY_PREFIX}{newest.name}")  # all that a kill can leave
    assert checkpoints.newest(made.root) == newest
    (made.root / f"{files.TEMPORARY_PREFIX}step_999").mkdir()  # one that was cut off
    assert checkpoints.newest(made.root) == newest
    assert not list(made.root.glob(files.TEMPORARY_PREFIX + "*"))
    newest.rename(made.root / f"{files.TEMPORARY_PREFIX}old-{newest.name}")  # moved aside, and nothing followed
    (made.root / f"{files.TEMPORARY_PREFIX}{newest.name}").mkdir()
    assert checkpoints.newest(made.root) == newest


def test_a_disk_that_fails_while_a_step_is_saved_again_leaves_it(loop, monkeypatch):
    made, os_rename = loop(), os.rename
    made.epoch(0, None)
    newest = (made.root / "last").resolve()

    def rename(source, target):
        if Path(source).name == f"{files.TEMPORARY_PREFIX}{newest.name}":
            raise OSError(errno.EIO, "the disk")
        os_rename(source, target)

    monkeypatch.setattr(checkpoints.os, "rename", rename)
    with pytest.raises(OSError, match="the disk"):
        made.save()
    assert not checkpoints._damage(newest) and checkpoints.newest(made.root) == newest


def test_processes_that_stop_wait_for_the_one_that_writes(loop, monkeypatch):
    made, said = loop(), []
    made.stage.signal = signal.SIGTERM
    made.trainer.processes = SimpleNamespace(any=lambda flag: said.append("met") or flag)
    monkeypatch.setattr(made, "save", lambda: said.append("saved"))
    with pytest.raises(Interrupted):
        made.save_if_due()
    assert said == ["met", "saved", "met"]


def test_the_only_checkpoint_stays_while_its_step_is_saved_again(loop, monkeypatch):
    made = loop()
    made.epoch(0, None)
    whole, os_rename = [], os.rename

    def look_around(call):
        def watched(*values, **keywords):
            assert call is os_rename or not Path(values[0]).name.startswith("step_")  # half of it would lie there
            for moment in ("before", "after"):
                folders = [*made.root.glob("step_*"), *made.root.glob(f"{files.TEMPORARY_PREFIX}step_*")]
                whole.append(any(not checkpoints._damage(folder) for folder in folders))  # which `newest` would find
                if moment == "before":
                    call(*values, **keywords)
        return watched

    monkeypatch.setattr(checkpoints.os, "rename", look_around(os_rename))
    monkeypatch.setattr(checkpoints.shutil, "rmtree", look_around(shutil.rmtree))
    made.save()
    assert len(whole) >= 8 and all(whole), whole


def test_a_signal_during_validation_keeps_the_steps_before_it(loop):
    def stop():
        raise Interrupted(signal.SIGTERM)

    stopped = loop(check_stop=stop)
    with pytest.raises(Interrupted):
        stopped.epoch(0, None)
    resumed = loop()
    assert (resumed.counters["step"], resumed.counters["epoch"]) == (resumed.schedule.steps_per_epoch[0], 0)
    resumed.epoch(0, None)  # validates only
    straight = resumed.counters
    shutil.rmtree(resumed.root)
    other = loop()
    other.epoch(0, None)
    assert other.counters == straight


def test_a_kill_between_metrics_and_checkpoint_repeats_no_row(loop, monkeypatch):
    made = loop()
    made.options.save_every_steps = 1

    def killed(*_, **more):
        raise KeyboardInterrupt

    def save_of_the_end():
        monkeypatch.setattr(checkpoints, "save", killed)
        Loop.save(made)

    end_epoch = made.end_epoch
    made.end_epoch = lambda epoch: (setattr(made, "save", save_of_the_end), end_epoch(epoch))
    with pytest.raises(KeyboardInterrupt):
        made.epoch(0, None)
    monkeypatch.undo()
    resumed = loop()
    resumed.epoch(0, None)
    rows = [(row["kind"], row["step"]) for _, row in files.read_jsonl(resumed.metrics)]
    assert len(rows) == len(set(rows)) == resumed.schedule.steps_per_epoch[0] + 1
