"""Stage 04 in several processes: what a signal, a failure in one of them, or a kill at any moment leaves behind."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.pipeline import LAYERS, manifest, run_stage, tree
from support.processes import gone, lives
from support.project import ROOT

from eagle3.common import files, workers
from eagle3.common.errors import Interrupted, PreconditionError
from eagle3.common.options import TrainSection
from eagle3.drafter import network, verifier, vocab
from eagle3.states.store import StateStore, load_dataset
from eagle3.training import batches, checkpoints
from eagle3.training.loop import Loop
from eagle3.training.schedule import Schedule
from eagle3.training.trainer import Processes, Trainer

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


def end(process, seconds=20):
    """Return (exit code, stderr) of a process that ends by itself."""
    _, errors = process.communicate(timeout=seconds)
    return process.returncode, errors


# --- failures ---------------------------------------------------------------------------------------------


def test_workers_complete_what_the_parent_opened(toy):
    process = toy.start("completes completes", "--json", ready=False)
    while len(list(toy.out.glob("*.pid"))) < 2:
        time.sleep(0.02)
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


# --- signals ----------------------------------------------------------------------------------------------


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


# --- the environment --------------------------------------------------------------------------------------

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


# --- checkpoints between two moments ------------------------------------------------------------------------


@pytest.fixture
def loop(prepared, tiny_model, tmp_path):
    """Return a function that makes a new Loop of one process on one directory, as a new start does."""
    facts = verifier.read(tiny_model)
    mapping = vocab.load_mapping(prepared / "03_vocab" / vocab.MAPPING)
    store = StateStore(prepared / "02_states")
    samples = batches.read_samples(store, load_dataset(prepared / "02_states"))
    options = TrainSection(batch_tokens=300, lr=1e-3, epochs=2)

    def make(check_stop=lambda: None):
        stage = SimpleNamespace(directory=tmp_path, signal=None, check_stop=check_stop)
        model = network.build(facts, [2, 4, 5, 7], *mapping, network.layer_shape(facts))
        trainer = Trainer(model, store, options, Processes(0, 1, torch.device("cpu")))
        made = Loop(stage, facts, trainer, Schedule(samples, options, 1), samples[:4], [2, 4, 5, 7])
        made.saved_at = time.monotonic()
        made.resume()
        return made

    return make


def test_links_that_a_kill_left_behind_are_set_right(loop):
    loop().epoch(0, None)
    first = loop()
    assert (first.root / "best").resolve().name == (first.root / "last").resolve().name
    newest = (first.root / "last").resolve()
    (first.root / "best").unlink()
    (first.root / "last").unlink()
    assert loop().counters["epoch"] == 1
    assert (first.root / "best").resolve() == (first.root / "last").resolve() == newest


def test_a_checkpoint_that_only_lacks_its_name_gets_it(loop):
    """The same step is saved twice at the end of an epoch: the first must not go before the second has its name."""
    made = loop()
    made.epoch(0, None)
    newest = (made.root / "last").resolve()
    newest.rename(made.root / f"{files.TEMPORARY_PREFIX}{newest.name}")  # all that a kill can leave
    assert checkpoints.newest(made.root) == newest
    (made.root / f"{files.TEMPORARY_PREFIX}step_999").mkdir()  # one that was cut off
    assert checkpoints.newest(made.root) == newest
    assert not list(made.root.glob(files.TEMPORARY_PREFIX + "*"))
    newest.rename(made.root / f"{files.TEMPORARY_PREFIX}old-{newest.name}")  # moved aside, and nothing followed
    (made.root / f"{files.TEMPORARY_PREFIX}{newest.name}").mkdir()
    assert checkpoints.newest(made.root) == newest


def test_a_disk_that_fails_while_a_step_is_saved_again_leaves_it(loop, monkeypatch):
    made, os_rename = loop(), os.rename
    made.epoch(0, None)
    newest = (made.root / "last").resolve()

    def rename(source, target):
        if Path(source).name == f"{files.TEMPORARY_PREFIX}{newest.name}":
            raise OSError(errno.EIO, "the disk")
        os_rename(source, target)

    monkeypatch.setattr(checkpoints.os, "rename", rename)
    with pytest.raises(OSError, match="the disk"):
        made.save()
    assert not checkpoints._damage(newest) and checkpoints.newest(made.root) == newest


def test_processes_that_stop_wait_for_the_one_that_writes(loop, monkeypatch):
    made, said = loop(), []
    made.stage.signal = signal.SIGTERM
    made.trainer.processes = SimpleNamespace(any=lambda flag: said.append("met") or flag)
    monkeypatch.setattr(made, "save", lambda: said.append("saved"))
    with pytest.raises(Interrupted):
        made.save_if_due()
    assert said == ["met", "saved", "met"]


def test_the_only_checkpoint_stays_while_its_step_is_saved_again(loop, monkeypatch):
    made = loop()
    made.epoch(0, None)
    whole, os_rename = [], os.rename

    def look_around(call):
        def watched(*values, **keywords):
            assert call is os_rename or not Path(values[0]).name.startswith("step_")  # half of it would lie there
            for moment in ("before", "after"):
                folders = [*made.root.glob("step_*"), *made.root.glob(f"{files.TEMPORARY_PREFIX}step_*")]
                whole.append(any(not checkpoints._damage(folder) for folder in folders))  # which `newest` would find
                if moment == "before":
                    call(*values, **keywords)
        return watched

    monkeypatch.setattr(checkpoints.os, "rename", look_around(os_rename))
    monkeypatch.setattr(checkpoints.shutil, "rmtree", look_around(shutil.rmtree))
    made.save()
    assert len(whole) >= 8 and all(whole), whole


def test_a_signal_during_validation_keeps_the_steps_before_it(loop):
    def stop():
        raise Interrupted(signal.SIGTERM)

    stopped = loop(check_stop=stop)
    with pytest.raises(Interrupted):
        stopped.epoch(0, None)
    resumed = loop()
    assert (resumed.counters["step"], resumed.counters["epoch"]) == (resumed.schedule.steps_per_epoch[0], 0)
    resumed.epoch(0, None)  # validates only
    straight = resumed.counters
    shutil.rmtree(resumed.root)
    other = loop()
    other.epoch(0, None)
    assert other.counters == straight


def test_a_kill_between_metrics_and_checkpoint_repeats_no_row(loop, monkeypatch):
    made = loop()
    made.options.save_every_steps = 1

    def killed(*_, **more):
        raise KeyboardInterrupt

    def save_of_the_end():
        monkeypatch.setattr(checkpoints, "save", killed)
        Loop.save(made)

    end_epoch = made.end_epoch
    made.end_epoch = lambda epoch: (setattr(made, "save", save_of_the_end), end_epoch(epoch))
    with pytest.raises(KeyboardInterrupt):
        made.epoch(0, None)
    monkeypatch.undo()
    resumed = loop()
    resumed.epoch(0, None)
    rows = [(row["kind"], row["step"]) for _, row in files.read_jsonl(resumed.metrics)]
    assert len(rows) == len(set(rows)) == resumed.schedule.steps_per_epoch[0] + 1


def test_a_states_file_that_is_gone_is_not_passed_over(prepared, tmp_path):
    shutil.copytree(prepared / "02_states", tmp_path / "s")
    store, rows = StateStore(tmp_path / "s"), load_dataset(tmp_path / "s")
    store.path(5).unlink()
    assert len(batches.read_samples(store, rows, limit=5)) > 0
    with pytest.raises(PreconditionError, match="hs_5.safetensors"):
        batches.read_samples(store, rows)


# --- real processes -----------------------------------------------------------------------------------------


def arguments(run_dir, model, out, *more):
    return ["--run-dir", run_dir, "--model", model, "--layers", *LAYERS.split(), "--epochs", 2, "--lr", "1e-3",
            "--batch-tokens", 100, "--validation-fraction", 0.2, "--save-every-steps", 1, "--log-every-steps", 1,
            "--out", out, *more]


@pytest.fixture(scope="module")
def two(prepared, tiny_model, tmp_path_factory):
    """An undisturbed run of two processes, in a terminal whose variables are somebody else's."""
    out = tmp_path_factory.mktemp("two") / "04_train"
    run_stage("04_train.py", *arguments(prepared, tiny_model, out, "--gpus", 2), env={"RANK": "1", "LOCAL_RANK": "1"})
    return out


def test_two_processes_compute_the_same_run(two, prepared, tiny_model, tmp_path):
    run_stage("04_train.py", *arguments(prepared, tiny_model, tmp_path / "one", "--accumulation", 2))
    losses = [[row["loss"] for _, row in files.read_jsonl(out / "metrics.jsonl")] for out in (tmp_path / "one", two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert manifest(tmp_path / "one")["fingerprint"] == manifest(two)["fingerprint"]


def test_fewer_batches_a_step_are_refused_and_a_finished_run_starts_nothing(two, prepared, tiny_model):
    refused = run_stage("04_train.py", *arguments(prepared, tiny_model, two), check=3)
    assert "train.batches_per_step: 2 → 1" in refused.stderr and "--gpus times --accumulation" in refused.stderr
    again = run_stage("04_train.py", *arguments(prepared, tiny_model, two, "--gpus", 2))
    assert "complete already" in again.stderr and "starting" not in again.stderr


def test_a_killed_worker_costs_nothing(two, prepared, tiny_model, tmp_path):
    command = [ROOT / "04_train.py", *arguments(prepared, tiny_model, tmp_path / "out", "--gpus", 2)]
    process = subprocess.Popen([sys.executable, *map(str, command)], stderr=subprocess.PIPE, text=True,
                               env=os.environ | {"OMP_NUM_THREADS": "1"})
    for line in process.stderr:
        if "step 3/" in line:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGKILL)
            break
    code, errors = end(process, 60)
    assert code == 3 and "process 2 of 2 was killed" in errors and "Traceback" not in errors, errors
    resumed = run_stage(*command)
    assert "resuming at step" in resumed.stderr
    assert tree(tmp_path / "out") == tree(two)


def test_a_file_that_one_process_cannot_read_ends_all_with_its_fix(prepared, tiny_model, tmp_path):
    states = tmp_path / "02_states"
    shutil.copytree(prepared / "02_states", states)
    samples = batches.read_samples(StateStore(states), load_dataset(states))
    training, _ = batches.split(samples, 0.2, 0)
    of_second = Schedule(training, TrainSection(batch_tokens=100), 2).steps(0)[0][1][0]
    path = StateStore(states).path(of_second.i)
    path.write_bytes(path.read_bytes()[:-64] + b"\0" * 64)
    failed = run_stage("04_train.py", *arguments(prepared, tiny_model, tmp_path / "out", "--gpus", 2), "--states",
                       states, check=3)
    assert failed.stderr.count("only that sample is captured again") == 1 and path.name in failed.stderr
    assert "Traceback" not in failed.stderr
    assert path.name in manifest(tmp_path / "out")["error"]
