"""Checkpoints beside other things: copies made by hand, and a file system without symbolic links."""

import os

import pytest
from support.file_systems import without
from support.pipeline import ROOT, manifest, run_stage

from eagle3.common import files
from eagle3.training import checkpoints

COPIES = ["step_20_2", "step_20_backup", "step_20 (copy)", "step_020", "step_²", "step_", "step_-1", "step_20.tar"]


def make(root, name, epoch_end=True):
    folder = root / name
    folder.mkdir(parents=True)
    files.write_json(folder / checkpoints.COUNTERS, {"epoch_end": epoch_end})
    files.write_json(folder / checkpoints.CHECKSUMS, {})
    return folder


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_made_by_hand_is_no_checkpoint(tmp_path, copy):
    for step in (3, 10, 20):
        make(tmp_path, f"step_{step}")
    make(tmp_path, copy)
    (tmp_path / "step_99").write_text("a file")
    checkpoints.point_to(tmp_path, "last", tmp_path / "step_20")
    assert checkpoints.newest(tmp_path) == tmp_path / "step_20"
    assert [path.name for path in checkpoints.folders(tmp_path)] == ["step_20", "step_10", "step_3"]
    checkpoints.prune(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"step_20", copy, "step_99", "last"}


@pytest.mark.parametrize("links", [True, False])
def test_what_best_and_last_lead_to_is_kept(tmp_path, monkeypatch, links):
    def none(*_, **__):
        raise OSError(95, "Operation not supported")

    if not links:
        monkeypatch.setattr(os, "symlink", none)
    for step in (1, 2, 3, 4):
        make(tmp_path, f"step_{step}", epoch_end=False)
    checkpoints.point_to(tmp_path, "best", tmp_path / "step_1")
    checkpoints.point_to(tmp_path, "last", tmp_path / "step_3")
    checkpoints.point_to(tmp_path, "best", tmp_path / "step_2")
    assert (tmp_path / "best").is_symlink() == links
    checkpoints.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "last", "step_2", "step_3"]
    assert files.followed(tmp_path / "best").resolve() == tmp_path / "step_2"


def test_training_resumes_and_is_exported_without_symbolic_links(prepared, tiny_model, tmp_path):
    for name in ("02_states", "03_vocab"):
        (tmp_path / name).symlink_to(prepared / name)
    (tmp_path / "01_traces").symlink_to(prepared / "01_traces")
    here = {"env": {"PYTHONPATH": os.pathsep.join([without(tmp_path / "shim", "symlink", "flock"), str(ROOT)])}}
    train = ("04_train.py", "--run-dir", tmp_path, "--model", tiny_model, "--epochs", 2, "--batch-tokens", 400)
    log = run_stage(*train, **here).stderr
    assert "no symbolic links" in log and "no locks" in log
    root = tmp_path / "04_train" / "checkpoints"
    assert (root / "best").is_file() and (root / "last").is_file()
    assert run_stage(*train, **here).stderr.count("complete already") == 1
    os.unlink(tmp_path / "04_train" / "manifest.json")  # as if it had been killed at its end
    assert "resuming at step" in run_stage(*train, **here).stderr
    run_stage("05_fix_weight_keys.py", "--run-dir", tmp_path, "--model", tiny_model, **here)
    assert manifest(tmp_path / "05_export")["trained"] == {"ids": [2, 4, 5], "here": True, "norms": []}
    assert manifest(tmp_path / "04_train")["outputs"]["best"]["path"].startswith("checkpoints/step_")
