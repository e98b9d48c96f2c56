"""Figures of a load: times of chunks and tokens, acceptance and its error, repeats put together, energy."""

import random
import statistics

import pytest

from eagle3.benchmark import energy, figures
from eagle3.benchmark.streaming import Row
from eagle3.engines.counters import Counters


def row(times, tokens, started=10.0, ended=None):
    return Row(0, 200, "", started, started + (times[-1] if ended is None else ended), times, tokens)


def test_times_are_those_of_the_definitions():
    # two requests: 1 + 2 + 2 tokens at 0.5, 0.7, 1.1 s; and 1 + 1 tokens at 1.0, 1.2 s
    told = figures.times([row([0.5, 0.7, 1.1], [1, 2, 2]), row([1.0, 1.2], [1, 1], ended=1.5)], [5, 2])
    assert told["first_token_s"]["median"] == pytest.approx(0.75)
    assert told["between_tokens_s"]["mean"] == pytest.approx((0.6 / 4 + 0.2 / 1) / 2)
    assert told["between_chunks_s"]["mean"] == pytest.approx((0.2 + 0.4 + 0.2) / 3)
    assert told["latency_s"]["mean"] == pytest.approx((1.1 + 1.5) / 2)
    assert told["tokens_per_chunk"] == pytest.approx(7 / 5)
    assert told["tokens_per_s_per_user"] == pytest.approx(1 / statistics.median([0.15, 0.2]))


def test_what_a_server_does_not_tell_is_no_figure():
    told = figures.times([row([0.5, 0.7], [-1, -1])], [5])
    assert told["between_tokens_s"] is None and told["between_chunks_s"]["mean"] == pytest.approx(0.2)
    whole = figures.times([Row(0, 200, "", 0.0, 2.0)], [5])
    assert whole["first_token_s"] is None and whole["latency_s"]["mean"] == 2.0 and whole["tokens_per_chunk"] is None


def test_percentiles_are_interpolated():
    found = figures.summary([float(k) for k in range(101)])
    assert (found["median"], found["p95"], found["p99"]) == (50.0, 95.0, 99.0)
    assert figures.summary([3.0]) == {"mean": 3.0, "median": 3.0, "p95": 3.0, "p99": 3.0}
    assert figures.summary([]) is None


def test_the_error_of_a_length_is_that_of_replies_where_their_rounds_are_known():
    """Replies of different ease: the spread of repeated experiments is the error told of one, not that of rounds."""
    chance = random.Random(0)

    def experiment():
        pairs = []
        for _ in range(60):
            ease = chance.choice((0.2, 0.9))
            pairs.append((40, sum(1 + sum(chance.random() < ease for _ in range(2)) for _ in range(40))))
        return pairs

    lengths = [sum(t for _, t in pairs) / sum(r for r, _ in pairs) for pairs in (experiment() for _ in range(300))]
    pairs = experiment()
    rounds, tokens = (sum(column) for column in zip(*pairs, strict=True))
    told = figures.acceptance(Counters(rounds, 2 * rounds, tokens - rounds, (0.6 * rounds, 0.5 * rounds)), pairs)
    assert told["error_from"] == "replies" and told["error"] == pytest.approx(statistics.stdev(lengths), rel=0.2)
    other = figures.acceptance(Counters(rounds + 500, 2 * rounds, tokens, (0.6 * rounds, 0.5 * rounds)), pairs)
    assert other["error_from"] == "rounds"  # chunks were not the rounds
    alone = figures.acceptance(Counters(rounds, 2 * rounds, tokens - rounds, (0.6 * rounds, 0.5 * rounds)))
    assert alone["error_from"] == "rounds" and alone["error"] < told["error"] / 2


def test_acceptance_by_position_conditional_and_used():
    told = figures.acceptance(Counters(100, 300, 140, (80, 40, 20)))
    assert told["length"] == 2.4 and told["by_position"] == [0.8, 0.4, 0.2]
    assert told["conditional"] == pytest.approx([0.8, 0.5, 0.5]) and told["used"] == pytest.approx(140 / 300)
    assert figures.conditional([0.0, 0.0]) == [0.0, None]
    assert figures.acceptance(None) is None and figures.acceptance(Counters(0, 0, 0)) is None


def test_repeats_become_medians_with_spread_and_pooled_rounds():
    def one(name, rate, accepted, drafts):
        acceptance = figures.acceptance(Counters(drafts, 2 * drafts, accepted, (accepted, 0)))
        return {"name": name, "tokens_per_s": rate, "latency_s": {"mean": rate, "median": 1 / rate},
                "acceptance": acceptance, "joules_per_token": None}

    cell = figures.pooled([one("a", 90.0, 50, 100), one("b", 100.0, 90, 300), one("c", 80.0, 40, 100)])
    assert cell["name"] == "a" and cell["measurements"] == ["a", "b", "c"]
    assert cell["tokens_per_s"] == 90.0 and cell["spread"]["tokens_per_s"] == [80.0, 100.0]
    assert cell["latency_s"] == {"mean": 90.0, "median": pytest.approx(1 / 90)}
    assert cell["acceptance"]["length"] == pytest.approx(1 + 180 / 500) and cell["acceptance"]["drafts"] == 500
    assert cell["spread"]["acceptance_length"] == pytest.approx([1.3, 1.5])
    assert "joules_per_token" not in cell["spread"]


def test_energy_is_the_integral_of_the_readings_of_the_servers_gpus(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    lines = 'echo "GPU-a, 100.0"; echo "GPU-b, 300.00"; echo "GPU-b, [N/A]"; echo "GPU-x, 50"; sleep 0.05'
    script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" > "$0.asked"\nwhile :; do {lines}; done\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    import time

    with energy.Meter(["GPU-a", "GPU-b"]) as meter:
        time.sleep(0.2)
        start = time.monotonic()
        time.sleep(0.5)
        end = time.monotonic()
    assert meter.joules(start, end) == pytest.approx(400 * (end - start), rel=1e-6)
    assert "-lms 200" in (tmp_path / "nvidia-smi.asked").read_text()
    assert meter.joules(start, start + 1e-4) is None  # too short for two readings
    with energy.Meter(["GPU-a", "GPU-c"]) as meter:
        time.sleep(0.2)
    assert meter.joules(0, time.monotonic()) is None  # half of it would be no energy
    with energy.Meter([]) as meter:
        pass
    assert meter.joules(0, 1) is None
