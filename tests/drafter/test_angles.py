"""RoPE as numbers, against transformers' own functions, and what is the same in another spelling."""

import math

import pytest

from eagle3.common.errors import PreconditionError
from eagle3.drafter import angles

FACTORS = [1.0 + 0.5 * i for i in range(16)]
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 512, "rope_theta": 5e5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e4},
    "yarn-mscale": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 512, "mscale": 0.7,
                    "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2, "truncate": False, "rope_theta": 5e4},
    "yarn-attention": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "rope_theta": 1e4},
    "longrope": {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS[::-1],
                 "original_max_position_embeddings": 512, "rope_theta": 1e4},
    "longrope-factor": {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS[::-1], "factor": 3.0,
                        "original_max_position_embeddings": 512, "rope_theta": 1e4},
    "partial": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5, "rope_theta": 1e4},
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("length", [100, 3000])
def test_frequencies_are_those_of_transformers(name, length):
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=2048,
                         rope_parameters=dict(ROPES[name]))
    if name == "default":
        theirs, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        theirs, factor = ROPE_INIT_FUNCTIONS[ROPES[name]["rope_type"]](config, None, seq_len=length)
    ours, our_factor = angles.frequencies(ROPES[name] | {"max_position_embeddings": 2048}, 32, length)
    rotated = [each for each in ours if each]
    torch.testing.assert_close(torch.tensor(rotated), theirs, rtol=1e-5, atol=0)
    assert our_factor == pytest.approx(factor, rel=1e-6) and len(ours) == 16
    turned = angles.angles(ROPES[name] | {"max_position_embeddings": 2048}, 32, [0, length - 1])
    assert turned == [[0.0] * 16, pytest.approx([(length - 1) * each for each in ours])]


SAME = [
    ({"rope_theta": 1e6, "rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ({"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e6, "mrope_section": [8, 4, 4],
                                               "mrope_interleaved": True}}),
    ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}},
     {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000}}),
    ({"rope_theta": 1e4}, {"rope_parameters": {"rope_type": "linear", "factor": 1.0}}),
    ({"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, {}),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 512},
     {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32,
                       "attention_factor": 0.1 * math.log(4) + 1}}),
]
OTHER = [
    ({"rope_theta": 1e6}, {"rope_theta": 1e4}, "position 4095, pair 1"),
    ({"rope_theta": 1e4}, {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "position 4095, pair 0"),
    ({"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, {}, "position 4095"),
    ({"rope_scaling": ROPES["yarn"]}, {"rope_scaling": ROPES["yarn"] | {"attention_factor": 1.0}}, "scaled by"),
    ({"rope_theta": 1e4}, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "pair 1"),
    ({"rope_parameters": ROPES["longrope"]}, {"rope_parameters": ROPES["longrope"] | {"short_factor": FACTORS[::-1]}},
     "position 511"),
]


@pytest.mark.parametrize(("a", "b"), SAME)
def test_spellings_that_mean_the_same_angles(a, b):
    assert angles.same(angles.normal(a), angles.normal(b), 32, 4096)


@pytest.mark.parametrize(("a", "b", "words"), OTHER)
def test_other_angles_are_named_where_they_part(a, b, words):
    assert words in angles.difference(angles.normal(a), angles.normal(b), 32, 4096)


def test_each_generation_of_transformers_reads_its_own_spelling():
    both = {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    assert [angles.normal(both, way)["rope_theta"] for way in ("new", "old", "both")] == [1e6, 5e5, 1e6]
    scaled = {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert angles.normal(scaled, "new") == {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize("config", [
    {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
    {"rope_parameters": [1]}, {"rope_scaling": "yarn"}, {"rope_theta": "1e6"}, {"rope_theta": -1},
    {"rope_scaling": {"type": "yarn", "factor": None}}, {"rope_scaling": {"type": 3}},
    {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0], "factor": 2.0}},
    {"rope_scaling": {"type": "secret"}}, {"rope_scaling": {"type": "linear", "factor": float("nan")}},
    {"rope_theta": 10**400},
])
def test_what_is_no_rope_is_named(config):
    with pytest.raises(PreconditionError, match="RoPE"):
        angles.frequencies(angles.normal(config | {"max_position_embeddings": 2048}), 32, 100)


# What vLLM's get_rope computes: angles and factors from its table of cos and sin for positions 1 and 100.
VLLM = """
import json, math, sys
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
with set_current_vllm_config(VllmConfig()):
    for rope in json.loads(sys.argv[1]):
        table = get_rope(32, 2048, rope_parameters=rope, dtype=torch.float32).cos_sin_cache
        half = table.shape[1] // 2
        cos, sin = table[1, :half], table[1, half:]
        print(json.dumps([torch.atan2(sin, cos).tolist(), float((cos ** 2 + sin ** 2).sqrt().mean())]))
"""


@pytest.mark.engine
def test_frequencies_are_those_of_vllm():
    import json
    import subprocess
    import sys

    named = {name: each for name, each in ROPES.items() if each["rope_type"] not in ("longrope", "dynamic")}
    named["mrope"] = ROPES["default"] | {"mrope_section": [8, 4, 4]}
    named["yarn-attention"] = named["yarn-attention"] | {"original_max_position_embeddings": 512}
    done = subprocess.run([sys.executable, "-c", VLLM, json.dumps(list(named.values()))], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("[[")]
    assert len(lines) == len(named)
    for (name, each), line in zip(named.items(), lines, strict=True):
        theirs, factor = json.loads(line)
        ours, our_factor = angles.frequencies(each, 32, 100)
        assert [one for one in ours if one] == pytest.approx(theirs, rel=1e-4), name
        assert our_factor == pytest.approx(factor, rel=1e-5), name
