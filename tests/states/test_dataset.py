"""The dataset beside the states: written and read without a fingerprint that `datasets` computes."""

import pickle

import datasets
import pytest

from eagle3.states import store

SAMPLES = [store.Sample(i, f"t-{i}", "ab" * 8, [1, 2, 3 + i], [0, 1, 1]) for i in range(3)]


@pytest.fixture
def no_hashing(monkeypatch):
    """Let hashing fail as it does where packages lie outside the interpreter's prefix."""
    def refuse(*_, **__):
        raise pickle.PicklingError("Can't pickle <class 'pyarrow.lib.MonthDayNano'>")

    monkeypatch.setattr(datasets.fingerprint.Hasher, "hash", refuse)
    monkeypatch.setattr(datasets.fingerprint.Hasher, "update", refuse)
    with pytest.raises(pickle.PicklingError):
        datasets.Dataset.from_dict({"a": [1]}).with_format("torch")


def test_it_is_written_and_read_where_datasets_cannot_hash(tmp_path, no_hashing):
    store._write_dataset(tmp_path, SAMPLES)
    rows = store.load_dataset(tmp_path)
    assert rows.ids == ["t-0", "t-1", "t-2"] and [list(each) for each in rows.masks] == [[False, True, True]] * 3
    assert [list(each) for each in rows.input_ids] == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]


def test_others_read_it_as_they_did(tmp_path):
    """The same columns, types, format and bytes of data as `from_dict` and `set_format` give."""
    (tmp_path / "ours").mkdir()
    store._write_dataset(tmp_path / "ours", SAMPLES)
    features = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int64")),
                                  "loss_mask": datasets.Sequence(datasets.Value("bool")),
                                  "seq_len": datasets.Value("int64"), "id": datasets.Value("string")})
    usual = datasets.Dataset.from_dict({
        "input_ids": [sample.input_ids for sample in SAMPLES], "seq_len": [3] * 3, "id": [s.id for s in SAMPLES],
        "loss_mask": [[bool(value) for value in sample.loss_mask] for sample in SAMPLES]}, features=features)
    usual.set_format("torch")
    ours = datasets.load_from_disk(str(tmp_path / "ours"))
    assert ours.features == usual.features and ours.format == usual.format | {"columns": ours.column_names}
    assert [{name: str(value) for name, value in row.items()} for row in ours] == [
        {name: str(row[name]) for name in ours.column_names} for row in usual]
    first = (tmp_path / "ours" / "state.json").read_bytes()
    store._write_dataset(tmp_path / "ours", SAMPLES)
    assert (tmp_path / "ours" / "state.json").read_bytes() == first
