"""The drafter as a network: where it starts, and what of it is trained."""


import numpy as np
import torch

from eagle3.drafter import network, verifier, vocab
from eagle3.training import checkpoints


def test_only_the_drafter_is_trained(parts):
    build, _, _ = parts
    names = checkpoints.trainable(build())
    assert {"fc.weight", "lm_head.weight", "norm.weight", "layers.0.self_attn.q_proj.weight"} <= names.keys()
    assert not [name for name in names if name.startswith(("embed_tokens", "verifier_"))]


def test_a_fresh_drafter_starts_from_the_verifier(parts, tiny_model):
    model, facts = parts[0](), verifier.read(tiny_model)
    last = verifier.load_layer_weights(facts, facts.num_layers - 1)
    layer, hidden = model.layers[0], facts.hidden_size
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert torch.equal(getattr(layer.mlp, name).weight, last[f"mlp.{name}.weight"].float())
    for name in ("q_proj", "k_proj", "v_proj"):
        assert torch.equal(getattr(layer.self_attn, name).weight[:, hidden:], last[f"self_attn.{name}.weight"].float())
    assert torch.equal(layer.hidden_norm.weight, last["input_layernorm.weight"].float())
    assert torch.allclose(model.fc.weight[:, -hidden:].diagonal().mean(), torch.tensor(1.0), atol=0.1)


def test_a_layer_of_another_shape_is_left_alone(parts, tiny_model):
    _, store, _ = parts
    facts = verifier.read(tiny_model)
    d2t, t2d = (torch.from_numpy(a) for a in vocab.build_mapping(np.ones(facts.vocab_size, dtype=np.int64), 64))
    shape = network.layer_shape(facts, intermediate_size=96)
    layer = network.build(facts, [2, 4, 5, 7], d2t, t2d, shape).layers[0]
    last = verifier.load_layer_weights(facts, facts.num_layers - 1)
    assert torch.equal(layer.self_attn.o_proj.weight, last["self_attn.o_proj.weight"].float())
    assert torch.equal(layer.post_attention_layernorm.weight, torch.ones(facts.hidden_size))
