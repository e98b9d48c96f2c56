"""Counters of speculation: parsed, taken as differences, pooled, never guessed."""


import pytest

from eagle3.common.errors import PreconditionError
from eagle3.engines import counters
from eagle3.engines.counters import Counters


def page(drafts, accepted, positions=()):
    lines = [
        "# HELP vllm:spec_decode_num_drafts_total Number of drafts.",
        f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="a b"}} {drafts}',
        'vllm:spec_decode_num_drafts_created{engine="0"} 1.79e9',
        f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {3 * drafts}',
        f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}',
    ]
    lines += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}} {count}'
        for i, count in enumerate(positions)
    ]
    return "\n".join(lines) + "\n"


def test_acceptance_length_is_pooled_over_rounds():
    assert Counters(10, 30, 15).acceptance_length() == 2.5
    replies = [{"spec_verify_ct": 10, "completion_tokens": 30}, {"spec_verify_ct": 1, "completion_tokens": 1}]
    assert counters.from_meta_info(replies).acceptance_length() == pytest.approx(31 / 11)  # not (3 + 1) / 2


def test_counters_are_differences():
    before, after = counters.parse(page(100, 200, (90, 70, 40))), counters.parse(page(110, 215, (98, 75, 42)))
    counted = counters.difference(before, after)
    assert counted == Counters(10, 30, 15, (8, 5, 2))
    assert counted.acceptance_length() == 2.5
    assert counted.acceptance_by_position() == [0.8, 0.5, 0.2]


def test_counters_add_up_over_engines():
    second = page(10, 20, (8, 7, 5)).replace('engine="0"', 'engine="1"')
    assert counters.parse(page(1, 2, (1, 1, 0)) + second) == Counters(11, 33, 22, (9, 8, 5))


def test_missing_counters_are_unavailable_not_zero():
    assert counters.parse("vllm:num_requests_running 0\n") is None
    assert counters.parse(page(5, 5).replace("accepted_tokens_total", "renamed_total")) is None
    assert counters.difference(None, Counters(1, 3, 1)) is None
    assert counters.difference(Counters(1, 3, 1), None) is None
    assert Counters(0, 0, 0).acceptance_length() is None
    assert counters.from_meta_info([{"completion_tokens": 5}]) is None
    assert counters.from_meta_info([]) is None


def test_restarted_server_is_an_error():
    with pytest.raises(PreconditionError, match="restarted"):
        counters.difference(Counters(100, 300, 200), Counters(10, 30, 15))


def test_sglang_histogram_becomes_acceptance_by_position():
    meta = {"spec_verify_ct": 10, "completion_tokens": 25, "spec_num_correct_drafts": 15,
            "spec_num_proposed_drafts": 30, "spec_correct_drafts_histogram": [2, 3, 3, 2]}
    single = {"completion_tokens": 1}  # prefill only
    counted = counters.from_meta_info([meta, single])
    assert counted == Counters(10, 30, 15, (8, 5, 2))
