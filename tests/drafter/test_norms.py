"""Drafters with the norms of EAGLE-3.1: written, read, continued, exported for engines that know them."""

import pytest
import torch
from safetensors.torch import save_file
from support.pipeline import LAYERS, manifest, run_stage

from eagle3.common import files, findings, tensor_files
from eagle3.common.errors import PreconditionError
from eagle3.drafter import checkpoint, config_keys, export_checks, network
from eagle3.training import batches, checkpoints, ttt

ALL = [("fc_norm",), ("norm_output",), ("norm_before_fc", "norm_output"), ("fc_norm", "norm_output"),
       ("norm_before_residual", "norm_before_fc", "norm_output")]  # the last: what speculators trains by default
SINCE = {"norm_before_fc": "0.18.0", "fc_norm": "0.22.0", "norm_output": "0.22.0"}


def publish(model, facts, folder):
    """Write a drafter whose norms are not ones, as training leaves them."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if name.startswith(("fc_norm.", "input_norm.")):
            weight.data.uniform_(0.5, 2.0, generator=generator)
    folder.mkdir()
    save_file(checkpoints.served_tensors(model), folder / tensor_files.SINGLE)
    files.write_json(folder / "config.json", network.served_config(model, facts))
    return folder


def export_of(folder, facts, **changes):
    known = {"engine": "vllm", "version": "0.32.0", "serving_length": 64, "trained_here": True,
             "trained_ids": [2, 4, 5]} | changes
    return checkpoint.Export(folder=folder, raw=config_keys.read(folder), tensors=tensor_files.read(folder),
                             verifier=facts, **known)


@pytest.mark.parametrize("norms", ALL)
def test_a_drafter_with_norms_is_read_and_continued_as_it_was_written(parts, facts, tmp_path, norms):
    build, store, samples = parts
    batch = batches.collate(store, samples[:2], 1000, 3, verify=False)
    model = build(norms=norms)
    folder = publish(model, facts, tmp_path / "drafter")
    for read in (network.load(folder, facts), network.continue_from(folder, facts, [2, 4, 5, 7])):
        assert set(network.norms_of(read)) == set(norms)
        for ours, theirs in zip(ttt.logits_by_step(model, batch, 3), ttt.logits_by_step(read, batch, 3), strict=True):
            assert torch.allclose(ours, theirs, rtol=0.05, atol=0.05)  # the file is in bfloat16
    plain = list(ttt.logits_by_step(build(), batch, 3))
    assert not torch.allclose(list(ttt.logits_by_step(read, batch, 3))[2], plain[2], rtol=0.05, atol=0.05)


def test_a_warm_start_keeps_the_drafters_norms(parts, facts, tmp_path):
    model = parts[0](norms=("fc_norm",))
    folder = publish(model, facts, tmp_path / "drafter")
    t2d = model.t2d
    assert network.check_start(folder, facts, [2, 4, 5, 7], t2d, norms={"fc_norm": None, "norm_output": None}) == []
    with pytest.raises(PreconditionError, match=r"--norm-output[^$]*false \(or nothing\)"):
        network.check_start(folder, facts, [2, 4, 5, 7], t2d, norms={"fc_norm": True, "norm_output": True})
    with pytest.raises(PreconditionError, match="--fc-norm"):
        network.check_start(folder, facts, [2, 4, 5, 7], t2d, norms={"fc_norm": False})


@pytest.mark.parametrize("flag", SINCE)
def test_vllm_serves_a_norm_since_the_version_that_reads_it(parts, facts, tmp_path, flag):
    folder = publish(parts[0](norms=(flag,)), facts, tmp_path / "drafter")

    def check(version, **more):
        export = export_of(folder, facts, version=version, trained_norms=[flag], **more)
        assert export_checks.norm_flags_match_training(export).status == findings.OK
        return export_checks.norm_flags_served(export)

    major, minor, _ = SINCE[flag].split(".")
    assert check(SINCE[flag]).status == check("0.32.0").status == findings.OK
    assert SINCE[flag] in check(f"{major}.{int(minor) - 1}.9").expected


def test_a_flag_that_was_changed_after_training_is_found(parts, facts, tmp_path):
    """norm_output leaves no tensor behind: only the record of the training tells."""
    folder = publish(parts[0](norms=("norm_output",)), facts, tmp_path / "drafter")
    right = export_checks.norm_flags_match_training(export_of(folder, facts, trained_norms=["norm_output"]))
    wrong = export_checks.norm_flags_match_training(export_of(folder, facts))
    assert (right.status, wrong.status, wrong.found) == (findings.OK, findings.FAIL, "norm_output")
    files.write_json(folder / "config.json", files.read_json(folder / "config.json") | {"norm_output": False})
    lost = export_checks.norm_flags_match_training(export_of(folder, facts, trained_norms=["norm_output"]))
    assert (lost.status, lost.found, lost.expected) == (findings.FAIL, "all false", "norm_output")


@pytest.mark.parametrize("norms", [{}, [3], ["norm_of_all"]])
def test_a_record_of_norms_that_is_none_is_refused(tmp_path, norms):
    files.write_json(tmp_path / checkpoint.TRAINING, {"norms": norms})
    if norms == {}:
        assert checkpoint.trained_norms(tmp_path) == []
        return
    with pytest.raises(PreconditionError, match="norms: some of"):
        checkpoint.trained_norms(tmp_path)


def test_stages_04_and_05_carry_the_norms(prepared, tiny_model, tmp_path):
    where = ["--run-dir", tmp_path, "--model", tiny_model]
    states = ["--states", prepared / "02_states", "--vocab", prepared / "03_vocab"]
    train = ["04_train.py", *where, *states, "--layers", *LAYERS.split(), "--epochs", 1, "--batch-tokens", 400]
    refused = run_stage(*train, "--fc-norm", "--norm-before-fc", check=2)
    assert "two norms before fc" in refused.stderr
    refused = run_stage(*train, "--optimizer", "muon", "--gpus", 2, check=2)
    assert "Muon needs whole matrices" in refused.stderr
    run_stage(*train, "--fc-norm", "--norm-output")
    step = tmp_path / "04_train/checkpoints/best"
    assert files.read_json(step / "trainer.json")["norms"] == ["fc_norm", "norm_output"]
    export = ["05_fix_weight_keys.py", *where, "--engine-version"]
    old = run_stage(*export, "0.21.0", check=3)
    assert "fc_norm: 0.22.0" in old.stderr
    run_stage(*export, "0.26.0", "--restart")
    assert manifest(tmp_path / "05_export")["trained"]["norms"] == ["fc_norm", "norm_output"]
    config = files.read_json(tmp_path / "05_export/vllm/config.json")
    assert config["fc_norm"] is config["norm_output"] is True and config["norm_before_fc"] is False
    shipped = tensor_files.read(tmp_path / "05_export/vllm")
    assert {f"fc_norm.{k}.weight" for k in range(3)} <= set(shipped)
