"""Several processes of one stage: what a signal, a failure in one of them, or a kill leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from support.pipeline import manifest
from support.processes import end, gone, lives
from support.project import ROOT

from eagle3.common import workers
from eagle3.common.errors import PreconditionError

# A stage without torch. What its workers do is in TOY, one word for each.
TOY = '''"""A toy."""
import os, signal, time
from eagle3.common import workers
from eagle3.common.errors import PreconditionError
from eagle3.common.options import TrainOptions
from eagle3.common.script import main

def run(options, stage):
    if workers.world() == 1:
        return stage.run_workers(2) if stage.open(inputs={}) else None
    mode = os.environ["TOY"].split()[workers.rank()]
    print("shown once", flush=True)
    (stage.directory / f"{workers.rank()}.new").write_text(str(os.getpid()))
    os.rename(stage.directory / f"{workers.rank()}.new", stage.directory / f"{workers.rank()}.pid")
    while len(list(stage.directory.glob("*.pid"))) < 2:
        time.sleep(0.01)
    if mode == "refuses":
        time.sleep(0.3)
        raise PreconditionError("the file is damaged", fix="make it anew")
    if mode == "fails":
        raise KeyError("the bug")
    if mode == "loses":
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer")
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while mode == "hangs":
        time.sleep(0.01)
    if mode in ("saves", "completes"):
        while stage.signal is None:
            time.sleep(0.01)
        time.sleep(1.2)
        (stage.directory / f"saved-{workers.rank()}").touch()
    if mode == "saves":
        stage.check_stop()
    if workers.rank() == 0:
        stage.join()
        stage.complete(counts={}, outputs={})
    while mode == "late" and '"complete"' not in (stage.directory / "manifest.json").read_text():
        time.sleep(0.01)
    if mode == "late":
        os.abort()

if __name__ == "__main__":
    main(__doc__, TrainOptions, run)
'''


@pytest.fixture
def toy(tmp_path):
    """Start the toy with a word for each of its two workers; whatever lives at the end is killed."""
    (tmp_path / "04_train.py").write_text(TOY)
    out, started = tmp_path / "runs/x/04_train", []

    def start(modes, *flags, ready=True, **environment):
        env = os.environ | {"PYTHONPATH": str(ROOT), "TOY": modes, "EAGLE3_PEERS_S": "60"} | environment
        process = subprocess.Popen([sys.executable, "04_train.py", "--run-dir", "runs/x", *flags], cwd=tmp_path,
                                   env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   start_new_session=True)
        started.append(process)
        deadline = time.monotonic() + 20
        while ready and len(list(out.glob("*.pid"))) < 2:
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()[1]
            time.sleep(0.02)
        return process

    yield SimpleNamespace(start=start, out=out, pids=lambda: [int(path.read_text()) for path in out.glob("*.pid")])
    left = [process.pid for process in started if process.poll() is None]
    for pid in [*left, *(int(path.read_text()) for path in out.glob("*.pid"))]:
        if lives(pid):
            os.kill(pid, signal.SIGKILL)
    for process in started:
        process.communicate()


def test_workers_complete_what_the_parent_opened(toy):
    process = toy.start("completes completes", "--json")
    process.send_signal(signal.SIGTERM)  # all of it was done by then: that is no interruption
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    assert json.loads(output.replace("shown once\n", ""))["status"] == "complete" == manifest(toy.out)["status"]
    assert errors.count("next: python 05_fix_weight_keys.py") == 1
    code, errors = end(toy.start("fails fails", ready=False))
    assert code == 0 and "complete already" in errors and "starting" not in errors


@pytest.mark.parametrize("modes", ["refuses hangs", "hangs refuses", "loses refuses", "refuses refuses",
                                   "fails refuses"])
def test_one_workers_refusal_is_the_stages_and_is_said_once(toy, modes):
    code, errors = end(toy.start(modes, EAGLE3_PEERS_S="0.5"))
    assert (code, errors.count("the file is damaged"), errors.count("make it anew")) == (3, 1, 1), errors
    assert "Traceback" not in errors
    assert manifest(toy.out)["status"] == "failed" and "the file is damaged" in manifest(toy.out)["error"]
    assert gone(toy.pids(), 0)
    assert not (toy.out / "saved-0").exists()


def test_a_bug_is_told_by_the_worker_that_has_it(toy):
    code, errors = end(toy.start("loses fails"))
    assert (code, errors.count("Traceback"), "KeyError: 'the bug'" in errors) == (1, 1, True), errors
    assert "gloo" not in errors
    log = (toy.out.parent / "logs/04_train.log").read_text()
    assert "Connection closed by peer" in log  # but nothing is lost


@pytest.mark.parametrize("modes", ["loses killed", "hangs killed"])
def test_a_killed_worker_is_named(toy, modes):
    code, errors = end(toy.start(modes, EAGLE3_PEERS_S="0.5"))
    assert code == 3 and "process 2 of 2 was killed" in errors and "SIGKILL" in errors, errors
    assert "gloo" not in errors and "memory" in errors
    assert manifest(toy.out)["status"] == "failed"
    assert gone(toy.pids(), 0)


def test_a_crash_after_the_end_takes_nothing_back(toy):
    assert end(toy.start("trains late"))[0] == 3
    assert manifest(toy.out)["status"] == "complete"
    assert "complete already" in end(toy.start("trains trains", ready=False))[1]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_to_all_processes_at_once_and_again_by_the_parent_saves(toy, number, code):
    process = toy.start("saves saves")
    for pid in [*toy.pids(), process.pid]:
        os.kill(pid, number)
    time.sleep(0.7)  # more than what counts as the same signal: a worker leaves the second one to its parent
    for pid in toy.pids():
        os.kill(pid, number)
    found, errors = end(process)
    assert (found, errors.count("finishing the unit in hand")) == (code, 1), errors
    assert (toy.out / "saved-0").exists() and (toy.out / "saved-1").exists()
    assert manifest(toy.out)["status"] == "interrupted"


def test_the_second_signal_ends_workers_that_hang(toy):
    process = toy.start("hangs saves")
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1.0)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert end(process)[0] == 130
    assert time.monotonic() - start < 2 and gone(toy.pids(), 1)


def test_workers_end_with_a_killed_parent_and_the_same_command_starts(toy):
    process = toy.start("hangs hangs")
    pids = toy.pids()
    code, errors = end(toy.start("hangs hangs", ready=False))
    assert code == 3 and f"pid {process.pid}" in errors  # two starts at once
    process.kill()
    assert gone(pids, 5)
    for path in toy.out.glob("*.pid"):
        path.unlink()
    again = toy.start("saves saves")
    again.send_signal(signal.SIGTERM)
    assert end(again)[0] == 143


LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(("environment", "gpus", "world"), [
    ({}, 8, 1), ({"RANK": "3", "LOCAL_RANK": "3"}, 8, 1), ({"RANK": "0", "WORLD_SIZE": "1"}, 8, 1),
    ({"EAGLE3_WORKERS": "1:/tmp"}, 8, 1), (LAUNCHED, 1, 2), (LAUNCHED, 2, 2),
])
def test_variables_of_an_outer_shell_do_no_harm(monkeypatch, environment, gpus, world):
    for name in (*LAUNCHED, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    workers.check_environment(gpus)
    assert workers.world() == world and workers._shared_folder() is None
    assert (workers.rank(), workers.local_rank()) == ((1, 1) if world == 2 else (0, 0))
    assert workers.takes_part("04_train") == (world == 2)
    assert not workers.takes_part("01_generate_synthetic")  # whose second signal has to stop it at once


@pytest.mark.parametrize(("environment", "gpus"), [
    ({"WORLD_SIZE": "2"}, 1), ({**LAUNCHED, "WORLD_SIZE": "4"}, 8), ({"WORLD_SIZE": "2", "RANK": "1"}, 2)])
def test_variables_that_would_make_it_wait_for_nobody_are_refused(monkeypatch, environment, gpus):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PreconditionError, match="env -u RANK -u WORLD_SIZE"):
        workers.check_environment(gpus)
