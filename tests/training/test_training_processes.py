"""Stage 04 in several processes: the same run, whatever becomes of one of them."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.pipeline import LAYERS, manifest, run_stage, tree
from support.processes import end, free_port
from support.project import ROOT

from eagle3.common import files
from eagle3.common.options import TrainSection
from eagle3.states.store import StateStore, load_dataset
from eagle3.training import batches
from eagle3.training.schedule import Schedule


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


def test_two_hosts_compute_the_same_run(two, prepared, tiny_model, tmp_path):
    """A torchrun on each of two loopback addresses, as on two machines that share a file system."""
    port = free_port()
    hosts = []
    for number, address in enumerate(("127.0.0.1", "127.0.0.2")):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--node-rank", number,
                    "--nproc-per-node", 1, "--master-addr", "127.0.0.1", "--master-port", port, "--local-addr", address]
        command = [*launcher, ROOT / "04_train.py", *arguments(prepared, tiny_model, tmp_path / "out")]
        hosts.append(subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True,
                                      env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}))
    said = [end(host, 240) for host in hosts]
    assert [code for code, _ in said] == [0, 0], said[0][1][-3000:] + said[1][1][-3000:]
    assert "process 2 of 2 waits for the others at 127.0.0.1" in said[1][1]
    assert tree(tmp_path / "out") == tree(two)
    assert manifest(tmp_path / "out")["fingerprint"] == manifest(two)["fingerprint"]


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
