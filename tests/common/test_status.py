"""eagle3.status: what it says about finished, running, dead and damaged stages."""

import json
import os
import resource
import subprocess
import sys
import threading
import time

import pytest
from support.project import ROOT

from eagle3.common import lock

HOLDER = (
    "import sys, time\nfrom pathlib import Path\nfrom eagle3.common.lock import DirectoryLock\n"
    "lock = DirectoryLock(Path(sys.argv[1]))\nprint('held', flush=True)\ntime.sleep(300)\n"
)


def status(run_dir, *arguments):
    """Return (exit code, stdout, stderr) of eagle3.status as a process."""
    command = [sys.executable, "-m", "eagle3.status", str(run_dir), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    return done.returncode, done.stdout, done.stderr


def report(run_dir):
    code, output, errors = status(run_dir, "--json")
    assert code == 0, errors
    content = json.loads(output)
    return {stage["folder"]: stage for stage in content["stages"]}, content["next"]


def write_stage(run_dir, folder, stage=None, *, status="complete", progress=None, **more):
    path = run_dir / folder
    path.mkdir(parents=True)
    manifest = {
        "schema_version": 1,
        "stage": stage or folder,
        "status": status,
        "started_at": "2026-01-02T03:04:05+00:00",
        "ended_at": None if status == "running" else "2026-01-02T04:04:05+00:00",
        "argv": [f"{folder}.py", "--config", "configs/a b.yaml", "--run-dir", str(run_dir)],
        "options": {"common": {"config": "configs/a b.yaml"}},
        "counts": {},
        **more,
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    if progress:
        (path / "progress.json").write_text(json.dumps(progress))
    return path


@pytest.fixture
def hold():
    """Return hold(folder): another process takes the folder's lock until the test ends."""
    started = []

    def start(folder):
        process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], cwd=ROOT, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_stages_come_in_order_with_variants_and_old_results_beside_them(tmp_path):
    write_stage(tmp_path, "01_traces", counts={"expected": 10, "done": 9, "failed": 1})
    write_stage(tmp_path, "02_states")
    write_stage(tmp_path, "04_train_lr1e-4", "04_train")
    write_stage(tmp_path, "02_states.old-1", "02_states")
    write_stage(tmp_path, "sweep-a", "04_train")
    write_stage(tmp_path, "foreign", "someone else's")
    (tmp_path / "logs").mkdir()
    stages, _ = report(tmp_path)
    assert list(stages) == [
        *("01_traces", "02_states", "02_states.old-1", "03_vocab"),
        *("04_train", "04_train_lr1e-4", "sweep-a", "05_export", "06_bench"),
    ]
    assert [name for name, stage in stages.items() if stage["old"]] == ["02_states.old-1"]
    assert [stages["01_traces"][key] for key in ("state", "done", "total", "failed")] == ["complete", 9, 10, 1]
    assert stages["03_vocab"]["state"] == "not started"
    _, text, _ = status(tmp_path)
    assert "02_states.old-1 (old)" in text
    assert "9/10 (1 failed)" in text


def test_a_running_stage_shows_its_rate_and_when_it_ends(tmp_path, hold):
    progress = {"done": 30, "total": 100, "failed": 2, "unit": "prompts", "rate": 2.5, "eta_s": 100.0,
                "at": time.time() - 40, "label": "x"}
    folder = write_stage(tmp_path, "01_traces", status="running", progress=progress, counts={"done": 1, "expected": 9})
    process = hold(folder)
    stages, following = report(tmp_path)
    stage = stages["01_traces"]
    assert (stage["state"], stage["done"], stage["total"], stage["failed"]) == ("running", 30, 100, 2)
    assert stage["rate"] == 2.5
    assert 55 < stage["eta_s"] < 61  # 100 s as of 40 s ago
    assert f"pid {process.pid} on {os.uname().nodename}" in stage["owner"]
    assert following.startswith("wait for 01_traces")
    _, text, _ = status(tmp_path)
    assert "2.5 prompts/s" in text


def test_looking_never_gets_in_the_way_of_a_stage_that_starts(tmp_path):
    lock.DirectoryLock(tmp_path).release()
    stop = threading.Event()

    def look():
        while not stop.is_set():
            lock.holder(tmp_path)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for _ in range(300):
            taken = lock.DirectoryLock(tmp_path)  # raises if somebody else has it, however briefly
            assert lock.holder(tmp_path).startswith(f"pid {os.getpid()} ")
            taken.release()
    finally:
        stop.set()
        watcher.join()
    assert lock.holder(tmp_path) == ""


def test_a_stage_whose_process_is_gone_has_died(tmp_path, hold):
    folder = write_stage(tmp_path, "01_traces", status="running")
    process = hold(folder)
    process.kill()
    process.wait()
    stages, following = report(tmp_path)
    assert stages["01_traces"]["state"] == "died"
    assert stages["01_traces"]["eta_s"] is None
    assert following == f"python 01_traces.py --config 'configs/a b.yaml' --run-dir {tmp_path}"


def test_a_manifest_without_any_lock_file_has_died(tmp_path):
    write_stage(tmp_path, "01_traces", status="running")
    assert report(tmp_path)[0]["01_traces"]["state"] == "died"


def test_a_lock_of_another_machine_is_believed(tmp_path):
    folder = write_stage(tmp_path, "01_traces", status="running")
    (folder / ".lock").write_text("pid 1 on some-other-host since 2026-01-01T00:00:00Z")
    assert report(tmp_path)[0]["01_traces"]["state"] == "running"


def test_a_failed_stage_shows_its_error_and_what_to_run(tmp_path):
    write_stage(tmp_path, "01_traces")
    write_stage(tmp_path, "02_states", status="failed", error="the disk is full\n  where: x")
    stages, following = report(tmp_path)
    assert stages["02_states"]["error"] == "the disk is full"
    assert following.startswith("python 02_states.py ")
    _, text, _ = status(tmp_path)
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("02_states"))
    assert lines[at + 1].strip() == "the disk is full"


def test_the_next_stage_gets_the_same_configuration(tmp_path):
    write_stage(tmp_path, "01_traces")
    _, following = report(tmp_path)
    expected = f"python 02_extract_hidden_states.py --config 'configs/a b.yaml' --run-dir {tmp_path}"
    assert following == expected


def test_when_all_is_done_the_report_is_named(tmp_path):
    for name in ("01_traces", "02_states", "03_vocab", "04_train", "05_export", "06_bench"):
        write_stage(tmp_path, name)
    assert report(tmp_path)[1] == f"nothing to run; the report is {tmp_path}/06_bench/report.html"


def test_a_damaged_manifest_is_shown_as_such(tmp_path):
    write_stage(tmp_path, "01_traces")
    (write_stage(tmp_path, "02_states") / "manifest.json").write_text('{"stage": "02_st')
    stages, _ = report(tmp_path)
    assert stages["02_states"]["state"] == "unreadable"
    assert "manifest.json" in stages["02_states"]["error"]


def test_exit_codes(tmp_path):
    code, output, errors = status(tmp_path / "missing")
    assert (code, output, "no such run directory" in errors) == (3, "", True)
    code, _, errors = status(tmp_path)
    assert (code, "no stage has run" in errors) == (3, True)
    assert subprocess.run([sys.executable, "-m", "eagle3.status"], cwd=ROOT, capture_output=True).returncode == 2


def test_many_files_are_counted_or_bounded_within_a_second(tmp_path):
    folder = write_stage(tmp_path, "02_states") / "hidden_states"
    folder.mkdir()
    for i in range(20_000):
        os.close(os.open(folder / f"hs_{i}.safetensors", os.O_CREAT))
    (folder / "hs_0.safetensors").write_bytes(b"x" * 1000)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    stages, _ = report(tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 1.0
    size = stages["02_states"]["disk_bytes"]
    manifest = (tmp_path / "02_states/manifest.json").stat().st_size
    assert size == 1000 + manifest if stages["02_states"]["disk_bytes_complete"] else size <= 1000 + manifest
