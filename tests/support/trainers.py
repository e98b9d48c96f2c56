"""Trainers on the prepared run of the tiny model."""

import time
from types import SimpleNamespace

import torch

from eagle3.common.log import Progress
from eagle3.common.options import TrainSection
from eagle3.drafter import network, verifier, vocab
from eagle3.states.store import StateStore, load_dataset
from eagle3.training import batches
from eagle3.training import trainer as training
from eagle3.training.loop import Loop
from eagle3.training.schedule import Schedule

# Five batches in steps of two: in the third the second process has none. The norm is one that clips.
OPTIONS = TrainSection(batch_tokens=100, lr=1e-3, max_grad_norm=0.5)


def trainer_of(run_dir, model, processes, seed=0, options=OPTIONS, norms=()):
    """Return a trainer and the loaded steps of this process on the first five batches."""
    facts = verifier.read(model)
    mapping = vocab.load_mapping(run_dir / "03_vocab" / vocab.MAPPING)
    store = StateStore(run_dir / "02_states")
    samples = batches.read_samples(store, load_dataset(run_dir / "02_states"))
    built = network.build(facts, [2, 4, 5, 7], *mapping, network.layer_shape(facts), norms=norms, seed=seed)
    trainer = training.Trainer(built, store, options, processes)
    packed = Schedule(samples, options, 1).packed(0)[:5]
    return trainer, [packed[start : start + 2] for start in (0, 2, 4)], facts


def loop_of(run_dir, states, model, directory, options):
    """Return a Loop of one process that has resumed what lies in a directory; the first four samples are held out."""
    facts = verifier.read(model)
    mapping = vocab.load_mapping(run_dir / "03_vocab" / vocab.MAPPING)
    store = StateStore(states)
    samples = batches.read_samples(store, load_dataset(states), missing=options.max_failures)
    built = network.build(facts, [2, 4, 5, 7], *mapping, network.layer_shape(facts))
    trainer = training.Trainer(built, store, options, training.Processes(0, 1, torch.device("cpu")))
    stage = SimpleNamespace(directory=directory, signal=None, check_stop=lambda: None,
                            progress=lambda *_: Progress("", 1, ""))
    loop = Loop(stage, facts, trainer, Schedule(samples[4:], options, 1), samples[:4], [2, 4, 5, 7])
    loop.saved_at = time.monotonic()
    loop.resume()
    return loop
