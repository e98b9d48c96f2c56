"""A toy stage that runs as a real process, and a small disk."""

import contextlib
import os
import subprocess
import sys

import pytest
from support.project import ROOT

TOY = '''"""A toy stage: what it does between open and complete is in $TOY."""
import os
import time

from eagle3.common import files
from eagle3.common.errors import FailureLimitError
from eagle3.common.options import ExtractOptions
from eagle3.common.script import main


def run(options, stage):
    mode = os.environ.get("TOY", "")
    if options.common.dry_run or not stage.open(inputs={"traces": os.environ.get("TOY_INPUT", "one")}):
        return
    if mode == "bug":
        raise KeyError("the bug")
    if mode == "failures":
        raise FailureLimitError("3 of 5 failed")
    if mode == "fill":
        with files.Appender(stage.directory / "rows.jsonl") as rows:
            for number in range(200):
                rows.append([{"number": number, "text": "x" * 10_000}])
    if mode in ("polite", "stuck"):
        progress = stage.progress("toy", 1000, "units")
        progress.update(3)
        print("ready", flush=True)
        while True:
            time.sleep(0.05)
            if mode == "polite":
                stage.check_stop()
    result = stage.directory / "result.txt"
    files.write_bytes(result, b"x" * 100)
    stage.complete(counts={"expected": 5, "done": 5}, outputs={"result": result})


if __name__ == "__main__":
    main(__doc__, ExtractOptions, run)
'''


@pytest.fixture
def toy(tmp_path):
    """Return start(*arguments, **environment) → Popen of a toy stage 02 in tmp_path."""
    script = tmp_path / "02_extract_hidden_states.py"
    script.write_text(TOY)
    started = []

    def start(*arguments, mode="", **environment):
        process = subprocess.Popen(
            [sys.executable, script.name, "--run-dir", "runs/x", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TOY": mode, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()


@pytest.fixture
def stage(tmp_path, toy):
    """Return run(*arguments, **environment) → (exit code, stderr) of a toy stage that ends by itself."""

    def run(*arguments, **environment):
        process = toy(*arguments, **environment)
        _, errors = process.communicate(timeout=20)
        return process.returncode, errors

    return run


@pytest.fixture
def small_disk(tmp_path):
    """Return a folder on a file system of 1 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if mount.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
