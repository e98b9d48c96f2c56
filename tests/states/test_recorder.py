"""The residual stream read off a running decoder."""

import pytest
import torch

from eagle3.states import recorder


def test_the_hooks_see_the_streams_that_the_layers_convention_names(tiny_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    hooks = recorder.LayerHooks(model, [2, 4, 5, 7], 8)
    ids = torch.arange(5, 15)[None]
    with torch.inference_mode():
        output = model(ids, output_hidden_states=True, use_cache=False)
    streams = hooks.take()
    # hidden_states[k] of transformers enters layer k; the last one is normed, so the teacher is checked by logits
    for slot, layer in enumerate([2, 4, 5]):
        assert torch.equal(streams[slot], output.hidden_states[layer])
    assert torch.allclose(model.lm_head(model.model.norm(streams[3])), output.logits)
    assert hooks.take() == []


def test_positions_are_found_wherever_a_layer_takes_them():
    states, places = torch.zeros(3, 4), torch.arange(3)
    for arguments, keywords in (((places, states, None), {}), ((states, places, None), {}),
                                ((states,), {"positions": places})):
        assert torch.equal(recorder.positions_in(arguments, keywords), places)
    assert recorder.positions_in((states,), {}) is None


class Decoder(torch.nn.Module):
    """As the engines' are: layers that return the stream in two parts, and streams on request."""

    def __init__(self, gives: int) -> None:
        super().__init__()
        self.embed_tokens, self.layers = torch.nn.Embedding(9, 4), torch.nn.ModuleList(Layer() for _ in range(3))
        self.gives, self.asked = gives, None

    def set_aux_hidden_state_layers(self, layers):
        self.asked = layers

    def forward(self, input_ids, positions):
        hidden, rest, streams = self.embed_tokens(input_ids), None, []
        for index, layer in enumerate(self.layers):
            hidden, rest = layer(positions, hidden, rest)
            if self.asked and index + 1 in self.asked:
                streams.append(hidden + rest)
        normed = (hidden + rest) / 2
        return (normed, streams[: self.gives]) if self.asked else normed


class Layer(torch.nn.Module):
    def forward(self, _positions, hidden, rest):
        return hidden * 2, hidden if rest is None else rest + hidden


def test_outputs_and_hooks_show_the_same_and_the_engine_gets_its_own_output_only():
    ids, places, seen = torch.arange(5), torch.arange(5), []
    for outputs in (True, False):
        torch.manual_seed(0)
        model, rehearsed = Decoder(gives=4), []
        plain = model(ids, places)
        tap = recorder.EngineTap(model, [1, 2], 3, outputs=outputs, rehearse=rehearsed.append)
        assert torch.equal(model(ids, positions=places), plain) and len(rehearsed) == 1
        tap.listen(seen.append)
        assert torch.equal(model(ids, positions=places), plain) and len(rehearsed) == 1
    ours, theirs = seen
    assert len(ours.streams) == 2 and all(map(torch.equal, ours.streams, theirs.streams))
    assert torch.equal(ours.streams[-1] / 2, ours.hidden) and torch.equal(theirs.tokens, ids)


def test_a_model_that_gives_too_few_streams_is_refused():
    model = Decoder(gives=1)
    recorder.EngineTap(model, [1, 2], 3, outputs=True, rehearse=lambda _: None)
    with pytest.raises(LookupError, match="2 streams asked for, 1 given.*--capture hooks"):
        model(torch.arange(5), positions=torch.arange(5))
