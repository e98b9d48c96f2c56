"""Stage 03 and the mapping: known cases, ranges, consistency, staleness."""

import json
import shutil

import numpy as np
import pytest
import torch
from support.pipeline import manifest, run_stage, write_traces

from eagle3.common import files
from eagle3.common.errors import PreconditionError
from eagle3.drafter import coverage, vocab
from eagle3.traces import token_counts
from eagle3.traces.trace_rows import Ledger


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


def test_pinned_tokens_go_in_and_leave_places_for_the_others():
    counts = counts_of(16, t5=3, t9=1, t12=7)
    d2t, t2d = vocab.build_mapping(counts, 3, [15, 15, 0])
    assert (d2t + np.arange(3)).tolist() == [0, 12, 15] and t2d[15]
    with pytest.raises(PreconditionError, match="more tokens have to be in the draft vocabulary"):
        vocab.build_mapping(counts, 2, [1, 2, 3])


def test_every_size_is_covered_as_a_mapping_of_that_size_is():
    halves = np.random.default_rng(0).zipf(1.5, (2, 3000))
    sizes = coverage.by_size(halves, 1234, [7, 2999], hidden=64, layer=1000)
    assert [each.size for each in sizes] == [1000, 1234, 2000, 3000]
    for each in sizes:
        own = vocab.build_mapping(halves.sum(0), each.size, [7, 2999])[1]
        assert each.coverage == pytest.approx(vocab.coverage(halves.sum(0), own))
        assert each.held_out == pytest.approx(vocab.held_out_coverage(halves, each.size, [7, 2999]))
        assert (each.head_bytes, each.head_share) == (each.size * 128, each.size * 64 / (each.size * 64 + 1000))
    page = coverage.page(sizes, 1234, int(halves.sum()))
    assert "1,234 (chosen)" in page and page.count("<figure>") == 1


def test_counts_kept_by_stage_01_give_the_mapping_of_the_traces(tiny_model, tmp_path):
    traces = write_traces(tmp_path, tiny_model, count=5)
    run_stage("03_build_vocab_mapping.py", "--run-dir", tmp_path, "--model", tiny_model, "--draft-vocab-size", 64)
    ledger = Ledger(traces)
    assert ledger.tokens.write(traces / token_counts.FILE_NAME)
    written = manifest(traces)
    written["outputs"] = {"token_counts": {"path": token_counts.FILE_NAME, **proof(traces / token_counts.FILE_NAME)}}
    files.write_json(traces / "manifest.json", written)
    (traces / "traces.jsonl").write_text("")  # nobody reads it
    run_stage("03_build_vocab_mapping.py", "--run-dir", tmp_path, "--model", tiny_model, "--draft-vocab-size", 64,
              "--out", tmp_path / "kept")
    assert (tmp_path / "kept" / vocab.MAPPING).read_bytes() == (tmp_path / "03_vocab" / vocab.MAPPING).read_bytes()
    for name in ("counts", "coverage", "held_out_coverage", "coverage_by_size"):
        assert manifest(tmp_path / "kept")[name] == manifest(tmp_path / "03_vocab")[name], name
    path = traces / token_counts.FILE_NAME
    path.write_bytes(path.read_bytes()[:-8] + b"\1" * 8)
    refused = run_stage("03_build_vocab_mapping.py", "--run-dir", tmp_path, "--model", tiny_model, "--out",
                        tmp_path / "damaged", check=3)
    assert token_counts.FILE_NAME in refused.stderr


def proof(path):
    return {"bytes": path.stat().st_size, "sha256": files.sha256_file(path)}


def test_ids_are_counted_by_half_whatever_their_number():
    counts, rng = token_counts.TokenCounts(), np.random.default_rng(0)
    rows = [rng.integers(0, 50 + 10 * number, 7000).tolist() for number in range(30)]
    for row in rows:
        counts.add(row)
    for half in (0, 1):
        expected = np.bincount(np.concatenate(rows[half::2]), minlength=400)
        assert counts.halves(400)[half].tolist() == expected.tolist()
    counts.add([1 << 40])  # no token of any verifier: it must not be counted up to
    assert not counts.write("nowhere")


def test_pins_and_padding(tiny_model, tmp_path):
    """A model padded to more rows than its tokenizer has ids, and a draft vocabulary that reaches into them."""
    model = shutil.copytree(tiny_model, tmp_path / "padded")
    config = json.loads((model / "config.json").read_text())
    size = config["vocab_size"]
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": size + 64}))
    write_traces(tmp_path, tiny_model, count=3)
    common = ["--run-dir", tmp_path, "--model", model]
    log = run_stage("03_build_vocab_mapping.py", *common, "--draft-vocab-size", 64, "--pin",
                    f"{size - 1} {size + 63} '<think>'").stderr
    result = manifest(tmp_path / "03_vocab")
    assert {size - 1, size + 63} < {*result["pinned"]} and len(result["pinned"]) == 3
    t2d = vocab.load_mapping(tmp_path / "03_vocab" / vocab.MAPPING)[1]
    assert t2d[result["pinned"]].all() and "1 places of the draft vocabulary are padding" in log
    assert (tmp_path / "03_vocab" / coverage.PAGE).read_text().count("<figure>") == 1
    for wrong in (str(size + 64), "several words of text"):
        refused = run_stage("03_build_vocab_mapping.py", *common, "--pin", f"'{wrong}'", "--out", tmp_path / "x",
                            check=3)
        assert "not a token of the verifier" in refused.stderr and wrong in refused.stderr
    changed = run_stage("03_build_vocab_mapping.py", *common, "--draft-vocab-size", 64, check=3)
    assert "vocab.pin" in changed.stderr
