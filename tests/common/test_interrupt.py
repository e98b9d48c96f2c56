"""Signals: the first finishes the unit in hand, the second stops at once."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support.pipeline import manifest
from support.project import ROOT


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_interrupts_and_the_same_command_resumes(tmp_path, toy, stage, number, code):
    process = toy(mode="polite")
    process.stdout.readline()
    process.send_signal(number)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == code, errors
    assert manifest(tmp_path / "runs/x/02_states")["status"] == "interrupted"
    assert manifest(tmp_path / "runs/x/02_states")["ended_at"]
    assert "Traceback" not in errors
    assert stage()[0] == 0


def test_the_second_signal_stops_at_once(tmp_path, toy):
    process = toy(mode="stuck")
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1.0)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130
    assert time.monotonic() - start < 2


def test_one_signal_that_arrives_twice_is_one(tmp_path, toy):
    process = toy(mode="polite")
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 143
    assert manifest(tmp_path / "runs/x/02_states")["status"] == "interrupted"


def test_under_nohup_a_hangup_is_ignored(tmp_path, toy):
    script = f"trap '' HUP; exec {sys.executable} 02_extract_hidden_states.py --run-dir runs/x"
    process = subprocess.Popen(["sh", "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               env={**os.environ, "PYTHONPATH": str(ROOT), "TOY": "polite"}, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
    finally:
        process.kill()
        process.communicate()
