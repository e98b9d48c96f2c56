"""One stage at a time in a directory."""

import os

from support.pipeline import manifest


def test_a_lock_held_by_another_process_is_respected(tmp_path, toy, stage):
    owner = toy(mode="polite")
    assert owner.stdout.readline() == "ready\n"
    code, errors = stage()
    assert code == 3
    assert f"pid {owner.pid} on {os.uname().nodename}" in errors
    assert manifest(tmp_path / "runs/x/02_states")["status"] == "running"  # the owner's manifest is as it was
    assert stage("--out", "runs/x/elsewhere")[0] == 0


def test_a_dead_owners_lock_is_taken_over(tmp_path, toy, stage):
    owner = toy(mode="polite")
    owner.stdout.readline()
    owner.kill()
    owner.wait()
    assert (tmp_path / "runs/x/02_states/.lock").read_text().startswith(f"pid {owner.pid} ")
    assert manifest(tmp_path / "runs/x/02_states")["status"] == "running"
    assert stage()[0] == 0
    assert manifest(tmp_path / "runs/x/02_states")["status"] == "complete"
