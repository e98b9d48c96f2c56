"""The residual stream read off a running decoder, and which sample each token belongs to."""


import torch

from eagle3.states import recorder


def test_the_hooks_see_the_streams_that_the_layers_convention_names(tiny_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    hooks = recorder.Recorder(model, [2, 4, 5, 7], 8)
    ids = torch.arange(5, 15)[None]
    with torch.inference_mode():
        output = model(ids, output_hidden_states=True, use_cache=False)
    streams = hooks.passes[0]["streams"]
    # hidden_states[k] of transformers enters layer k; the last one is normed, so the teacher is checked by logits
    for slot, layer in enumerate([2, 4, 5]):
        assert torch.equal(streams[slot], output.hidden_states[layer])
    assert torch.allclose(model.lm_head(model.model.norm(streams[3])), output.logits)


def test_positions_are_found_wherever_a_layer_takes_them():
    states, places = torch.zeros(3, 4), torch.arange(3)
    for arguments, keywords in (((places, states, None), {}), ((states, places, None), {}),
                                ((states,), {"positions": places})):
        assert torch.equal(recorder._positions(arguments, keywords), places)
    assert recorder._positions((states,), {}) is None


def passes_of(*pieces):
    """Build recorder passes out of (ids, start) pieces; the state of a token is its id."""
    tokens = [token for ids, _ in pieces for token in ids]
    positions = [start + k for ids, start in pieces for k in range(len(ids))]
    return tokens, positions, torch.tensor(tokens, dtype=torch.float32)[:, None, None]


def test_packed_and_chunked_sequences_find_their_samples():
    jobs = [(0, [1, 2, 3]), (1, [1, 2, 4, 5]), (2, [9])]
    passes = [passes_of(([1, 2, 3], 0), ([1, 2], 0)), passes_of(([4, 5], 2), ([9], 0))]
    complete, missing = recorder.assign(passes, jobs)
    assert not missing
    assert {number: states.flatten().tolist() for number, states in complete.items()} == dict(jobs)


def test_a_sample_without_all_its_tokens_is_rejected():
    complete, missing = recorder.assign(
        [passes_of(([1, 2], 0)), passes_of(([7, 8], 64))], [(0, [1, 2, 3]), (1, [6] * 66)])
    assert not complete
    assert "2 of 3 tokens" in missing[0] and "0 of 66" in missing[1]
