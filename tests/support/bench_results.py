"""results.json of benchmarks, made by hand."""


def hand_made_results():
    """What a small benchmark of an earlier version gave."""
    times = {"mean": 1.25, "median": 1.0, "p95": 2.0}
    shared = {"requests": 4, "seconds": 5.0, "output_tokens": 400, "latency_s": times, "s_per_token": times}
    return {
        "schema_version": 1,
        "model": {"path": "/models/<verifier>", "identity": "a" * 64},
        "drafter": {"path": "/drafters/d", "identity": "b" * 64},
        "engine": {"kind": "vllm", "version": "0.32.0", "attached": False},
        "settings": {"prompts": 4, "max_tokens": 100, "temperature": 0.0, "warmup_prompts": 2, "gpus": []},
        "runs": [
            {"name": "baseline_c1", "draft_tokens": 0, "concurrency": 1, "tokens_per_s": 80.0, "acceptance": None}
            | shared,
            {"name": "drafter-2_c1", "draft_tokens": 2, "concurrency": 1, "tokens_per_s": 120.0, "speedup": 1.5,
             "acceptance": {"length": 1.987, "by_position": [0.654, 0.333]}, "difference": -0.025,
             "predicted": {"length": 1.962, "by_position": [0.641, 0.321], "rounds": 9},
             "lossless": {"replies": 4, "identical": 3, "first_difference": {"x": 7}}} | shared,
            {"name": "drafter-2_c8", "draft_tokens": 2, "concurrency": 8, "tokens_per_s": 500.0, "speedup": 1.1,
             "acceptance": None} | shared,
        ],
    }  # fmt: skip


def wide_results():
    """What a whole matrix gives at its widest: 16 draft tokens, long names, large figures, spreads."""
    four = {"mean": 12.0, "median": 12.345, "p95": 23.456, "p99": 123.456}
    each = {"latency_s": four, "s_per_token": four, "first_token_s": four, "tokens_per_chunk": 3.21, "prompts": "p",
            "between_tokens_s": {name: value / 100 for name, value in four.items()},
            "between_chunks_s": {name: value / 10 for name, value in four.items()},
            "tokens_per_s": 12345.6, "tokens_per_s_per_user": 123.4, "joules_per_token": 12.34, "requests": 500,
            "measurements": ["a", "b"], "temperature": 0.65, "concurrency": 256,
            "spread": {"tokens_per_s": [12000.1, 13000.2], "tokens_per_s_per_user": [111.1, 133.3],
                       "joules_per_token": [11.11, 13.33], "speedup": [1.111, 2.222]}}
    shares = [0.9 ** k for k in range(1, 17)]
    acceptance = {"length": 5.432, "error": 0.012, "by_position": shares, "conditional": [0.9] * 15 + [None],
                  "drafts": 1234567.0, "used": 0.34}
    runs = [{"server": "baseline", "draft_tokens": 0} | each, {"server": "baseline-again", "draft_tokens": 0} | each]
    runs += [{"server": server, "draft_tokens": 16, "acceptance": acceptance, "speedup": 1.5, "difference": -0.012,
              "predicted": {"length": 5.42, "by_position": shares, "rounds": 1}, "lossless": {
                  "replies": 500, "identical": 499, "margins": {"a": {"within_noise": True}}}}
             | each | {"prompts": "a-very-long-name-of-a-prompt-set", "temperature": temperature}
             for server in ("drafter", "control") for temperature in (0.0, 0.65)]
    return hand_made_results() | {
        "schema_version": 2, "runs": runs, "settings": {"max_tokens": 100, "gpus": []},
        "sets": [{"name": "gsm8k", "about": "word problems", "prompts": 1319, "path": "/data/" + 30 * "deep/"}],
        "drift": [{"prompts": "gsm8k", "temperature": 0.0, "concurrency": 8, "start": 100.0, "end": 93.4,
                   "change": -0.066}],
        "control": {"answer": "training", "text": "only ours is low"}}
