"""Which measurements there are, which of them are done, and those of earlier versions."""

import pytest

from eagle3.benchmark import matrix, measurements
from eagle3.benchmark.matrix import AGAIN, BASELINE, CONTROL, DRAFTER, Matrix, ServerKind
from eagle3.common import files

ALONE, THREE, FIVE, END = ServerKind(BASELINE), ServerKind(DRAFTER, 3), ServerKind(DRAFTER, 5), ServerKind(AGAIN)


def plan(counts=(3,), concurrency=(1,), temperatures=(0.0,), sets=("p",), repeats=1, control=""):
    kinds = matrix.servers(list(counts), control=bool(control), again=True)
    return Matrix(kinds, list(concurrency), list(temperatures), {name: f"hash of {name}" for name in sets}, repeats,
                  control)


def measured(wanted, kept=()):
    """Measure what is missing, in order; the time is the number of the measurement."""
    kept = list(kept)
    for kind in wanted.servers:
        kept += [cell.key() | {"measured_at": f"{len(kept) + k:03}"}
                 for k, cell in enumerate(wanted.missing(kind, kept))]
    return kept


def test_the_servers_of_a_benchmark_begin_and_end_with_the_verifier_alone():
    found = [kind.name for kind in matrix.servers([3, 5], control=True, again=True)]
    assert found == ["baseline", "drafter-3", "drafter-5", "control-3", "control-5", "baseline-again"]


def test_every_combination_is_measured_once_with_a_name_of_its_own():
    wanted = plan((3, 5), (1, 8), (0.0, 0.7), ("p", "q"), repeats=2)
    kept = measured(wanted)
    assert len(kept) == 3 * 2 * 2 * 2 * 2 + 2 * 2 * 2  # the end has no repeats
    names = [cell.name("p") for kind in wanted.servers for cell in wanted.cells(kind)]
    assert len(set(names)) == len(names)
    assert names[0] == "baseline_c1" and "drafter-5_c8_t0.7_q_r2" in names and "baseline-again_c8_q" in names
    assert len({matrix.key_of(run) for run in kept}) == len(kept)
    assert measured(wanted, kept) == kept


@pytest.mark.parametrize(("wider", "new"), [
    (plan((3, 5)), {FIVE: 1, END: 1}),
    (plan(concurrency=(1, 8)), {ALONE: 1, THREE: 1, END: 1}),
    (plan(temperatures=(0.0, 1.0)), {ALONE: 1, THREE: 1, END: 1}),
    (plan(sets=("p", "q")), {ALONE: 1, THREE: 1, END: 1}),
    (plan(repeats=3), {ALONE: 2, THREE: 2, END: 1}),  # its end is to be the end again
    (plan(control="c"), {ServerKind(CONTROL, 3): 1, END: 1}),
])
def test_one_value_more_on_an_axis_is_all_that_is_measured(wider, new):
    kept = measured(plan())
    assert {kind: len(cells) for kind, cells in wider.all_missing(kept).items() if cells} == new
    more = measured(wider, kept)[len(kept):]
    assert {kind: sum(run["server"] == kind.role and run["draft_tokens"] == kind.draft_tokens for run in more)
            for kind in new} == new and len(more) == sum(new.values())
    assert measured(wider, [*kept, *more]) == [*kept, *more]


def test_other_prompts_and_another_control_are_measured_anew_and_alone_shown():
    kept = measured(plan(control="c"))
    other = Matrix(plan(control="d").servers, [1], [0.0], {"p": "other prompts"}, 1, "d")
    assert not any(other.shown(run) for run in kept)
    assert len(measured(other, kept)) == 2 * len(kept)
    narrower = plan(counts=(7,), sets=("q",))
    assert [narrower.shown(run) for run in kept] == [run["server"] != CONTROL for run in kept]


def store(directory, name, **more):
    figures = {"name": name, "fingerprint": "f", "requests": 1} | ServerKind(BASELINE).__dict__ | more
    return measurements.store(directory, figures, [{"id": "a", "completion_token_ids": [1]}])


def test_a_file_is_never_overwritten_by_another_measurement(tmp_path):
    cell = next(plan().cells(ALONE))
    first = store(tmp_path, "baseline_c1", **cell.key())
    second = store(tmp_path, "baseline_c1", **cell.key())
    assert (first["name"], second["name"]) == ("baseline_c1", "baseline_c1-2")
    assert [run["name"] for run in measurements.kept(tmp_path, "f")] == ["baseline_c1", "baseline_c1-2"]
    (tmp_path / "replies_baseline_c1.jsonl").write_text("damaged")
    assert [run["name"] for run in measurements.kept(tmp_path, "f")] == ["baseline_c1-2"]
    assert store(tmp_path, "baseline_c1", **cell.key())["name"] == "baseline_c1"
    assert measurements.kept(tmp_path, "other") == []


def old_stage(tmp_path, temperature=0.0):
    """Write measurements as they were before each was kept by itself; return the manifest of that time."""
    basis = {"benchmark.draft_tokens": [3], "benchmark.concurrency": [1], "benchmark.temperature": temperature,
             "benchmark.prompts": "held_out.jsonl", "benchmark.max_tokens": 20, "benchmark.predict": True,
             "input prompts": "hash of p", "input model": "m"}
    fingerprint = files.sha256_json(basis)
    for name, count in (("baseline_c1", 0), ("drafter-3_c1", 3)):
        path = tmp_path / f"replies_{name}.jsonl"
        files.write_bytes(path, b"{}\n")
        run = {"name": name, "draft_tokens": count, "concurrency": 1, "fingerprint": fingerprint,
               "replies": files.sha256_file(path), "acceptance": None}
        files.write_json(tmp_path / "runs" / f"{name}.json", run)
    files.write_json(tmp_path / "runs" / "predicted_drafter-3_c1.json",
                     {"fingerprint": fingerprint, "replies": files.sha256_file(path), "margins": {}, "length": 2.0,
                      "by_position": [1.0], "rounds": 9})
    return {"fingerprint": fingerprint, "fingerprint_basis": basis}


def test_what_an_earlier_version_measured_is_kept_and_extended(tmp_path):
    basis = measurements.adopted(tmp_path, old_stage(tmp_path))
    assert basis == {"benchmark.max_tokens": 20, "input model": "m"}
    kept = measurements.kept(tmp_path, files.sha256_json(basis))
    assert [(run["name"], run["server"], run["prompts"], run["prompts_identity"]) for run in kept] == [
        ("baseline_c1", BASELINE, "held_out", "hash of p"), ("drafter-3_c1", DRAFTER, "held_out", "hash of p")]
    assert measurements.use_prediction(tmp_path, dict(kept[1]))
    again = measurements.adopted(tmp_path, {"fingerprint_basis": basis, "fingerprint": files.sha256_json(basis)})
    assert again == basis and measurements.kept(tmp_path, files.sha256_json(basis)) == kept
    same = Matrix([ALONE, THREE, END], [1], [0.0], {"held_out": "hash of p"}, 1)
    assert [len(same.missing(kind, kept)) for kind in same.servers] == [0, 0, 0]  # nothing is loaded for it
    wider = Matrix([ALONE, THREE, FIVE, END], [1], [0.0], {"held_out": "hash of p"}, 1)
    assert [len(wider.missing(kind, kept)) for kind in wider.servers] == [0, 0, 1, 0]  # the end: once five is there


def test_an_old_temperature_is_kept_with_its_measurement(tmp_path):
    basis = measurements.adopted(tmp_path, old_stage(tmp_path, temperature=0.7))
    assert {run["temperature"] for run in measurements.kept(tmp_path, files.sha256_json(basis))} == {0.7}
