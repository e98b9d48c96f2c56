"""Stage 03 and the mapping: known cases, ranges, consistency, staleness."""

import numpy as np
import pytest
import torch
from support.pipeline import manifest, run_stage, write_traces

from eagle3.common.errors import PreconditionError
from eagle3.drafter import vocab


def counts_of(size: int, **seen: int) -> np.ndarray:
    counts = np.zeros(size, dtype=np.int64)
    for token, count in seen.items():
        counts[int(token[1:])] = count
    return counts


def test_few_distinct_tokens_are_filled_with_the_lowest_ids():
    d2t, t2d = vocab.build_mapping(counts_of(16, t5=3, t9=1, t12=7), 8)
    assert (d2t + np.arange(8)).tolist() == [0, 1, 2, 3, 4, 5, 9, 12]
    assert d2t.tolist() == [0, 0, 0, 0, 0, 0, 3, 5]
    assert t2d.sum() == 8 and d2t.dtype == np.int64 and t2d.dtype == bool


def test_the_most_frequent_tokens_win():
    d2t, _ = vocab.build_mapping(counts_of(10, t9=5, t3=4, t7=4, t1=1), 3)
    assert (d2t + np.arange(3)).tolist() == [3, 7, 9]


@pytest.mark.parametrize("size", [0, -1, 17])
def test_a_size_out_of_range_is_refused(size):
    with pytest.raises(PreconditionError, match="from 1 to 16"):
        vocab.build_mapping(counts_of(16, t1=1), size)


def test_coverage_counts_occurrences_not_tokens():
    counts = counts_of(10, t1=90, t2=10)
    _, t2d = vocab.build_mapping(counts, 1)
    assert vocab.coverage(counts, t2d) == pytest.approx(0.9)


def test_held_out_coverage_is_that_of_the_other_half():
    halves = np.stack([counts_of(10, t8=9, t7=1), counts_of(10, t8=4, t9=4)])
    assert vocab.coverage(halves.sum(0), vocab.build_mapping(halves.sum(0), 3)[1]) == 1.0
    # {8, 7, 0} holds half of the second, {8, 9, 0} nine tenths of the first
    assert vocab.held_out_coverage(halves, 3) == pytest.approx((0.5 + 0.9) / 2)


@pytest.mark.parametrize("damage", [lambda d2t: d2t + 1, lambda d2t: d2t[:-1], lambda d2t: d2t * 0])
def test_a_mapping_that_contradicts_itself_is_refused(damage):
    d2t, t2d = (torch.from_numpy(array) for array in vocab.build_mapping(counts_of(16, t5=3, t9=1), 4))
    vocab.check_mapping(d2t, t2d, "here")
    with pytest.raises(PreconditionError, match="do not belong together"):
        vocab.check_mapping(damage(d2t), t2d, "here")


def test_the_stage_counts_generated_tokens_only_and_refuses_other_settings(tiny_model, tmp_path):
    traces = write_traces(tmp_path, tiny_model, count=3)
    common = ["--run-dir", tmp_path, "--model", tiny_model]
    run_stage("03_build_vocab_mapping.py", *common, "--draft-vocab-size", 64)
    result = manifest(tmp_path / "03_vocab")
    assert result["counts"]["tokens"] == 20 + 21 + 22  # completions; the prompts' tokens are not in it
    assert result["coverage"] == 1.0 and 0 < result["held_out_coverage"] <= 1
    d2t, t2d = vocab.load_mapping(tmp_path / "03_vocab" / vocab.MAPPING)
    assert len(d2t) == 64 and t2d.sum() == 64

    again = run_stage("03_build_vocab_mapping.py", *common, "--draft-vocab-size", 64)
    assert "complete already" in again.stderr
    refused = run_stage("03_build_vocab_mapping.py", *common, "--draft-vocab-size", 32, check=3)
    assert "vocab.draft_vocab_size: 64 → 32" in refused.stderr and "--restart" in refused.stderr
    write_traces(tmp_path, tiny_model, count=1, first=3)
    stale = run_stage("03_build_vocab_mapping.py", *common, "--draft-vocab-size", 64, check=3)
    assert "input traces" in stale.stderr
    assert traces.is_dir()
