"""Stage 02 and the store, on the transformers backend."""

import json
import shutil

import pytest
import torch
from support.pipeline import LAYERS, kill_midway, manifest, run_stage, tree, write_traces

from eagle3.common.errors import PreconditionError, UsageError
from eagle3.drafter import verifier
from eagle3.states import shards
from eagle3.states.agreement import AgreementCheck
from eagle3.states.extraction import batches
from eagle3.states.store import Sample, StateStore, load_dataset
from eagle3.training.batches import read_samples


def test_batches_depend_on_the_list_only():
    samples = [Sample(i, str(i), "", [0] * length, []) for i, length in enumerate([5, 4, 3, 9, 1])]
    assert [[s.i for s in batch] for batch in batches(samples, 9)] == [[0, 1], [2], [3], [4]]


@pytest.mark.parametrize(("given", "layers"), [([], [2, 15, 27, 29]), ([2, 15, 27, 30], [2, 15, 27, 29])])
def test_layers(given, layers, tiny_model):
    facts = verifier.read(tiny_model)
    facts = type(facts)(**{**facts.__dict__, "num_layers": 30})
    assert facts.layers(given) == layers


@pytest.mark.parametrize(
    "given", [[2, 4, 5], [2, 4, 5, 6], [2, 4, 5, 9], [5, 4, 2, 7], [0, 4, 5, 7], [2, 2, 5, 7], [7]])
def test_wrong_layers_are_refused(given, tiny_model):
    with pytest.raises(PreconditionError):
        verifier.read(tiny_model).layers(given)


@pytest.fixture(scope="module")
def captured(tiny_model, tmp_path_factory):
    """A run directory with traces and states of the transformers backend."""
    run_dir = tmp_path_factory.mktemp("captured")
    write_traces(run_dir, tiny_model)
    extract(run_dir, tiny_model)
    return run_dir


def extract_arguments(run_dir, model):
    return ["02_extract_hidden_states.py", "--run-dir", run_dir, "--model", model, "--backend", "hf", "--dtype",
            "float32", "--layers", *LAYERS.split(), "--max-length", 64, "--batch-tokens", 64]


def extract(run_dir, model, *more, check=0):
    return run_stage(*extract_arguments(run_dir, model), *more, check=check)


def test_the_store_holds_what_the_design_says(captured, tiny_model):
    states = captured / "02_states"
    result = manifest(states)
    assert result["status"] == "complete" and result["agreement"] == 1.0
    assert result["counts"]["done"] == 12 and result["layers"] == [2, 4, 5, 7]
    store = StateStore(states)
    ids, input_ids, masks = load_dataset(states)
    index = store.index()
    assert ids == [index[i]["id"] for i in range(12)] == sorted(ids)
    for i in range(12):
        hidden, tokens = store.load(i, index[i]["sha256"])
        assert hidden.shape == (len(input_ids[i]), 4, 64) and hidden.dtype == torch.float32
        assert tokens.tolist() == input_ids[i].tolist()
        assert masks[i].sum() == 20 + i % 7 and not masks[i][: 6 + i % 5].any()


def test_speculators_reads_the_store(captured):
    from speculators.train.data import ArrowDataset

    dataset = ArrowDataset(max_len=128, datapath=captured / "02_states", on_missing="raise")
    sample = dataset[3]
    assert sample["hidden_states"].shape == (sample["lengths"].item(), 3 * 64)
    assert sample["verifier_last_hidden_states"].shape[1] == 64
    assert sample["loss_mask"].sum() == 23


def test_a_second_run_does_nothing_and_appended_traces_extend(captured, tiny_model, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(captured, run_dir)
    before = {p.name: p.stat().st_mtime_ns for p in (run_dir / "02_states" / "hidden_states").iterdir()}
    assert "complete already" in extract(run_dir, tiny_model).stderr
    write_traces(run_dir, tiny_model, count=3, first=12)
    extract(run_dir, tiny_model)
    after = {p.name: p.stat().st_mtime_ns for p in (run_dir / "02_states" / "hidden_states").iterdir()}
    assert {name: after[name] for name in before} == before and len(after) == 15


def test_halved_and_emptied_files_are_captured_again_and_only_they(captured, tiny_model, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(captured, run_dir)
    files = run_dir / "02_states" / "hidden_states"
    half, empty = files / "hs_2.safetensors", files / "hs_9.safetensors"
    half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])
    empty.write_bytes(b"")
    before = {p.name: p.stat().st_mtime_ns for p in files.iterdir()}
    extract(run_dir, tiny_model)
    changed = {p.name for p in files.iterdir() if p.stat().st_mtime_ns != before[p.name]}
    assert changed == {half.name, empty.name}
    assert tree(run_dir / "02_states") == tree(captured / "02_states")


def test_a_flipped_bit_is_found_when_all_is_verified_and_only_that_sample_is_captured_again(captured, tiny_model,
                                                                                            tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(captured, run_dir)
    files = run_dir / "02_states" / "hidden_states"
    data = bytearray((files / "hs_5.safetensors").read_bytes())
    data[-40] ^= 1
    (files / "hs_5.safetensors").write_bytes(data)
    before = {p.name: p.stat().st_mtime_ns for p in files.iterdir()}
    assert "complete already" in extract(run_dir, tiny_model).stderr
    assert "hs_5.safetensors is damaged" in extract(run_dir, tiny_model, "--verify", "full").stderr
    assert {p.name for p in files.iterdir() if p.stat().st_mtime_ns != before[p.name]} == {"hs_5.safetensors"}
    assert tree(run_dir / "02_states") == tree(captured / "02_states")


def test_shards_put_together_are_the_undivided_capture(captured, tiny_model, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(captured / "01_traces", run_dir / "01_traces")
    assert "needs a folder of its own" in extract(run_dir, tiny_model, "--shard", "1/2", check=2).stderr
    parts = [tmp_path / f"part_{k}" for k in (1, 2)]
    for k, part in enumerate(parts, 1):
        extract(run_dir, tiny_model, "--shard", f"{k}/2", "--out", part)
        assert manifest(part)["shard"] == f"{k}/2" and manifest(part)["counts"]["done"] < 12
    (parts[0] / "hidden_states/hs_0.safetensors").write_bytes(b"")  # damaged on its way: captured again
    told = extract(run_dir, tiny_model, "--merge", " ".join(map(str, parts))).stderr
    assert "loading the verifier" in told and "samples from" in told
    assert tree(run_dir / "02_states") == tree(captured / "02_states")
    store = StateStore(tmp_path / "other")
    with pytest.raises(PreconditionError, match="a shard was captured with other options"):
        shards.merge(store, [parts[1]], [], "another fingerprint")
    with pytest.raises(PreconditionError, match="numbers its samples otherwise"):
        shards.merge(store, [parts[1]], [], manifest(parts[1])["fingerprint"])


@pytest.mark.parametrize("given", ["0/2", "3/2", "2", "a/b", "-1/2", "1/0"])
def test_what_is_no_shard_is_refused(given):
    with pytest.raises(UsageError, match="not a shard"):
        shards.parse(given)


def test_sigkill_costs_nothing(captured, tiny_model, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(captured / "01_traces", run_dir / "01_traces")
    arguments = extract_arguments(run_dir, tiny_model)
    kill_midway(*arguments, done=lambda: len(list(run_dir.glob("02_states/hidden_states/hs_*"))))
    run_stage(*arguments)
    assert tree(run_dir / "02_states") == tree(captured / "02_states")


def test_changed_traces_and_options_are_refused(captured, tiny_model, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(captured, run_dir)
    refused = extract(run_dir, tiny_model, "--layers", 1, 4, 5, 7, check=3)
    assert "model.layers: [2, 4, 5, 7] → [1, 4, 5, 7]" in refused.stderr
    path = run_dir / "01_traces" / "traces.jsonl"
    lines = path.read_text().splitlines()
    from eagle3.traces import trace_rows

    row = json.loads(lines[0])
    row["completion_token_ids"] = row["completion_token_ids"][:-1]
    lines[0] = json.dumps(trace_rows.sealed({k: v for k, v in row.items() if k != "digest"}))
    path.write_text("\n".join(lines) + "\n")
    assert "traces have changed since their states were captured" in extract(run_dir, tiny_model, check=3).stderr


def test_flipped_bits_and_zero_tails_are_found_on_reading(captured, tmp_path):
    states = tmp_path / "02_states"
    shutil.copytree(captured / "02_states", states)
    store = StateStore(states)
    index = store.index()
    path = store.path(4)
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    with pytest.raises(PreconditionError, match="only that sample is captured again"):
        store.load(4, index[4]["sha256"])
    path.write_bytes(bytes(data[:-64]) + b"\0" * 64)
    with pytest.raises(PreconditionError, match="checksum"):
        store.load(4, index[4]["sha256"])


def test_states_of_another_layer_fail_the_agreement_check(captured, tiny_model, tmp_path):
    from safetensors.torch import save_file

    states = tmp_path / "02_states"
    shutil.copytree(captured / "02_states", states)
    store = StateStore(states)
    entries = list(store.index().values())
    facts = verifier.read(tiny_model)
    good = AgreementCheck(facts, store, 0.9, "float32", "float32")
    good.add(entries)
    good.judge()
    for entry in entries:
        hidden, ids = store.load(entry["i"])
        save_file({"hidden_states": hidden[:, [0, 1, 3, 2]].contiguous(), "token_ids": ids}, store.path(entry["i"]))
    shifted = AgreementCheck(facts, store, 0.9, "float32", "float32")
    shifted.add(entries)
    with pytest.raises(PreconditionError, match="own next tokens"):
        shifted.judge()


def test_the_plan_is_refused_when_the_disk_is_too_small(tiny_model, tmp_path):
    big = tmp_path / "big"
    shutil.copytree(tiny_model, big)
    config = json.loads((big / "config.json").read_text())
    (big / "config.json").write_text(json.dumps(config | {"hidden_size": 4096}))
    folder = tmp_path / "run" / "01_traces"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({
        "status": "complete", "fingerprint": "f", "counts": {"done": 100_000, "prompt_tokens": 0,
                                                             "completion_tokens": 100_000 * 2048}}))
    refused = run_stage("02_extract_hidden_states.py", "--run-dir", tmp_path / "run", "--model", big, "--dry-run",
                        "--dtype", "bfloat16", check=3)
    assert "6.7 TB" in refused.stderr and "the disk is too small" in refused.stderr
    assert not (tmp_path / "run" / "02_states").exists()


def test_nothing_to_learn_stops_with_counts(captured):
    store = StateStore(captured / "02_states")
    rows = load_dataset(captured / "02_states")
    with pytest.raises(PreconditionError, match="0 supervised of"):
        read_samples(store, rows._replace(masks=[mask * 0 for mask in rows.masks]))
