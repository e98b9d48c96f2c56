"""A sample of tests/manual/damage_sweep.py: damage to a finished run is refused by name or without effect."""

import pytest
from support import damage

# (file, damage), one of each kind and each stage; the sweep has all.
SAMPLE = [
    ("01_traces/traces.jsonl", "one_bit"), ("01_traces/manifest.json", "half"),
    ("02_states/index.jsonl", "torn_line"), ("02_states/hidden_states/hs_0.safetensors", "zero_tail"),
    ("02_states/data-00000-of-00001.arrow", "swapped"), ("03_vocab/vocab_mapping.safetensors", "swapped"),
    ("05_export/vllm/config.json", "one_bit"), ("05_export/vllm/model.safetensors", "one_bit"),
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tiny_model, tmp_path_factory):
    """(a finished run, another one, what each stage makes of the first)."""
    scratch = tmp_path_factory.mktemp("damage")
    run, other = (damage.finished_run(scratch / name, tiny_model, first) for name, first in (("run", 0), ("other", 40)))
    return run, other, damage.expected_results(run, tiny_model, scratch)


@pytest.mark.parametrize(("name", "kind"), SAMPLE)
def test_damage_is_refused_by_name_or_without_effect(runs, tiny_model, tmp_path, name, kind):
    run, other, good = runs
    assert name in damage.damageable(run)
    found = damage.outcomes(run, tiny_model, other, name, kind, good, tmp_path)
    assert found and not [each for each in found if each.verdict not in ("refused", "without effect")]


def test_the_undamaged_run_is_refused_by_nobody(runs):
    assert all(result for script, result in runs[2].items() if not script.startswith("06"))
