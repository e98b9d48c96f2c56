"""Samples cut, packed and supervised."""

import random
import shutil
from dataclasses import replace

import numpy as np
import pytest

from eagle3.common.errors import PreconditionError
from eagle3.states.store import StateStore, load_dataset
from eagle3.training import batches
from eagle3.training.batches import TrainingSample
from eagle3.training.schedule import supervised


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


def test_a_cut_sample_ends_its_loss_before_the_cut(parts):
    _, store, samples = parts
    sample = replace(samples[0], loss_mask=np.ones_like(samples[0].loss_mask))
    batch = batches.collate(store, [sample, samples[1]], 10, 3, verify=False)
    assert batch.lengths[0] == 10 and batch.mask[:10].tolist() == [True] * 9 + [False]
    assert supervised([sample], 10) == 9


def test_a_states_file_that_is_gone_is_not_passed_over(prepared, tmp_path):
    shutil.copytree(prepared / "02_states", tmp_path / "s")
    store, rows = StateStore(tmp_path / "s"), load_dataset(tmp_path / "s")
    store.path(5).unlink()
    assert len(batches.read_samples(store, rows, limit=5)) > 0
    with pytest.raises(PreconditionError, match="hs_5.safetensors"):
        batches.read_samples(store, rows)
