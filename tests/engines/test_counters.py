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
    assert counters.from_meta_info(replies).acceptance_length() == pytest.approx(30 / 11)  # not (2.9 + 1) / 2


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


SGLANG_NAMES = {
    "0.5.10": ("spec_draft_token_num", "spec_accept_token_num"),
    "0.5.11": ("spec_proposed_drafts", "spec_accepted_drafts"),
    "0.5.12": ("spec_num_proposed_drafts", "spec_num_correct_drafts"),
}


@pytest.mark.parametrize("version", SGLANG_NAMES)
def test_every_sglang_counts_the_first_token_to_the_prefill(version):
    proposed, accepted = SGLANG_NAMES[version]
    meta = {"completion_tokens": 30, "spec_verify_ct": 10, proposed: 30, accepted: 19, "spec_accept_length": 3.0}
    meta |= {"spec_correct_drafts_histogram": [1, 2, 4, 3]} if version == "0.5.12" else {}
    counted = counters.from_meta_info([meta] * 4)
    assert (counted.accepted, counted.draft_tokens) == (76, 120)
    assert counted.acceptance_length() == pytest.approx(2.9)
    assert counted.by_position == ((36, 28, 12) if version == "0.5.12" else ())  # the older ones do not tell
    assert counters.from_meta_info([{"completion_tokens": 30, "spec_verify_ct": 10}]).accepted == 19


def test_positions_are_told_only_if_every_reply_has_them():
    meta = {"completion_tokens": 4, "spec_verify_ct": 1, "spec_num_correct_drafts": 2}
    assert counters.from_meta_info([meta | {"spec_correct_drafts_histogram": [0, 0, 1]}, meta]).by_position == ()


@pytest.mark.parametrize("change", [{"spec_verify_ct": "10"}, {"spec_verify_ct": None}, {"spec_verify_ct": -1},
                                    {"spec_num_correct_drafts": [1]}, {"spec_correct_drafts_histogram": 5},
                                    {"spec_correct_drafts_histogram": ["a"]}, {"spec_num_correct_drafts": 1e400}])
def test_figures_that_are_no_numbers_are_unavailable(change):
    assert counters.from_meta_info([{"completion_tokens": 30, "spec_verify_ct": 10} | change]) is None


def test_a_page_with_odd_values_is_read_without_them():
    odd = page(1, 2) + 'vllm:spec_decode_num_drafts_total{engine="1"} NaN\nvllm:spec_decode_num_drafts_total many\n'
    assert counters.parse(odd) == Counters(1, 3, 2)


def test_sglang_histogram_becomes_acceptance_by_position():
    meta = {"spec_verify_ct": 10, "completion_tokens": 25, "spec_num_correct_drafts": 15,
            "spec_num_proposed_drafts": 30, "spec_correct_drafts_histogram": [2, 3, 3, 2]}
    single = {"completion_tokens": 1}  # prefill only
    counted = counters.from_meta_info([meta, single])
    assert counted == Counters(10, 30, 15, (8, 5, 2))
