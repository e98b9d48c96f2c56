"""The foundation rooms: options, durable files, and the manners of a stage run as a real process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support.project import ROOT

from eagle3.common import config, files, log
from eagle3.common.errors import PreconditionError, UsageError
from eagle3.common.options import ExtractOptions, GenerateOptions, TrainOptions

# --- options ----------------------------------------------------------------------------------------------


def parse(options_class, *arguments):
    return config.parse(options_class, list(arguments), "doc")


def yaml_file(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return str(path)


def test_flag_beats_file_beats_default(tmp_path):
    path = yaml_file(tmp_path, "train:\n  lr: 1e-4\n  epochs: 7\n")
    train = parse(TrainOptions, "--config", path, "--epochs", "9").train
    assert (train.epochs, train.lr, train.seed) == (9, 1e-4, 0)
    assert isinstance(train.lr, float)  # YAML 1.1 reads 1e-4 as text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train:\n  epoch: 3\n", ["train.epoch", "did you mean epochs?"]),
        ("trian:\n  epochs: 3\n", ["trian", "did you mean train?"]),
        ("train:\n  epochs: three\n", ["train.epochs", "int", "'three'"]),
        ("train:\n  epochs: 2.5\n", ["train.epochs", "not a whole number"]),
        ("train:\n  epochs: 0\n", ["train.epochs", "at least 1"]),
        ("train:\n  validation_fraction: 0.95\n", ["at most 0.9"]),
        ("train:\n  lr: true\n", ["train.lr", "float"]),
        ("train:\n  loss: mse\n", ["kl_div or ce", "'mse'"]),
        ("generate:\n  serve: 1\n", ["generate.serve", "not true or false"]),
        ("model:\n  layers: 3\n", ["model.layers", "a list"]),
        ("model:\n  layers: [a]\n", ["model.layers", "int"]),
        ("train: 3\n", ["train", "a section must hold options"]),
        ("- 1\n", ["must hold sections"]),
        ("a: [\n", ["not YAML"]),
    ],
)
def test_a_wrong_file_is_refused_whatever_section_it_is_in(tmp_path, text, words):
    path = yaml_file(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        parse(ExtractOptions, "--config", path)
    assert caught.value.exit_code == 2
    for word in [*words, path]:
        assert word in str(caught.value)


def test_a_binary_or_missing_file_is_refused(tmp_path):
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    for name, words in (("b.yaml", "not YAML"), ("missing.yaml", "does not exist")):
        with pytest.raises(UsageError, match=words):
            parse(TrainOptions, "--config", str(tmp_path / name))


def test_an_unknown_flag_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean --epochs?") as caught:
        parse(TrainOptions, "--epoch", "3")
    assert "--epoch" in str(caught.value)


def test_flags_are_checked_like_the_file():
    for arguments, word in ((["--epochs", "0"], "at least 1"), (["--lr", "fast"], "float"), (["--lr"], "argument")):
        with pytest.raises(UsageError, match=word):
            parse(TrainOptions, *arguments)


def test_lists_dictionaries_and_engine_arguments_on_the_command_line():
    options = parse(
        GenerateOptions,
        *("--layers", "2", "15", "27", "29", "--engine-env", '{"A": "1"}', "--no-serve"),
        *("--engine-args", "--enforce-eager --override '{\"a b\": 1}'", "--serve-args=--verbose"),
    )
    assert options.model.layers == [2, 15, 27, 29]
    assert options.engine.env == {"A": "1"}
    assert options.engine.args == ["--enforce-eager", "--override", '{"a b": 1}']
    assert options.generate.serve_args == ["--verbose"]
    assert options.generate.serve is False


def test_one_engine_argument_after_a_space():
    assert parse(GenerateOptions, "--engine-args", "--enforce-eager", "--serve").engine.args == ["--enforce-eager"]


@pytest.mark.parametrize("options_class", [GenerateOptions, TrainOptions])
def test_the_printed_configuration_reads_back(tmp_path, options_class):
    arguments = ["--model", "m", "--layers", "1", "2", "3", "4"]
    if options_class is GenerateOptions:
        arguments += ["--engine-args", "--a 'b c'", "--chat-template-kwargs", '{"thinking": false}', "--top-p", "0.9"]
    options = parse(options_class, *arguments)
    again = parse(options_class, "--config", yaml_file(tmp_path, config.to_yaml(options)))
    assert config.to_dict(again) | {"common": 0} == config.to_dict(options) | {"common": 0}
    assert again.model.layers == [1, 2, 3, 4]


def test_secrets_are_masked_everywhere():
    options = parse(GenerateOptions, "--engine-env", '{"VLLM_API_KEY": "canary", "A": "1"}')
    assert options.engine.env["VLLM_API_KEY"] == "canary"
    shown = json.dumps([config.to_dict(options), config.result_options(options), config.to_yaml(options)])
    assert "canary" not in shown
    assert '"A": "1"' in shown
    for argv in (["x", "--engine-env", '{"MY_TOKEN": "canary"}'], ["x", '--engine-env={"MY_TOKEN": "canary"}']):
        assert "canary" not in str(config.without_secrets(argv))
    assert config.without_secrets(["x", "--engine-env"]) == ["x", "--engine-env"]


# --- files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b"", b""),
        (b'{"a":1}\n', b'{"a":1}\n'),
        (b'{"a":1}\n{"b":', b'{"a":1}\n'),
        ('{"a":1}\n{"b":"ü'.encode()[:-1], b'{"a":1}\n'),
        (b'{"a":', b""),
        (b'{"a":1}\n' + b"\0" * 3_000_000, b'{"a":1}\n'),
    ],
)
def test_a_torn_tail_is_cut_off(tmp_path, content, kept):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    expected = [(number, json.loads(line)) for number, line in enumerate(kept.splitlines(), start=1)]
    assert list(files.read_jsonl(path)) == expected
    with files.Appender(path) as appender:
        assert appender.repaired_bytes == len(content) - len(kept)
        appender.append([{"text": "\ud800 \u2028"}])
    assert path.read_bytes().startswith(kept)
    assert [row for _, row in files.read_jsonl(path)][-1] == {"text": "\ud800 \u2028"}


@pytest.mark.parametrize("line", [b"{broken", b"[1]", b'{"a": "\xff"}', b""])
def test_damage_in_the_middle_names_the_line(tmp_path, line):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\n' + line + b'\n{"b":2}\n')
    with pytest.raises(PreconditionError, match=r"x\.jsonl line 2"):
        list(files.read_jsonl(path))


def test_replacing_leaves_the_old_file_and_nothing_else_on_error(tmp_path):
    path = tmp_path / "x"
    files.write_bytes(path, b"old")

    def fail():
        with files.replacing(path) as temporary:
            temporary.write_bytes(b"half")
            raise ValueError

    pytest.raises(ValueError, fail)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"x": b"old"}


def test_a_full_disk_is_named_and_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x"
    files.write_bytes(path, b"old")
    appender = files.Appender(tmp_path / "rows")
    appender.append([{"a": 1}])

    def full(_fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda: files.write_bytes(path, b"new"), lambda: appender.append([{"a": 2}])):
        with pytest.raises(PreconditionError, match="disk is full") as caught:
            write()
        assert str(tmp_path) in str(caught.value)
        assert "bytes free" in str(caught.value)
    assert path.read_bytes() == b"old"
    assert [row for _, row in files.read_jsonl(tmp_path / "rows")] == [{"a": 1}]


def test_what_append_returned_for_survives_a_kill(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom eagle3.common import files\n"
        "appender = files.Appender(Path(sys.argv[1]))\n"
        "for i in range(10**9):\n    appender.append([{'i': i}])\n    print(i, flush=True)\n"
    )
    path = tmp_path / "x.jsonl"
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for _ in range(50):
        process.stdout.readline()
    process.kill()
    acknowledged = 50 + len(process.stdout.read().splitlines())
    process.wait()
    rows = [row["i"] for _, row in files.read_jsonl(path)]
    assert rows == list(range(len(rows)))
    assert len(rows) >= acknowledged


def test_an_identity_sees_weights_and_configuration(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights = bytearray(1 << 20)
    (tmp_path / "model.safetensors").write_bytes(weights)
    before = files.model_identity(tmp_path)
    weights[-1] = 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    after = files.model_identity(tmp_path)
    assert [name for name in before if before[name] != after[name]] == ["model.safetensors"]
    with pytest.raises(PreconditionError, match=r"config\.json"):
        files.model_identity(tmp_path / "elsewhere")


def test_json_with_a_file_name_that_is_not_unicode(tmp_path):
    value = {"argv": [os.fsdecode(b"run\xff")]}
    files.write_json(tmp_path / "m.json", value)
    assert files.read_json(tmp_path / "m.json") == value


def test_figures_for_people():
    assert [log.duration(s) for s in (8, 187, 3720)] == ["8s", "3m07s", "1h02m"]
    assert [log.size(n) for n in (999, 1500, 547e9)] == ["999 B", "1.5 kB", "547.0 GB"]


# --- a stage as a process ---------------------------------------------------------------------------------

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


def manifest(tmp_path, folder="02_states"):
    return json.loads((tmp_path / "runs/x" / folder / "manifest.json").read_text())


def test_a_stage_completes_once(tmp_path, stage):
    code, errors = stage("--max-length", "100")
    assert code == 0, errors
    assert errors.splitlines()[-1].endswith("next: python 03_build_vocab_mapping.py --run-dir runs/x")
    first = manifest(tmp_path)
    assert (first["status"], first["stage"], first["error"]) == ("complete", "02_states", "")
    assert first["outputs"]["result"]["bytes"] == 100
    assert first["options"]["extract"]["max_length"] == 100
    assert first["versions"]["python"]
    code, errors = stage("--max-length", "100")
    assert code == 0
    assert "complete already" in errors
    assert manifest(tmp_path) == first


def test_options_that_change_no_result_may_change(tmp_path, stage):
    assert stage()[0] == 0
    code, errors = stage("--batch-tokens", "99999", "--log-level", "debug")
    assert (code, "complete already" in errors) == (0, True)


def test_a_damaged_output_is_made_again(tmp_path, stage):
    assert stage()[0] == 0
    (tmp_path / "runs/x/02_states/result.txt").write_bytes(b"short")
    code, errors = stage()
    assert (code, "missing or damaged" in errors) == (0, True)
    assert (tmp_path / "runs/x/02_states/result.txt").stat().st_size == 100


def test_a_changed_option_is_refused_with_both_ways_on(tmp_path, stage):
    assert stage("--max-length", "100")[0] == 0
    code, errors = stage("--max-length", "200", "--engine-args", "--a 'b c'", TOY_INPUT="two")
    assert code == 3
    assert "extract.max_length: 100 → 200" in errors
    assert "engine.args: [] → " in errors
    assert "input traces: \"one\" → \"two\"" in errors
    ways = [line for line in errors.splitlines() if "python 02_extract_hidden_states.py" in line]
    assert ways[0].endswith("--out runs/x/02_states_2")
    assert "--restart" in ways[1]
    assert "'--a '\"'\"'b c'\"'\"''" in ways[0]  # can be copied as it is
    assert manifest(tmp_path)["status"] == "complete"


def test_restart_moves_the_old_result_aside(tmp_path, stage):
    assert stage("--max-length", "100")[0] == 0
    assert stage("--max-length", "200", "--restart")[0] == 0
    assert stage("--max-length", "300", "--restart")[0] == 0
    manifests = [manifest(tmp_path, f"02_states{end}") for end in ("", ".old-1", ".old-2")]
    lengths = [content["options"]["extract"]["max_length"] for content in manifests]
    assert lengths == [300, 100, 200]
    assert (tmp_path / "runs/x/02_states.old-1/result.txt").exists()


def test_out_writes_beside(tmp_path, stage):
    assert stage("--max-length", "100")[0] == 0
    assert stage("--max-length", "200", "--out", "runs/x/02_states_200")[0] == 0
    assert manifest(tmp_path, "02_states_200")["options"]["extract"]["max_length"] == 200
    assert manifest(tmp_path)["options"]["extract"]["max_length"] == 100
    assert (tmp_path / "runs/x/logs/02_states_200.log").exists()


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


def test_a_lock_held_by_another_process_is_respected(tmp_path, toy, stage):
    owner = toy(mode="polite")
    assert owner.stdout.readline() == "ready\n"
    code, errors = stage()
    assert code == 3
    assert f"pid {owner.pid} on {os.uname().nodename}" in errors
    assert manifest(tmp_path)["status"] == "running"  # the owner's manifest is as it was
    assert stage("--out", "runs/x/elsewhere")[0] == 0


def test_a_dead_owners_lock_is_taken_over(tmp_path, toy, stage):
    owner = toy(mode="polite")
    owner.stdout.readline()
    owner.kill()
    owner.wait()
    assert (tmp_path / "runs/x/02_states/.lock").read_text().startswith(f"pid {owner.pid} ")
    assert manifest(tmp_path)["status"] == "running"
    assert stage()[0] == 0
    assert manifest(tmp_path)["status"] == "complete"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_interrupts_and_the_same_command_resumes(tmp_path, toy, stage, number, code):
    process = toy(mode="polite")
    process.stdout.readline()
    process.send_signal(number)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == code, errors
    assert manifest(tmp_path)["status"] == "interrupted"
    assert manifest(tmp_path)["ended_at"]
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
    assert manifest(tmp_path)["status"] == "interrupted"


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


def test_a_bug_is_exit_1_with_the_traceback_in_the_log(tmp_path, stage):
    code, errors = stage(mode="bug")
    assert (code, "Traceback" in errors) == (1, True)
    assert "KeyError: 'the bug'" in (tmp_path / "runs/x/logs/02_states.log").read_text()
    assert manifest(tmp_path)["status"] == "failed"
    assert stage()[0] == 0
    assert "KeyError: 'the bug'" in (tmp_path / "runs/x/logs/02_states.log").read_text()  # logs are appended


def test_too_many_failures_is_exit_4(tmp_path, stage):
    code, errors = stage(mode="failures")
    assert (code, "3 of 5 failed" in errors, "Traceback" in errors) == (4, True, False)
    assert manifest(tmp_path)["status"] == "partial"


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


def test_a_row_that_did_not_fit_never_comes_back(small_disk):
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * 600_000)
    with files.Appender(small_disk / "rows") as rows:
        rows.append([{"row": 1}])
        with pytest.raises(PreconditionError, match="disk is full"):
            rows.append([{"row": 2, "text": "y" * 600_000}])
        filler.unlink()  # now the rest would fit
    assert (small_disk / "rows").read_bytes() == b'{"row":1}\n'
