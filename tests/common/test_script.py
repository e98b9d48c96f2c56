"""What every script does around its run: usage, exit codes, logs without secrets."""

import json
import os
import subprocess
import sys

from support.pipeline import manifest
from support.project import ROOT

from eagle3.common import files


def test_dry_run_and_print_config_write_nothing(tmp_path, stage):
    for flag in ("--dry-run", "--print-config", "--help"):
        assert stage(flag)[0] == 0
    assert not (tmp_path / "runs").exists()


def test_usage_errors(tmp_path, toy, stage):
    code, errors = stage("--max-lenght", "3")
    assert (code, "did you mean --max-length?" in errors, "Traceback" in errors) == (2, True, False)
    script = tmp_path / "02_extract_hidden_states.py"
    done = subprocess.run([sys.executable, script], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert (done.returncode, b"--run-dir" in done.stderr) == (2, True)


def test_a_bug_is_exit_1_with_the_traceback_in_the_log(tmp_path, stage):
    code, errors = stage(mode="bug")
    assert (code, "Traceback" in errors) == (1, True)
    assert "KeyError: 'the bug'" in (tmp_path / "runs/x/logs/02_states.log").read_text()
    assert manifest(tmp_path / "runs/x/02_states")["status"] == "failed"
    assert stage()[0] == 0
    assert "KeyError: 'the bug'" in (tmp_path / "runs/x/logs/02_states.log").read_text()  # logs are appended


def test_too_many_failures_is_exit_4(tmp_path, stage):
    code, errors = stage(mode="failures")
    assert (code, "3 of 5 failed" in errors, "Traceback" in errors) == (4, True, False)
    assert manifest(tmp_path / "runs/x/02_states")["status"] == "partial"


def test_no_secret_is_written_anywhere(tmp_path, toy):
    secret = json.dumps({"VLLM_API_KEY": "canary-1", "HF_TOKEN": "canary-1", "PLAIN": "value-1"})
    for mode, arguments in (("", ()), ("bug", ("--restart",)), ("", ("--max-length", "9", "--json"))):
        output = toy("--engine-env", secret, *arguments, mode=mode).communicate(timeout=20)
        assert "canary-1" not in str(output)
    written = [p for p in (tmp_path / "runs").rglob("*") if p.is_file()]
    assert any(b"value-1" in p.read_bytes() for p in written)
    assert [p for p in written if b"canary-1" in p.read_bytes()] == []


def test_an_unwritable_run_directory_is_no_bug(tmp_path, stage):
    (tmp_path / "runs").write_text("a file in the way")
    code, errors = stage()
    assert (code, "Traceback" in errors, "runs" in errors) == (3, False, True)


def test_a_full_disk_is_exit_3_and_resumes(small_disk, stage):
    code, errors = stage("--out", "small/states", mode="fill")
    assert code == 3, errors
    assert "the disk is full" in errors
    assert "small/states/rows.jsonl" in errors
    assert "bytes free" in errors
    assert "Traceback" not in errors
    rows = [row["number"] for _, row in files.read_jsonl(small_disk / "states/rows.jsonl")]
    assert rows == list(range(len(rows)))
    assert len(rows) > 10
    (small_disk / "states/rows.jsonl").unlink()
    assert stage("--out", "small/states")[0] == 0
