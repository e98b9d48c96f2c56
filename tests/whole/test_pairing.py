"""What belongs together: traces, states, masks, mapping and verifier are compared where they are used."""

import json
import shutil

import pytest
from support.pipeline import LAYERS, manifest, run_stage, tree, write_traces
from support.stub_server import Stub

from eagle3.common import files
from eagle3.states.store import StateStore, load_dataset

EXTRACT = ["--backend", "hf", "--dtype", "float32", "--layers", *LAYERS.split(), "--max-length", 64]
TRAIN = ["--epochs", 1, "--batch-tokens", 200, "--validation-fraction", 0.2]


def extract(run, model, *more, check=0, **keywords):
    return run_stage("02_extract_hidden_states.py", "--run-dir", run, "--model", model, *EXTRACT, *more, check=check,
                     **keywords)


def train(run, model, *more, check=0):
    return run_stage("04_train.py", "--run-dir", run, "--model", model, *TRAIN, *more, check=check)


@pytest.fixture
def run(prepared, tmp_path):
    """A run of its own with traces, states and mapping."""
    shutil.copytree(prepared, tmp_path / "run")
    return tmp_path / "run"


def rewrite(run, change):
    """Let `change` edit the lines of traces.jsonl, and finish stage 01 anew."""
    path = run / "01_traces/traces.jsonl"
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    told = manifest(run / "01_traces")
    told.pop("outputs", None)
    files.write_json(run / "01_traces/manifest.json", told | {"identity": files.sha256_file(path)})


def test_a_removed_trace_leaves_a_gap_that_training_knows(run, tiny_model):
    before = {i: entry["sha256"] for i, entry in StateStore(run / "02_states").index().items()}
    rewrite(run, lambda lines: lines[:7] + lines[8:])
    write_traces(run, tiny_model, count=1, first=90)
    result = extract(run, tiny_model)
    assert "1 captured traces are gone from traces.jsonl, such as trace-007" in result.stderr
    index, rows = StateStore(run / "02_states").index(), load_dataset(run / "02_states")
    assert (index[24]["id"], rows.ids[24]) == ("trace-090", "trace-090") and len(rows.ids) == 25
    assert index[7]["retired"] and rows.ids[7] == "" and not rows.masks[7].any()
    assert {i: index[i]["sha256"] for i in before} == before
    assert StateStore(run / "02_states").load(24)[1].tolist() == rows.input_ids[24].tolist()
    run_stage("03_build_vocab_mapping.py", "--run-dir", run, "--model", tiny_model, "--draft-vocab-size", 128,
              "--restart")
    train(run, tiny_model)
    counts = manifest(run / "04_train")["counts"]
    assert counts["training_samples"] + counts["validation_samples"] == 24


def test_a_trace_that_is_back_is_not_captured_again(run, tiny_model):
    kept = []

    def without_one(lines):
        kept.append(lines.pop(3))
        return lines

    before = tree(run / "02_states")
    rewrite(run, without_one)
    extract(run, tiny_model)
    rewrite(run, lambda lines: lines + kept)
    assert "loading the verifier" not in extract(run, tiny_model).stderr
    assert tree(run / "02_states") == before


@pytest.mark.parametrize(("name", "damage"), [
    ("01_traces/traces.jsonl", "half"), ("02_states/index.jsonl", "half"),
    ("03_vocab/vocab_mapping.safetensors", "bit"), ("02_states/data-00000-of-00001.arrow", "bit"),
    ("02_states/manifest.json", "layers"),
])  # fmt: skip
def test_what_the_writer_recorded_is_proved_by_the_reader(run, tiny_model, name, damage):
    path = run / name
    if name.startswith("01"):
        told = manifest(run / "01_traces")
        entry = {"path": "traces.jsonl", "bytes": path.stat().st_size, "sha256": files.sha256_file(path)}
        files.write_json(run / "01_traces/manifest.json", told | {"outputs": {"traces": entry}})
    data = path.read_bytes()
    if damage == "half":
        lines = data.splitlines(keepends=True)
        data = b"".join(lines[: len(lines) // 2])
    elif damage == "bit":
        data = bytes([*data[:-200], data[-200] ^ 1, *data[-199:]])
    else:
        data = data.replace(b"\n    5,\n", b"\n    6,\n")
    assert data != path.read_bytes()
    path.write_bytes(data)
    stage = extract if name.startswith("01") else train
    refused = stage(run, tiny_model, "--out", run / "fresh", check=3)
    assert name in refused.stderr and "expected:" in refused.stderr and "fix:" in refused.stderr
    assert not list((run / "fresh").rglob("*.safetensors"))


def test_states_and_mapping_swapped_with_another_runs_are_refused(run, tiny_model, tmp_path):
    other = tmp_path / "other"
    write_traces(other, tiny_model, count=24, first=30)
    extract(other, tiny_model)
    for number in (2, 5):
        name = f"02_states/hidden_states/hs_{number}.safetensors"
        shutil.copy(other / name, run / name)
    refused = train(run, tiny_model, "--out", run / "fresh", check=3)
    assert "hidden_states/hs_" in refused.stderr
    run_stage("03_build_vocab_mapping.py", "--run-dir", other, "--model", tiny_model, "--draft-vocab-size", 128)
    mapping = "03_vocab/vocab_mapping.safetensors"
    assert files.sha256_file(other / mapping) != files.sha256_file(run / mapping)
    shutil.copy(other / mapping, run / mapping)
    refused = train(run, tiny_model, "--out", run / "fresh", check=3)
    assert mapping in refused.stderr


def test_training_with_another_verifier_of_the_same_sizes_is_refused(run, tiny_model, tmp_path):
    other = tmp_path / "tiny-llama"
    shutil.copytree(tiny_model, other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-64:] = bytes(64)
    (other / "model.safetensors").write_bytes(weights)
    refused = train(run, other, "--out", run / "fresh", check=3)
    assert "model.safetensors" in refused.stderr and "of another model" in refused.stderr
    shutil.copy(tiny_model / "model.safetensors", other)
    (other / "generation_config.json").write_text("{}")  # says nothing about states
    train(run, other, "--out", run / "fresh")


def test_grown_states_and_an_old_mapping_are_not_mixed(run, tiny_model):
    write_traces(run, tiny_model, count=2, first=50)
    extract(run, tiny_model)
    refused = train(run, tiny_model, "--out", run / "fresh", check=3)
    assert "03_build_vocab_mapping.py" in refused.stderr and "other traces" in refused.stderr
    named = train(run, tiny_model, "--out", run / "fresh", "--vocab", run / "03_vocab")  # the user's own choice
    assert "other traces" in named.stderr


def test_a_complete_result_outlives_a_failure_before_any_work(run, tiny_model, tmp_path):
    complete = (run / "02_states/manifest.json").read_bytes()
    write_traces(run, tiny_model, count=1, first=70)
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['transformers'] = None\n")
    failed = extract(run, tiny_model, check=3, env={"PYTHONPATH": str(tmp_path)})
    assert "the capture process ended" in failed.stderr and "stays complete" in failed.stderr
    assert (run / "02_states/manifest.json").read_bytes() == complete
    train(run, tiny_model, "--out", run / "fresh")


def test_traces_stay_complete_while_their_server_is_away(tmp_path, tiny_model):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "a", "prompt": "one"}) + "\n")
    with Stub() as stub:
        command = ["--run-dir", tmp_path / "run", "--prompts", prompts, "--endpoint", stub.url, "--max-tokens", 64]
        run_stage("01_generate_synthetic.py", *command)
    complete = (tmp_path / "run/01_traces/manifest.json").read_bytes()
    prompts.write_text(prompts.read_text() + json.dumps({"id": "b", "prompt": "two"}) + "\n")
    failed = run_stage("01_generate_synthetic.py", *command, check=3)  # nobody listens there any more
    assert "stays complete" in failed.stderr
    assert (tmp_path / "run/01_traces/manifest.json").read_bytes() == complete
