"""Numbers of samples: one trace each, for good; what became of a trace decides, not where it stands."""

from pathlib import Path

import pytest

from eagle3.common.errors import PreconditionError, StaleError
from eagle3.states.numbering import number_traces


def row(name, digest="d", tokens=4):
    return name, f"{name}-{digest}", list(range(tokens)), [0, *[1] * (tokens - 1)], "s"


def numbered(rows, index=None, **more):
    return number_traces(rows, index or {}, Path("traces"), **{"max_length": 100} | more)


def index_of(result, **more):
    """Return the index after all samples of a result have been captured."""
    return {sample.i: {"i": sample.i} | sample.identity() | {"tokens": 4, "bytes": 9} | more
            for sample in result.samples}


def names(result):
    return {sample.i: sample.id for sample in result.samples}


def test_numbers_follow_the_ids_and_appended_traces_the_numbers():
    first = numbered([row("b"), row("a"), row("c")])
    assert names(first) == {0: "a", 1: "b", 2: "c"}
    grown = numbered([row("0"), row("a"), row("b"), row("c")], index_of(first))
    assert names(grown) == {0: "a", 1: "b", 2: "c", 3: "0"} and not grown.retired


@pytest.mark.parametrize("gone", ["a", "b", "c", "d"])
def test_a_number_is_never_given_twice(gone):
    index = index_of(numbered([row(name) for name in "abcd"]))
    left = numbered([row(name) for name in "abcdx" if name != gone], index)
    assert names(left) == {k: name for k, name in enumerate("abcd") if name != gone} | {4: "x"}
    assert [entry["id"] for entry in left.retired] == [gone]
    # and not later either, when the gap is in the index
    index |= index_of(left) | {entry["i"]: entry | {"retired": True} for entry in left.retired}
    later = numbered([row(name) for name in "abcdxy" if name != gone], index)
    assert {4: "x", 5: "y"}.items() <= names(later).items() and not later.retired


def test_a_trace_that_comes_back_takes_its_own_number_again_and_another_one_does_not():
    index = index_of(numbered([row(name) for name in "abc"]))
    index[1] |= {"retired": True}
    same = numbered([row(name) for name in "abc"], index)
    assert names(same) == {0: "a", 1: "b", 2: "c"} and [entry["i"] for entry in same.revived] == [1]
    other = numbered([row("a"), row("b", "other"), row("c")], index)
    assert names(other) == {0: "a", 2: "c", 3: "b"} and not other.revived


def test_a_changed_trace_is_refused_by_name():
    index = index_of(numbered([row("a"), row("b")]))
    with pytest.raises(StaleError, match="traces have changed") as refused:
        numbered([row("a"), row("b", "other")], index)
    assert refused.value.parts["found"] == "ids b"


def test_traces_of_something_else_are_refused_before_anything_is_retired():
    index = index_of(numbered([row(name) for name in "abcd"]))
    with pytest.raises(StaleError, match="most of the captured traces") as refused:
        numbered([row(name) for name in "dxyz"], index)
    assert refused.value.parts["found"] == "1 of them"


def test_a_limit_leaves_what_is_captured():
    index = index_of(numbered([row(name) for name in "abc"]))
    assert names(numbered([row(name) for name in "abc"], index, limit=1)) == {0: "a", 1: "b", 2: "c"}
    assert names(numbered([row(name) for name in "abc"], limit=2)) == {0: "a", 1: "b"}


def test_what_is_left_out_is_counted_and_nothing_left_is_an_error():
    empty = ("e", "e-d", [1, 2], [0, 0], "s")
    result = numbered([row("a"), row("long", tokens=101), empty])
    assert result.skipped == {"too_long": 1, "nothing_generated": 1}
    with pytest.raises(PreconditionError, match="no trace can be captured"):
        numbered([empty])
