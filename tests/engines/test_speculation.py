"""Which servers' rounds can be walked over their replies: what settings are found, and what is refused and why."""

import json
from types import SimpleNamespace

import pytest

from eagle3.engines import speculation


def vllm(*words):
    return speculation.settings("vllm", words, {})


def sglang(*words, **env):
    return speculation.settings("sglang", words, env)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_defaults_can_be_walked(temperature):
    assert not speculation.refusal("vllm", vllm(), temperature)
    assert not speculation.refusal("vllm", {}, temperature)  # an attached server does not tell
    assert not speculation.refusal("sglang", sglang("--speculative-eagle-topk", "1"), temperature)


@pytest.mark.parametrize(("kind", "found", "reason", "greedy_too"), [
    ("vllm", vllm("--speculative-config", json.dumps({"draft_sample_method": "probabilistic"})), "draws its drafts", 0),
    ("vllm", vllm("--speculative-config.draft_sample_method", "probabilistic"), "draws its drafts", 0),
    ("vllm", vllm('--speculative_config={"rejection_sample_method": "block"}'), "block", 0),
    ("vllm", vllm("-sc", '{"rejection_sample_method": "synthetic"}'), "synthetic", 1),
    ("sglang", sglang("--speculative-use-rejection-sampling"), "speculative_use_rejection_sampling", 1),
    ("sglang", sglang(SGLANG_SIMULATE_ACC_LEN="3.5"), "SGLANG_SIMULATE_ACC_LEN", 1),
    ("sglang", sglang("--speculative-eagle-topk", "4"), "tree", 1),
    ("sglang", sglang("--speculative-accept-threshold-acc", "0.9"), "thresholds", 0),
    ("sglang", sglang("--speculative-accept-threshold-single=0.5"), "thresholds", 0),
])
def test_other_ways_of_accepting_are_refused_with_the_reason(kind, found, reason, greedy_too):
    assert reason in speculation.refusal(kind, found, 0.7)
    assert (reason in speculation.refusal(kind, found, 0.0)) == bool(greedy_too)


def test_a_server_that_says_how_it_accepts_is_believed(monkeypatch):
    answer = {"version": "0.5.17", "speculative_eagle_topk": 1, "speculative_use_rejection_sampling": True}
    monkeypatch.setattr(speculation, "get", lambda url: json.dumps(answer))
    server = SimpleNamespace(kind="sglang", root_url="http://x", child=None)
    assert speculation.of_server(server, [], {}) == {"speculative_eagle_topk": 1,
                                                     "speculative_use_rejection_sampling": True}
    server.child = object()
    found = speculation.of_server(server, ["--speculative-accept-threshold-acc", "0.9"], {})
    assert found["speculative_use_rejection_sampling"] and found["speculative_accept_threshold_acc"] == 0.9
    server.kind, server.child = "vllm", None
    assert speculation.of_server(server, [], {}) == {}


def test_schedules_by_batch_size_are_of_newer_versions():
    assert speculation.has_schedules("0.26.0") and speculation.has_schedules("0.32.0+cpu")
    assert not speculation.has_schedules("0.22.0") and not speculation.has_schedules(None)
