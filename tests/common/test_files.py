"""Durable files: what is torn is cut off, what is damaged is named, what was appended stays."""

import json
import os
import subprocess
import sys

import pytest
from support.project import ROOT

from eagle3.common import files
from eagle3.common.errors import PreconditionError


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


def test_a_row_that_did_not_fit_never_comes_back(small_disk):
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * 600_000)
    with files.Appender(small_disk / "rows") as rows:
        rows.append([{"row": 1}])
        with pytest.raises(PreconditionError, match="disk is full"):
            rows.append([{"row": 2, "text": "y" * 600_000}])
        filler.unlink()  # now the rest would fit
    assert (small_disk / "rows").read_bytes() == b'{"row":1}\n'
