"""Keys and values merged one by one into attention give what attention over all of them at once gives."""

import pytest
import torch

from eagle3.training import ttt


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_merging_gives_outputs_and_gradients_of_plain_attention(heads, kv_heads):
    torch.manual_seed(0)
    rows, size, own = 7, 16, 2
    query, *drafted = (torch.randn(rows, count, size, dtype=torch.float64, requires_grad=True)
                       for count in (heads, *[kv_heads] * (2 * own)))
    scores, values = torch.randn(rows, heads, 5).double(), torch.randn(rows, heads, 5, size).double()  # before these
    gradient = torch.randn(rows, heads, size).double()

    group = heads // kv_heads
    more = [(query * key.repeat_interleave(group, 1)).sum(-1, keepdim=True) for key in drafted[::2]]
    weights = torch.cat([scores, *more], -1).softmax(-1)
    everything = torch.cat([values, *(value.repeat_interleave(group, 1)[:, :, None] for value in drafted[1::2])], 2)
    expected = (weights[..., None] * everything).sum(2)
    expected.backward(gradient)

    with torch.no_grad():
        out, lse = (scores.softmax(-1)[..., None] * values).sum(2).float(), scores.logsumexp(-1).float()
        given = [tensor.detach().float() for tensor in (query, *drafted)]
        pairs = list(zip(given[1::2], given[2::2], strict=True))
        for key, value in pairs:
            ttt._merge(given[0], key, value, out, lse)
        dquery = torch.zeros_like(given[0])
        shares = [share for key, value in pairs
                  for share in ttt._merge_gradients(gradient.float(), given[0], out, key, value, lse, dquery)]
    assert torch.allclose(out.double(), expected, atol=1e-5)
    for found, tensor in zip([dquery, *shares], [query, *drafted], strict=True):
        assert torch.allclose(found.double(), tensor.grad, atol=1e-5)
