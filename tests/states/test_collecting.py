"""From a pass in the engine's memory to a file: matched by position and ids, written once, the memory freed."""

import threading
import time

import pytest
import torch
from safetensors.torch import save
from support.captures import samples_of

from eagle3.common.errors import PreconditionError
from eagle3.states import slabs
from eagle3.states.collecting import Collector
from eagle3.states.encoding import encode_fp8
from eagle3.states.pass_sender import pass_tensors
from eagle3.states.self_check import checksums, ranks_agree, rows_to_check
from eagle3.states.store import StateStore
from eagle3.states.writing import Writer

SIZE = slabs.slab_bytes(64, 4 * 2 * 8 + 8)


@pytest.fixture
def both(tmp_path):
    """(store, the engine's sender, the stage's collector)."""
    store = StateStore(tmp_path / "02_states")
    store.files.mkdir(parents=True)
    with slabs.Receiver() as receiver:
        collector = Collector(receiver, Writer(store.files, {"capture": "{}"}))
        yield store, slabs.Sender(receiver.address, SIZE, torch.device("cpu")), collector


def send(sender, *pieces, broken=None):
    """Send a pass of (ids, position of the first); the state of a token is its id and its slot."""
    tokens = torch.tensor([token for ids, _ in pieces for token in ids])
    places = torch.tensor([first + k for ids, first in pieces for k in range(len(ids))])
    streams = [(tokens * 10 + slot)[:, None].expand(-1, 8).bfloat16() for slot in range(4)]
    if broken is not None:
        streams[1][broken, 0] = float("nan")
    tensors = pass_tensors(tokens, places, [each.contiguous() for each in streams], fp8=False)
    rows = rows_to_check(places, len(pieces))
    sender.send(tensors | {"rows": rows, "row_tokens": tokens[rows] + 1, "row_differences": torch.zeros(len(rows)),
                           "row_agrees": torch.ones(len(rows), dtype=torch.bool)})


def run(both, sequences, *passes, wanted=None, batch=1, **more):
    _, sender, collector = both
    collector.expect(batch, samples_of(sequences), set(sequences) if wanted is None else wanted)
    for pieces in passes:
        send(sender, *pieces, **more)
    sender.tell(batch=batch)
    return collector.result(batch)


def test_packed_and_chunked_sequences_find_their_samples(both):
    sequences = {0: [1, 2, 3], 1: [1, 2, 4, 5], 2: [9]}
    found = run(both, sequences, [([1, 2, 3], 0), ([1, 2], 0)], [([4, 5], 2), ([9], 0)])
    assert sorted(entry["i"] for entry in found.entries) == [0, 1, 2]
    index = {entry["i"]: entry for entry in found.entries}
    for i, ids in sequences.items():
        states, tokens = both[0].load(i, index[i]["sha256"])
        assert tokens.tolist() == ids and (index[i]["tokens"], index[i]["bytes"]) == (
            len(ids), both[0].path(i).stat().st_size)
        assert states[:, :, 0].tolist() == [[token * 10 + slot for slot in range(4)] for token in ids]
        assert found.rows[i].places.tolist()[-1] == len(ids) - 1 and found.rows[i].tokens[-1] == ids[-1] + 1


def test_equal_sequences_are_two_samples_and_only_wanted_ones_are_written(both):
    found = run(both, {0: [1, 2], 1: [1, 2], 2: [3]}, [([1, 2], 0), ([1, 2], 0), ([3], 0)], wanted={1, 2})
    assert sorted(entry["i"] for entry in found.entries) == [1, 2] and sorted(found.rows) == [0, 1, 2]
    assert not both[0].path(0).exists()


def test_a_sample_without_all_its_tokens_is_an_error(both):
    found = run(both, {0: [1, 2, 3], 1: [6] * 66}, [([1, 2], 0)], [([7, 8], 64)])
    assert {entry["i"]: entry["error"] for entry in found.entries} == {
        0: "states for 2 of 3 tokens (cached prefix?)", 1: "states for 0 of 66 tokens (cached prefix?)"}


def test_nan_is_named_by_slot_and_not_written(both):
    found = run(both, {0: [1, 2], 1: [3, 4]}, [([1, 2], 0), ([3, 4], 0)], broken=2)
    errors = {entry["i"]: entry.get("error") for entry in found.entries}
    assert errors == {0: None, 1: "NaN or Inf: in so many of 2 tokens, by layer slot: {1: 1}"}
    assert not both[0].path(1).exists()


def test_the_engine_waits_while_no_slab_is_free_and_no_longer(both, monkeypatch):
    _, sender, collector = both
    go, write = threading.Event(), Writer._write
    monkeypatch.setattr(Writer, "_write", lambda *given: (go.wait(10), write(*given))[1])
    sequences = {i: [i + 1, i + 2] for i in range(slabs.SLABS + 2)}
    collector.expect(1, samples_of(sequences), set(sequences))
    sent = []
    engine = threading.Thread(target=lambda: [(send(sender, (ids, 0)), sent.append(i)) for i, ids in sequences.items()])
    engine.start()
    time.sleep(0.5)
    assert len(sent) == slabs.SLABS
    go.set()
    engine.join(10)
    sender.tell(batch=1)
    assert len(collector.result(1).entries) == len(sequences)
    assert [both[0].load(i)[1].tolist() for i in sequences] == [*sequences.values()]


def test_a_full_disk_keeps_what_was_written_and_is_said(both, monkeypatch):
    from eagle3.common import files

    real = files.write_parts

    def full(path, *given):
        if path.name == "hs_1.safetensors":
            raise files.disk_full(path)
        return real(path, *given)

    monkeypatch.setattr(files, "write_parts", full)
    found = run(both, {0: [1], 1: [2], 2: [3]}, [([1], 0), ([2], 0), ([3], 0)])
    assert sorted(entry["i"] for entry in found.entries) == [0, 2]
    assert isinstance(found.problem, PreconditionError) and "disk is full" in str(found.problem)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_file_has_the_bytes_that_safetensors_would_write(dtype, fp8, tmp_path):
    states, ids = torch.randn(7, 4, 16).to(dtype), torch.arange(7)
    piece = {"states": states, "finite": torch.ones(7, 4, dtype=torch.bool)}
    expected = {"hidden_states": states, "token_ids": ids}
    if fp8:
        piece["states"], piece["scales"] = encode_fp8(states)
        expected |= {"hidden_states": piece["states"], "hidden_states_scales": piece["scales"]}
    halves = [{name: value[part] for name, value in piece.items()} for part in (slice(0, 3), slice(3, 7))]
    Writer(tmp_path, {"capture": '{"ö": 1}'}).submit(3, ids, halves).result()
    assert (tmp_path / "hs_3.safetensors").read_bytes() == save(expected, metadata={"capture": '{"ö": 1}'})


def test_rows_are_one_in_so_many_and_the_last_of_each_sequence():
    places = torch.cat([torch.arange(150), torch.arange(3), torch.arange(40, 60)])
    assert rows_to_check(places, 3).tolist() == [45, 109, 149, 152, 172]
    assert rows_to_check(torch.arange(5), 2).tolist() == [4, 0]  # fewer than said: any row is looked at twice


def test_ranks_that_hold_other_states_are_named():
    whole = [torch.randn(2000, 8) for _ in range(2)]
    sums = [checksums(whole), checksums([each.clone() for each in whole])]
    assert sums[0] == sums[1] and ranks_agree(sums) == "" and ranks_agree([None]) == ""
    part = checksums([whole[0], whole[1] / 2])
    assert "layer slot 1" in ranks_agree([*sums, part]) and "rank 2" in ranks_agree([*sums, part])
