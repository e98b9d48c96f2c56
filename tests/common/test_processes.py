"""Guarded children: whatever happens to the stage, nothing that it started stays behind."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support.processes import gone, lives, wait_for
from support.project import ROOT

from eagle3.common.processes import Child

# A server with a worker, as engines have: the worker's and the leader's process ids go into a file.
SERVER = "sleep 300 & echo $! $$ > {pids}.new; mv {pids}.new {pids}; wait"
STUBBORN = "trap '' TERM; " + SERVER.replace("wait", "while :; do sleep 1; done")


def read_pids(path):
    wait_for(path.exists)
    return [int(word) for word in path.read_text().split()]


@pytest.fixture
def pids(tmp_path):
    path = tmp_path / "pids"
    yield path
    for pid in path.read_text().split() if path.exists() else []:
        if lives(int(pid)):
            os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 137)])
def test_exit_codes_pass_through(tmp_path, script, code):
    child = Child(["sh", "-c", script], log_path=tmp_path / "log")
    wait_for(lambda: child.poll() is not None)
    assert child.poll() == code
    assert child.stop() == code


def test_output_goes_to_the_log_and_the_tail_is_this_childs(tmp_path):
    log = tmp_path / "logs" / "x.log"
    for word in ("first", "second"):
        child = Child(["sh", "-c", f"echo {word}; echo error-{word} >&2; echo $WORD"], log_path=log, env={"WORD": "w"})
        wait_for(lambda child=child: child.poll() is not None)
        assert child.tail() == f"{word}\nerror-{word}\nw"
        child.stop()
    assert log.read_text().startswith("first\n")


def test_pipes_connect_to_the_command(tmp_path):
    with Child(["cat"], log_path=tmp_path / "log", piped=True) as child:
        child.stdin.write(b"hello\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"hello\n"


def test_a_command_that_does_not_exist_ends_with_a_word_in_the_log(tmp_path):
    child = Child(["/no/such/program"], log_path=tmp_path / "log")
    wait_for(lambda: child.poll() is not None)
    assert child.poll() != 0
    assert "/no/such/program" in child.tail()
    child.stop()


def test_stop_ends_the_whole_group(tmp_path, pids):
    child = Child(["sh", "-c", SERVER.format(pids=pids)], log_path=tmp_path / "log")
    members = read_pids(pids)
    assert all(lives(pid) for pid in members)
    start = time.monotonic()
    assert child.stop() == 143
    assert time.monotonic() - start < 5
    assert gone(members)
    assert child.stop() == 143  # twice is harmless


def test_stop_ends_a_group_that_ignores_sigterm(tmp_path, pids):
    command = ["sh", "-c", STUBBORN.format(pids=pids)]
    child = Child(command, log_path=tmp_path / "log", env={"EAGLE3_GRACE_S": "0.5"})
    members = read_pids(pids)
    start = time.monotonic()
    assert child.stop() == 137
    assert 0.4 < time.monotonic() - start < 5
    assert gone(members)


def test_workers_do_not_outlive_their_leader(tmp_path, pids):
    child = Child(["sh", "-c", SERVER.format(pids=pids)], log_path=tmp_path / "log")
    worker, leader = read_pids(pids)
    os.kill(leader, signal.SIGKILL)
    wait_for(lambda: child.poll() is not None)
    assert child.poll() == 137
    wait_for(lambda: gone([worker]))
    child.stop()


@pytest.mark.parametrize("script", [SERVER, STUBBORN])
def test_the_group_ends_when_the_stage_is_killed(tmp_path, pids, script):
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom eagle3.common.processes import Child\n"
        "child = Child(['sh', '-c', sys.argv[1]], log_path=Path(sys.argv[2]))\ntime.sleep(300)\n"
    )
    arguments = [sys.executable, "-c", code, script.format(pids=pids), str(tmp_path / "log")]
    stage = subprocess.Popen(arguments, cwd=ROOT, env={**os.environ, "EAGLE3_GRACE_S": "0.5"})
    members = read_pids(pids)
    stage.kill()
    stage.wait()
    wait_for(lambda: gone(members), 5)


def test_a_child_of_a_process_with_many_open_files(tmp_path):
    import resource

    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2000:
        pytest.skip("needs 2,000 file descriptors")
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        child = Child(["sh", "-c", "exit 5"], log_path=tmp_path / "log")
        wait_for(lambda: child.poll() is not None)
        assert child.stop() == 5
    finally:
        for fd in held:
            os.close(fd)
