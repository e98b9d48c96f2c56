"""File systems that lack a call: found out when a stage opens its folder, gone around, or named before the work."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.file_systems import without

from eagle3.common import files, lock, probe
from eagle3.common.errors import PreconditionError

ROOT = Path(__file__).resolve().parents[2]
STAGE = '''"""A toy stage."""
import sys
import time

from eagle3.common import files
from eagle3.common.options import ExtractOptions
from eagle3.common.script import main


def run(options, stage):
    if not stage.open(inputs={"traces": "one"}):
        return
    if options.common.limit:
        print("ready", flush=True)
        time.sleep(60)
    with files.Appender(stage.directory / "step_1" / "rows.jsonl") as rows:
        rows.append([{"a": 1}])
    files.point(stage.directory / "best", "step_1")
    best = files.followed(stage.directory / "best")
    stage.complete(counts={"expected": 1, "done": 1}, outputs={"rows": best / "rows.jsonl"})


if __name__ == "__main__":
    main(__doc__, ExtractOptions, run)
'''


@pytest.fixture
def start(tmp_path):
    """Return start(lacking, *arguments) → a process of a toy stage 02 where the file system lacks some calls."""
    (tmp_path / "02_extract_hidden_states.py").write_text(STAGE)
    started = []

    def start(lacking, *arguments):
        path = os.pathsep.join([without(tmp_path / "-".join(["shim", *lacking]), *lacking), str(ROOT)])
        command = [sys.executable, "02_extract_hidden_states.py", "--run-dir", "run", *arguments]
        started.append(subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()


def end(process):
    errors = process.communicate(timeout=30)[1]
    return process.returncode, errors


@pytest.mark.parametrize(("lacking", "words"), [
    (["flock"], "this file system has no locks (Function not implemented)"),
    (["symlink"], "no symbolic links"),
    (["folder_sync"], "no sync of folders"),
    (["file_sync"], "no sync of files"),
    (["flock", "symlink", "folder_sync", "file_sync"], "no symbolic links"),
    ([], ""),
], ids=lambda value: "-".join(value) or "all" if isinstance(value, list) else "")
def test_a_stage_works_where_a_call_is_missing_and_says_so_once(tmp_path, start, lacking, words):
    code, errors = end(start(lacking))
    assert code == 0, errors
    assert errors.count(words) == 1 if words else "file system" not in errors
    folder = tmp_path / "run" / "02_states"
    assert json.loads((folder / "manifest.json").read_text())["status"] == "complete"
    assert (folder / "best").is_symlink() == ("symlink" not in lacking)
    assert (files.followed(folder / "best") / "rows.jsonl").read_text() == '{"a":1}\n'
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "step_1", "best", ".lock"}
    assert end(start(lacking))[0] == 0 and end(start(lacking, "--restart"))[0] == 0
    assert lock.holder(folder) == lock.holder(folder.with_name("02_states.old-1")) == ""


@pytest.mark.parametrize(("lacking", "words"), [(["rename_over"], "rename a file over another"),
                                               (["append"], "append to a file and cut it")])
def test_what_there_is_no_way_around_is_named_before_the_work(tmp_path, start, lacking, words):
    code, errors = end(start(lacking))
    assert (code, "Traceback" in errors) == (3, False), errors
    assert words in errors and "--out" in errors and "02_states" in errors
    assert [path.name for path in (tmp_path / "run" / "02_states").iterdir()] == [".lock"]


def test_without_locks_a_second_run_is_refused_and_a_dead_owners_place_is_taken(tmp_path, start):
    owner = start(["flock"], "--limit", "1")
    assert owner.stdout.readline() == "ready\n"
    folder = tmp_path / "run" / "02_states"
    code, errors = end(start(["flock"]))
    assert code == 3 and f"pid {owner.pid} on {os.uname().nodename}" in errors and str(folder.name) in errors
    assert lock.OWNER in errors.partition("fix:")[2]  # what to remove if that run is gone
    assert lock.holder(folder).startswith(f"pid {owner.pid} ")
    owner.kill()
    owner.wait()
    assert lock.holder(folder) == ""
    assert end(start(["flock"], "--restart"))[0] == 0
    assert not (folder / lock.OWNER).exists()


def test_without_locks_an_owner_is_its_process_not_its_number_and_another_host_is_believed(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    here = os.uname().nodename
    for text in (f"pid {os.getpid()} on {here} since x, started 1", f"pid 4194304 on {here} since x, started 1"):
        (tmp_path / lock.OWNER).write_text(text)
        lock.DirectoryLock(tmp_path).release()
        assert not (tmp_path / lock.OWNER).exists()
    for text in ("pid 1 on elsewhere since x, started 1", ""):  # the last was created a moment ago
        (tmp_path / lock.OWNER).write_text(text)
        with pytest.raises(PreconditionError, match="another run"):
            lock.DirectoryLock(tmp_path)


def test_a_look_leaves_nothing_behind_and_takes_milliseconds(tmp_path):
    assert probe.look(tmp_path) == [] and not list(tmp_path.iterdir())


def test_a_pointer_is_a_name_beside_it_and_nothing_else(tmp_path):
    (tmp_path / "step_1").mkdir()
    for content in (b"../x\n", b".\n", b"..", b"\xff\xfe", b"", b"x" * 300, b"step_2", b"step_1/"):
        (tmp_path / "best").write_bytes(content)
        assert files.followed(tmp_path / "best") == tmp_path / "best"
    (tmp_path / "best").write_bytes(b"step_1\n")
    assert files.followed(tmp_path / "best") == tmp_path / "step_1" == files.followed(tmp_path / "step_1")
