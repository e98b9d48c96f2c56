"""Rows of traces: what is never written."""

import pytest

from eagle3.traces import trace_rows


def test_rows_without_a_token_or_a_field_are_never_sealed():
    row = {"id": "a", "key": "k", "source": "s", "model": "m", "prompt": {}, "chat_template_kwargs": {},
           "sampling": {}, "reasoning": None, "content": "x", "tool_calls": [], "finish_reason": "stop",
           "prompt_token_ids": [1, 2], "completion_token_ids": [3], "token_source": "server", "usage": {}}
    good = trace_rows.sealed(row)
    assert trace_rows.sequence(good) == ([1, 2, 3], [0, 0, 1])
    assert trace_rows.content_identity([good, trace_rows.sealed(row | {"id": "b"})]) == trace_rows.content_identity(
        [trace_rows.sealed(row | {"id": "b"}), good])
    for change in ({"completion_token_ids": []}, {"completion_token_ids": [1.5]}, {"prompt_token_ids": [-1]},
                   {"content": 5}, {"id": None}):
        with pytest.raises(ValueError):
            trace_rows.sealed(row | change)
    for name in row:
        with pytest.raises(ValueError):
            trace_rows.sealed({other: value for other, value in row.items() if other != name})
