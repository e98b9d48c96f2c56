"""run.sh: order, arguments, exit codes and signals, with toy stages in place of the real ones."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from support.project import ROOT

SCRIPTS = ("01_generate_synthetic", "02_extract_hidden_states", "03_build_vocab_mapping", "04_train",
           "05_fix_weight_keys", "06_benchmark")
TOY = """import os, signal, sys, time
print(os.path.basename(sys.argv[0]), *sys.argv[1:], flush=True)
mode = os.environ.get("TOY_" + os.path.basename(sys.argv[0])[:2], "0")
if mode != "wait":
    sys.exit(int(mode))
def stop(number, frame):
    time.sleep(0.3)  # saving
    print("saved", flush=True)
    sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM):
    assert signal.getsignal(number) != signal.SIG_IGN
    signal.signal(number, stop)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""
EMBEDDED = "import sys\nprint('embedded', *sys.argv[1:], flush=True)\n"


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "a project"
    (folder / "eagle3").mkdir(parents=True)
    (folder / "configs").mkdir()
    shutil.copy(ROOT / "run.sh", folder)
    shutil.copy(ROOT / "configs" / "smollm2-135m.yaml", folder / "configs")
    (folder / "configs" / "other.yaml").write_text("model: {path: /elsewhere}\n")
    (folder / "configs" / "tiny.yaml").write_text("model:\n  path: models/tiny-kimi\n")
    (folder / "eagle3" / "embedded.py").write_text(EMBEDDED)
    (folder / "tiny_kimi").mkdir()
    (folder / "tiny_kimi" / "model.py").write_text(EMBEDDED.replace("embedded", "tiny"))
    for name in SCRIPTS:
        (folder / f"{name}.py").write_text(TOY)
    return folder


def start(project, *arguments, cwd=None, **environment):
    command = [project / "run.sh", "--python", sys.executable, *arguments]
    return subprocess.Popen(command, cwd=cwd or project, env={**os.environ, **environment}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def run(project, *arguments, **more):
    process = start(project, *arguments, **more)
    output, errors = process.communicate(timeout=30)
    return process.returncode, output.splitlines(), errors


def test_all_stages_run_in_order_on_the_embedded_model(project):
    code, lines, errors = run(project)
    assert code == 0, errors
    common = "--config configs/smollm2-135m.yaml --run-dir runs/smollm2-135m"
    assert lines[0] == "embedded --out models/smollm2-135m"
    assert lines[1] == f"01_generate_synthetic.py {common} --serve"
    assert lines[2:] == [f"{name}.py {common}" for name in SCRIPTS[1:]]
    assert errors.splitlines()[-1] == "[run] report: runs/smollm2-135m/06_bench/report.html"
    assert errors.count("exit code 0 after") == 6


def test_paths_are_the_callers(project, tmp_path):
    code, lines, errors = run(project, "--model", "m", "--run-dir", "r", "--config", "c.yaml", cwd=tmp_path)
    assert code == 0, errors
    assert lines[-1] == f"06_benchmark.py --config {tmp_path}/c.yaml --run-dir {tmp_path}/r --model {tmp_path}/m"
    assert len(lines) == 6  # nothing was converted


def test_a_gguf_file_is_converted(project):
    _, lines, _ = run(project, "--model", "x/small.gguf")
    assert lines[0] == "embedded --gguf x/small.gguf --out models/small"
    assert lines[-1].endswith("--model models/small")


def test_another_configuration_needs_no_embedded_model(project):
    _, lines, _ = run(project, "--config", "configs/other.yaml")
    assert lines[0].startswith("01_generate_synthetic.py")


def test_the_tiny_kimi_is_made_first(project):
    _, lines, _ = run(project, "--config", "configs/tiny.yaml")
    assert lines[0] == "tiny --out models/tiny-kimi"
    assert lines[1].startswith("01_generate_synthetic.py --config configs/tiny.yaml")


def test_the_first_failing_stage_ends_it_with_its_code(project):
    code, lines, errors = run(project, TOY_03="4")
    assert (code, len(lines)) == (4, 4)
    assert "03_build_vocab_mapping.py: exit code 4" in errors


@pytest.mark.parametrize(
    ("arguments", "word"), [(("--modle", "x"), "--modle"), (("--model",), "needs a value"), (("x",), "unknown")]
)
def test_wrong_arguments_are_exit_2(project, arguments, word):
    code, lines, errors = run(project, *arguments)
    assert (code, lines, word in errors) == (2, [], True)


def test_help_needs_no_set_up(project):
    done = subprocess.run([project / "run.sh", "--help"], capture_output=True, text=True, check=True)
    assert "--model" in done.stdout
    assert not (project / ".venv").exists()


@pytest.mark.parametrize(
    ("number", "to_group", "code"),
    [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143), (signal.SIGTERM, True, 143)],
)
def test_a_signal_reaches_the_stage_and_its_code_comes_back(project, number, to_group, code):
    process = start(project, TOY_02="wait")
    try:
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
        if to_group:  # as a terminal does
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        started = time.monotonic()
        output, errors = process.communicate(timeout=10)
        assert (process.returncode, output) == (code, "saved\n"), errors
        assert time.monotonic() - started < 5
        assert f"02_extract_hidden_states.py: exit code {code}" in errors
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
