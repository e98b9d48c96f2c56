"""Readers of what lies on disk, given 10,000 damaged files each: a result, or an error with what, where and fix."""

import json
import random

import pytest
from support.damaged_json import of_bytes, of_value, put

from eagle3.common import files, manifest, tensor_files
from eagle3.common.errors import StageError

COUNT = 10_000


def require_whole(error: StageError, path) -> None:
    assert error.what and str(path) in str(error.parts["where"]) and error.parts["fix"], error.render()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


def outcomes(path, contents, read):
    """Return how many files were read and how many refused; every refusal is a whole error."""
    count = {"read": 0, "refused": 0}
    for data in contents:
        put(path, data)
        try:
            read()
            count["read"] += 1
        except StageError as error:
            require_whole(error, path)
            count["refused"] += 1
    assert sum(count.values()) == COUNT and min(count.values()) > COUNT // 100, count
    return count


def test_json_lines(path):
    rows = [{"i": i, "id": f"trace-{i}", "digest": "ab" * 8, "tokens": 20 + i, "bytes": 4096, "sha256": "00" * 32}
            for i in range(3)]
    rng, lines = random.Random(1), [files.encode_line(row) for row in rows]

    def contents():
        for number in range(COUNT):
            if number % 2:
                yield of_bytes(b"".join(lines), rng)
            else:
                yield b"".join([*lines[:1], json.dumps(of_value(rows[1], rng)).encode() + b"\n", *lines[2:]])

    def read():
        assert all(isinstance(row, dict) and number > 0 for number, row in files.read_jsonl(path))

    outcomes(path, contents(), read)


MANIFEST = {
    "schema_version": 1, "stage": "02_states", "status": "complete", "argv": ["02.py", "--run-dir", "x"], "pid": 3,
    "fingerprint": "ab" * 32, "fingerprint_basis": {"extract.dtype": "bfloat16"},
    "inputs": {"model": {"config.json": "a"}},
    "counts": {"expected": 3, "done": 3}, "seconds": {"before": 0.0, "this_run": 2.5},
    "outputs": {"index": {"path": "index.jsonl", "bytes": 100, "sha256": "00" * 32}},
}


@pytest.mark.parametrize("seal", [True, False])
def test_manifests(tmp_path, seal):
    """A damaged manifest is refused by its seal; without one, of an older version, what is taken has its form."""
    content = manifest.sealed(MANIFEST) if seal else MANIFEST
    rng, whole, taken = random.Random(2), json.dumps(content).encode(), []
    for number in range(COUNT // 2):
        data = of_bytes(whole, rng) if number % 2 else json.dumps(of_value(content, rng)).encode()
        put(tmp_path / "manifest.json", data)
        try:
            found = manifest.read(tmp_path, "run the stage again")
            manifest.outputs_of(found, tmp_path)
            taken.append(found)
        except StageError as error:
            require_whole(error, tmp_path)
    changed = [found for found in taken if found != MANIFEST]
    assert len(changed) > COUNT // 20 if not seal else all(_lost_its_seal(found) for found in changed)


def _lost_its_seal(found):
    """Say whether the seal itself was damaged away: then it is as a manifest of an older version."""
    strange = found.keys() - MANIFEST.keys()
    return len(found) <= len(MANIFEST) or any("s" in name for name in strange)


def test_headers_of_weights(tmp_path):
    """What is taken for whole is what the safetensors library loads, with the same names, types and shapes."""
    import numpy as np
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import save

    tensors = {"a.weight": np.ones((4, 6), np.float32), "b": np.arange(5), "c": np.zeros((0, 3), np.float16),
               "m": np.array([True, False])}
    whole, rng, path = save(tensors, {"format": "pt"}), random.Random(3), tmp_path / "file"
    length = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]

    def contents():
        for number in range(COUNT):
            if number % 2:
                yield of_bytes(whole[: 8 + length], rng) + data
            else:
                text = json.dumps(of_value(header, rng)).encode()
                yield len(text).to_bytes(8, "little") + text + data

    def read():
        found = {name: (entry.dtype, list(entry.shape)) for name, entry in tensor_files.read_header(path).items()}
        try:
            with safe_open(path, framework="np") as file:
                theirs = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                assert found == {name: (each.get_dtype(), each.get_shape()) for name, each in theirs.items()}
        except SafetensorError as error:
            raise AssertionError(f"taken for whole, but not by the library: {error}: {path.read_bytes()!r}") from None

    outcomes(path, contents(), read)
